"""The version of segcal, and the formats of the documents it writes: name and number, both checked on reading."""

from __future__ import annotations

import segcal

#: Part of every key of a cache: another version finds nothing of an older one.
SEGCAL = segcal.__version__
#: ``results.json`` of ``segcal compare``.
STUDY = ("segcal.Study", 1)
#: ``results.json`` of ``segcal evaluate``. Since version 2, pooled rows have no case and rows count missed classes;
#: since 3, rows have a channel; since 4, pooled values have intervals; since 5, there is a table of classes.
RESULTS = ("segcal.Results", 5)
