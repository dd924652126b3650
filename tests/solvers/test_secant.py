import numpy as np
import pytest

from segcal.errors import SegcalError
from segcal.solvers import projected_newton, secant_newton
from segcal.solvers.solution import Box
from solvers.problems import Witness, identity, softmax_data, softmax_regression


def quadratic(seed, size=6):
    random = np.random.default_rng(seed)
    root = random.normal(size=(size, size))
    hessian, centre = root @ root.T + 0.1 * np.eye(size), random.normal(size=size)
    return lambda x: (0.5 * (x - centre) @ hessian @ (x - centre), hessian @ (x - centre)), hessian, centre


@pytest.mark.parametrize("seed", range(3))
def test_the_caution_about_a_true_curvature_is_soon_unlearnt(seed):
    function, hessian, centre = quadratic(seed)
    solution = secant_newton(function, np.zeros(6), [(slice(None), hessian)], gain=1e-12)
    assert solution.evaluations <= 20
    np.testing.assert_allclose(solution.value, centre, atol=1e-5)


@pytest.mark.parametrize("factor", [0.05, 1.0, 20.0])
@pytest.mark.parametrize("bounds", [(None, None), (0.0, None), (-0.5, 0.3)])
def test_a_wrong_curvature_is_corrected(factor, bounds):
    data = softmax_data()
    whole = softmax_regression(*data)
    best = projected_newton(whole, identity(4), *bounds)
    witness = Witness(lambda x: whole(x)[:2])
    start = [(slice(None), factor * np.eye(len(identity(4))))]
    solution = secant_newton(witness, identity(4), start, *bounds, gain=1e-12, max_passes=400)
    assert solution.converged
    assert solution.objective - best.objective < 1e-8
    assert len(witness.points) == solution.evaluations
    assert (np.diff(solution.history) <= 0).all()
    box = Box(*bounds, len(solution.value))
    assert solution.certificate == pytest.approx(box.certificate(solution.value, whole(solution.value)[1]), abs=1e-12)


def test_blocks_are_solved_each_on_its_own():
    """Interleaved variables: as many passes as the slowest alone, and the same points."""
    problems = [quadratic(seed)[0] for seed in range(3)]
    indices = [np.arange(part, 18, 3) for part in range(3)]

    def both(x):
        found = [own(x[index]) for own, index in zip(problems, indices, strict=True)]
        gradient = np.empty(18)
        for index, (_, slope) in zip(indices, found, strict=True):
            gradient[index] = slope
        return np.array([value for value, _ in found]), gradient

    together = secant_newton(both, np.zeros(18), [(index, np.eye(6)) for index in indices], gain=3e-10)
    alone = [secant_newton(own, np.zeros(6), [(slice(None), np.eye(6))], gain=1e-10) for own in problems]
    assert together.evaluations == max(solution.evaluations for solution in alone)
    for index, solution in zip(indices, alone, strict=True):
        np.testing.assert_allclose(together.value[index], solution.value, atol=1e-12)


def test_too_few_passes_are_admitted():
    function, _, _ = quadratic(0)
    solution = secant_newton(function, np.full(6, 50.0), [(slice(None), np.eye(6))], max_passes=3)
    assert not solution.converged
    assert "not converged" in solution.message


def test_a_start_without_a_value_is_refused():
    with pytest.raises(SegcalError):
        secant_newton(lambda x: (np.nan, x), [1.0], [(slice(None), np.eye(1))])
