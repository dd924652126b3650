"""What a study is asked for: its settings, checked before any work, and the methods it compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from segcal.calibrators import CALIBRATORS
from segcal.cases import CaseSet
from segcal.errors import InputError, check_name, check_seed, check_whole
from segcal.evaluation.evaluate import DEFAULT_METRICS
from segcal.evaluation.plan import DEFAULT_REGIONS, LOCAL, columns_in, metric_spec
from segcal.metrics import Column
from segcal.regions import BANDS, REGIONS
from segcal.statistics import EVERYTHING

Tune = Literal["none", "path", "paper"]
Select = Literal["nll", "ece", "brier"]
Preserve = Literal["order", "argmax", "none"]
Pooling = Literal["single", "probs", "logits"]
Sensitivity = Literal["bins", "size", "members"]

UNCALIBRATED = "uncalibrated"
STUDY_METRICS = (*DEFAULT_METRICS, "flip")
FLIPS = ("harmful", "beneficial", "neutral")
#: Columns that every advice needs, whatever metrics were asked for.
NLL, ECE = ("nll", EVERYTHING), ("ece", EVERYTHING)
#: Scores that the report splits into calibration and refinement, and the metrics of their calibration parts.
SCORES = (
    ("nll", EVERYTHING),
    ("nll-calibration", EVERYTHING),
    ("brier", EVERYTHING),
    ("brier-calibration", EVERYTHING),
)
#: Numbers of bins of the sensitivity study.
BIN_COUNTS = (5, 10, 15, 20, 30, 50, 100)
_CHOICES = {"tune": Tune, "select": Select, "preserve": Preserve, "pooling": Pooling, "sensitivity": Sensitivity}


@dataclass(frozen=True)
class Settings:
    """Everything that decides what a study finds.

    Attributes:
        methods: Ids of ``segcal.CALIBRATORS``.
        repeats: The number of splits.
        fractions: Shares of the cases for calibration, validation and test.
        tune: ``"path"`` chooses the shrinkage of exact maps on the validation part. ``"paper"`` trains by Adam, with
            settings searched by Optuna, as published. ``"none"`` takes the defaults.
        select: The metric that tuning minimises.
        metrics: Ids of ``segcal.METRICS``, with options if needed, such as ``"ece[num_bins=50]"``.
        regions: Ids of ``segcal.REGIONS``.
        preserve: What a recommended method must keep: the label (``"argmax"``), the ``"order"`` of all classes, or
            ``"none"``.
        translation_invariant: Recommend only methods that ignore offsets of the logits.
        robust: Recommend only methods that lose neither to ``ts`` nor to uncalibrated scores on the shifted cases.
        pooling: For ensembles: compare a ``"single"`` member, the mean of ``"probs"``, the mean of ``"logits"``.
        sensitivity: Also vary the number of ``"bins"``, the calibration ``"size"``, the ensemble ``"members"``.
        seed: Seed of the splits, the fits and the bootstrap.
    """

    methods: tuple[str, ...]
    repeats: int = 1
    fractions: tuple[float, float, float] = (0.5, 0.2, 0.3)
    tune: Tune = "path"
    select: Select = "nll"
    metrics: Sequence[str] = STUDY_METRICS
    regions: Sequence[str] = DEFAULT_REGIONS
    preserve: Preserve = "argmax"
    translation_invariant: bool = False
    robust: bool = False
    pooling: Sequence[Pooling] = ()
    sensitivity: Sequence[Sensitivity] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("metrics", "regions", "pooling", "sensitivity"):
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name) or ())))
        check_seed(self.seed)
        check_whole("repeats", self.repeats, 1)
        in_range = len(self.fractions) == 3 and all(0 < part < 1 for part in self.fractions)
        if not in_range or sum(self.fractions) > 1 + 1e-9:
            raise InputError(
                f"fractions are {', '.join(f'{part:g}' for part in self.fractions)}",
                expected="three shares above 0 that sum to at most 1: calibration, validation, test",
            )
        for name, kind in _CHOICES.items():
            given = getattr(self, name)
            for word in given if isinstance(given, tuple) else (given,):
                check_name(name, word, get_args(kind))
        if not self.regions or not self.metrics:
            raise InputError("no regions or no metrics", expected="at least one of each")
        for region in self.regions:
            check_name("region", region, REGIONS)
        columns_in(self.metrics, self.regions)  # raises for metrics that do not exist

    def check_members(self, cases: CaseSet) -> None:
        """Raise if the study varies ensemble members and the cases have none."""
        asked = [f"pooling = {', '.join(self.pooling)}"] if self.pooling else []
        asked += ["sensitivity = members"] if "members" in self.sensitivity else []
        if asked and (cases.num_members or 1) < 2:
            raise InputError(
                f"{' and '.join(asked)}, but the cases have no ensemble members",
                expected="a dataset with logits/<member>/<case>.* for every member",
            )

    @property
    def columns(self) -> list[Column]:
        """The columns of the tables: every metric in every region."""
        return columns_in(self.metrics, self.regions)

    @property
    def measured(self) -> list[Column]:
        """These columns, and those that the advice, the pictures and the sensitivity study need."""
        more = [Column("flip", options={"kind": kind}) for kind in FLIPS]
        more += [Column("ece"), *(Column(metric) for metric, _ in SCORES)]
        if "bins" in self.sensitivity:
            more += [Column("ece", options={"num_bins": count}) for count in BIN_COUNTS]
        if self.bands:
            more += [Column("nll", band) for band in BANDS]
        return list({column.key: column for column in (*self.columns, *more)}.values())

    @property
    def bands(self) -> bool:
        """Whether distances to the boundary are measured."""
        return any("distance" in metric_spec(column.metric).needs for column in self.columns)

    def shown(self, metric: str, region: str) -> bool:
        """Whether the tables have this column."""
        asked = LOCAL if region in ("local-mean", "local-max") else region
        return (metric, asked) in {column.key for column in self.columns}


@dataclass(frozen=True)
class Method:
    """A row of the study: a calibrator, and how it pools an ensemble (None: as the dataset does).

    Examples:
        >>> Method("ts", "probs").key, Method("ts").key
        ('ts@probs', 'ts')
    """

    id: str
    pooling: str | None = None

    @property
    def key(self) -> str:
        """Its name in the study."""
        return f"{self.id}@{self.pooling}" if self.pooling else self.id

    def row(self, parameters: int | None, reason: str | None) -> dict[str, Any]:
        """Its entry in the results."""
        about = {"name": "Uncalibrated", "preserves": "order", "translation_invariant": True, "parameters": 0}
        if self.id != UNCALIBRATED:
            own = CALIBRATORS[self.id]()
            keeps = {"preserves": own.preserves, "translation_invariant": own.translation_invariant}
            about = {"name": own.title, **keeps, "parameters": parameters}
        status = {"status": "ok" if reason is None else "failed", "reason": reason}
        return {"key": self.key, "id": self.id, "pooling": self.pooling, **about, **status}


def variant_of(cases: CaseSet, variant: str | None) -> CaseSet:
    """The cases as a variant sees them: pooled in a space, the first member alone, or the first few."""
    if variant is None:
        return cases
    if variant == "single":
        return cases.members([0])
    if variant.startswith("members-"):
        return cases.members(range(int(variant.removeprefix("members-"))))
    return cases.pooled("probs" if variant == "probs" else "logits")


def resolve_methods(methods: str | Sequence[str], *, members: bool = False) -> tuple[str, ...]:
    """Ids of calibrators from ``"all"``, ``"decision-preserving"``, one id, or several.

    ``members`` says whether ``"all"`` includes the calibrator of ensembles, which does nothing without members.

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
