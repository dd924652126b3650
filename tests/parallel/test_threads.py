"""Who may use how many threads."""

import threadpoolctl

from segcal.parallel.threads import blas_threads


def threads_of_blas():
    return [library["num_threads"] for library in threadpoolctl.threadpool_info() if library["user_api"] == "blas"]


def test_linear_algebra_has_so_many_threads_in_the_block_and_as_many_as_before_behind_it():
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        before = threads_of_blas()
        for _ in range(2):
            with blas_threads(1):
                assert threads_of_blas() == [1] * len(before)
            assert threads_of_blas() == before
    assert 2 in before
