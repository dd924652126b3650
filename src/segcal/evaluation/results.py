"""Results of an evaluation: tidy rows, their summary, and their files. Needs no torch."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from segcal.errors import DataError, InputError
from segcal.evaluation.picture import reliability_picture
from segcal.files.atomic import atomic_path
from segcal.files.plain import number, plain
from segcal.files.versions import RESULTS
from segcal.inference import FEW_GROUPS, bootstrap_interval

if TYPE_CHECKING:
    from typing_extensions import Self

#: Channel (empty for ordinary data, and for means over channels), region and metric: what identifies a column.
Key = tuple[str, str, str]
#: The case of a pooled row.
POOLED = None
# The case of a pooled row in version 1, which a real case may be called, too.
_ONCE_POOLED = "(pooled)"


class Row(NamedTuple):
    """One number: a metric in a region of a case, or of all cases pooled, and the number of values that it averages.

    ``case`` is None in pooled rows. ``missed`` counts the classes that are only in the prediction or only in the
    labels: metrics of surfaces have no distance for them (``segcal.metrics.surfaces``). ``channel`` is a channel of
    multi-label data. Rows of such data without one are means over the ``count`` channels where the metric is defined.
    """

    case: str | None
    region: str
    metric: str
    value: float
    count: int  # type: ignore[assignment]  # rows need no tuple.count
    missed: int = 0
    channel: str = ""


class SummaryRow(NamedTuple):
    """A metric in a region over all cases.

    ``mean`` is the mean over the ``cases`` where the metric is defined, without the ``undefined`` ones. ``low`` to
    ``high`` is its 95% bootstrap interval over cases, or over groups of cases if there are groups. ``pooled`` is the
    value of all voxels together, NaN if that has no meaning, and ``pooled_low`` to ``pooled_high`` its interval, from
    the same draws; NaN where it has none (``segcal.metrics.additive``). ``missed`` counts the missed classes of all
    cases.
    """

    region: str
    metric: str
    pooled: float
    mean: float
    low: float
    high: float
    cases: int
    undefined: int
    missed: int
    channel: str = ""
    pooled_low: float = math.nan
    pooled_high: float = math.nan


class ClassRow(NamedTuple):
    """A class, or a channel of multi-label data, over the voxels of all cases together.

    ``ece`` is that of the class against the rest, in 15 bins of its probability: ``cece`` is the mean over the classes.
    ``dice`` is that of the pooled confusion matrix. ``voxels`` have the class as label, ``predicted`` as prediction.
    ``balance`` is the mean of NLL - entropy over the predicted ones: for a calibrated network it is 0 there, but not
    over the voxels of a label. NaN where there is nothing to average. The row of a channel is that of its inside.
    """

    name: str
    ece: float
    dice: float
    voxels: int
    predicted: int
    balance: float


@dataclass(frozen=True)
class Results:
    """What ``segcal.evaluate`` found.

    Attributes:
        rows: Tidy rows; ``pandas.DataFrame(results.rows)`` is a data frame.
        about: What was evaluated and how: data, groups of cases, calibrator, classes, bins, seed, versions.
        reliability: Region to reliability data, for the top label and for every predicted class.
        diagnosis: Findings in words and numbers.
        classes: A row for each class or, for multi-label data, for each channel; over all cases.
        pooled_intervals: Channel, region and metric to the 95% interval of the pooled value.
        sums: Channel, region and metric to what each case adds to the pooled value, ``(cases, ...)``. Not in files.

    For multi-label data, rows without a channel are means over the channels, ``reliability`` and ``diagnosis`` have
    an entry for each channel, and ``channel(name)`` gives the results of one.

    Examples:
        >>> rows = [Row("a", "everything", "ece", 0.1, 9), Row("b", "everything", "ece", 0.3, 9)]
        >>> results = Results((*rows, Row(POOLED, "everything", "ece", 0.18, 18)))
        >>> results.value("ece"), results.value("ece", case="a")
        (0.18, 0.1)
        >>> results.summary()[0].mean
        0.2
    """

    rows: tuple[Row, ...]
    about: Mapping[str, Any] = field(default_factory=dict)
    reliability: Mapping[str, Any] = field(default_factory=dict)
    diagnosis: Mapping[str, Any] = field(default_factory=dict)
    classes: tuple[ClassRow, ...] = ()
    pooled_intervals: Mapping[Key, tuple[float, float]] = field(default_factory=dict)
    sums: Mapping[Key, NDArray[np.float64]] = field(default_factory=dict, repr=False, compare=False)

    def value(self, metric: str, region: str = "everything", case: str | None = POOLED, *, channel: str = "") -> float:
        """One value: of a case or, by default, pooled; of a channel or, by default, the mean over channels."""
        row = self._columns.get((channel, region, metric), {}).get(case)
        if row is not None:
            return row.value
        of_channel = f" in channel {channel!r}" if channel else ""
        raise InputError(
            f"no value of {metric!r} in {region!r} for {'all cases pooled' if case is POOLED else repr(case)}"
            + of_channel,
            expected="one of " + ", ".join(sorted({f"{row.metric} in {row.region}" for row in self.rows})),
        )

    def values(self, metric: str, region: str = "everything", *, channel: str = "") -> dict[str, float]:
        """The value of every case, by name: of a channel or, by default, the mean over channels."""
        rows = self._columns.get((channel, region, metric), {})
        return {case: row.value for case, row in rows.items() if case is not POOLED}

    @cached_property
    def _columns(self) -> dict[Key, dict[str | None, Row]]:
        """Rows by channel, region and metric, then by case."""
        found: dict[Key, dict[str | None, Row]] = {}
        for row in self.rows:
            found.setdefault((row.channel, row.region, row.metric), {})[row.case] = row
        return found

    @property
    def channels(self) -> tuple[str, ...]:
        """The names of the channels of multi-label data; empty for ordinary data."""
        return tuple(self.about.get("channels") or ())

    def channel(self, name: str) -> Self:
        """The results of one channel of multi-label data, in the form of those of ordinary data."""
        if name not in self.channels:
            raise InputError(f"channel {name!r}", expected=f"one of {', '.join(self.channels) or 'none'}")
        return replace(
            self,
            rows=tuple(row._replace(channel="") for row in self.rows if row.channel == name),
            about={**self.about, "channels": None, "channel": name},
            reliability=self.reliability[name],
            diagnosis=self.diagnosis["channels"][name],
            classes=tuple(row for row in self.classes if row.name == name),
            pooled_intervals={("", *key[1:]): own for key, own in self.pooled_intervals.items() if key[0] == name},
            sums={("", *key[1:]): own for key, own in self.sums.items() if key[0] == name},
        )

    def summary(self, *, seed: int = 0) -> list[SummaryRow]:
        """Every metric in every region and channel, summarised over all cases, in the order of the rows.

        ``seed`` is that of the intervals of means. Those of pooled values were drawn by ``evaluate``.
        """
        found = []
        for key, rows in self._columns.items():
            low, high = self.pooled_intervals.get(key, (math.nan, math.nan))
            own = _summarise(list(rows.values()), self.groups, seed)
            found.append(own._replace(pooled_low=low, pooled_high=high))
        return found

    def picture(self, region: str = "everything", *, before: Results | None = None) -> str:
        """The reliability diagram as text, 15 bins of all voxels; beside that of ``before`` if these are given.

        For multi-label data, the diagrams of one channel below those of another.
        """
        if self.channels:
            pairs = [(name, self.channel(name), before and before.channel(name)) for name in self.channels]
            return "\n\n".join(f"{name}\n{own.picture(region, before=other)}" for name, own, other in pairs)
        if region not in self.reliability:
            raise InputError(f"region {region!r}", expected=f"one of {', '.join(self.reliability)}")
        name = self.about.get("calibrator")
        if before is None:
            return reliability_picture({name or "uncalibrated": self.reliability[region]["top"]})
        both = {"before": before, f"after {name}" if name else "after": self}
        return reliability_picture({title: own.reliability[region]["top"] for title, own in both.items()})

    @property
    def groups(self) -> Mapping[str, str] | None:
        """The group of every case, for the bootstrap; None if cases are independent."""
        groups = self.about.get("groups")
        return None if groups is None else groups["cases"]

    def notes(self) -> list[str]:
        """What the user should know about the intervals."""
        if self.groups is None:
            return []
        count = len(set(self.groups.values()))
        few = f": with fewer than {FEW_GROUPS} they are too narrow" if count < FEW_GROUPS else ""
        return [f"intervals are over {count} group{'s' * (count != 1)} of cases, not over single cases{few}"]

    def to_json(self, path: str | Path | None = None) -> str:
        """Everything as JSON, with null for NaN and texts for infinities. Also written to ``path`` if given."""
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False)
        if path is not None:
            with atomic_path(Path(path)) as temporary:
                temporary.write_text(text)
        return text

    def to_dict(self) -> dict[str, Any]:
        """Everything in dictionaries, lists and numbers that JSON can hold."""
        return {
            "format": RESULTS[0],
            "version": RESULTS[1],
            "about": plain(self.about),
            "columns": list(Row._fields),
            "rows": plain(self.rows),
            "reliability": plain(self.reliability),
            "diagnosis": plain(self.diagnosis),
            "classes": plain([row._asdict() for row in self.classes]),
            "pooled_intervals": plain([[*key, *ends] for key, ends in self.pooled_intervals.items()]),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """The results that ``to_dict`` wrote; ``ValueError``, ``KeyError`` or ``TypeError`` for anything else."""
        if content["format"] != RESULTS[0] or content["version"] not in range(1, RESULTS[1] + 1):
            raise ValueError(f"format {content['format']}, version {content['version']}")
        rows = tuple(Row(c, r, m, number(v), *rest) for c, r, m, v, *rest in content["rows"])
        if content["version"] == 1:
            rows = tuple(row._replace(case=POOLED) if row.case == _ONCE_POOLED else row for row in rows)
        classes = tuple(
            ClassRow(**{**row, **{name: number(row[name]) for name in ("ece", "dice", "balance")}})
            for row in content.get("classes", ())
        )
        intervals = {(c, r, m): (number(a), number(b)) for c, r, m, a, b in content.get("pooled_intervals", ())}
        return cls(rows, content["about"], content["reliability"], content["diagnosis"], classes, intervals)

    @classmethod
    def from_json(cls, path: str | Path) -> Self:
        """Read what ``to_json`` wrote."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"cannot be read ({error})", where=str(path), expected="a results.json of segcal") from None

    def to_csv(self, path: str | Path) -> None:
        """The tidy rows as CSV; pooled rows have no case, and their 95% interval in ``low`` and ``high``."""
        ends = [
            self.pooled_intervals.get((row.channel, row.region, row.metric), ()) if row.case is POOLED else ()
            for row in self.rows
        ]
        shown = [["" if math.isnan(end) else end for end in own] or ["", ""] for own in ends]
        with atomic_path(Path(path)) as temporary, temporary.open("w", newline="") as file:
            csv.writer(file).writerow([*Row._fields, "low", "high"])
            csv.writer(file).writerows([*row, *own] for row, own in zip(self.rows, shown, strict=True))


