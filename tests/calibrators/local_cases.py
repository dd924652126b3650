"""Cases for the tests of local temperature scaling: from tensors with images, and planted scenes."""

import torch
from torch import Tensor

import segcal
from segcal.calibrators.local import (
    ImageTemperatureScaling,
    LocalTemperatureScaling,
    TranslationInvariantLocalTemperature,
)
from segcal.cases import CaseRef, CaseSet
from segcal.synthetic import scenes
from segcal.types import Case

LOCAL = (LocalTemperatureScaling, TranslationInvariantLocalTemperature, ImageTemperatureScaling)


class Tensors:
    """A case from tensors, with an image."""

    spacing, sliceable, ignore_index = None, True, 255

    def __init__(self, name: str, logits: Tensor, labels: Tensor, image: Tensor | None) -> None:
        self.id, self._all = name, {"logits": logits, "labels": labels, "image": image}
        self.batch, self.num_classes, *spatial = logits.shape
        self.spatial = tuple(spatial)

    def logits(self, rows):
        return self._all["logits"][:, :, rows]

    def labels(self, rows):
        return self._all["labels"][:, rows]

    def image(self, rows):
        return None if self._all["image"] is None else self._all["image"][:, :, rows]

    def mask(self, rows):
        return None


def case_set(*sources):
    return CaseSet([CaseRef(s.id, lambda s=s: Case(s)) for s in sources], num_classes=sources[0].num_classes)


def kept(cases):
    """The same scenes, each generated once."""
    opened = [cases[i] for i in range(len(cases))]
    return CaseSet([CaseRef(case.id, lambda case=case: case) for case in opened], num_classes=cases.num_classes)


def random_logits(*shape, seed=0, scale=4.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def untrained(cls, num_classes, seed=0, **options):
    """A calibrator with random weights, as if fitted."""
    calibrator = cls(**options)
    calibrator.num_classes = num_classes
    calibrator.allocate(num_classes)
    generator = torch.Generator().manual_seed(seed)
    for parameter in calibrator.network.parameters():
        parameter.copy_(0.03 * torch.randn(parameter.shape, generator=generator))
    calibrator.network.mean.copy_(torch.randn(num_classes, generator=generator))
    calibrator.network.scale.copy_(1 + torch.rand(num_classes, generator=generator))
    calibrator.beta.fill_(0.7)
    return calibrator


def nll(calibrator, cases):
    return segcal.evaluate(cases, calibrator, metrics=("nll",)).value("nll")


def planted(count, plant, seed=0, size=(48, 64), coherence=0):
    return kept(scenes(count, size=size, num_classes=4, plant=plant, coherence=coherence, seed=seed))


def lit_cases(count, seed, channels=2):
    """Overconfidence that only the image shows: temperatures of 3 where its first channel is bright, 1 elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    sources = []
    for index in range(count):
        z = 1.5 * torch.randn(1, 3, 24, 28, generator=generator)
        labels = torch.distributions.Categorical(logits=z.movedim(1, -1))
        y = torch.multinomial(labels.probs.reshape(-1, 3), 1, generator=generator).reshape(1, 24, 28)
        bright = (torch.rand(1, 1, 24, 28, generator=generator) < 0.5).float()
        image = torch.cat([100 * bright, torch.rand(1, channels - 1, 24, 28, generator=generator)], 1)
        sources.append(Tensors(f"{index:02d}", z * (1 + 2 * bright), y, image))
    return case_set(*sources)
