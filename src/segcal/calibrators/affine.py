"""One affine map for all voxels: vector, matrix and Dirichlet scaling."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from segcal.calibrators.base import ParameterCount
from segcal.calibrators.experts import ExpertCalibrator
from segcal.fitting.limits import Limits
from segcal.kernels import AffineMap

__all__ = ["DirichletCalibration", "MatrixScaling", "TranslationInvariantMatrixScaling", "VectorScaling"]


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

    @classmethod
    def parameter_count(cls, num_classes: int) -> ParameterCount:
        """``2 C``; a shift of all biases has no effect."""
        return ParameterCount(2 * num_classes, 2 * num_classes - 1)


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

    @classmethod
    def parameter_count(cls, num_classes: int) -> ParameterCount:
        """``C (C + 1)`` and ``C^2 - 1``."""
        return ParameterCount(num_classes * (num_classes + 1), num_classes**2 - 1)


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

    @classmethod
    def parameter_count(cls, num_classes: int) -> ParameterCount:
        """``C^2 + 1`` and ``C (C - 1)``."""
        return ParameterCount(num_classes**2 + 1, num_classes * (num_classes - 1))


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

    @classmethod
    def parameter_count(cls, num_classes: int) -> ParameterCount:
        """``C (C + 1)`` and ``C^2 - 1``."""
        return ParameterCount(num_classes * (num_classes + 1), num_classes**2 - 1)
