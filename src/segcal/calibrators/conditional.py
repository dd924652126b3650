"""One affine map per predicted class, unconstrained or such that decisions are preserved."""

from __future__ import annotations

from segcal.calibrators.base import ParameterCount
from segcal.calibrators.experts import ExpertCalibrator

__all__ = ["CMSArgmaxPreserving", "CMSOrderPreserving", "ClassConditionalDirichlet"]


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

    @classmethod
    def parameter_count(cls, num_classes: int) -> ParameterCount:
        """``C^2 (C + 1)`` and ``C (C^2 - 1)``."""
        return ParameterCount(num_classes**2 * (num_classes + 1), num_classes * (num_classes**2 - 1))


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

    @classmethod
    def parameter_count(cls, num_classes: int) -> ParameterCount:
        """``C (C^2 + 1)`` as published, and ``C^2 (C - 1)``, which are those optimised here."""
        return ParameterCount(num_classes * (num_classes**2 + 1), num_classes**2 * (num_classes - 1))


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

    @classmethod
    def parameter_count(cls, num_classes: int) -> ParameterCount:
        """As ``cms-ap``."""
        return CMSArgmaxPreserving.parameter_count(num_classes)
