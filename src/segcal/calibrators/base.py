"""The base class: a module that maps logits to log-probabilities, with fitting, saving and the registry."""

from __future__ import annotations

import copy
import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
from safetensors.torch import save
from torch import Tensor
from typing_extensions import Self

from segcal.calibrators.module import CalibratorModule, become
from segcal.calibrators.per_channel import channel_pieces, for_each_channel, report_of_channels, split_channels
from segcal.calibrators.precision import fitting, full_precision
from segcal.cases import CaseSet, Source
from segcal.cases.batches import cases_to_fit
from segcal.cases.calibrated import check_classes
from segcal.cases.device import Device
from segcal.errors import InputError, SegcalError, check_name, check_seed
from segcal.files.atomic import atomic_path
from segcal.files.plain import plain
from segcal.fitting.cost import FitCost, check_cost
from segcal.fitting.data import FitData, Fitted, VoxelBudget
from segcal.kernels import AffineMap, cuda_kernels, fast_maps
from segcal.scores import at_least_float32, keep_argmax, only_possible, probabilities
from segcal.types import Case, FitReport

Preserves = Literal["order", "argmax"]

#: The format of files: safetensors with JSON metadata. Those with a map for each channel of multi-label data have
#: another version, so that no reader takes them for one map.
FORMAT, VERSION, VERSION_WITH_CHANNELS = "segcal.calibrator", 1, 2
#: The format of a model and its calibrator in one file, and how the names of the calibrator's tensors begin there.
NETWORK_FORMAT, NETWORK_VERSION, CALIBRATOR_PREFIX = "segcal.network", 1, "calibrator."


class Choice(NamedTuple):
    """One of several values, in a hyperparameter search."""

    values: tuple[int, ...]

    def suggest(self, trial: Any, name: str) -> Any:
        """A value drawn by an Optuna trial."""
        return trial.suggest_categorical(name, self.values)


class LogUniform(NamedTuple):
    """A number between bounds, uniform in its logarithm; with ``or_zero``, exactly zero half of the time."""

    low: float
    high: float
    or_zero: bool = False

    def suggest(self, trial: Any, name: str) -> Any:
        """A value drawn by an Optuna trial."""
        if self.or_zero and trial.suggest_categorical(f"{name} is zero", (True, False)):
            return 0.0
        return trial.suggest_float(name, self.low, self.high, log=True)


class ParameterCount(NamedTuple):
    """Parameters that the published method optimises, and those that the softmax can tell apart."""

    optimised: int
    identifiable: int


