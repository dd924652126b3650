"""Starts that are minima, problems that do not fit their blocks, and validation that never changes."""

from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from torch import nn

from segcal.errors import InputError
from segcal.solvers import DampedNewton, Newton, adam, minimise
from segcal.solvers.driver import Policy
from segcal.solvers.solution import falls_on


def bowl(x):
    return 0.5 * np.sum(x**2), x, np.eye(len(x))


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_start_at_the_minimum_has_converged_whatever_the_steps(steps):
    for policy in (Newton(bowl), DampedNewton(lambda x: bowl(x)[:2], lambda x, blocks: [np.eye(len(x))])):
        solution = minimise(policy, np.zeros(3), max_steps=steps)
        assert solution.converged
        assert (solution.iterations, solution.evaluations) == (0, 1)
        assert not solution.flat
        assert "flat" not in solution.message


def test_without_steps_another_start_has_not_converged():
    solution = minimise(Newton(bowl), np.ones(3), max_steps=0)
    assert not solution.converged
    assert np.array_equal(solution.value, np.ones(3))
    assert solution.evaluations == 1


def test_a_single_step_to_the_minimum_of_a_bowl_is_not_flat():
    solution = minimise(Newton(bowl), np.ones(3), max_steps=1)
    assert solution.converged
    assert not solution.flat


@pytest.mark.parametrize(
    ("step", "left", "falls"), [(5e-3, 0.2, True), (3e-3, 0.2, False), (5e-3, 0.05, False), (0.0, 1.0, False)]
)
def test_a_function_falls_on_where_a_long_step_leaves_much_of_its_slope(step, left, falls):
    assert falls_on(np.array([0.0, -step]), np.array([3.0, 0.0]), left) == falls  # long: over 1e-3 (1 + 3)


@pytest.mark.parametrize("values", [1, 3])
def test_there_is_one_value_for_each_block(values):
    def problem(x):
        return np.zeros(values), x, [np.eye(1), np.eye(1)]

    with pytest.raises(InputError, match=f"there are {values} values"):
        minimise(Newton(problem), np.zeros(2), blocks=[[0], [1]])


def test_of_equal_states_the_first_is_kept():
    module = nn.Linear(1, 1)
    start = module.weight.item()
    rows = torch.ones(4, 1)
    training = adam(module, lambda batch: module(batch).square().mean(), lambda _: [rows], lambda: 1.0, patience=3)
    assert (training.best, len(training.history), training.converged) == (0, 4, True)
    assert module.weight.item() == start


def test_the_loss_of_an_epoch_is_the_mean_of_its_batches_and_the_seed_is_zero():
    weights = []
    for seed in ({}, {"seed": 0}, {"seed": 5}):
        module = nn.Linear(1, 1, bias=False)
        nn.init.ones_(module.weight)

        def loss(batch, module=module):
            return (module.weight.sum() * 0 + batch * torch.rand(())).sum()

        def batches(generator):
            return [torch.full((1,), 2.0), torch.full((1,), 4.0), torch.rand(1, generator=generator)]

        training = adam(module, loss, batches, lambda: 1.0, max_epochs=1, **seed)
        weights.append(training.history[1].loss)
    assert weights[0] == weights[1] != weights[2]

    module = nn.Linear(1, 1)
    fixed = adam(
        module,
        lambda batch: module.weight.sum() * 0 + batch,
        lambda _: torch.tensor([1.0, 2.0, 6.0]),
        lambda: 1.0,
        max_epochs=1,
    )
    assert fixed.history[1].loss == pytest.approx(3.0)


def test_solutions_and_policies_cannot_be_changed_and_solutions_are_themselves():
    policy = Newton(bowl)
    one, other = (minimise(policy, np.ones(2)) for _ in range(2))
    damped = DampedNewton(lambda x: bowl(x)[:2], lambda x, blocks: [np.eye(len(x))])
    assert one == one
    assert one != other  # and not an array of comparisons
    module = nn.Linear(1, 1)
    training = adam(module, lambda x: module(x).sum(), lambda _: [torch.ones(1, 1)], lambda: 1.0, max_epochs=1)
    for frozen, name in ((policy, "problem"), (damped, "whole"), (one, "value"), (training, "best")):
        with pytest.raises(FrozenInstanceError):
            setattr(frozen, name, None)


@pytest.mark.parametrize("missing", ["evaluate", "aim", "judge"])
def test_a_policy_says_how_to_step_and_how_to_judge(missing):
    methods = {name: (lambda self, *rest: None) for name in ("evaluate", "aim", "judge") if name != missing}
    with pytest.raises(TypeError, match="abstract method"):
        type("Careless", (Policy,), methods)()
