"""What the ranks of a torchrun job do in ``test_ranks``: rank 0 compares with what it finds alone."""

import operator
import os
import sys
from contextlib import nullcontext

import pytest

import segcal
import worker_tasks
from segcal.calibrators import TemperatureScaling
from segcal.cases.shares import check_same
from segcal.errors import DataError, InputError
from segcal.evaluation.evaluate import evaluate_many, versions
from segcal.evaluation.plan import Plan
from segcal.parallel.ranks import alone, crew, joined
from segcal.parallel.workers import in_turn, in_workers


def answers_are_merged_whoever_has_work():
    assert crew() == int(os.environ["WORLD_SIZE"])
    told = []
    shares = [(rank, 2) for rank in range(crew())]
    assert in_workers(worker_tasks.told, shares, operator.add, told.append) == [(r, r + 2) for r in range(crew())]
    assert sorted(told) == sorted(str(rank) for rank in range(crew()))
    assert in_workers(worker_tasks.told, shares[:2], operator.add, told.append) == [(0, 2), (1, 3)]  # the others rest
    with alone():
        assert crew() == 1


def errors_of_any_rank_reach_the_first_and_the_job_goes_on():
    for faulty in (0, crew() - 1):
        with pytest.raises(InputError, match=f"case 'c': rank {faulty}"):
            in_workers(worker_tasks.failing, [(rank, faulty) for rank in range(crew())], operator.add)
    with pytest.raises(RuntimeError, match="Unsendable"):
        in_workers(worker_tasks.unsendable, [(rank,) for rank in range(crew())], operator.add)


def tasks_are_taken_in_turn_each_once():
    done = []
    found = in_turn(worker_tasks.square, [(number,) for number in range(7)], 1, done.append)
    assert found == {number: number**2 for number in range(7)}
    assert sorted(done) == list(range(7))


def a_dataset_that_differs_is_refused(folder):
    cases = segcal.open_cases(folder)
    check_same(cases)
    in_workers(worker_tasks.see_other_sizes, [(rank,) for rank in range(crew())], operator.add)
    with pytest.raises(DataError, match=r"4 cases differ in size on .*the same dataset on all ranks"):
        check_same(cases)


def a_fit_and_an_evaluation_are_those_of_one_process(folder):
    cases, plan = segcal.open_cases(folder), Plan.make(("nll", "ece"), ("everything", "boundary"))
    found = []
    for whom in (nullcontext, alone):
        with whom():
            fitted = TemperatureScaling().fit(cases)
            found.append((evaluate_many(plan, cases, {"": fitted})[""], fitted.temperature))
    (mine, together), (own, one) = found
    assert together == pytest.approx(one, rel=1e-8)
    for row, other in zip(mine.rows, own.rows, strict=True):
        assert row._replace(value=0) == other._replace(value=0)  # counts are equal
        assert row.value == pytest.approx(other.value, rel=1e-8)


if __name__ == "__main__":
    with joined(versions()) as ranks:
        if ranks.rank:
            ranks.serve()
        else:
            answers_are_merged_whoever_has_work()
            errors_of_any_rank_reach_the_first_and_the_job_goes_on()
            tasks_are_taken_in_turn_each_once()
            a_fit_and_an_evaluation_are_those_of_one_process(sys.argv[1])
            a_dataset_that_differs_is_refused(sys.argv[1])
            print("all is well")
