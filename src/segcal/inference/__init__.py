"""Statistics of studies: bootstrap intervals, tests of pairs, ranks. Arrays in, numbers out; needs no torch.

Axes have one order, ``(repeats, cases, methods, metrics)``; each function names those that it takes. NaN means missing:
a case that a repeat did not test, a metric undefined in a case, a method that failed. Missing values are left out,
results say how many values there were, and the result of no values is NaN. Infinities (the surface distance to a
missing class) are values: they make means infinite, rank last, and two equal ones differ by 0. ``groups`` names what
each case belongs to (its patient), if the cases of one group are not independent. Nothing here warns.

``scipy.stats`` takes half a second to import, and every import of segcal imports this package. So functions that need
it import it themselves.
"""

from __future__ import annotations

from segcal.inference.bootstrap import *
from segcal.inference.pairs import *
from segcal.inference.ranks import *
