"""Tasks for worker processes, in a module of their own: a worker imports by name what it is to run."""

import os

from segcal.cases import caseset
from segcal.errors import InputError


def scaled(factor, values, *, progress):
    for value in values:
        progress(f"{factor * value}")
    if values == [0]:
        raise InputError("nothing to scale")
    return [factor * value for value in values]


def opened_only_by(pid, ref):
    """A case that kills any other process that opens it."""
    if os.getpid() != pid:
        os._exit(9)
    return ref.open()


class UnsendableError(Exception):
    def __reduce__(self):
        raise TypeError


def told(rank, more, *, progress):
    progress(str(rank))
    return [(rank, rank + more)]


def failing(rank, faulty):
    if rank == faulty:
        raise InputError(f"rank {rank}", case="c")
    return 1


def unsendable(rank):
    if rank:
        raise UnsendableError
    return 1


def square(number):
    return number**2


def see_other_sizes(rank):
    if rank:
        caseset.file_size = lambda path: 1
    return 0
