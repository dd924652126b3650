"""What all calibrators share whose map is a ``segcal.kernels.ExpertMap``: an exact, convex fit with a certificate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import Self

from segcal.calibrators.base import Calibrator, Choice, LogUniform
from segcal.cases import CaseSet
from segcal.errors import InputError
from segcal.fitting.cost import FitCost, curvature_cost
from segcal.fitting.data import FitData, Fitted
from segcal.fitting.expert_adam import fit_by_adam
from segcal.fitting.expert_exact import fit_exactly, sample_voxels
from segcal.fitting.first_pass import FirstPass
from segcal.fitting.limits import Limits
from segcal.kernels import ExpertMap, Features
from segcal.parallel.threads import blas_threads

FloatArray = NDArray[np.float64]
Solver = Literal["exact", "adam"]

# Smallest d: at the optimum many constraints are active, and without a floor outputs would tie.
FLOOR = 1e-3
# Bounds that no sensible map comes near; they only keep separable data from running to infinity.
_LARGEST, _LARGEST_BIAS = 100.0, 20.0


class ExpertCalibrator(Calibrator):
    """A calibrator whose experts map features of the logits; subclasses say which, and what bounds them.

    Args:
        off_diagonal: lambda of the ODIR penalty, on the mean square of the off-diagonal weights.
        bias: mu of the ODIR penalty, on the mean square of the biases.
        shrinkage: Penalty on the mean square of the difference to the fitted temperature scaling; infinity gives
            that itself, as nearly as the constraints allow.
        solver: ``"exact"`` finds the global optimum; ``"adam"`` trains the papers' parameterisation, for comparison.
        rate: Adam's learning rate.
        patience: Epochs without improvement before Adam stops.
    """

    features: ClassVar[Features]
    routed: ClassVar[bool]
    weight: Tensor
    bias: Tensor

    def __init__(
        self,
        off_diagonal: float = 0.0,
        bias: float = 0.0,
        shrinkage: float = 0.0,
        *,
        solver: Solver = "exact",
        rate: float = 1e-2,
        patience: int = 20,
    ) -> None:
        super().__init__()
        for name, value in (("off_diagonal", off_diagonal), ("bias", bias), ("shrinkage", shrinkage)):
            if not (value >= 0 and (np.isfinite(value) or name == "shrinkage")):
                raise InputError(f"{name} is {value}", expected="a penalty, zero or more")
        if solver not in ("exact", "adam"):
            raise InputError(f"solver is {solver!r}", expected="'exact' or 'adam'")
        if not (rate > 0 and patience > 0):
            raise InputError(f"rate is {rate} and patience is {patience}", expected="more than zero")
        self.off_diagonal, self.bias_penalty, self.shrinkage = float(off_diagonal), float(bias), float(shrinkage)
        self.solver, self.rate, self.patience = solver, rate, patience
        self.register_buffer("weight", torch.zeros(0, 0, 0, dtype=torch.float64))
        self.register_buffer("bias", torch.zeros(0, 0, dtype=torch.float64))

    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {
            "off_diagonal": self.off_diagonal,
            "bias": self.bias_penalty,
            "shrinkage": self.shrinkage,
            "solver": self.solver,
            "rate": self.rate,
            "patience": self.patience,
        }

    # -- the map -------------------------------------------------------------------------------------------------------

    @property
    def constrained(self) -> bool:
        """Whether weights and biases are non-negative, so that decisions are preserved."""
        return self.features in ("margins", "gaps")

    @property
    def map(self) -> ExpertMap:
        """The fitted map."""
        return ExpertMap(self.features, self.weight, self.bias)

    def allocate(self, num_classes: int) -> None:
        """The identity."""
        self.set_parameters(self.identity(num_classes))

    def set_parameters(self, theta: FloatArray) -> None:
        """Weights and biases from ``theta (E, K, J + 1)``."""
        values = torch.from_numpy(theta).to(self.weight.device)
        self.weight, self.bias = values[:, :, :-1].contiguous(), values[:, :, -1].contiguous()

    def shape(self, num_classes: int) -> tuple[int, int, int]:
        """``(E, K, J + 1)`` of the parameters: experts, and each one's outputs and inputs, with the bias."""
        outputs = num_classes - (self.features == "gaps")
        return num_classes if self.routed else 1, outputs, 2 if self.features == "own-logit" else outputs + 1

    def shapes(self, num_classes: int) -> dict[str, tuple[int, ...]]:
        """Of weight and bias."""
        experts, outputs, columns = self.shape(num_classes)
        return {"weight": (experts, outputs, columns - 1), "bias": (experts, outputs)}

    def limits(self) -> dict[str, Limits]:
        """Those of the fit; but the identity, which may be kept, has no floor."""
        assert self.num_classes is not None
        lower, upper = (torch.from_numpy(own) for own in self.bounds(self.num_classes, len(self.weight)))
        if self.constrained:
            lower[:, :, -1] = 0
        return {
            "weight": Limits(lower[:, :, :-1], upper[:, :, :-1]),
            "bias": Limits(lower[:, :, -1], upper[:, :, -1]),
        }

    def identity(self, num_classes: int, experts: int | None = None) -> FloatArray:
        """The parameters ``(E, K, J + 1)`` that change nothing."""
        own_experts, outputs, columns = self.shape(num_classes)
        theta = np.zeros((experts or own_experts, outputs, columns))
        if self.features == "own-logit":
            theta[:, :, 0] = 1
            return theta
        theta[:, :, :-1] = np.eye(outputs)
        if self.features == "margins" and len(theta) > 1:
            own = np.arange(num_classes)
            theta[own, own, own] = 0  # the winner's margin is 0 anyway
        return theta

    def scaled_identity(self, num_classes: int, beta: float, experts: int | None = None) -> FloatArray:
        """Temperature scaling in these parameters, or the feasible map nearest to it."""
        theta = beta * self.identity(num_classes, experts)
        return np.clip(theta, *self.bounds(num_classes, len(theta)))

    def bounds(self, num_classes: int, experts: int) -> tuple[FloatArray, FloatArray]:
        """Of theta ``(E, K, J + 1)``; equal where a parameter is not free."""
        upper = np.full(self.identity(num_classes, experts).shape, _LARGEST)
        lower = -upper
        if self.constrained:
            lower[:] = 0
            lower[:, :, -1], upper[:, :, -1] = FLOOR, _LARGEST_BIAS
        if self.features == "margins" and experts > 1:
            own = np.arange(num_classes)
            for bound in (lower, upper):
                bound[own, own, :] = 0  # the winner's score,
                bound[own, :, own] = 0  # and its margin, are 0
        return lower, upper

    def basis(self, num_classes: int) -> FloatArray | None:
        """The free directions of an expert's parameters ``(P, F)``; None where all are free but for the bounds."""
        return None

    def _scores(self, logits: Tensor) -> Tensor:
        return self.map(logits)

    def _fast(self, kernels: Any, logits: Tensor) -> Tensor:
        log_probs: Tensor = kernels.apply_experts(logits, self.map, keep=self.preserves is not None)
        return log_probs

    @property
    def search_space(self) -> Mapping[str, Choice | LogUniform]:  # type: ignore[override]
        """That of Kirscher et al., Appendix B, for Adam."""
        if self.solver == "exact":
            return {}
        penalty = LogUniform(1e-6, 1e-1, or_zero=True)
        rates = LogUniform(1e-4, 3e-2)
        return {"rate": rates, "patience": Choice((10, 20, 50)), "off_diagonal": penalty, "bias": penalty}

    def cost(self, num_classes: int) -> FitCost:
        """That of the curvature."""
        voxels = sample_voxels(self, num_classes, everything=True)
        return curvature_cost(*self.shape(num_classes), voxels)

    def fit_from(self, first: FirstPass, cases: CaseSet, start: Self | None = None) -> Self:
        """Fit to the sample of a first pass over the cases, starting from another fitted calibrator of this kind."""
        theta = None if start is None else torch.cat((start.weight, start.bias[:, :, None]), 2).numpy()
        return self._become(cases, lambda trial: fit_exactly(trial, first, None, theta))

    def _fit(self, data: FitData) -> Fitted:
        with blas_threads(1):
            if self.solver == "adam":
                return fit_by_adam(self, data)
            everything = data.voxels == "all"
            voxels = sample_voxels(self, data.cases.num_classes, everything=everything)
            first = FirstPass.over(data.cases, voxels, data.seed)
            return fit_exactly(self, first, data.cases if everything else None)
