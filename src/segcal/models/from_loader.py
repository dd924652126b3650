"""``segcal.calibrate``: from a model and a loader of images and labels to a calibrated network."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from segcal.calibrators import CALIBRATORS, Calibrator
from segcal.cases.batches import Declared, check_order, stored_cases
from segcal.cases.device import Device, resolved
from segcal.cases.splits import Groups
from segcal.cases.tensors import is_pair, whole_numbers
from segcal.errors import InputError, check_name, check_seed, naming
from segcal.models.network import CalibratedNetwork, Inference, LogitsOf, check_model, device_of, scores_of
from segcal.scores import KINDS
from segcal.types import Kind

# Names under which batches that are dicts hold images and labels.
_IMAGES, _LABELS = ("image", "images", "pixel_values"), ("label", "labels")


def calibrate(
    model: nn.Module,
    loader: Iterable[Any] | None = None,
    method: str | Calibrator = "trust",
    *,
    kind: Kind = "logits",
    ignore_index: int = 255,
    channel_names: Sequence[str] | None = None,
    groups: Groups | Sequence[str] | None = None,
    inference: Inference | None = None,
    logits_of: LogitsOf | None = None,
    device: Device | None = None,
    seed: int = 0,
) -> CalibratedNetwork:
    """Fit a calibrator to what a model predicts, and return both as one module: images in, log-probabilities out.

    The model is run once over the loader, in ``eval()`` and ``torch.inference_mode()``; afterwards it is in the mode
    that it was in. Its scores are kept in a temporary folder while the calibrator is fitted, so that memory does not
    depend on their number. Images must be others than those that the model was trained on.

    Args:
        model: Gives scores ``(N, C, *spatial)``.
        loader: Yields ``(images, labels)``, or dicts with ``image``, ``images`` or ``pixel_values``, ``label`` or
            ``labels``, and perhaps ``mask`` (True where a voxel counts) and ``id``. A DataLoader or any iterable; it
            may shuffle, but should not augment at random. None if ``method`` is a fitted calibrator.
        method: An id of ``segcal.CALIBRATORS``, or a calibrator, which is fitted. Without a loader, a fitted one.
        kind: Whether the model gives ``logits`` or ``probs``.
        ignore_index: The label of voxels to ignore.
        channel_names: For a model with sigmoid outputs: the names of its K channels. Labels are then
            ``(N, K, *spatial)``, for every channel 0 outside and 1 inside.
        groups: Images that belong together, such as the slices of a patient: as in ``segcal.cases_from``.
        inference: ``(images, model) -> output``, for sliding windows: what is calibrated is the blended result.
        logits_of: ``output -> scores``, for a model that does not return a tensor, or returns scores of another size
            than the labels: they are calibrated after upsampling.
        device: Where the model is run and the calibrator fitted, to which the model is moved: ``auto``, ``cpu``,
            ``cuda``; None for where the model is.
        seed: Seeds all random numbers of the fit.

    Examples:
        >>> import segcal
        >>> model = nn.Conv2d(1, 3, 3, padding=1).eval()
        >>> loader = [(torch.randn(2, 1, 16, 16), torch.randint(3, (2, 16, 16))) for _ in range(4)]
        >>> net = segcal.calibrate(model, loader, "ts")
        >>> net(torch.randn(1, 1, 20, 24)).shape, net.fit_report.nll_after <= net.fit_report.nll_before
        (torch.Size([1, 3, 20, 24]), True)
    """
    check_model(model)
    check_name("kind", kind, KINDS)
    check_seed(seed)
    calibrator = _calibrator(method)
    if device is not None:
        model.to(resolved(device))
    there = device_of(model)
    if loader is None:
        if calibrator.num_classes is None:
            raise InputError("no loader", expected="images and labels to fit to, or a fitted calibrator as method")
    else:
        if groups is not None:
            check_order(loader)
        declared = Declared.of(kind, ignore_index, channel_names)
        run = _Run(model, inference, logits_of, there, declared)
        with _evaluating(model):
            cases = stored_cases(run.over(loader), declared, groups)
        calibrator.fit(cases, seed=seed)
    if there is not None:
        calibrator.to(there)
    if model.training:
        warnings.warn(
            "the model is in training mode, as it was before: call eval() of the calibrated network before you use it",
            stacklevel=2,
        )
    return CalibratedNetwork(model, calibrator, kind=kind, inference=inference, logits_of=logits_of)


def _calibrator(method: Any) -> Calibrator:
    if not isinstance(method, Calibrator):
        check_name("method", method, CALIBRATORS, expected=f"a calibrator or one of {', '.join(CALIBRATORS)}")
        return CALIBRATORS[method]()
    if method.image_channels:
        raise InputError(
            f"the calibrator needs images of {method.image_channels} channels",
            where="method",
            expected="image_channels = 0: images are not kept with the scores",
            fix="write a dataset with images and fit to that",
        )
    return method


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Every part of a model in evaluation mode, and afterwards as it was."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


class _Run(NamedTuple):
    """How batches of images become batches of scores."""

    model: nn.Module
    inference: Inference | None
    logits_of: LogitsOf | None
    device: torch.device | None
    declared: Declared

    def over(self, loader: Iterable[Any]) -> Iterator[dict[str, Any]]:
        """Batches of scores and labels, as ``segcal.cases_from`` takes them."""
        if isinstance(loader, str | Path | Mapping) or not isinstance(loader, Iterable):
            expected = "a DataLoader, or another iterable of (images, labels)"
            raise InputError(f"the loader is of type {type(loader).__name__}", expected=expected)
        for number, given in enumerate([loader] if is_pair(loader) else loader):
            with naming(where=f"batch {number}"):
                batch = self._scored(_parts(given))
            yield batch

    def _scored(self, parts: dict[str, Any]) -> dict[str, Any]:
        images, labels = (_tensor(name, parts.pop(name)) for name in ("images", "labels"))
        # The mode is left before the batch is given away: nothing else runs in it.
        with torch.inference_mode():
            there = images if self.device is None else images.to(self.device)
            scores = scores_of(self.model, there, self.inference, self.logits_of)
        self._check_space(scores, labels)
        return {self.declared.kind: scores, "labels": whole_numbers(labels), **parts}

    def _check_space(self, scores: Tensor, labels: Tensor) -> None:
        space = tuple(scores.shape[2:])
        if space and tuple(labels.shape[-len(space) :]) != space:
            raise InputError(
                f"the scores have shape {tuple(scores.shape)}, and the labels {tuple(labels.shape)}",
                expected="the same height and width, and depth",
                fix="upsample in logits_of, before calibration: logits_of=lambda output: "
                "torch.nn.functional.interpolate(output, size, mode='bilinear')",
            )
        if scores.ndim > 1 and scores.shape[1] == 1 and not self.declared.multilabel:
            raise InputError(
                "the model gives one channel",
                expected="at least two classes",
                fix="name the channel if it is before a sigmoid: channel_names=('foreground',)",
            )


def _parts(given: Any) -> dict[str, Any]:
    """Images, labels, and mask and id if they are there, of a batch."""
    if isinstance(given, Mapping):
        found = {name: given[name] for name in ("mask", "id") if name in given}
        for what, names in (("images", _IMAGES), ("labels", _LABELS)):
            have = [name for name in names if name in given]
            if len(have) != 1:
                raise InputError(
                    f"the batch holds {', '.join(map(str, given)) or 'nothing'}",
                    expected=f"one of {', '.join(_IMAGES)} and one of {', '.join(_LABELS)}",
                    fix="give a generator: ((batch['x'], batch['y']) for batch in loader)",
                )
            found[what] = given[have[0]]
        return found
    if isinstance(given, tuple | list) and len(given) == 2:
        return {"images": given[0], "labels": given[1]}
    raise InputError(f"the batch is of type {type(given).__name__}", expected="(images, labels), or a dict of them")


def _tensor(name: str, given: Any) -> Tensor:
    if isinstance(given, np.ndarray):
        return torch.as_tensor(given)
    if not isinstance(given, Tensor):
        raise InputError(f"{name} are of type {type(given).__name__}", expected="a tensor or a numpy array")
    return given
