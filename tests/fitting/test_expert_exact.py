"""Which step policy an exact fit takes, as the table in ``segcal.solvers.driver`` has it."""

import numpy as np
import pytest

from reference.calibrators import drawn
from segcal.calibrators import CALIBRATORS
from segcal.cases.tensors import tensors_as_cases
from segcal.fitting import expert_exact
from segcal.fitting.expert_exact import ExpertProblem
from segcal.fitting.first_pass import FirstPass


@pytest.fixture
def policies(monkeypatch):
    """The names of the policies that were run, in their order; a sample of 2,000 is six times what curvature needs."""
    taken, solve = [], ExpertProblem.solve

    def recorded(self, policy, x, **options):
        taken.append(type(policy).__name__)
        return solve(self, policy, x, **options)

    monkeypatch.setattr(ExpertProblem, "solve", recorded)
    monkeypatch.setattr(expert_exact, "SAMPLE_VOXELS", 2000)
    monkeypatch.setattr(expert_exact, "_CURVATURE_VOXELS", 300)
    monkeypatch.setattr(expert_exact, "_VOXELS_PER_PARAMETER", 1)
    return taken


@pytest.mark.parametrize("name", ["vs", "dc", "cms-op"])
def test_the_policy_follows_the_size_of_the_data(name, policies, monkeypatch):
    z, y = drawn(4000, 3)
    for voxels in ("auto", "all"):
        CALIBRATORS[name]().fit(z, y, voxels=voxels)
        assert policies == ["Newton", "SampledNewton"]
        policies.clear()
    monkeypatch.setattr(expert_exact, "_DIRECT", 10)
    CALIBRATORS[name]().fit(z, y)
    assert policies == ["Newton", "Newton"]  # on a part, then on the whole sample
    policies.clear()
    CALIBRATORS[name]().fit(z[:90], y[:90])  # fewer than a rough start would take
    assert policies[-1:] == ["Newton"]
    assert "SampledNewton" not in policies


@pytest.mark.parametrize(("voxels", "last"), [("auto", "Newton"), ("all", "DampedNewton")])
def test_another_policy_goes_on_where_the_passes_ran_out(voxels, last, policies, monkeypatch):
    z, y = drawn(4000, 3)
    exact = CALIBRATORS["dc"]().fit(z, y, voxels=voxels).fit_report
    policies.clear()
    monkeypatch.setattr(expert_exact, "_PASSES", 1)
    monkeypatch.setattr(expert_exact, "_GAIN", 1e-15)
    report = CALIBRATORS["dc"]().fit(z, y, voxels=voxels).fit_report
    assert policies == ["Newton", "SampledNewton", last]
    assert report.converged
    assert report.nll_after == pytest.approx(exact.nll_after, abs=1e-6)


@pytest.mark.parametrize("voxels", ["auto", "all"])
def test_free_experts_take_damped_steps(voxels, policies):
    CALIBRATORS["cdc"]().fit(*drawn(4000, 3), voxels=voxels)
    assert policies == ["DampedNewton"]


def test_a_warm_start_needs_no_rough_fit(policies):
    cases = tensors_as_cases(*drawn(4000, 3), 255, None)
    first = FirstPass.over(cases, 2000, 0)
    fitted = CALIBRATORS["dc"]().fit_from(first, cases)
    policies.clear()
    again = CALIBRATORS["dc"]().fit_from(first, cases, fitted)
    assert policies == ["SampledNewton"]
    assert np.isclose(again.fit_report.nll_after, fitted.fit_report.nll_after, atol=1e-6)
