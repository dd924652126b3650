"""Memory that was freed is given back to the system."""

from pathlib import Path

import pytest

from segcal.parallel.memory import _trim, give_back

STATUS = Path("/proc/self/status")


def allocated():
    """Bytes."""
    return 1024 * next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith("RssAnon"))


@pytest.mark.skipif(_trim() is None or not STATUS.exists(), reason="not glibc on Linux")
def test_memory_below_what_is_in_use_is_given_back():
    blocks = [b"x" * 100_000 for _ in range(1000)]
    last = blocks[-1]
    before = allocated()
    del blocks
    give_back()
    assert before - allocated() > 90e6
    assert len(last) == 100_000


def test_nothing_happens_where_the_library_cannot(monkeypatch):
    asked = []
    monkeypatch.setattr("segcal.parallel.memory._trim", lambda: asked.append("the library"))
    give_back()  # which gets None, and calls nothing
    assert asked == ["the library"]
