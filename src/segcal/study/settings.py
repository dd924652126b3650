"""What a study is asked for, checked before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from segcal.calibrators import CALIBRATORS
from segcal.cases import CaseSet
from segcal.errors import InputError, check_name, check_seed, check_whole
from segcal.evaluation.plan import LOCAL, columns_in, metric_spec, parse_metric
from segcal.metrics import Column
from segcal.regions import BANDS, REGIONS

Tune = Literal["none", "path", "paper"]
Select = Literal["nll", "ece", "brier"]
Preserve = Literal["order", "argmax", "none"]
Pooling = Literal["single", "probs", "logits"]
Sensitivity = Literal["bins", "size", "members"]

UNCALIBRATED = "uncalibrated"
FLIPS = ("harmful", "beneficial", "neutral")
#: Numbers of bins of the sensitivity study.
BIN_COUNTS = (5, 10, 15, 20, 30, 50, 100)
_PARTS = ("calibration", "validation", "test")


@dataclass(frozen=True)
class Settings:
    """The arguments of ``compare`` that decide what it finds; ``compare`` explains them."""

    methods: tuple[str, ...]
    repeats: int
    fractions: tuple[float, float, float]
    tune: Tune
    select: Select
    metrics: tuple[str, ...]
    regions: tuple[str, ...]
    preserve: Preserve
    translation_invariant: bool
    robust: bool
    pooling: tuple[Pooling, ...]
    sensitivity: tuple[Sensitivity, ...]
    seed: int

    def __post_init__(self) -> None:
        check_seed(self.seed)
        check_whole("repeats", self.repeats, 1)
        in_range = len(self.fractions) == len(_PARTS) and all(0 < part < 1 for part in self.fractions)
        if not in_range or sum(self.fractions) > 1 + 1e-9:
            raise InputError(
                f"fractions are {', '.join(f'{part:g}' for part in self.fractions)}",
                expected="three shares above 0 that sum to at most 1: calibration, validation, test",
            )
        for name, kind in (("tune", Tune), ("select", Select), ("preserve", Preserve)):
            check_name(name, getattr(self, name), get_args(kind))
        for space in self.pooling:
            check_name("pooling", space, get_args(Pooling))
        for study in self.sensitivity:
            check_name("sensitivity", study, get_args(Sensitivity))
        if not self.regions or not self.metrics:
            raise InputError("no regions or no metrics", expected="at least one of each")
        for region in self.regions:
            check_name("region", region, REGIONS)
        for metric in self.metrics:
            parse_metric(metric)

    def check_members(self, cases: CaseSet) -> None:
        """Pooling spaces and ensemble sizes need members."""
        asked = [f"pooling = {', '.join(self.pooling)}"] if self.pooling else []
        asked += ["sensitivity = members"] if "members" in self.sensitivity else []
        if asked and (cases.num_members or 1) < 2:
            raise InputError(
                f"{' and '.join(asked)}, but the cases have no ensemble members",
                expected="a dataset with logits/<member>/<case>.* for every member",
            )

    @property
    def columns(self) -> list[Column]:
        """Every metric in every region, as the tables show them; surfaces belong to a case as a whole."""
        return columns_in(self.metrics, self.regions)

    @property
    def measured(self) -> list[Column]:
        """The same, and what else the study needs: kinds of flips, the ECE cases are chosen by, bins, bands."""
        more = [Column("flip", options={"kind": kind}) for kind in FLIPS]
        more += [Column("ece"), Column("nll")]
        if "bins" in self.sensitivity:
            more += [Column("ece", options={"num_bins": count}) for count in BIN_COUNTS]
        if self.bands:
            more += [Column("nll", band) for band in BANDS]
        known = {column.key: column for column in (*self.columns, *more)}
        return list(known.values())

    @property
    def bands(self) -> bool:
        """Whether distances to the boundary are measured."""
        return any("distance" in metric_spec(column.metric).needs for column in self.columns)

    def shown(self, metric: str, region: str) -> bool:
        """Whether a row of an evaluation is one that was asked for."""
        names = {column.key for column in self.columns}
        asked = LOCAL if region in ("local-mean", "local-max") else region
        return (metric, asked) in names


def resolve_methods(methods: str | Sequence[str], *, members: bool = False) -> tuple[str, ...]:
    """Ids of calibrators from ``"all"``, ``"decision-preserving"``, one id, or several.

    ``members`` says whether ``"all"`` should have the ensemble among them, which without members does nothing.

    Examples:
        >>> resolve_methods(("ts", "cms-op", "ts"))
        ('ts', 'cms-op')
        >>> "dc" in resolve_methods("all"), "dc" in resolve_methods("decision-preserving")
        (True, False)
    """
    if methods == "all":
        return tuple(id for id in CALIBRATORS if members or id != "ensemble")
    if methods == "decision-preserving":
        return tuple(id for id, cls in CALIBRATORS.items() if cls().preserves is not None)
    wanted = (methods,) if isinstance(methods, str) else tuple(dict.fromkeys(methods))
    for id in wanted:
        known = f"'all', 'decision-preserving', or some of {', '.join(CALIBRATORS)}"
        check_name("method", id, ("all", "decision-preserving", *CALIBRATORS), expected=known)
    if not wanted:
        raise InputError("no methods", expected="at least one")
    return wanted
