"""The guard: images unlike those of the fit are given the probabilities of ts."""

import pytest
import torch

from segcal.calibrators import TemperatureScaling, TrustCalibration
from segcal.calibrators.trust.guard import fit_guard, known
from segcal.synthetic import SpatialTemperature, scenes


def draw(count, seed=0):
    mix = torch.tensor([[1.0, 0.9, 0.0], [0.0, 0.3, 0.0], [0.0, 0.0, 5.0]]).double()
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed)).double() @ mix


def test_most_images_of_the_same_kind_are_judged_in_full():
    guard = fit_guard(draw(60))
    others = known(draw(2000, seed=1), *guard)
    assert 0.85 < float((others == 1).double().mean()) < 0.97
    assert float(others.mean()) > 0.93


@pytest.mark.parametrize("count", [8, 12, 24])
def test_few_images_make_the_reach_no_shorter(count):
    full = [known(draw(200, seed=1000 + s), *fit_guard(draw(count, seed=s))) == 1 for s in range(40)]
    assert float(torch.cat(full).double().mean()) > 0.87  # 0.9, but for shrinking and chance


def test_distances_are_mahalanobis_and_leave_the_image_itself_out():
    summaries = draw(30)
    centre, whiten, reach = fit_guard(summaries)
    lengths = []
    for i in range(30):
        others = torch.cat((summaries[:i], summaries[i + 1 :]))
        covariance = others.T.cov()
        variances = covariance.diagonal().diag()
        shrunk = torch.lerp(covariance, variances, 3 / (3 + 29)) + 1e-3 * variances
        away = summaries[i] - others.mean(0)
        lengths.append((away @ torch.linalg.solve(shrunk, away)).sqrt())
    assert float(reach) == pytest.approx(float(torch.stack(lengths).sort().values[27]), rel=1e-9)  # ceil(0.9 x 31)-th
    covariance = summaries.T.cov()
    variances = covariance.diagonal().diag()
    shrunk = torch.lerp(covariance, variances, 3 / (3 + 30)) + 1e-3 * variances
    torch.testing.assert_close(whiten @ shrunk @ whiten.T, torch.eye(3).double(), atol=1e-6, rtol=0)
    step = torch.linalg.solve(whiten, torch.tensor([1.0, 0, 0]).double()) * reach
    shares = known(centre + torch.tensor([0.0, 1.0, 1.25, 1.5, 9.0]).double()[:, None] * step, centre, whiten, reach)
    torch.testing.assert_close(shares, torch.tensor([1.0, 1.0, 0.5, 0.0, 0.0]).double())


def test_images_that_are_all_alike_make_no_infinity():
    guard = fit_guard(torch.ones(9, 3).double())
    assert known(torch.ones(1, 3).double(), *guard) == 1
    assert known(torch.full((1, 3), 2.0).double(), *guard) == 0


def test_a_strange_image_has_the_probabilities_of_ts():
    cases = scenes(9, size=(48, 64), plant=[SpatialTemperature()])
    trust, ts = TrustCalibration().fit(cases), TemperatureScaling().fit(cases)
    z = cases[0].logits
    assert (trust.predict_proba(z) - ts.predict_proba(z)).abs().max() > 0.01
    strange = torch.cat((z, 0.05 * z))  # one of them is far less confident than all of the fit
    p, q = trust.predict_proba(strange), ts.predict_proba(strange)
    torch.testing.assert_close(p[1], q[1], atol=1e-5, rtol=0)
    torch.testing.assert_close(p[:1], trust.predict_proba(z), atol=1e-6, rtol=0)


def test_images_that_are_alike_but_for_one_are_fitted():
    """Without the one, the scatter of the others is the rounding of a difference."""
    random = torch.Generator().manual_seed(0)
    z = torch.zeros(10, 3, 24, 24)
    z[:, 0] = 40 + torch.randn(10, 24, 24, generator=random)
    z[4] = 2 * torch.randn(3, 24, 24, generator=random)
    z[4, 1, 6:18, 6:18] += 6
    y = z.argmax(1)
    wrong = torch.rand(24, 24, generator=random) < 0.15
    y[4][wrong] = torch.randint(3, (int(wrong.sum()),), generator=random)
    fitted = TrustCalibration().fit(z, y)
    assert torch.equal(fitted(z).argmax(1), z.argmax(1))
