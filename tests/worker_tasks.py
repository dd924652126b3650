"""Tasks for worker processes, in a module of their own: a worker imports by name what it is to run."""

import os

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
