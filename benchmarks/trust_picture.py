"""The picture of docs/trust.md, of scenes not fitted to: ``python benchmarks/trust_picture.py docs/trust.png``."""

from __future__ import annotations

import sys

import matplotlib.pyplot as plt
import numpy as np

import segcal
from segcal.synthetic import ClassConditional, SpatialTemperature, scenes

PLANT = [SpatialTemperature(), ClassConditional([2.5, 1, 1, 2, 1, 1])]
SIZE = (128, 160)


def main() -> None:
    cases = scenes(24, size=SIZE, plant=PLANT, coherence=0)
    others = scenes(24, size=SIZE, plant=PLANT, coherence=0, seed=9)
    ts, trust = (segcal.CALIBRATORS[name]().fit(cases) for name in ("ts", "trust"))
    case = others[0]
    wrong = (case.logits.argmax(1) != case.labels)[0]
    figure, axes = plt.subplots(1, 4, figsize=(13, 2.9), layout="constrained")
    confidence = {"`ts`": ts.predict_proba(case.logits).amax(1)[0], "`trust`": trust.trust_map(case.logits)[0]}
    axes[0].imshow(wrong, cmap="Greys", interpolation="nearest")
    axes[0].set_title("wrong predictions (black)")
    for axis, (name, values) in zip(axes[1:3], confidence.items(), strict=True):
        shown = axis.imshow(values, vmin=0.2, vmax=1, cmap="viridis")
        axis.set_title(f"{name.strip('`')}: probability of the prediction")
    figure.colorbar(shown, ax=axes[1:3], shrink=0.9)
    for axis in axes[:3]:
        axis.set_xticks([])
        axis.set_yticks([])
    for name, calibrator in (("uncalibrated", None), ("ts", ts), ("trust", trust)):
        bins = segcal.evaluate(others, calibrator, metrics=("ece",), regions=("everything", "boundary"))
        own = bins.reliability["boundary"]["top"]
        count, p, right = (np.array(own[key], float) for key in ("count", "confidence", "correct"))
        seen = count > 200
        axes[3].plot(p[seen] / count[seen], right[seen] / count[seen], "o-", markersize=3, label=name)
    axes[3].plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    axes[3].set(
        title="near boundaries, 24 other scenes", xlabel="confidence", ylabel="accuracy", xlim=(0.2, 1), ylim=(0.2, 1)
    )
    axes[3].legend(frameon=False, fontsize=8)
    figure.savefig(sys.argv[1], dpi=110)


if __name__ == "__main__":
    main()
