"""The processes of a torchrun job, on one machine or many: the first runs the program, the others work for it.

Rank 0 runs the program as if it were alone. Where cases are shared, it sends every rank a function and its share
(``Ranks.run``), and answers are merged in pairs on their way back. Only rank 0 decides, prints and writes, so ranks
never disagree about what comes next.
"""

from __future__ import annotations

import operator
import os
import pickle
import re
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from segcal.errors import InputError, RankError

Progress = Callable[[str], None]
# How long a rank waits for another one, which may be busy alone. A connection that breaks ends the wait at once.
_PATIENCE = timedelta(days=7)
# How much of what was shared is kept: a length and a content for each of the last eight times.
_SHARED = 16
_this: Ranks | None = None  # this process as a rank
_free = False  # whether the other ranks wait for work of this one
_told = "told"  # in the store: how many names of progress there are, and each of them


class Job(NamedTuple):
    """A call of a function for each of the first ranks, and how two answers become one."""

    function: Callable[..., Any]
    calls: Sequence[tuple[Any, ...]]
    merge: Callable[[Any, Any], Any]
    progress: bool


class Answer(NamedTuple):
    """What a rank found, or why it did not; nothing for a rank without a call."""

    found: tuple[Any, ...] = ()
    error: Exception | None = None

    def merged(self, other: Answer, merge: Callable[[Any, Any], Any]) -> Answer:
        """Both; an error of either is the error of both."""
        if self.error or other.error:
            return Answer((), self.error or other.error)
        if self.found and other.found:
            return Answer((merge(*self.found, *other.found),))
        return self if self.found else other


@dataclass
class Ranks:
    """The ranks of this job, as one of them sees it. ``store`` is the table of keys and values that all share."""

    rank: int
    world: int
    store: Any
    read: int = 0  # names of progress that were read
    # What was shared last. Gloo's threads let go of it a moment later; were they the last to hold it, they would take
    # Python's lock to free it. With older versions of torch (2.6), whoever destroys the group holds that lock and waits
    # for these threads: for ever.
    shared: deque[Any] = field(default_factory=lambda: deque(maxlen=_SHARED))

    def run(
        self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], merge: Callable[[Any, Any], Any],
        progress: Progress | None,
    ) -> Any:  # fmt: skip
        """On rank 0: the merged answers of one call for each rank; fewer calls leave the last ranks idle."""
        job = Job(function, calls, merge, progress is not None)
        with self._losing():
            self._share(pickle.dumps(job))
            answer = self._work(job, progress)
        if answer.error:
            raise answer.error
        self._tell(progress)
        return answer.found[0]

    def serve(self) -> None:
        """On the other ranks: work for rank 0 until it is done."""
        with self._losing():
            while content := self._share(b""):
                try:
                    job = pickle.loads(content)  # from rank 0 of this job
                except Exception as error:
                    self._collect(Answer((), _sendable(error)), max)
                    continue
                self._work(job, self._say if job.progress else None)

    def stop(self) -> None:
        """On rank 0: let the others go."""
        if self.rank == 0:
            with self._losing():
                self._share(b"")

    def turns(self, name: str, count: int) -> Iterator[int]:
        """Numbers below ``count``, each given to one rank only: whoever asks first."""
        while (turn := self.store.add(name, 1) - 1) < count:
            yield turn

    def _work(self, job: Job, progress: Progress | None) -> Answer:
        answer = Answer()
        if self.rank < len(job.calls):
            options = {} if progress is None else {"progress": progress if self.rank else self._both(progress)}
            try:
                with alone():
                    answer = Answer((job.function(*job.calls[self.rank], **options),))
            except Exception as error:
                answer = Answer((), _sendable(error))
        return self._collect(answer, job.merge)

    def _collect(self, answer: Answer, merge: Callable[[Any, Any], Any]) -> Answer:
        """Merge the answers in pairs: rank 1 into 0 and 3 into 2, then 2 into 0, and so on."""
        from torch import distributed

        step = 1
        while step < self.world:
            if self.rank % (2 * step):
                distributed.send_object_list([answer], self.rank - step)
                break
            if self.rank + step < self.world:
                other: list[Any] = [None]
                distributed.recv_object_list(other, self.rank + step)
                answer = answer.merged(other[0], merge)
            step *= 2
        return answer

    def _share(self, content: bytes) -> bytes:
        """What rank 0 gives, on every rank."""
        import torch
        from torch import distributed

        def sent(tensor: torch.Tensor) -> torch.Tensor:
            self.shared.append(tensor)
            distributed.broadcast(tensor, 0)
            return tensor

        length = int(sent(torch.tensor([len(content)])))
        if length == 0:
            return b""
        there = bytearray(content) if self.rank == 0 else bytearray(length)
        return sent(torch.frombuffer(there, dtype=torch.uint8)).numpy().tobytes()

    # -- progress ------------------------------------------------------------------------------------------------------

    def _say(self, name: str) -> None:
        """Leave a name of progress for rank 0."""
        self.store.set(f"{_told}/{self.store.add(_told, 1)}", name)

    def _tell(self, progress: Progress | None) -> None:
        """On rank 0: pass on what others have left."""
        if progress is not None:
            for number in range(self.read, self.store.add(_told, 0)):
                self.read = number + 1
                progress(self.store.get(f"{_told}/{self.read}").decode())
                self.store.delete_key(f"{_told}/{self.read}")

    def _both(self, progress: Progress) -> Progress:
        def told(name: str) -> None:
            self._tell(progress)
            progress(name)

        return told

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """A connection that breaks in this block is a clear error."""
        try:
            yield
        except RuntimeError as error:  # what gloo raises
            reason = re.sub(r"^\[\S*\] ", "", str(error)).partition("\n")[0]  # without the place in gloo's source
            raise RankError(self.rank, self.world, reason.partition(". ")[0]) from None


