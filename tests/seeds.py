"""The seed of what tests draw at random, and how often they draw: the only reader of these two variables.

``make torture`` takes the day of the year as its seed, and more rounds. Otherwise both are the same in every run.
"""

from __future__ import annotations

import os

import pytest

DEFAULT_SEED = 0
SEED = int(os.environ.get("SEGCAL_SEED", DEFAULT_SEED))
#: Multiplies the rounds of torture and the examples of property tests.
ROUNDS = int(os.environ.get("SEGCAL_ROUNDS", "1"))
#: For tests that take too long for every run.
in_torture_only = pytest.mark.skipif(ROUNDS == 1, reason="runs with make torture")
