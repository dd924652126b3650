"""What the parameters of an expert map are: the identity changes nothing, bounds and bases are what they say."""

import numpy as np
import pytest
import torch

from segcal.fitting.expert_form import FLOOR, ExpertForm
from segcal.fitting.expert_sums import expert_map

FORMS = [
    ExpertForm(features, classes, routed)
    for classes in (2, 4)
    for features in ("logits", "own-logit", "log-probs", "margins", "gaps")
    for routed in (False, True)
    if not (features == "own-logit" and routed)
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_identity_changes_nothing(form):
    z = 3 * torch.randn(200, form.num_classes, generator=torch.Generator().manual_seed(0)).double()
    assert form.identity.shape == form.shape
    mapped = expert_map(form.identity, form.features)(z)
    assert torch.allclose(mapped.log_softmax(1), z.log_softmax(1), atol=1e-12)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_temperatures_are_within_the_bounds(form):
    lower, upper = form.bounds
    for beta in (1e-3, 0.5, 1e3):
        theta = form.scaled_identity(beta)
        assert (theta >= lower).all()
        assert (theta <= upper).all()
    assert form.constrained == bool((lower >= 0).all())
    if form.constrained:
        assert set(lower[:, :, -1].ravel()) <= {0.0, FLOOR}


def test_the_winners_own_score_and_margin_are_fixed():
    lower, upper = ExpertForm("margins", 3, routed=True).bounds
    fixed = lower == upper
    for winner in range(3):
        assert fixed[winner, winner].all()
        assert fixed[winner, :, winner].all()
        assert fixed[winner].sum() == 4 + 2  # a row with its bias, and the rest of a column


def test_a_basis_spans_the_weights_whose_rows_share_one_sum():
    form = ExpertForm("logits", 4, routed=False, equal_row_sums=True)
    basis = form.basis.toarray()
    assert basis.shape == (20, 17)
    assert np.linalg.matrix_rank(basis) == 17
    x = np.random.default_rng(0).normal(size=17)
    theta = (basis @ x).reshape(4, 5)
    sums = theta[:, :-1].sum(1)
    assert np.allclose(sums, sums[0])
    assert np.allclose(form.free(theta[None])[0], x)
    other = np.random.default_rng(1).normal(size=(4, 5))
    nearest = basis @ np.linalg.lstsq(basis, other.ravel(), rcond=None)[0]
    assert np.allclose(form.project(other).ravel(), nearest)
    assert ExpertForm("logits", 4, routed=False).basis is None
