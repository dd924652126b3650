"""What an evaluation has measured so far, so that one that was stopped can go on."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from segcal.files.atomic import remove_leftovers, write_text

# Seconds between two writes: what a stopped evaluation has to do again. The sums of very many cases take longer to
# write, so at least so many times as long as the last write took.
EVERY, _RARELY = 10.0, 20
_NAME = "share-{}.json"


@dataclass
class Unfinished:
    """A folder where every process keeps the sums of those cases of its share that it has measured.

    ``key`` names all that decides the results. A process goes on only from what the same key and the same share left,
    so an evaluation that goes on adds up in the same order, and its results are the same to the bit.
    """

    folder: Path
    key: str
    _written: float = field(default_factory=time.time)  # of the wall clock, which machines share
    _took: float = 0.0

    def read(self, share: Sequence[str]) -> tuple[int, Any]:
        """How many cases of this share are done, and their sums; none if nothing was left."""
        try:
            content = json.loads(self._file(share).read_text(encoding="utf-8"))
            return int(content["done"]), content["sums"]
        except (OSError, ValueError, KeyError, TypeError):
            return 0, None

    def write(self, share: Sequence[str], done: int, sums: Callable[[], Any]) -> None:
        """Keep the sums of the first cases of this share, if the last ones were kept long enough ago."""
        if (now := time.time()) - self._written >= max(EVERY, _RARELY * self._took):
            write_text(self._file(share), json.dumps({"done": done, "sums": sums()}))
            self._written = time.time()
            self._took = self._written - now

    def remove(self) -> None:
        """Remove what was kept."""
        if self.folder.is_dir():
            remove_leftovers(self.folder)
        for file in self.folder.glob(_NAME.format("*")):
            file.unlink(missing_ok=True)  # Another run may remove them, too.
        with suppress(OSError):  # missing, or with files of others
            self.folder.rmdir()

    def _file(self, share: Sequence[str]) -> Path:
        name = hashlib.sha256(json.dumps([self.key, *share]).encode()).hexdigest()[:24]
        return self.folder / _NAME.format(name)
