from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from segcal.errors import InputError
from segcal.solvers import adam

WEIGHTS = torch.tensor([1.0, -2.0, 0.5])


def shuffled(generator):
    return torch.randperm(256, generator=generator).split(64)


@pytest.fixture
def line():
    """A linear module at 0, its loss on a batch of rows, and its validation loss; the planted model is WEIGHTS, 0.3."""
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(512, 3, generator=random)
    targets = inputs @ WEIGHTS + 0.3
    module = nn.Linear(3, 1)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)

    def loss(rows):
        return (module(inputs[rows]).squeeze(1) - targets[rows]).square().mean()

    return module, loss, lambda: loss(slice(256, 512)).item()


def test_a_planted_linear_model_is_recovered(line):
    module, loss, validation = line
    training = adam(module, loss, shuffled, validation, learning_rate=0.1, patience=12, seed=3)
    torch.testing.assert_close(module.weight[0], WEIGHTS, atol=1e-3, rtol=0)
    torch.testing.assert_close(module.bias, torch.tensor([0.3]), atol=1e-3, rtol=0)
    assert training.objective == validation() == training.history[training.best].validation < 1e-5
    assert training.objective == min(epoch.validation for epoch in training.history)
    assert training.iterations == 4 * (len(training.history) - 1)
    assert math.isnan(training.history[0].loss)


def test_the_same_seed_gives_the_same_bits(line):
    module, loss, validation = line
    start = {name: tensor.clone() for name, tensor in module.state_dict().items()}

    def noisy(rows):
        return loss(rows) * (1 + 0.1 * torch.rand(()))  # torch's own generator is seeded too

    def train(seed):
        module.load_state_dict(start)
        training = adam(module, noisy, shuffled, validation, max_epochs=5, seed=seed)
        return training.history[1:], module.weight.tolist()

    torch.manual_seed(7)
    first = train(0)
    torch.manual_seed(8)
    state = torch.get_rng_state()
    assert train(0) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert train(1) != first


def test_the_best_state_is_kept_and_training_stops(line):
    """The loss leads away from what validation likes, so the start is best and nothing follows it."""
    module, loss, validation = line
    start = module.weight.clone()
    module.eval()
    training = adam(module, lambda rows: -loss(rows), shuffled, validation, patience=8)
    assert torch.equal(module.weight, start)
    assert training.best == 0
    assert training.objective == validation()
    assert training.converged
    assert len(training.history) == 1 + 8
    assert "kept epoch 0 of 8" in training.message
    assert not module.training
    # The rate halves after every patience // 4 = 2 epochs without improvement.
    assert [epoch.learning_rate / 1e-3 for epoch in training.history[1:]] == [1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125]


def test_buffers_belong_to_the_state():
    module = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
    values = iter([1.0, 0.5, 2.0, 2.0])
    seen = []

    def validation():
        assert not module.training
        seen.append(module[0].running_mean.clone())
        return next(values)

    def loss(batch):
        assert module.training
        return module(batch).square().mean()

    training = adam(module, loss, lambda generator: [torch.full((4, 1), 5.0) + torch.arange(4)[:, None]], validation,
                    max_epochs=3, patience=9)  # fmt: skip
    assert training.best == 1
    assert torch.equal(module[0].running_mean, seen[1])
    assert not torch.equal(seen[1], seen[3])
    assert module.training
    assert not training.converged
    assert "epochs ran out" in training.message


def test_an_interruption_leaves_the_best_state(line):
    module, loss, validation = line
    states = []

    def batches(generator):
        states.append(module.weight.clone())
        if len(states) == 3:
            yield torch.arange(4)
            raise KeyboardInterrupt
        yield from shuffled(generator)

    with pytest.raises(KeyboardInterrupt):
        adam(module, loss, batches, validation)
    assert torch.equal(module.weight, states[2])


def test_batches_that_are_not_finite_are_skipped(line):
    module, loss, validation = line

    def sometimes(rows):
        return loss(rows) * (math.nan if rows[0] % 4 == 0 else 1.0)

    training = adam(module, sometimes, shuffled, validation, learning_rate=0.1, max_epochs=40)
    assert training.objective < 1e-3
    assert sum(epoch.skipped for epoch in training.history) > 0
    assert "skipped" in training.message


def test_gradients_are_clipped(line):
    module, loss, validation = line
    norms = []
    module.weight.register_post_accumulate_grad_hook(lambda weight: norms.append(weight.grad))
    adam(module, lambda rows: 1e4 * loss(rows), shuffled, validation, max_epochs=1)
    assert all(norm.norm() <= 1 + 1e-6 for norm in norms)


def test_bad_input(line):
    module, loss, validation = line
    with pytest.raises(InputError, match="not finite at the start"):
        adam(module, loss, shuffled, lambda: math.nan)
    with pytest.raises(InputError, match="at least one batch"):
        adam(module, loss, lambda generator: [], validation)
    with pytest.raises(InputError, match="require a gradient"):
        adam(nn.Linear(2, 1).requires_grad_(False), loss, shuffled, validation)
