"""What every calibrator is: a module from logits to log-probabilities that is fitted, saved and loaded alike."""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor
from typing_extensions import Self

from segcal.calibrators.module import CalibratorModule, become
from segcal.calibrators.per_channel import (
    channel_pieces,
    for_each_channel,
    report_of_channels,
    split_channels,
)
from segcal.calibrators.storage import calibrator_bytes
from segcal.cases import CaseSet
from segcal.cases.calibrated import check_classes
from segcal.cases.tensor_cases import tensors_as_cases
from segcal.errors import InputError, SegcalError, check_name, check_seed
from segcal.files.atomic import atomic_path
from segcal.fitting.cost import FitCost, check_cost
from segcal.fitting.data import FitData, Fitted, VoxelBudget
from segcal.kernels import AffineMap, fast_maps
from segcal.scores import keep_argmax, only_possible
from segcal.types import Case, FitReport

Preserves = Literal["order", "argmax"]
TensorPair = tuple[Tensor, Tensor]


class Choice(NamedTuple):
    """One of some values, for a hyperparameter search."""

    values: tuple[int, ...]

    def suggest(self, trial: Any, name: str) -> Any:
        """A draw, by an Optuna trial."""
        return trial.suggest_categorical(name, self.values)


class LogUniform(NamedTuple):
    """A number between bounds, uniform in its logarithm; with ``or_zero``, exactly zero half of the time."""

    low: float
    high: float
    or_zero: bool = False

    def suggest(self, trial: Any, name: str) -> Any:
        """A draw, by an Optuna trial."""
        if self.or_zero and trial.suggest_categorical(f"{name} is zero", (True, False)):
            return 0.0
        return trial.suggest_float(name, self.low, self.high, log=True)


class ParameterCount(NamedTuple):
    """Scalars that the published parameterisation optimises, and those that the softmax can tell apart."""

    optimised: int
    identifiable: int


