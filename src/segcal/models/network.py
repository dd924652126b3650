"""A model and its calibrator as one module, and as one file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from segcal.calibrators.base import CALIBRATOR_PREFIX, NETWORK_FORMAT, NETWORK_VERSION, Calibrator
from segcal.calibrators.loading import load
from segcal.cases.splits import some
from segcal.errors import DataError, InputError, SegcalError, check_name
from segcal.files.atomic import atomic_path
from segcal.files.plain import plain
from segcal.scores import KINDS, at_least_float32, keep_argmax, log_clamped, multilabel_view, presence, probabilities
from segcal.types import FitReport, Kind

#: ``(images, model) -> output``: how the model is run, if not by ``model(images)``.
Inference = Callable[[Any, nn.Module], Any]
#: ``output -> logits``: where the logits are in what the model returns.
LogitsOf = Callable[[Any], Tensor]

_MODEL_PREFIX = "model."


class CalibratedNetwork(nn.Module):
    """``model`` and then ``calibrator``: images in, calibrated log-probabilities out. ``segcal.calibrate`` makes one.

    The model is the user's own module, not a copy. Calibration comes last, after ``inference`` has joined the windows
    and ``logits_of`` has found the logits.

    Args:
        model: Gives scores ``(N, C, *spatial)``.
        calibrator: Fitted to these scores.
        kind: Whether the scores are ``logits`` or ``probs``.
        inference: ``(images, model) -> output``, for sliding windows; by default ``model(images)``.
        logits_of: ``output -> scores``, for a model that does not return a tensor.

    Examples:
        >>> import segcal
        >>> model = nn.Conv2d(1, 3, 1).eval()
        >>> images, labels = torch.randn(4, 1, 8, 8), torch.randint(3, (4, 8, 8))
        >>> calibrator = segcal.calibrators.TemperatureScaling().fit(model(images), labels)
        >>> net = CalibratedNetwork(model, calibrator)
        >>> bool((net.predict(images) == model(images).argmax(1)).all()), net.predict_proba(images).shape
        (True, torch.Size([4, 3, 8, 8]))
    """

    def __init__(
        self,
        model: nn.Module,
        calibrator: Calibrator,
        *,
        kind: Kind = "logits",
        inference: Inference | None = None,
        logits_of: LogitsOf | None = None,
    ) -> None:
        super().__init__()
        check_model(model)
        check_name("kind", kind, KINDS)
        if calibrator.num_classes is None:
            raise SegcalError("the calibrator has not been fitted", fix="segcal.calibrate(model, loader, calibrator)")
        self.model, self.calibrator = model, calibrator
        self.kind: Kind = kind
        self.inference, self.logits_of = inference, logits_of
        # The model stays in the mode that its owner left it in; this module says which that is.
        self.training = model.training

    @property
    def fit_report(self) -> FitReport | None:
        """How the fit of the calibrator went."""
        return self.calibrator.fit_report

    def scores(self, images: Any) -> Tensor:
        """What the model gives before calibration, ``(N, C, *spatial)``: logits, or probabilities if it gives these."""
        return scores_of(self.model, images, self.inference, self.logits_of)

    def forward(self, images: Any) -> Tensor:
        """Calibrated log-probabilities ``(N, C, *spatial)``; of multi-label channels, those of inside."""
        return self._log_probs(self.scores(images))

    def predict_proba(self, images: Any) -> Tensor:
        """Calibrated probabilities ``(N, C, *spatial)`` with the labels of ``predict``: their argmax, or above 0.5."""
        scores = self.scores(images)
        if self.calibrator.channels is not None:
            pairs = [own(pair) for own, pair in self._by_channel(scores)]
            return torch.stack([presence(pair, pair.dtype) for pair in pairs], 1)
        log_probs = self._log_probs(scores)
        return probabilities(log_probs, log_probs.dtype)

    def predict(self, images: Any) -> Tensor:
        """Labels ``(N, *spatial)``, or ``(N, K, *spatial)`` of 0 and 1 for K channels.

        They are exactly the model's if the calibrator preserves the argmax, as ``trust`` and ``ts`` do.
        """
        scores = self.scores(images)
        if self.calibrator.channels is not None:
            return torch.stack([own.predict(pair) for own, pair in self._by_channel(scores)], 1)
        return (scores if self.calibrator.preserves else self._log_probs(scores)).argmax(1)

    def _log_probs(self, scores: Tensor) -> Tensor:
        if self.calibrator.channels is not None:
            return torch.stack([own(pair)[:, 1] for own, pair in self._by_channel(scores)], 1)
        if self.kind == "logits":
            found: Tensor = self.calibrator(scores)
            return found
        # In the type of the scores, logarithms of different probabilities may be equal.
        log_probs = self.calibrator(log_clamped(at_least_float32(scores))).to(scores.dtype)
        return keep_argmax(log_probs, scores.argmax(1)) if self.calibrator.preserves else log_probs

    def _by_channel(self, scores: Tensor) -> Iterator[tuple[Calibrator, Tensor]]:
        """The calibrator of each channel, and the channel's logits of outside and inside ``(N, 2, *spatial)``."""
        channels = self.calibrator.per_channel
        if scores.ndim < 3 or scores.shape[1] != len(channels):
            names = ", ".join(self.calibrator.channel_names or ())
            raise InputError(
                f"the model gives scores of shape {tuple(scores.shape)}",
                expected=f"(N, {len(channels)}, *spatial), for the channels {names}",
            )
        for k, own in enumerate(channels):
            yield own, multilabel_view(at_least_float32(scores[:, k : k + 1]), self.kind).to(scores.dtype)

    def save(self, path: str | Path) -> None:
        """Write the model's weights and the calibrator to one safetensors file, which ``load_calibrated`` reads."""
        about = {
            "format": NETWORK_FORMAT,
            "version": NETWORK_VERSION,
            "kind": self.kind,
            "needs": [name for name in ("inference", "logits_of") if getattr(self, name) is not None],
            "calibrator": self.calibrator.about(),
        }
        tensors = {CALIBRATOR_PREFIX + name: tensor for name, tensor in self.calibrator.tensors().items()}
        tensors |= {_MODEL_PREFIX + name: tensor for name, tensor in _tensors(self.model).items()}
        content = save(_apart(tensors), {"segcal": json.dumps(plain(about), allow_nan=False)})
        with atomic_path(Path(path)) as temporary:
            temporary.write_bytes(content)


