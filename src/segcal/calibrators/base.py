"""What every calibrator is: a module from logits to log-probabilities that is fitted, saved and loaded alike."""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from segcal.calibrators.module import CalibratorModule
from segcal.calibrators.storage import calibrator_bytes, read_calibrator
from segcal.cases import CaseRef, CaseSet
from segcal.errors import InputError, SegcalError
from segcal.files import atomic_path
from segcal.kernels import AffineMap, fast_maps
from segcal.scores import keep_argmax
from segcal.types import CHUNK_VALUES, Case, FitReport

Preserves = Literal["order", "argmax"]
VoxelBudget = Literal["auto", "all"]
TensorPair = tuple[Tensor, Tensor]

# Cases that the images of a tensor are divided into, if there are as many.
_TENSOR_CASES = 10
# Of the cases, where a calibrator needs validation data and was given none.
_HELD_OUT = 0.2


class FitData(NamedTuple):
    """What a calibrator is fitted to: cases, cases to validate on, how many voxels to use, and a seed."""

    cases: CaseSet
    validation: CaseSet | None
    voxels: VoxelBudget
    seed: int

    def held_out(self) -> FitData:
        """The same with validation cases: a seeded fifth of the cases where none were given, all if there is one."""
        if self.validation is not None:
            return self
        if len(self.cases) < 2:
            return self._replace(validation=self.cases)
        held_out = max(1, round(_HELD_OUT * len(self.cases)))
        split = self.cases.split(len(self.cases) - held_out, held_out, 0, seed=self.seed)
        return self._replace(cases=split.calibration, validation=split.validation)


