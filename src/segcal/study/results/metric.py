"""What a report says about a metric: its name, which direction is better, its definition, its citation."""

from __future__ import annotations

import inspect
import re
from typing import Any

from segcal.evaluation.plan import DEFAULT_BINS, metric_spec, parse_metric
from segcal.metrics import options_of


def describe_metric(metric: str) -> dict[str, Any]:
    """The entry of a metric in the results.

    Examples:
        >>> found = describe_metric("ece[num_bins=50]")
        >>> found["name"], found["better"], found["citation"], found["bins"]
        ('ECE (num_bins = 50)', 'lower', 'Naeini 2015, Guo 2017', 50)
        >>> describe_metric("ece")["definition"].endswith("Here with 15 bins.")
        True
    """
    id, options = parse_metric(metric)
    spec = metric_spec(id)
    bins = options.get("num_bins", DEFAULT_BINS) if "num_bins" in options_of(spec.function) else None
    extra = ", ".join(f"{name} = {value}" for name, value in sorted(options.items()))
    paragraphs = re.split(r"\n\s*\n", inspect.getdoc(spec.function) or "")
    definition = " ".join(paragraphs[0].split())
    cited = re.findall(r"\(([^()]*(?:\d{4}|et al)[^()]*)\)", " ".join(" ".join(paragraphs[:2]).split()))
    return {
        "id": metric,
        "name": f"{spec.title} ({extra})" if extra else spec.title,
        "better": spec.better,
        "quality": spec.quality,
        "definition": definition.replace("``", "") + (f" Here with {bins} bins." if bins else ""),
        "bins": bins,
        "citation": cited[0] if cited else "",
    }