def load_calibrated(
    path: str | Path,
    model: nn.Module,
    *,
    inference: Inference | None = None,
    logits_of: LogitsOf | None = None,
) -> CalibratedNetwork:
    """Read what ``CalibratedNetwork.save`` wrote: ``model`` gets the weights of the file, and its calibrator.

    Args:
        path: The file.
        model: A module of the same architecture; its own weights do not matter. If it does not suit, it is unchanged.
        inference: As it was given to ``segcal.calibrate``: functions are not in the file.
        logits_of: The same.

    Examples:
        >>> import segcal, tempfile
        >>> images, labels = torch.randn(4, 1, 8, 8), torch.randint(3, (4, 8, 8))
        >>> net = segcal.calibrate(nn.Conv2d(1, 3, 1).eval(), [(images, labels)], "ts")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     net.save(f"{folder}/net.safetensors")
        ...     again = segcal.load_calibrated(f"{folder}/net.safetensors", nn.Conv2d(1, 3, 1).eval())
        >>> torch.equal(again(images), net(images))
        True
    """
    check_model(model)
    calibrator = load(path)
    about, state = _read(path)
    for name, given in (("inference", inference), ("logits_of", logits_of)):
        if (given is not None) != (name in about["needs"]):
            with_or = "with" if given is None else "without"
            raise InputError(
                f"{name} is {'missing' if given is None else 'given'}",
                where=str(path),
                expected=f"as in segcal.calibrate, which was called {with_or} it",
            )
    _check_match(_tensors(model), state, str(path))
    model.load_state_dict(state)
    there = device_of(model)
    return CalibratedNetwork(
        model, calibrator if there is None else calibrator.to(there), kind=about["kind"], inference=inference,
        logits_of=logits_of,
    )  # fmt: skip


