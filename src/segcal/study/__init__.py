"""``compare``: which calibrator to deploy, and how certain that is.

In the order of a study:

1. ``settings``: what is asked for, checked before any work, and the methods to compare.
2. ``splits``: which cases are fitted to, chosen on and tested on, repeat by repeat.
3. ``work``: the fits (with ``tuning``) and the evaluations, done or found in the store; ``work.run`` combines them.
4. ``summary``: from the values of all cases to means, intervals, differences, ranks and voxel counts.
5. ``advice``: the rule that chooses a method, and the sentences that say what it found.
6. ``results``: pictures of cases, and ``Study``, which users hold, with its tables.

``engine.compare`` runs all of it and collects the results document.
"""

from segcal.study.engine import compare
from segcal.study.results.study import Study
from segcal.study.settings import Settings
from segcal.study.work.run import Step

__all__ = ["Settings", "Step", "Study", "compare"]
