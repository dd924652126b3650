"""Affine maps: one for all voxels (vector, matrix and Dirichlet scaling), or one per predicted class (cdc, CMS)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from segcal.calibrators.experts import ExpertCalibrator
from segcal.fitting.limits import Limits
from segcal.kernels import AffineMap

__all__ = [
    "CMSArgmaxPreserving", "CMSOrderPreserving", "ClassConditionalDirichlet", "DirichletCalibration", "MatrixScaling",
    "TranslationInvariantMatrixScaling", "VectorScaling",
]  # fmt: skip


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
