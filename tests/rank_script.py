"""What the ranks of a torchrun job do in ``test_ranks``: rank 0 compares with what it finds alone."""

import operator
import os
import sys
from contextlib import nullcontext

import pytest

import segcal
import worker_tasks
from segcal.calibrators import CALIBRATORS, temperature
from segcal.cases.shares import check_same
from segcal.errors import DataError, InputError
from segcal.evaluation.evaluate import evaluate_many, versions
from segcal.evaluation.plan import Plan
from segcal.fitting import expert_exact
from segcal.parallel.ranks import alone, crew, joined
from segcal.parallel.workers import in_turn, in_workers
from segcal.study.tuning import tune
from segcal.synthetic import SpatialTemperature, scenes


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


def results_are_those_of_one_process(folder):
    cases, plan = segcal.open_cases(folder), Plan.make(("nll", "ece", "tace"), ("everything", "boundary"), exact=True)
    together = evaluate_many(plan, cases, {"": None})[""]
    with alone():
        one = evaluate_many(plan, cases, {"": None})[""]
    for mine, own in zip(together.rows, one.rows, strict=True):
        assert mine._replace(value=0) == own._replace(value=0)  # counts are equal
        assert mine.value == pytest.approx(own.value, rel=1e-12)
    assert together.reliability["everything"]["cases"] == one.reliability["everything"]["cases"]


def calibrators_are_those_of_one_process(cases):
    # Fewer than the cases have, so that exact fits read the cases again and again.
    expert_exact.SAMPLE_VOXELS = temperature.MIXTURE_VOXELS = 3000
    fast = {"lts-ti": {"epochs": 2}}
    for method in ("ts", "ets", "cms-op", "histogram", "lts-ti", "trust"):
        fits = []
        for whom in (nullcontext, alone):
            with whom():
                fits.append(CALIBRATORS[method](**fast.get(method, {})).fit(cases, voxels="all"))
        mine, own = (fit.tensors() for fit in fits)
        for name in own:
            gap = float((mine[name] - own[name]).abs().max() / own[name].abs().max().clamp(min=1))
            assert gap < 1e-8, f"{method} {name} {gap}"
        assert fits[0].fit_report.nll_after == pytest.approx(fits[1].fit_report.nll_after, rel=1e-10), method
        assert fits[0].fit_report.voxels_used == fits[1].fit_report.voxels_used
    tuned = tune("vs", cases, strengths=(1.0, 0.01))
    with alone():
        assert tuned.tuning == tune("vs", cases, strengths=(1.0, 0.01)).tuning


if __name__ == "__main__":
    with joined(versions()) as ranks:
        if ranks.rank:
            ranks.serve()
        else:
            answers_are_merged_whoever_has_work()
            errors_of_any_rank_reach_the_first_and_the_job_goes_on()
            tasks_are_taken_in_turn_each_once()
            results_are_those_of_one_process(sys.argv[1])
            calibrators_are_those_of_one_process(scenes(9, size=(24, 32), plant=[SpatialTemperature()]))
            a_dataset_that_differs_is_refused(sys.argv[1])
            print("all is well")
