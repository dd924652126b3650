"""Multi-label cases whose channels are known: two-class scenes, one set for each channel, stacked."""

from dataclasses import replace
from functools import partial

import torch

from segcal.cases import CaseRef, CaseSet
from segcal.synthetic import Temperature, scenes
from segcal.types import Case


class Stacked:
    """Some two-class cases of the same shape as the channels of one."""

    def __init__(self, parts):
        first = parts[0].source
        self.parts, self.batch, self.num_members = parts, len(parts), parts[0].members
        self.pooling = parts[0].pooling or "logits"
        self.id, self.num_classes, self.spatial, self.spacing = (
            first.id,
            first.num_classes,
            first.spatial,
            first.spacing,
        )
        self.ignore_index, self.sliceable, self.image = first.ignore_index, first.sliceable, first.image

    def logits(self, rows):
        return torch.cat([part.source.logits(rows) for part in self.parts])

    def labels(self, rows):
        return torch.cat([part.source.labels(rows) for part in self.parts])

    def mask(self, rows):
        masks = [part.source.mask(rows) for part in self.parts]
        return None if masks[0] is None else torch.cat(masks)

    def posterior(self, rows):
        return torch.cat([part.source.posterior(rows) for part in self.parts])

    def member(self, index, rows):
        return torch.cat([part.member_logits(index, rows) for part in self.parts])

    def pooled(self, members, space):
        return Stacked(tuple(part.pooled(space, members) for part in self.parts))


def opened(refs):
    return Case(Stacked(tuple(ref.open() for ref in refs)))


def stacked(**channels: CaseSet) -> CaseSet:
    """Case sets with the same names, as the channels of one."""
    sets = list(channels.values())
    refs = [CaseRef(refs[0].id, partial(opened, refs)) for refs in zip(*(own.refs for own in sets), strict=True)]
    return replace(sets[0], refs=refs, channel_names=tuple(channels))


def channels(count, temperatures, **options):
    """Two-class scenes for each channel, as confident as it is told to be: ``{"liver": 1.0, "tumour": 4.0}``."""
    options = {"size": (24, 28), "coherence": 0.0, **options}
    return {
        name: scenes(count, num_classes=2, plant=[Temperature(t)], seed=17 * k, **options)
        for k, (name, t) in enumerate(temperatures.items())
    }
