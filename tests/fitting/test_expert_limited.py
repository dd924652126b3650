"""Maps of many parameters are fitted without Hessians: to the same optimum as by Newton's method."""

import tracemalloc

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from reference.calibrators import drawn
from segcal.calibrators import CALIBRATORS
from segcal.cases.tensors import tensors_as_cases
from segcal.fitting import cost, expert_exact, expert_limited, first_pass
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
    unseen = expert_exact._unseen_shifts(form, strengths)
    penalties, *_ = expert_exact._penalties(form, strengths, first, form.scaled_identity(first.beta()), unseen)
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


@pytest.mark.parametrize("name", ["cdc", "cms-ap"])
def test_an_expert_is_shrunk_by_the_voxels_that_were_drawn(name, no_hessians, monkeypatch):
    """Those that they stand for tell nothing more: shrunk by their number, the map is worse on all voxels."""
    no_hessians()
    monkeypatch.setattr(first_pass, "_SCORES", 1200 * 12)
    z, y = drawn(12_000, 12)
    by_drawn = CALIBRATORS[name]().fit(z, y)
    monkeypatch.setattr(FirstPass, "drawn", property(lambda first: (first.true, first.predicted)))
    by_all = CALIBRATORS[name]().fit(z, y)
    assert by_drawn.fit_report.voxels_used == 1200
    losses = [float(F.nll_loss(own(z), y)) for own in (by_drawn, by_all)]
    assert losses[0] < losses[1]


@pytest.mark.parametrize(("name", "classes"), [("dc", 24), ("ms-c", 24), ("cms-op", 12), ("cdc", 12)])
def test_the_estimate_of_memory_is_an_upper_bound(name, classes, no_hessians):
    z, y = drawn(1000, classes)
    no_hessians()
    tracemalloc.start()
    CALIBRATORS[name]().fit(z, y)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < cost.gradient_cost(*CALIBRATORS[name].form(classes).shape, 1000).memory


@pytest.mark.parametrize("name", ["vs", "ms", "ms-c", "dc", "cdc"])
def test_shifts_that_the_softmax_does_not_see_are_held(name, no_hessians):
    cases = tensors_as_cases(*drawn(2000, CLASSES), 255, None)
    form, first = CALIBRATORS[name].form(CLASSES), FirstPass.over(cases, 2000, 0)
    no_hessians()
    theta, _ = fit_exactly(form, Strengths(0, 0, 0), first, None)
    moved = (theta - form.scaled_identity(first.beta())).mean(1)
    assert np.abs(moved[:, -1:] if name == "vs" else moved).max() < 1e-12


@pytest.mark.parametrize("hessians", [True, False])
def test_a_class_that_is_rarely_true_leaves_the_others_alone(hessians, no_hessians, monkeypatch):
    z, y = drawn(8000, 12)
    z[:, 5] -= 6
    some = (y != 5) | (torch.arange(8000) % 20 == 0)
    z, y = z[some], y[some]
    z_fit, y_fit, z_new, y_new = z[::2], y[::2], z[1::2], y[1::2]
    if not hessians:
        no_hessians()
    shrunk = CALIBRATORS["ms"]().fit(z_fit, y_fit)
    assert shrunk.fit_report.notes[0].endswith(f"shrunk toward temperature scaling: 5 ({int((y_fit == 5).sum())})")
    monkeypatch.setattr(expert_exact, "_ENOUGH", 0)
    free = CALIBRATORS["ms"]().fit(z_fit, y_fit)
    losses = [float(F.nll_loss(own(z_new), y_new)) for own in (shrunk, free)]
    assert losses[0] < losses[1]


def test_a_class_that_is_often_predicted_and_rarely_true_is_not_shrunk():
    z, y = drawn(8000, 12)
    some = (y != 5) | (torch.arange(8000) % 20 == 0)
    calibrator = CALIBRATORS["ms"]().fit(z[some], y[some])
    assert not calibrator.fit_report.notes
    assert float(calibrator.bias[0, 5]) < float(calibrator.bias[0].mean()) - 1


def test_a_fit_that_runs_out_of_gradients_says_how_much_the_last_steps_gained(no_hessians, monkeypatch):
    no_hessians()
    monkeypatch.setattr(expert_limited, "_MOST", 15)
    report = CALIBRATORS["ms"]().fit(*drawn(4000, CLASSES)).fit_report
    assert not report.converged
    assert "gradients ran out in 1 of 1 fits, whose last 10 steps lowered the NLL by " in report.notes[-1]
    assert 1e-7 < float(report.notes[-1].split()[-1]) < report.nll_before - report.nll_after