def scores_of(model: nn.Module, images: Any, inference: Inference | None, logits_of: LogitsOf | None) -> Tensor:
    """What a model gives for images, as a tensor."""
    output = model(images) if inference is None else inference(images, model)
    scores = output if logits_of is None else logits_of(output)
    if not isinstance(scores, Tensor):
        names = list(scores) if isinstance(scores, Mapping) else []
        came = f"{type(scores).__name__}{f' with {some(names)}' if names else ''}"
        key = f"[{names[0]!r}]" if names else ".logits"
        raise InputError(
            f"{'the model returns' if logits_of is None else 'logits_of returns'} a {came}",
            expected="a tensor, (N, C, *spatial)",
            fix=f"logits_of=lambda output: output{key}, or wherever the logits are",
        )
    return scores


def check_model(model: Any) -> None:
    """Raise unless this is a module."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model is of type {type(model).__name__}", expected="a torch.nn.Module")


def device_of(model: nn.Module) -> torch.device | None:
    """Where the first parameter or buffer is; None if there is none."""
    first = next(chain(model.parameters(), model.buffers()), None)
    return None if first is None else first.device


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict; raises if it holds something else than tensors."""
    state: Mapping[str, Any] = model.state_dict()
    if other := [name for name, value in state.items() if not isinstance(value, Tensor)]:
        raise InputError(
            f"the state dict of the model holds more than tensors: {some(other)}",
            expected="tensors, which alone are stored",
            fix="save the model on its own, and net.calibrator.save(path) beside it",
        )
    return dict(state)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors on the CPU that share no memory, as the format wants them: tied weights are stored twice."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        if own.numel() and own.untyped_storage().data_ptr() in seen:
            own = own.clone()
        seen.add(own.untyped_storage().data_ptr())
        found[name] = own
    return found


def _read(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What the file says, and the state dict of the model."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["segcal"])
            if about["format"] != NETWORK_FORMAT:
                raise DataError(
                    "holds a calibrator without a model",
                    where=str(path),
                    expected="a file of net.save, where net is what segcal.calibrate returned",
                    fix="segcal.calibrate(model, method=segcal.load(path))",
                )
            names = [name for name in file.keys() if name.startswith(_MODEL_PREFIX)]  # noqa: SIM118 - not a dict
            state = {name.removeprefix(_MODEL_PREFIX): file.get_tensor(name) for name in names}
        if about["kind"] not in KINDS or not isinstance(about["needs"], list):
            raise TypeError(f"kind {about['kind']!r}, needs {about['needs']!r}")
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, SegcalError):
            raise
        raise DataError(
            f"cannot be read ({type(error).__name__}: {error})",
            where=str(path),
            expected="a complete file of net.save, where net is what segcal.calibrate returned",
        ) from None
    return about, state


def _check_match(own: Mapping[str, Tensor], stored: Mapping[str, Tensor], path: str) -> None:
    """Raise unless the stored tensors are those of the model."""
    problems = {
        "the file lacks": [name for name in own if name not in stored],
        "the model lacks": [name for name in stored if name not in own],
        "other shapes": [
            f"{name} {tuple(stored[name].shape)} for {tuple(tensor.shape)}"
            for name, tensor in own.items()
            if name in stored and stored[name].shape != tensor.shape
        ],
    }
    if found := [f"{what} {some(names)}" for what, names in problems.items() if names]:
        raise InputError(
            f"the weights of the file do not suit the model: {'; '.join(found)}",
            where=path,
            expected="a model of the architecture that was calibrated",
        )