def mean_over_channels(channels: Sequence[Sequence[Row]]) -> list[Row]:
    """Average the rows of several channels, which differ only in their values.

    Examples:
        >>> one, other = [Row("a", "everything", "ece", 0.1, 9)], [Row("a", "everything", "ece", 0.3, 9)]
        >>> mean_over_channels([one, other])
        [Row(case='a', region='everything', metric='ece', value=0.2, count=2, missed=0, channel='')]
    """
    found = []
    for rows in zip(*channels, strict=True):
        assert len({row[:3] for row in rows}) == 1, "the same plan for every channel"
        defined = [row.value for row in rows if not math.isnan(row.value)]
        mean = math.fsum(defined) / len(defined) if defined else math.nan
        missed = sum(row.missed for row in rows)
        found.append(rows[0]._replace(value=mean, count=len(defined), missed=missed))
    return found


def _summarise(rows: Sequence[Row], groups: Mapping[str, str] | None, seed: int) -> SummaryRow:
    images = [row for row in rows if row.case is not POOLED]
    defined = [row for row in images if not math.isnan(row.value)]
    values = [row.value for row in defined]
    own = None if groups is None else [groups[str(row.case)] for row in defined]
    low, high = bootstrap_interval(values, groups=own, seed=seed)
    return SummaryRow(
        rows[0].region,
        rows[0].metric,
        pooled=next((row.value for row in rows if row.case is POOLED), math.nan),
        mean=math.fsum(values) / len(values) if values else math.nan,
        low=low,
        high=high,
        cases=len(defined),
        undefined=len(images) - len(defined),
        missed=sum(row.missed for row in images),
        channel=rows[0].channel,
    )
