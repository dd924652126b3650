"""Tasks for ranks, in a module of their own: a rank imports by name what it is to run."""

from segcal.cases import caseset
from segcal.errors import InputError


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
