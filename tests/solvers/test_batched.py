"""Many small problems at once: each ends where it would end alone."""

import math

import numpy as np
import pytest
import torch

from segcal.solvers import newton_of_blocks
from segcal.solvers.newton import _cubic_minimum


def blocks(centres, steepness):
    """``sum sqrt(1 + (s (x - c))^2)`` for each block: Newton's own steps run away from a start far off."""

    def problem(x):
        z = steepness * (x - centres)
        root = (1 + z * z).sqrt()
        gradient = steepness * z / root
        return root.sum(1), gradient, torch.diag_embed(steepness**2 / root**3)

    return problem


def test_every_block_ends_at_its_own_minimum():
    centres = torch.tensor([[1.0, -2.0], [0.5, 4.0], [-3.0, 0.0]], dtype=torch.float64)
    steepness = torch.tensor([[1.0], [0.3], [2.0]], dtype=torch.float64)
    start = torch.zeros(3, 2, dtype=torch.float64)
    found = newton_of_blocks(blocks(centres, steepness), start, 1e-9)
    torch.testing.assert_close(found.x, centres, atol=1e-8, rtol=0)
    assert found.converged
    assert found.certificate <= 1e-9


def test_the_certificate_is_the_largest_slope_of_a_block():
    centres = torch.tensor([[3.0, 0.0], [0.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    problem = blocks(centres, torch.ones(3, 1, dtype=torch.float64))
    start = torch.tensor([[0.0, 4.0], [3.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    slopes = problem(start)[1].norm(dim=1)
    found = newton_of_blocks(problem, start, 2.0)  # met where it starts
    assert torch.equal(found.x, start)
    assert found.certificate == pytest.approx(float(slopes.max()))
    assert found.converged


def test_a_function_without_minimum_is_not_said_to_have_one():
    def falling(x):
        return (-x).exp().sum(1), -(-x).exp(), torch.diag_embed((-x).exp())

    found = newton_of_blocks(falling, torch.zeros(2, 1, dtype=torch.float64), 0.0)
    assert not found.converged
    assert found.certificate > 0


@pytest.mark.parametrize("scale", [1.0, 1e200])
def test_the_minimum_of_a_cubic_is_a_root_of_its_derivative(scale):
    random = np.random.default_rng(0)
    for slope, end_slope, rise in zip(-random.random(50), random.random(50), random.normal(size=50), strict=True):
        # f = slope t + b t^2 + a t^3 with f(1) = rise and f'(1) = end_slope
        a, b = slope + end_slope - 2 * rise, 3 * rise - 2 * slope - end_slope
        roots = np.roots([3 * a, 2 * b, slope])
        lowest = [t.real for t in roots if abs(t.imag) < 1e-12 and 6 * a * t.real + 2 * b > 0]
        found = _cubic_minimum(scale * rise, scale * slope, scale * end_slope)
        assert math.isclose(found, lowest[0], rel_tol=1e-9)
        assert 0 < found < 1


def test_a_start_at_the_minimum_is_evaluated_once():
    calls = []

    def bowl(x):
        calls.append(x)
        return 0.5 * x.square().sum(1), x, torch.eye(2, dtype=x.dtype).expand(3, 2, 2)

    assert newton_of_blocks(bowl, torch.zeros(3, 2, dtype=torch.float64), 0.0).converged
    assert len(calls) == 1


def test_steps_must_lower_the_function_and_not_only_mirror_the_point():
    """Every Newton step on ``|x|^1.5`` ends at -x, where the function is the same."""

    def power(x):
        size = x.abs()
        return size[:, 0] ** 1.5, 1.5 * x.sign() * size.sqrt(), (0.75 / size.sqrt()).unsqueeze(2)

    found = newton_of_blocks(power, torch.tensor([[1.0], [-3.0]], dtype=torch.float64), 1e-4)
    assert found.converged
    assert float(found.x.abs().max()) < 1e-7


def test_small_units_do_not_hide_a_step_that_runs_away():
    def soft(x):
        value = x.abs() + torch.log1p(torch.exp(-2 * x.abs())) - math.log(2)  # log cosh
        return 1e-3 * value.sum(1), 1e-3 * x.tanh(), torch.diag_embed(1e-3 / x.cosh() ** 2)

    found = newton_of_blocks(soft, torch.full((2, 1), 2.0, dtype=torch.float64), 1e-12)
    assert found.converged
    assert float(found.x.abs().max()) < 1e-8


@pytest.mark.parametrize(("steps", "enough"), [(100, True), (101, False)])
def test_a_hundred_steps_are_made(steps, enough):
    def falling(x):  # each step goes on by 1, and the slope after n of them is exp(-n)
        e = torch.exp(-x)
        return e[:, 0], -e, e.unsqueeze(2)

    found = newton_of_blocks(falling, torch.zeros(1, 1, dtype=torch.float64), math.exp(0.5 - steps))
    assert found.converged == enough
