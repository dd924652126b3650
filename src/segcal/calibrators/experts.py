"""Affine maps: one for all voxels (vector, matrix and Dirichlet scaling), or one per predicted class (cdc, CMS).

Each is a ``segcal.kernels.ExpertMap``: a convex fit, exact and with a certificate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from segcal.calibrators.base import Calibrator, Choice, LogUniform, ParameterCount
from segcal.calibrators.module import renamed
from segcal.cases import CaseSet
from segcal.errors import InputError, check_name
from segcal.fitting.cost import FitCost, curvature_cost, gradient_cost
from segcal.fitting.data import FitData, Fitted
from segcal.fitting.expert_adam import fit_by_adam
from segcal.fitting.expert_exact import SAMPLE_VOXELS, fit_exactly, many_parameters, sample_voxels
from segcal.fitting.expert_form import ExpertForm, Strengths
from segcal.fitting.first_pass import FirstPass, most_voxels
from segcal.fitting.limits import Limits
from segcal.kernels import AffineMap, ExpertMap, Features
from segcal.parallel.threads import blas_threads
from segcal.types import FloatArray

__all__ = [
    "CMSArgmaxPreserving", "CMSOrderPreserving", "ClassConditionalDirichlet", "DirichletCalibration", "MatrixScaling",
    "TranslationInvariantMatrixScaling", "VectorScaling",
]  # fmt: skip

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
        self.off_diagonal, self.bias_penalty, self.shrinkage = map(float, (off_diagonal, bias_penalty, shrinkage))
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

    def set_parameters(self, theta: FloatArray) -> None:
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
        """The memory and time of the curvature or, with too many parameters for it, of gradients."""
        form = self.form(num_classes)
        if many_parameters(form):
            return gradient_cost(*form.shape, min(SAMPLE_VOXELS, most_voxels(num_classes)))
        return curvature_cost(*form.shape, sample_voxels(form, everything=True))

    def fit_from(self, first: FirstPass, cases: CaseSet, start: Self | None = None) -> Self:
        """Fit to the sample of a first pass over the cases, starting from another fitted calibrator of this kind."""
        theta = None if start is None else torch.cat((start.weight, start.bias[:, :, None]), 2).numpy()
        form, strengths = self.form(first.num_classes), self._strengths
        return self._become(cases, lambda trial: trial._take(*fit_exactly(form, strengths, first, None, theta)))

    def _fit(self, data: FitData) -> Fitted:
        form, everything = self.form(data.cases.num_classes), data.voxels == "all"
        with blas_threads(1):
            if self.solver == "adam":
                return self._take(*fit_by_adam(form, self._strengths, data, self.learning_rate, self.patience))
            first = FirstPass.over(data.cases, sample_voxels(form, everything=everything), data.seed)
            return self._take(*fit_exactly(form, self._strengths, first, data.cases if everything else None))

    def _take(self, theta: FloatArray, found: Fitted) -> Fitted:
        self.set_parameters(theta)
        return found

    @property
    def _strengths(self) -> Strengths:
        return Strengths(self.off_diagonal, self.bias_penalty, self.shrinkage)


class VectorScaling(ExpertCalibrator):
    """``vs``: ``S(a z + b)``, a scale and a bias per class (Guo et al., ICML 2017). Depends on offsets of the logits.

    Examples:
        >>> import segcal
        >>> plant = segcal.synthetic.ClassAffine([1.0, 1.5, 0.7], [0.0, 0.5, -0.5])
        >>> cases = segcal.synthetic.scenes(4, size=(48, 64), num_classes=3, plant=[plant])
        >>> report = VectorScaling().fit(cases).fit_report
        >>> report.converged, report.nll_after < report.nll_before
        (True, True)
    """

    id = "vs"
    title = "Vector scaling"
    translation_invariant = False
    preserves = None
    features = "own-logit"

    def _affine(self) -> AffineMap:
        return AffineMap(self.weight[0, :, 0], self.bias[0])

    def upgraded(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Earlier versions stored the scales as a diagonal matrix ``(1, C, C)``."""
        weight = tensors.get("weight")
        if weight is None or weight.ndim != 3 or weight.shape[1] != weight.shape[2]:
            return tensors
        scales = weight.diagonal(0, 1, 2)
        return {**tensors, "weight": scales[:, :, None]} if torch.equal(scales.diag_embed(), weight) else tensors


class MatrixScaling(ExpertCalibrator):
    """``ms``: ``S(W z + b)`` (Guo et al., ICML 2017). Depends on offsets of the logits; may change labels.

    Examples:
        >>> import segcal
        >>> cases = segcal.synthetic.scenes(4, size=(48, 64), plant=[segcal.synthetic.Temperature(2.0)])
        >>> report = MatrixScaling().fit(cases).fit_report
        >>> report.converged, report.nll_after < report.nll_before
        (True, True)
    """

    id = "ms"
    title = "Matrix scaling"
    translation_invariant = False
    preserves = None
    features = "logits"

    def _affine(self) -> AffineMap:
        return AffineMap(self.weight[0], self.bias[0])


