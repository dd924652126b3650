"""Which steps are recorded and repeated, with a pretended graph; ``test_on_device.py`` has the real one."""

from contextlib import contextmanager

import pytest
import torch

from segcal.solvers import recorded
from segcal.solvers.recorded import RecordedStep


class Graph:
    """Repeats what the step did while it was recorded."""

    work = None

    def replay(self):
        self.work()


@pytest.fixture
def steps(monkeypatch):
    """Twice the sum of a batch, step by step, and how each was made: run, recorded, or repeated."""
    made, recording = [], []

    @contextmanager
    def graph(own, **_):
        recording.append(own)
        yield
        recording.pop()

    def step(batch):
        tensors = [part for part in batch if part is not None]

        def total():
            return 2 * sum(part.sum() for part in tensors)

        found = total()
        made.append("recorded" if recording else "run")
        if recording:

            def work():
                made.append("repeated")
                found.copy_(total())

            recording[-1].work = work
        return found

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    return RecordedStep(step), made


def batch(value, size=3):
    return torch.full((size,), float(value)), None, torch.full((2,), 10.0 * value)


def test_a_shape_is_recorded_when_it_comes_again(steps):
    step, made = steps
    found = [step(batch(value)) for value in range(6)]
    assert [float(one) for one in found] == [2 * (3 * value + 20 * value) for value in range(6)]
    assert made == [*["run"] * recorded._FIRST, "recorded", *["repeated"] * (6 - recorded._FIRST)]
    assert recorded._FIRST == 2  # the first runs of a step may allocate


def test_a_batch_is_not_changed_and_a_result_stays(steps):
    step, _ = steps
    batches = [batch(value) for value in range(5)]
    found = [step(one) for one in batches]
    for value, one in enumerate(batches):
        assert all(torch.equal(mine, own) for mine, own in zip(one[::2], batch(value)[::2], strict=True))
    assert float(found[3]) == 2 * 23 * 3  # the next result is no longer in its place


def test_only_so_many_shapes_are_recorded(steps):
    step, made = steps
    for size in range(1, 7):
        for value in range(4):
            assert float(step(batch(value, size))) == 2 * (size * value + 20 * value)
    assert made.count("recorded") == recorded._SHAPES == 4
    assert made[-4:] == ["run"] * 4
