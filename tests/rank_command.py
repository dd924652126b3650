"""A command of segcal in a torchrun job, of which one rank kills itself.

Environment: ``KILLED`` is that rank, ``AFTER`` how many cases it measures before.
"""

import os
import signal

from segcal.cli import main
from segcal.evaluation import evaluate, unfinished
from segcal.study.work import run

measure_case = evaluate.measure_case
measured = 0


def count_and_kill(*arguments):
    global measured
    if os.environ["RANK"] == os.environ.get("KILLED") and measured == int(os.environ["AFTER"]):
        os.kill(os.getpid(), signal.SIGKILL)
    measured += 1
    return measure_case(*arguments)


if __name__ == "__main__":
    evaluate.measure_case = count_and_kill
    unfinished.EVERY = 0.0  # after every case
    run._MANY_SCORES = 0  # so that ranks share also small evaluations
    try:
        main()
    finally:
        print(f"rank {os.environ['RANK']} measured {measured}", flush=True)