class Fitted(NamedTuple):
    """What a subclass reports of its fit; the base class adds the time it took."""

    nll_before: float
    nll_after: float
    converged: bool
    certificate: float
    iterations: int
    voxels_used: int
    notes: Sequence[str] = ()


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
                out a fifth of the cases where none are given; exact ones do not need them.
            ignore_index: Label of voxels that do not count, with logits.
            mask: ``(N, *spatial)`` bool, True where a voxel counts, with logits.
            voxels: ``"auto"`` may fit to a stratified sample, ``"all"`` is exact; ``fit_report`` says what was used.
            seed: Of everything random.
        """
        if isinstance(data, CaseSet) == (labels is not None):
            problem = "labels come with cases" if labels is not None else "logits come without labels"
            raise InputError(problem, expected="fit(cases) or fit(logits, labels)")
        if voxels not in ("auto", "all"):
            raise InputError(f"voxels is {voxels!r}", expected="'auto' or 'all'")
        cases = data if isinstance(data, CaseSet) else _tensors_as_cases(data, labels, ignore_index, mask)
        if not len(cases):
            raise InputError("no cases to fit to", expected="at least one")
        if isinstance(validation, tuple):
            validation = _tensors_as_cases(*validation, ignore_index, None)
        if validation is not None and validation.num_classes != cases.num_classes:
            raise InputError(f"validation has {validation.num_classes} classes", expected=f"{cases.num_classes}")
        return self._become(cases, lambda trial: trial._fit(FitData(cases, validation, voxels, seed)))

    def _become(self, cases: CaseSet, fit: Callable[[Any], Fitted]) -> Self:
        """Fit a copy and, if that does not raise, be it."""
        started = time.perf_counter()
        trial = copy.deepcopy(self)
        trial.num_classes, trial.class_names = cases.num_classes, cases.class_names
        trial.allocate(cases.num_classes)
        found = fit(trial)
        trial.fit_report = FitReport(
            **{**found._asdict(), "notes": tuple(found.notes)}, seconds=time.perf_counter() - started
        )
        self.__dict__.update(trial.__dict__)
        return self

    @classmethod
    def parameter_count(cls, num_classes: int) -> ParameterCount | None:
        """How many parameters the map has for so many classes (Kirscher et al., Table 2); None without parameters."""
        return None

    def size(self) -> int:
        """Numbers that were fitted: by the published formula where there is one, else all that the file holds."""
        count = None if self.num_classes is None else self.parameter_count(self.num_classes)
        return count.optimised if count else sum(tensor.numel() for tensor in self.state_dict().values())

    def summary(self) -> str:
        """The map in a few numbers where it has few, else how many it has."""
        return f"{self.size():,} parameters"

    # -- applying ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _scores(self, logits: Tensor) -> Tensor:
        """Calibrated scores, up to a constant per voxel, of logits ``(N, C, *spatial)`` in float32 or float64."""

    def forward(self, logits: Tensor) -> Tensor:
        """Calibrated log-probabilities, in the dtype and on the device of the input."""
        if self.num_classes is None:
            raise SegcalError("the calibrator has not been fitted", fix="call fit, or segcal.load a fitted one")
        if logits.ndim < 2 or logits.shape[1] != self.num_classes:
            raise InputError(
                f"logits have shape {tuple(logits.shape)}", expected=f"(N, {self.num_classes}, *spatial), as fitted"
            )
        kernels = fast_maps(logits)
        fast = None if kernels is None else self._fast(kernels, logits)
        if fast is not None:
            return fast
        exact = logits if logits.dtype == torch.float64 else logits.float()
        log_probs = self._scores(exact).log_softmax(1).to(logits.dtype)
        return log_probs if self.preserves is None else keep_argmax(log_probs, logits.argmax(1))

    def _fast(self, kernels: Any, logits: Tensor) -> Tensor | None:
        """What ``forward`` returns, from ``segcal.kernels.apply_cpu``; None where that has no loop for this map."""
        return None

    def pieces(self, case: Case) -> Iterator[tuple[slice, Tensor]]:
        """Rows of a case and their log-probabilities ``(N, C, rows, ...)``, in order; only some rows are in memory."""
        for rows, logits in case.logit_rows():
            yield rows, self(logits)

    def predict_proba(self, logits: Tensor) -> Tensor:
        """Calibrated probabilities."""
        probabilities: Tensor = self(logits).exp()
        return probabilities

    def predict(self, logits: Tensor) -> Tensor:
        """The label map ``(N, *spatial)``: the input's argmax, exactly, for calibrators that preserve it."""
        return (logits if self.preserves else self(logits)).argmax(1)

    @property
    def score_map(self) -> AffineMap | None:
        """The map as an affine one, where it is: evaluation then applies it without materialising its output."""
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
        )

    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments, JSON-able."""
        return {}


def load(path: str | Path, calibrators: dict[str, type[Calibrator]]) -> Calibrator:
    """Read a calibrator that was saved, checking everything; nothing is unpickled."""
    stored = read_calibrator(Path(path), tuple(calibrators))
    calibrator = calibrators[stored.id](**stored.arguments)
    calibrator.allocate(stored.num_classes)
    wanted = {name: tuple(tensor.shape) for name, tensor in calibrator.tensors().items()}
    found = {name: tuple(tensor.shape) for name, tensor in stored.tensors.items()}
    if wanted != found:
        raise InputError(f"holds the tensors {found}", where=str(path), expected=f"{wanted} for '{stored.id}'")
    calibrator.num_classes, calibrator.class_names = stored.num_classes, stored.class_names
    calibrator.load_state_dict(stored.tensors)
    calibrator.fit_report = stored.fit_report
    return calibrator


def _tensors_as_cases(logits: Tensor, labels: Tensor | None, ignore_index: int, mask: Tensor | None) -> CaseSet:
    assert labels is not None
    if logits.ndim < 2 or logits.shape[1] < 2 or not logits.is_floating_point():
        raise InputError(
            f"logits have shape {tuple(logits.shape)} and dtype {logits.dtype}",
            expected="(N, C, *spatial), floating point, at least two classes",
        )
    like = (logits.shape[0], *logits.shape[2:])
    for name, tensor in (("labels", labels), ("mask", mask)):
        if tensor is not None and tuple(tensor.shape) != like:
            raise InputError(f"{name} have shape {tuple(tensor.shape)}", expected=f"{like} for these logits")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise InputError(f"labels have dtype {labels.dtype}", expected="class indices, integers", fix="labels.long()")
    if mask is not None and mask.dtype != torch.bool:
        raise InputError(f"the mask has dtype {mask.dtype}", expected="bool, True where voxels count", fix="mask > 0")
    if logits.ndim == 2:  # (N, C) is a row of N voxels
        logits, labels = logits.T[None], labels[None]
        mask = None if mask is None else mask[None]
    refs = []
    # Some images are a case: few enough to hold some out, many enough not to spend the time on turns.
    size = max(1, min(len(logits) // _TENSOR_CASES, CHUNK_VALUES // max(1, logits[:1].numel())))
    for n in range(0, len(logits), size):
        some = slice(n, n + size)
        source = _TensorSource(
            f"tensors[{n}]", logits[some].detach(), labels[some], None if mask is None else mask[some], ignore_index
        )
        refs.append(CaseRef(source.id, partial(Case, source)))
    return CaseSet(refs, num_classes=logits.shape[1], ignore_index=ignore_index)


class _TensorSource:
    """Tensors as a case."""

    sliceable = True
    spacing: tuple[float, ...] | None = None

    def __init__(self, id: str, logits: Tensor, labels: Tensor, mask: Tensor | None, ignore_index: int) -> None:
        self.id = id
        self.batch, self.num_classes, *spatial = logits.shape
        self.spatial, self.ignore_index = tuple(spatial), ignore_index
        self._logits, self._labels, self._mask = logits, labels, mask

    def logits(self, rows: slice) -> Tensor:
        return self._logits[:, :, rows]

    def labels(self, rows: slice) -> Tensor:
        return self._labels[:, rows]

    def mask(self, rows: slice) -> Tensor | None:
        return None if self._mask is None else self._mask[:, rows]

    def image(self, rows: slice) -> None:
        return None

    def posterior(self, rows: slice) -> None:
        return None