class Calibrator(CalibratorModule, ABC):
    """A map from logits ``(N, C, *spatial)`` to calibrated log-probabilities of the same shape, dtype and device.

    Subclasses declare their ``id``, the ``title`` that reports show, and what they guarantee: ``translation_invariant``
    (unchanged by ``z + c(v)``), ``preserves`` (the ``"order"`` of the classes, their ``"argmax"``, or None) and
    ``spatial`` (whether a voxel's result depends on its neighbours). Their constructors store each argument under its
    own name.
    """

    title: ClassVar[str]
    translation_invariant: bool
    preserves: Preserves | None
    spatial: bool = False
    #: Channels of the images that the map needs; 0 if it needs none.
    image_channels: int = 0
    #: The constructor arguments that ``segcal.tune(trials=...)`` varies.
    search_space: Mapping[str, Choice | LogUniform] = MappingProxyType({})
    #: The trials that ``segcal.tune`` made.
    tuning: tuple[Any, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.fit_report: FitReport | None = None

    # -- fitting -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _fit(self, data: FitData) -> Fitted:
        """Fit the parameters to the cases."""

    def fit(
        self,
        data: Source,
        labels: Any = None,
        *,
        validation: Source | None = None,
        ignore_index: int = 255,
        mask: Any = None,
        voxels: VoxelBudget = "auto",
        device: Device | None = None,
        seed: int = 0,
    ) -> Self:
        """Fit to cases, or to logits and labels, and return self. If this raises, the calibrator is unchanged.

        Args:
            data: A case set, which is streamed, or logits ``(N, C, *spatial)`` or ``(N, C)``, or anything else that
                ``segcal.cases_from`` takes, such as a DataLoader.
            labels: ``(N, *spatial)`` or ``(N, 1, *spatial)``, with logits.
            validation: Cases, (logits, labels), or batches, for early stopping and selection. Without them, calibrators
                that need them hold out a fifth of the cases (of a single case, a fifth of its voxels) and say so in
                the report. Exact fits do not need them.
            ignore_index: The label of voxels to ignore, with logits.
            mask: ``(N, *spatial)`` bool, True for voxels to use, with logits.
            voxels: ``"auto"`` may fit to a stratified sample, ``"all"`` is exact; ``fit_report`` says what was used.
            device: Where to compute: ``auto`` (a GPU if there is one), ``cpu``, ``cuda``; None for where the data are.
            seed: Seeds all random numbers.
        """
        check_name("voxels", voxels, ("auto", "all"))
        check_seed(seed)
        cases = cases_to_fit(data, labels, ignore_index, mask)
        if not len(cases):
            raise InputError("no cases to fit to", expected="at least one")
        cases = cases.on(device)
        chosen_on: CaseSet | None = None
        if validation is not None:
            chosen_on = cases_to_fit(validation, None, ignore_index, None).on(device)
            check_classes(chosen_on, cases, have="validation has", whose="what is fitted to")
        if cases.channel_names is None:
            return self._become(cases, lambda trial: trial._fit(FitData(cases, chosen_on, voxels, seed)))

        def fit_channel(index: int, own: CaseSet, held_out: CaseSet | None) -> Calibrator:
            # Channels that were tuned keep their own arguments.
            tuned = self.channel_names == cases.channel_names
            start = copy.deepcopy(self.per_channel[index]) if tuned else self.single()
            return start.fit(own, validation=held_out, voxels=voxels, seed=seed)

        return self.take_channels(cases.channel_names, for_each_channel(fit_channel, cases, chosen_on))

    @property
    def per_channel(self) -> Sequence[Self]:
        """The calibrators of the channels; empty unless the data are multi-label."""
        return cast("Sequence[Self]", self.channels or ())

    def take_channels(self, names: Sequence[str], channels: Sequence[Calibrator]) -> Self:
        """Become the calibrators that were fitted to the channels of multi-label cases, and return self."""
        whole = self.single().hold_channels(names, channels)
        whole.num_classes, whole.class_names = channels[0].num_classes, channels[0].class_names
        whole.fit_report = report_of_channels(names, [own.fit_report for own in channels])
        become(self, whole)
        return self

    def _become(self, cases: CaseSet, fit: Callable[[Any], Fitted]) -> Self:
        """Fit a copy, and become that copy unless this raises."""
        started = time.perf_counter()
        self.check_size(cases.num_classes)
        with fitting():
            trial = self.single()
            trial.num_classes, trial.class_names = cases.num_classes, cases.class_names
            trial.allocate(cases.num_classes)
            found = fit(trial)
        found, seconds = found._replace(notes=tuple(found.notes)), time.perf_counter() - started
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        trial.fit_report = FitReport(**found._asdict(), seconds=seconds, cases=len(cases), fitted=now)
        become(self, trial)
        return self

    def cost(self, num_classes: int) -> FitCost | None:
        """The memory and time of a fit to this many classes; None where they are small."""
        return None

    def check_size(self, num_classes: int) -> None:
        """Raise if a fit to this many classes needs more memory than there is."""
        check_cost(self.id, num_classes, self.cost(num_classes), CALIBRATORS)

    @classmethod
    def parameter_count(cls, num_classes: int) -> ParameterCount | None:
        """The parameters of the map for this many classes (Kirscher et al., Table 2); None if there is no formula."""
        return None

    def size(self) -> int:
        """The number of fitted parameters: by the published formula if there is one, else all numbers in the file."""
        if self.channels is not None:
            return sum(own.size() for own in self.per_channel)
        count = None if self.num_classes is None else self.parameter_count(self.num_classes)
        return count.optimised if count else sum(tensor.numel() for tensor in self.tensors().values())

    def summary(self) -> str:
        """The parameters if they are few, else how many there are; for multi-label data, by channel."""
        named = zip(self.channel_names or (), self.per_channel, strict=True)
        return "; ".join(f"{name}: {own.summary()}" for name, own in named) or self._summary()

    def _summary(self) -> str:
        """``summary`` for a single map."""
        return f"{self.size():,} parameters"

    # -- applying ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _scores(self, logits: Tensor) -> Tensor:
        """Calibrated scores, up to a constant per voxel, of logits ``(N, C, *spatial)`` in float32 or float64.

        Impossible classes (see ``segcal.scores.DEPTH``) are -inf in these logits, and must be -inf in the scores.
        """

    def forward(self, logits: Tensor | Sequence[Tensor], image: Tensor | None = None) -> Tensor:
        """Calibrated log-probabilities, in the dtype and on the device of the input.

        Args:
            logits: ``(N, C, *spatial)``; for a calibrator fitted to multi-label data ``(K, 2, *spatial)``, one item
                per channel. ``ensemble`` also takes a sequence of the members' logits.
            image: ``(N, channels, *spatial)``, or one for all items, if the calibrator was fitted to images.
        """
        if self.channels is None:
            with full_precision():
                return self._log_probs(logits, image)
        return torch.cat([own(z, seen) for own, z, seen in self._by_channel(logits, image)])

    def _by_channel(self, logits: Any, image: Tensor | None) -> Iterator[tuple[Self, Any, Tensor | None]]:
        """The calibrator of each channel with its logits, or those of its members, and its image."""
        single = isinstance(logits, Tensor)
        members = [split_channels(self.channel_names or (), z) for z in ([logits] if single else logits)]
        for index, own in enumerate(self.per_channel):
            parts = [channels[index] for channels in members]
            seen = image if image is None or len(image) == 1 else image[index : index + 1]
            yield own, parts[0] if single else parts, seen

    def _log_probs(self, logits: Tensor | Sequence[Tensor], image: Tensor | None) -> Tensor:
        """``forward`` for a single map."""
        logits = self._checked(logits, image)
        kernels = fast_maps(logits) or cuda_kernels(logits)
        fast: Tensor | None = None if kernels is None else self._fast(kernels, logits)
        if fast is not None:
            return fast
        log_probs = self._scores(only_possible(at_least_float32(logits))).log_softmax(1).to(logits.dtype)
        return log_probs if self.preserves is None else keep_argmax(log_probs, logits.argmax(1))

    def _checked(self, logits: Tensor | Sequence[Tensor], image: Tensor | None) -> Tensor:
        """The logits; raises if they or the image do not suit the fitted map."""
        if self.num_classes is None:
            raise SegcalError("the calibrator has not been fitted", fix="call fit, or segcal.load a fitted one")
        if not isinstance(logits, Tensor) or not logits.is_floating_point():
            came = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
            raise InputError(f"logits are {came}", expected="a tensor, (N, C, *spatial), floating point")
        if image is not None and not self.image_channels:
            raise InputError("an image came", expected="none, as the calibrator was fitted without images")
        if logits.ndim < 2 or logits.shape[1] != self.num_classes:
            raise InputError(
                f"logits have shape {tuple(logits.shape)}", expected=f"(N, {self.num_classes}, *spatial), as fitted"
            )
        return logits

    def _fast(self, kernels: Any, logits: Tensor) -> Any:
        """``forward`` by the loops of ``segcal.kernels.apply_cpu`` or ``cuda``; None if they have none for this map."""
        return None

    def pieces(self, case: Case) -> Iterator[tuple[slice, Tensor]]:
        """Rows of a case with their log-probabilities ``(N, C, rows, ...)``, in order; only some rows are in memory."""
        found = self._pieces(case) if self.channels is None else channel_pieces(self.per_channel, case)
        while True:
            with full_precision():  # left for the caller, who goes on between two pieces
                piece = next(found, None)
            if piece is None:
                return
            yield piece

    def _pieces(self, case: Case) -> Iterator[tuple[slice, Tensor]]:
        """``pieces`` for a single map."""
        for rows, logits in case.logit_rows():
            yield rows, self(logits)

    def predict_proba(self, logits: Tensor, image: Tensor | None = None) -> Tensor:
        """Calibrated probabilities; the arguments, and the argmax of the result, are those of ``forward``."""
        log_probs: Tensor = self(logits, image)
        return probabilities(log_probs, log_probs.dtype)

    def predict(self, logits: Tensor) -> Tensor:
        """The label map ``(N, *spatial)``; calibrators that preserve the argmax return exactly that of the input."""
        return (logits if self.preserves else self(logits)).argmax(1)

    @property
    def score_map(self) -> AffineMap | None:
        """The map if it is affine, else None: evaluation applies it without materialising its output."""
        return self._affine() if self.channels is None else None

    def _affine(self) -> AffineMap | None:
        """``score_map`` for a single map."""
        return None

    # -- saving --------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write a safetensors file with parameters, arguments and report; ``segcal.load`` reads it."""
        content = self.to_bytes()
        # safetensors would write a file that only its owner can read, whatever the umask is.
        with atomic_path(Path(path)) as temporary:
            temporary.write_bytes(content)

    def to_bytes(self) -> bytes:
        """The content of the file that ``save`` writes."""
        about = self.about()
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors().items()}
        return save(tensors, {"segcal": json.dumps(plain(about), allow_nan=False)})

    def about(self) -> dict[str, Any]:
        """What the file says besides its tensors."""
        if self.num_classes is None:
            raise SegcalError("the calibrator has not been fitted", fix="call fit before save")
        version = VERSION if self.channels is None else VERSION_WITH_CHANNELS
        about = {"format": FORMAT, "version": version, "id": self.id, **self._about_fit()}
        about |= {"num_classes": self.num_classes, "class_names": self.class_names}
        if self.channel_names is not None:
            named = zip(self.channel_names, self.per_channel, strict=True)
            about["channels"] = [{"name": name, **own._about_fit()} for name, own in named]
        about = json.loads(json.dumps(plain(about), allow_nan=False))  # as it will be read
        return {**about, "digest": content_digest(about, self.tensors())}

    def _about_fit(self) -> dict[str, Any]:
        """What a file says of a map, or of the map of a channel, besides its tensors."""
        return {"arguments": self.arguments(), "fit_report": self.fit_report and asdict(self.fit_report)}


def content_digest(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """A checksum of what a file says and of its tensors: safetensors has none, and a flipped bit is another map."""
    digest = hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors):
        values = tensors[name].detach().cpu().contiguous()
        digest.update(f"|{name}|{values.dtype}|{tuple(values.shape)}|".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


#: Every calibrator by its id, filled by ``segcal.calibrators``; defined here so that calibrators can look up others.
CALIBRATORS: dict[str, type[Calibrator]] = {}


def registered(cls: type[Calibrator] = Calibrator) -> dict[str, type[Calibrator]]:
    """All calibrators with an id of their own that are defined so far, in order."""
    found = {cls.id: cls} if "id" in vars(cls) else {}
    for own in cls.__subclasses__():
        found |= registered(own)
    return found
