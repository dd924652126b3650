"""Maps of many parameters are fitted without Hessians: to the same optimum as by Newton's method."""

import tracemalloc

import numpy as np
import pytest

from reference.calibrators import drawn
from segcal.calibrators import CALIBRATORS
from segcal.cases.caseset import tensors_as_cases
from segcal.fitting import cost, expert_exact, first_pass
from segcal.fitting.expert_exact import fit_exactly
from segcal.fitting.expert_form import Strengths
from segcal.fitting.expert_problem import ExpertProblem
from segcal.fitting.first_pass import FirstPass

MAPS = ("vs", "ms", "ms-c", "dc", "cdc", "cms-ap", "cms-op")
CLASSES = 6
# The largest excess over the optimum, in nats per voxel.
GAP = 1e-6


@pytest.fixture
def no_hessians(monkeypatch):
    """Every map counts as one of many parameters."""
    return lambda: monkeypatch.setattr(expert_exact, "_HESSIANS", 0)


def objective(form, strengths, first, theta):
    """Mean NLL plus penalties."""
    penalties, _ = expert_exact._penalties(form, strengths, first, form.scaled_identity(first.beta()))
    problem = ExpertProblem(form, first, penalties)
    return float(problem.whole(problem.x(theta))[0].sum())


@pytest.mark.parametrize("strengths", [Strengths(0, 0, 0), Strengths(0.1, 0.2, 0.05)])
@pytest.mark.parametrize("name", MAPS)
def test_the_optimum_is_that_of_newtons_method(name, strengths, no_hessians, monkeypatch):
    # All experts have voxels enough: the map of all voxels, a parent of the others, is not fitted to the same gap.
    monkeypatch.setattr(expert_exact, "_ENOUGH", 1)
    cases = tensors_as_cases(*drawn(4000, CLASSES), 255, None)
    form, first = CALIBRATORS[name].form(CLASSES), FirstPass.over(cases, 4000, 0)
    newton, before = fit_exactly(form, strengths, first, None)
    no_hessians()
    theta, report = fit_exactly(form, strengths, first, None)
    assert before.converged
    assert report.converged
    assert any("fitted by L-BFGS" in note for note in report.notes)
    excess = objective(form, strengths, first, theta) - objective(form, strengths, first, newton)
    assert -0.1 * GAP < excess < GAP
    lower, upper = form.bounds
    if not form.equal_row_sums:
        assert (theta >= lower).all()
        assert (theta <= upper).all()


@pytest.mark.parametrize("name", MAPS)
def test_all_voxels_are_fitted_from_a_sample(name, no_hessians, monkeypatch):
    z, y = drawn(4000, CLASSES)
    exact = CALIBRATORS[name]().fit(z, y, voxels="all").fit_report
    no_hessians()
    monkeypatch.setattr(first_pass, "_SCORES", 2000 * CLASSES)
    streamed = CALIBRATORS[name]().fit(z, y, voxels="all").fit_report
    assert streamed.voxels_used == 4000
    assert streamed.converged
    assert streamed.nll_after == pytest.approx(
        exact.nll_after, abs=3e-3 if name in ("cdc", "cms-ap", "cms-op") else GAP
    )


def test_experts_of_rare_classes_are_shrunk_without_hessians_too(no_hessians):
    z, y = drawn(600, CLASSES)
    exact = CALIBRATORS["cms-op"]().fit(z, y)
    no_hessians()
    calibrator = CALIBRATORS["cms-op"]().fit(z, y)
    assert "shrunk toward the pooled map" in calibrator.fit_report.notes[0]
    assert calibrator.fit_report.nll_after == pytest.approx(exact.fit_report.nll_after, abs=1e-3)
    assert np.array_equal(calibrator(z).argsort(1), z.argsort(1))


@pytest.mark.parametrize(("name", "classes"), [("dc", 24), ("ms-c", 24), ("cms-op", 12), ("cdc", 12)])
def test_the_estimate_of_memory_is_an_upper_bound(name, classes, no_hessians):
    z, y = drawn(1000, classes)
    no_hessians()
    tracemalloc.start()
    CALIBRATORS[name]().fit(z, y)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < cost.gradient_cost(*CALIBRATORS[name].form(classes).shape, 1000).memory