class TranslationInvariantMatrixScaling(ExpertCalibrator):
    """``ms-c``: ``S(W z + b)`` with equal row sums of W, so offsets of the logits cancel (Kirscher et al.).

    Examples:
        >>> import segcal
        >>> cases = segcal.synthetic.scenes(4, size=(48, 64), plant=[segcal.synthetic.GaugeOffsets(5.0)])
        >>> sums = TranslationInvariantMatrixScaling().fit(cases).weight[0].sum(1)
        >>> bool((sums - sums[0]).abs().max() < 1e-9)
        True
    """

    id = "ms-c"
    title = "Translation invariant matrix scaling"
    translation_invariant = True
    preserves = None
    features = "logits"
    equal_row_sums = True

    def limits(self) -> dict[str, Limits]:
        """Equal row sums; a diagonal entry is that sum less the others of its row, which are within the bounds."""
        limits = super().limits()
        largest = len(self.bias[0]) * limits["weight"].high
        return {**limits, "weight": Limits(-largest, largest, same_sum=True)}


class DirichletCalibration(ExpertCalibrator):
    """``dc``: ``S(W log S(z) + b)`` (Kull et al., NeurIPS 2019). Translation invariant; may change labels.

    Examples:
        >>> import segcal
        >>> cases = segcal.synthetic.scenes(4, size=(48, 64), plant=[segcal.synthetic.Temperature(2.0)])
        >>> report = DirichletCalibration().fit(cases).fit_report
        >>> report.converged, report.nll_after < report.nll_before
        (True, True)
    """

    id = "dc"
    title = "Dirichlet calibration"
    translation_invariant = True
    preserves = None
    features = "log-probs"


class ClassConditionalDirichlet(ExpertCalibrator):
    """``cdc``: a Dirichlet map for each predicted class (Kirscher et al.). Translation invariant; may change labels.

    Maps of classes with few voxels are shrunk towards the map fitted to all voxels.

    Examples:
        >>> import segcal
        >>> plant = segcal.synthetic.ClassConditional([1.0, 2.0, 3.0])
        >>> cases = segcal.synthetic.scenes(4, size=(48, 64), num_classes=3, plant=[plant])
        >>> report = ClassConditionalDirichlet().fit(cases).fit_report
        >>> report.converged, report.nll_after < report.nll_before
        (True, True)
    """

    id = "cdc"
    title = "Class conditional Dirichlet"
    translation_invariant = True
    preserves = None
    features = "log-probs"
    routed = True


class CMSArgmaxPreserving(ExpertCalibrator):
    """``cms-ap``: one affine map per winner, with non-negative weights, of the margins ``z_winner - z_k``.

    Constrained matrix scaling (Kirscher et al.): the winner scores 0, the others ``-(A m + d)`` with ``A >= 0`` and
    ``d >= 0.001``, so the argmax is kept, and offsets cancel.

    Examples:
        >>> import segcal
        >>> plant = segcal.synthetic.ClassConditional([1.0, 2.0, 3.0])
        >>> cases = segcal.synthetic.scenes(4, size=(48, 64), num_classes=3, plant=[plant])
        >>> calibrator = CMSArgmaxPreserving().fit(cases)
        >>> z = cases[0].logits
        >>> calibrator.fit_report.converged, bool((calibrator(z).argmax(1) == z.argmax(1)).all())
        (True, True)
    """

    id = "cms-ap"
    title = "CMS argmax preserving"
    translation_invariant = True
    preserves = "argmax"
    features = "margins"
    routed = True


class CMSOrderPreserving(ExpertCalibrator):
    """``cms-op``: one affine map per winner, with non-negative weights, of the gaps between sorted logits.

    Constrained matrix scaling (Kirscher et al.): sorted scores fall by ``A g + d`` with ``A >= 0`` and ``d >= 0.001``,
    so the order of all classes is kept, and offsets cancel.

    Examples:
        >>> import segcal
        >>> plant = segcal.synthetic.ClassConditional([1.0, 2.0, 3.0])
        >>> cases = segcal.synthetic.scenes(4, size=(48, 64), num_classes=3, plant=[plant])
        >>> calibrator = CMSOrderPreserving().fit(cases)
        >>> z = cases[0].logits
        >>> calibrator.fit_report.converged, bool((calibrator(z).argsort(1) == z.argsort(1)).all())
        (True, True)
    """

    id = "cms-op"
    title = "CMS order preserving"
    translation_invariant = True
    preserves = "order"
    features = "gaps"
    routed = True
