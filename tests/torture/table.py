"""The table of ``docs/reliability.md``: what errors were seen and what is promised.

``python tests/torture/table.py`` prints it. ``--measure ROUNDS`` goes through that many seeds first and writes
``bounds.py`` anew.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from torture.bounds import BOUNDS, Bound

HERE = Path(__file__).parent
#: Title and columns of every part, and what their paths are called.
PARTS: dict[str, tuple[str, dict[str, str]]] = {
    "metrics": ("Metric", {"float64": "float64, small inputs", "compiled": "large float32 inputs"}),
    "losses": ("Loss", {"float64": "float64", "float32": "float32", "gradient": "gradient, float32"}),
    "maps": (
        "Calibrator",
        {
            "float64": "float64",
            "float32": "float32",
            "compiled": "large float32 inputs",
            "float16": "float16",
            "bfloat16": "bfloat16",
        },
    ),
    "fits": ("Fit", {"before": "NLL before", "after": "NLL after", "worse": "worse than none", "optimum": "optimum"}),
}


def promised(seen: float) -> float:
    """1, 2 or 5 times a power of ten, 4 to 10 times what was seen."""
    if not seen:
        return 0.0
    power = math.floor(math.log10(4 * seen))
    digits = next(digits for digits in (1, 2, 5, 10) if digits * 10.0**power >= 4 * seen)
    return float(f"{digits}e{power}")


def table(part: str) -> str:
    """The rows of one part, in Markdown."""
    title, columns = PARTS[part]
    lines = [f"| {title} | " + " | ".join(columns.values()) + " |", "|---" * (len(columns) + 1) + "|"]
    for function, paths in BOUNDS[part].items():
        lines.append(f"| `{function}` | " + " | ".join(_cell(paths.get(path)) for path in columns) + " |")
    return "\n".join(lines)


def _cell(own: Bound | None) -> str:
    if own is None:
        return ""
    return f"{own.seen:.0e} / {own.bound:.0e}" if own.bound else "exact"


def measured(rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """The largest errors of that many seeds."""
    from torture.errors import loss_errors, metric_errors
    from torture.maps import fit_errors, map_errors, optimum_errors

    worst: dict[str, dict[str, dict[str, float]]] = {}
    sources = (
        ("metrics", metric_errors, rounds),
        ("losses", loss_errors, rounds),
        ("maps", map_errors, rounds),
        ("fits", fit_errors, rounds),
        # How far a fit goes beyond its tolerance is luck of the last step: only many seeds show the least of it.
        ("fits", optimum_errors, 5 * rounds),
    )
    for part, function, seeds in sources:
        own = worst.setdefault(part, {})
        for seed in range(seeds):
            for found in function(seed):
                paths = own.setdefault(found.function, {})
                paths[found.path] = max(paths.get(found.path, 0.0), found.error)
            print(part, seed, file=sys.stderr, flush=True)
    return worst


def source(worst: dict[str, dict[str, dict[str, float]]]) -> Iterator[str]:
    """The lines of ``bounds.py``."""
    text = (HERE / "bounds.py").read_text()
    yield text[: text.index("BOUNDS:")].rstrip("\n") + "\n"
    yield "BOUNDS: dict[str, dict[str, dict[str, Bound]]] = {"
    for part, functions in worst.items():
        yield f'    "{part}": {{'
        for function in sorted(functions):
            cells = []
            for path in (path for path in PARTS[part][1] if path in functions[function]):
                seen = float(f"{functions[function][path]:.1e}")
                cells.append(f'"{path}": Bound({seen:.1e}, {promised(seen):.0e})')
            yield f'        "{function}": {{{", ".join(cells)}}},'
        yield "    },"
    yield "}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", type=int, default=0, metavar="ROUNDS")
    rounds = parser.parse_args().measure
    if rounds:
        (HERE / "bounds.py").write_text("\n".join(source(measured(rounds))) + "\n")
    else:
        print("\n\n".join(table(part) for part in PARTS))