def under_torchrun() -> bool:
    """Whether this process is one of several that torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


@contextmanager
def joined(versions: Mapping[str, str]) -> Iterator[Ranks]:
    """The ranks of this torchrun job. In this block, rank 0 has the others at its service (``crew``).

    Raises on rank 0 if the ``versions`` of others differ from its own: the same input would not give the same numbers.
    """
    from torch import distributed
    from torch.distributed.rendezvous import rendezvous

    global _this, _free
    store, rank, world = next(rendezvous("env://", timeout=_PATIENCE))
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=_PATIENCE)
    # A job that torchrun restarts finds the same store: its keys carry the number of the attempt.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    _this = ranks = Ranks(rank, world, distributed.distributed_c10d.PrefixStore(f"segcal/{attempt}", store))
    with ranks._losing():
        everyone = ranks._collect(Answer(({rank: (socket.gethostname(), dict(versions))},)), operator.or_)
    try:
        if rank == 0:
            _check_versions(everyone.found[0])
            _free = True
        yield ranks
    except (KeyboardInterrupt, RankError):
        raise  # The others are busy or gone, and end with this process.
    except BaseException:
        ranks.stop()
        raise
    else:
        ranks.stop()
    finally:
        _this, _free = None, False
        distributed.destroy_process_group()


def crew(workers: int = 1) -> int:
    """How many processes can share the work: the ranks of this job or, without one, ``workers``."""
    ranks = current_ranks()
    return workers if ranks is None else ranks.world


def current_ranks() -> Ranks | None:
    """The ranks that are free to work for this process, if any."""
    return _this if _free else None


def this_rank() -> Ranks:
    """This process as a rank, also while it works for rank 0."""
    assert _this is not None
    return _this


@contextmanager
def alone() -> Iterator[None]:
    """Do the work of this block in this process."""
    global _free
    before, _free = _free, False
    try:
        yield
    finally:
        _free = before


def _check_versions(found: Mapping[int, tuple[str, Mapping[str, str]]]) -> None:
    _, mine = found[0]
    for rank, (host, other) in sorted(found.items()):
        if wrong := [name for name in mine if other.get(name) != mine[name]]:
            differ = ", ".join(f"{name} {other.get(name)} instead of {mine[name]}" for name in wrong)
            raise InputError(
                f"rank {rank} on {host} has {differ}",
                where="torchrun",
                expected="the same versions on all ranks",
                fix="install the same environment on every machine",
            )


def _sendable(error: Exception) -> Exception:
    """The error, or one with the same words if it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))  # made here
    except Exception:
        return RuntimeError(repr(error))
    return error
