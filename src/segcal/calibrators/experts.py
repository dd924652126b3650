"""The base of calibrators whose map is a ``segcal.kernels.ExpertMap``: a convex fit, exact and with a certificate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import Self

from segcal.calibrators.base import Calibrator, Choice, LogUniform, ParameterCount
from segcal.calibrators.module import renamed
from segcal.cases import CaseSet
from segcal.errors import InputError, check_name
from segcal.fitting.cost import FitCost, curvature_cost
from segcal.fitting.data import FitData, Fitted
from segcal.fitting.expert_adam import fit_by_adam
from segcal.fitting.expert_exact import fit_exactly, sample_voxels
from segcal.fitting.expert_form import ExpertForm, Strengths
from segcal.fitting.first_pass import FirstPass
from segcal.fitting.limits import Limits
from segcal.kernels import ExpertMap, Features
from segcal.parallel.threads import blas_threads

Solver = Literal["exact", "adam"]


class ExpertCalibrator(Calibrator):
    """An affine map of features of the logits, one for all voxels or one per predicted class; subclasses say which.

    Args:
        off_diagonal: lambda of the ODIR penalty, on the mean square of the off-diagonal weights.
        bias_penalty: mu of the ODIR penalty, on the mean square of the biases.
        shrinkage: Penalty on the mean square of the difference from the fitted temperature scaling; with infinity the
            map is temperature scaling, or the nearest map that the constraints allow.
        solver: ``"exact"`` finds the global optimum; ``"adam"`` trains the papers' parameterisation, for comparison.
        learning_rate: Adam's learning rate.
        patience: Epochs without improvement before Adam stops.
    """

    features: ClassVar[Features]
    routed: ClassVar[bool] = False
    equal_row_sums: ClassVar[bool] = False
    weight: Tensor
    bias: Tensor

    @renamed(bias="bias_penalty", rate="learning_rate")
    def __init__(
        self,
        off_diagonal: float = 0.0,
        bias_penalty: float = 0.0,
        shrinkage: float = 0.0,
        *,
        solver: Solver = "exact",
        learning_rate: float = 1e-2,
        patience: int = 20,
    ) -> None:
        super().__init__()
        for name, value in (("off_diagonal", off_diagonal), ("bias_penalty", bias_penalty), ("shrinkage", shrinkage)):
            if not (value >= 0 and (np.isfinite(value) or name == "shrinkage")):
                raise InputError(f"{name} is {value}", expected="a penalty, zero or more")
        check_name("solver", solver, ("exact", "adam"))
        if not (learning_rate > 0 and patience > 0):
            problem = f"learning_rate is {learning_rate} and patience is {patience}"
            raise InputError(problem, expected="more than zero")
        self.off_diagonal, self.bias_penalty = float(off_diagonal), float(bias_penalty)
        self.shrinkage = float(shrinkage)
        self.solver, self.learning_rate, self.patience = solver, learning_rate, patience
        self.register_buffer("weight", torch.zeros(0, 0, 0, dtype=torch.float64))
        self.register_buffer("bias", torch.zeros(0, 0, dtype=torch.float64))

    # -- the map -------------------------------------------------------------------------------------------------------

    @classmethod
    def form(cls, num_classes: int) -> ExpertForm:
        """Shape, identity and bounds of the parameters."""
        return ExpertForm(cls.features, num_classes, cls.routed, cls.equal_row_sums)

    @classmethod
    def parameter_count(cls, num_classes: int) -> ParameterCount:
        """Those of all experts; equal shifts of all classes have no effect.

        CMS: ``C (C^2 + 1)`` as published, of which ``C^2 (C - 1)`` are identifiable and optimised here.
        """
        form = cls.form(num_classes)
        if form.constrained:
            return ParameterCount(num_classes * (num_classes**2 + 1), num_classes**2 * (num_classes - 1))
        experts, outputs, columns = form.shape
        free = outputs * columns - (outputs - 1) * cls.equal_row_sums
        shifts = 1 if cls.features == "own-logit" else columns
        return ParameterCount(experts * free, experts * (free - shifts))

    @property
    def map(self) -> ExpertMap:
        """The fitted map."""
        return ExpertMap(self.features, self.weight, self.bias)

    def allocate(self, num_classes: int) -> None:
        """Set the parameters to the identity."""
        self.set_parameters(self.form(num_classes).identity)

    def set_parameters(self, theta: NDArray[np.float64]) -> None:
        """Weights and biases from ``theta (E, K, J + 1)``."""
        values = torch.from_numpy(theta).to(self.weight.device)
        self.weight, self.bias = values[:, :, :-1].contiguous(), values[:, :, -1].contiguous()

    def shapes(self, num_classes: int) -> dict[str, tuple[int, ...]]:
        """The shapes of weight and bias."""
        experts, outputs, columns = self.form(num_classes).shape
        return {"weight": (experts, outputs, columns - 1), "bias": (experts, outputs)}

    def limits(self) -> dict[str, Limits]:
        """The bounds of the fit; biases may also be 0, as in the identity."""
        assert self.num_classes is not None
        form = self.form(self.num_classes)
        lower, upper = (torch.from_numpy(own) for own in form.bounds)
        if form.constrained:
            lower[:, :, -1] = 0
        return {
            "weight": Limits(lower[:, :, :-1], upper[:, :, :-1]),
            "bias": Limits(lower[:, :, -1], upper[:, :, -1]),
        }

    def _scores(self, logits: Tensor) -> Tensor:
        return self.map(logits)

    def _fast(self, kernels: Any, logits: Tensor) -> Any:
        return kernels.apply_experts(logits, self.map, keep=self.preserves is not None)

    @property
    def search_space(self) -> Mapping[str, Choice | LogUniform]:  # type: ignore[override]
        """For Adam, that of Kirscher et al., Appendix B."""
        if self.solver == "exact":
            return {}
        penalty = LogUniform(1e-6, 1e-1, or_zero=True)
        return {
            "learning_rate": LogUniform(1e-4, 3e-2),
            "patience": Choice((10, 20, 50)),
            "off_diagonal": penalty,
            "bias_penalty": penalty,
        }

    def cost(self, num_classes: int) -> FitCost:
        """The memory and time of the curvature."""
        form = self.form(num_classes)
        return curvature_cost(*form.shape, sample_voxels(form, everything=True))

    def fit_from(self, first: FirstPass, cases: CaseSet, start: Self | None = None) -> Self:
        """Fit to the sample of a first pass over the cases, starting from another fitted calibrator of this kind."""
        theta = None if start is None else torch.cat((start.weight, start.bias[:, :, None]), 2).numpy()
        return self._become(cases, lambda trial: trial._fit_exactly(first, None, theta))

    def _fit(self, data: FitData) -> Fitted:
        form, everything = self.form(data.cases.num_classes), data.voxels == "all"
        with blas_threads(1):
            if self.solver == "adam":
                theta, found = fit_by_adam(form, self._strengths, data, self.learning_rate, self.patience)
                self.set_parameters(theta)
                return found
            first = FirstPass.over(data.cases, sample_voxels(form, everything=everything), data.seed)
            return self._fit_exactly(first, data.cases if everything else None)

    def _fit_exactly(self, first: FirstPass, cases: CaseSet | None, start: NDArray[np.float64] | None = None) -> Fitted:
        theta, found = fit_exactly(self.form(first.num_classes), self._strengths, first, cases, start)
        self.set_parameters(theta)
        return found

    @property
    def _strengths(self) -> Strengths:
        return Strengths(self.off_diagonal, self.bias_penalty, self.shrinkage)