class Calibrator(CalibratorModule, ABC):
    """A map from logits ``(N, C, *spatial)`` to calibrated log-probabilities of the same shape, dtype and device.

    Subclasses say what they guarantee: ``translation_invariant`` (unchanged by ``z + c(v)``), ``preserves`` (the
    ``"order"`` of the classes, their ``"argmax"``, or None), ``spatial`` (whether neighbours matter to a voxel).
    """

    id: ClassVar[str]
    translation_invariant: bool
    preserves: Preserves | None
    spatial: bool = False
    #: What ``segcal.tune(trials=...)`` varies: constructor arguments.
    search_space: Mapping[str, Choice | LogUniform] = MappingProxyType({})
    #: The trials of ``segcal.tune``.
    tuning: tuple[Any, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.fit_report: FitReport | None = None

    # -- fitting -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _fit(self, data: FitData) -> Fitted:
        """Set the parameters from the cases."""

    def fit(
        self,
        data: CaseSet | Tensor,
        labels: Tensor | None = None,
        *,
        validation: CaseSet | TensorPair | None = None,
        ignore_index: int = 255,
        mask: Tensor | None = None,
        voxels: VoxelBudget = "auto",
        seed: int = 0,
    ) -> Self:
        """Fit to cases, or to logits and labels. Returns self; if it raises, the calibrator is as it was before.

        Args:
            data: A case set, which is streamed, or logits ``(N, C, *spatial)`` or ``(N, C)``.
            labels: ``(N, *spatial)``, with logits.
            validation: Cases, or (logits, labels), for early stopping and selection. Calibrators that need them hold
                out a fifth of the cases where none are given, of a single case a fifth of its voxels, and say so in
                the report; exact ones do not need them.
            ignore_index: Label of voxels that do not count, with logits.
            mask: ``(N, *spatial)`` bool, True where a voxel counts, with logits.
            voxels: ``"auto"`` may fit to a stratified sample, ``"all"`` is exact; ``fit_report`` says what was used.
            seed: Of everything random.
        """
        if isinstance(data, CaseSet) == (labels is not None):
            problem = "labels come with cases" if labels is not None else "logits come without labels"
            raise InputError(problem, expected="fit(cases) or fit(logits, labels)")
        check_name("voxels", voxels, ("auto", "all"))
        check_seed(seed)
        cases = data if isinstance(data, CaseSet) else tensors_as_cases(data, labels, ignore_index, mask)
        if not len(cases):
            raise InputError("no cases to fit to", expected="at least one")
        if isinstance(validation, tuple):
            validation = tensors_as_cases(*validation, ignore_index, None)
        if validation is not None:
            check_classes(validation, cases, have="validation has", whose="what is fitted to")
        if cases.channel_names is None:
            return self._become(cases, lambda trial: trial._fit(FitData(cases, validation, voxels, seed)))

        def fit_channel(index: int, own: CaseSet, held_out: CaseSet | None) -> Calibrator:
            # Channels that were tuned keep the strengths they have.
            tuned = self.channel_names == cases.channel_names
            start = copy.deepcopy(self.per_channel[index]) if tuned else self.single()
            return start.fit(own, validation=held_out, voxels=voxels, seed=seed)

        return self.take_channels(cases.channel_names, for_each_channel(fit_channel, cases, validation))

    @property
    def per_channel(self) -> Sequence[Calibrator]:
        """The maps of ``channels``, none where there is one map."""
        return cast("Sequence[Calibrator]", self.channels or ())

    def take_channels(self, names: Sequence[str], channels: Sequence[Calibrator]) -> Self:
        """Be calibrators that were fitted to the channels of multi-label cases. Returns self."""
        whole = self.single().hold_channels(names, channels)
        whole.num_classes, whole.class_names = channels[0].num_classes, channels[0].class_names
        whole.fit_report = report_of_channels(names, [own.fit_report for own in channels])
        become(self, whole)
        return self

    def _become(self, cases: CaseSet, fit: Callable[[Any], Fitted]) -> Self:
        """Fit a copy and, if that does not raise, be it."""
        started = time.perf_counter()
        self.check_size(cases.num_classes)
        trial = self.single()
        trial.num_classes, trial.class_names = cases.num_classes, cases.class_names
        trial.allocate(cases.num_classes)
        found = fit(trial)
        trial.fit_report = FitReport(
            **{**found._asdict(), "notes": tuple(found.notes)}, seconds=time.perf_counter() - started
        )
        become(self, trial)
        return self

    def cost(self, num_classes: int) -> FitCost | None:
        """What a fit to so many classes takes; None where that is little."""
        return None

    def check_size(self, num_classes: int) -> None:
        """Raise where a fit to so many classes takes more memory than there is for it."""
        cost = self.cost(num_classes)
        if cost is not None:
            check_cost(self.id, num_classes, cost, CALIBRATORS)

    @classmethod
    def parameter_count(cls, num_classes: int) -> ParameterCount | None:
        """How many parameters the map has for so many classes (Kirscher et al., Table 2); None without parameters."""
        return None

    def size(self) -> int:
        """Numbers that were fitted: by the published formula where there is one, else all that the file holds."""
        if self.channels is not None:
            return sum(own.size() for own in self.per_channel)
        count = None if self.num_classes is None else self.parameter_count(self.num_classes)
        return count.optimised if count else sum(tensor.numel() for tensor in self.tensors().values())

    def summary(self) -> str:
        """The map in a few numbers where it has few, else how many it has; that of every channel."""
        named = zip(self.channel_names or (), self.per_channel, strict=True)
        return "; ".join(f"{name}: {own.summary()}" for name, own in named) or self._summary()

    def _summary(self) -> str:
        """What ``summary`` gives, of one map."""
        return f"{self.size():,} parameters"

    # -- applying ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _scores(self, logits: Tensor) -> Tensor:
        """Calibrated scores, up to a constant per voxel, of logits ``(N, C, *spatial)`` in float32 or float64.

        Whatever ``segcal.scores.DEPTH`` calls impossible is -inf in these logits, and must be -inf in the scores.
        """

    def forward(self, logits: Tensor | Sequence[Tensor], image: Tensor | None = None) -> Tensor:
        """Calibrated log-probabilities, in the dtype and on the device of the input.

        Args:
            logits: ``(N, C, *spatial)``; of a calibrator fitted to multi-label data ``(K, 2, *spatial)``, one for each
                of its channels. ``ensemble`` also takes a sequence of the members' logits.
            image: ``(N, channels, *spatial)``, or one for all, where the calibrator was fitted to images.
        """
        if self.channels is None or self.channel_names is None:
            return self._log_probs(logits, image)
        parts = [split_channels(self.channel_names, z) for z in ([logits] if isinstance(logits, Tensor) else logits)]
        found = []
        for index, own in enumerate(self.per_channel):
            members = [part[index] for part in parts]
            seen = image if image is None or len(image) == 1 else image[index : index + 1]
            found.append(own(members[0] if isinstance(logits, Tensor) else members, seen))
        return torch.cat(found)

    def _log_probs(self, logits: Tensor | Sequence[Tensor], image: Tensor | None) -> Tensor:
        """What ``forward`` gives, of one map."""
        if self.num_classes is None:
            raise SegcalError("the calibrator has not been fitted", fix="call fit, or segcal.load a fitted one")
        if not isinstance(logits, Tensor):
            raise InputError(f"logits are {type(logits).__name__}", expected="a tensor, (N, C, *spatial)")
        if image is not None:
            raise InputError("an image came", expected="none, as the calibrator was fitted without images")
        if logits.ndim < 2 or logits.shape[1] != self.num_classes:
            raise InputError(
                f"logits have shape {tuple(logits.shape)}", expected=f"(N, {self.num_classes}, *spatial), as fitted"
            )
        kernels = fast_maps(logits)
        fast = None if kernels is None else self._fast(kernels, logits)
        if fast is not None:
            return fast
        exact = logits if logits.dtype == torch.float64 else logits.float()
        log_probs = self._scores(only_possible(exact)).log_softmax(1).to(logits.dtype)
        return log_probs if self.preserves is None else keep_argmax(log_probs, logits.argmax(1))

    def _fast(self, kernels: Any, logits: Tensor) -> Tensor | None:
        """What ``forward`` returns, from ``segcal.kernels.apply_cpu``; None where that has no loop for this map."""
        return None

    def pieces(self, case: Case) -> Iterator[tuple[slice, Tensor]]:
        """Rows of a case and their log-probabilities ``(N, C, rows, ...)``, in order; only some rows are in memory."""
        return self._pieces(case) if self.channels is None else channel_pieces(self.per_channel, case)

    def _pieces(self, case: Case) -> Iterator[tuple[slice, Tensor]]:
        """What ``pieces`` gives, of one map."""
        for rows, logits in case.logit_rows():
            yield rows, self(logits)

    def predict_proba(self, logits: Tensor, image: Tensor | None = None) -> Tensor:
        """Calibrated probabilities; the arguments are those of ``forward``."""
        probabilities: Tensor = self(logits, image).exp()
        return probabilities

    def predict(self, logits: Tensor) -> Tensor:
        """The label map ``(N, *spatial)``: the input's argmax, exactly, for calibrators that preserve it."""
        return (logits if self.preserves else self(logits)).argmax(1)

    @property
    def score_map(self) -> AffineMap | None:
        """The map as an affine one, where it is: evaluation then applies it without materialising its output."""
        return self._affine() if self.channels is None else None

    def _affine(self) -> AffineMap | None:
        """What ``score_map`` gives, of one map."""
        return None

    # -- keeping -------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write a safetensors file with all there is to know; ``segcal.load`` reads it."""
        content = self.to_bytes()
        # Written here and not by safetensors, whose files nobody else may read, whatever the user's umask.
        with atomic_path(Path(path)) as temporary:
            temporary.write_bytes(content)

    def to_bytes(self) -> bytes:
        """What ``save`` writes."""
        if self.num_classes is None:
            raise SegcalError("the calibrator has not been fitted", fix="call fit before save")
        return calibrator_bytes(
            {name: tensor.detach().cpu() for name, tensor in self.tensors().items()},
            id=self.id,
            arguments=self.arguments(),
            num_classes=self.num_classes,
            class_names=self.class_names,
            fit_report=self.fit_report,
            channels=[(own.arguments(), own.fit_report) for own in self.per_channel],
            channel_names=self.channel_names,
        )


#: Every calibrator by its id, filled by ``segcal.calibrators``; here, so that calibrators can look up others.
CALIBRATORS: dict[str, type[Calibrator]] = {}
