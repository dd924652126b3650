"""A study as ``segcal.compare`` writes it, made of random numbers that look like one. Nothing is fitted here."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

HOSTILE = "<script>alert('case')</script>"
CHECKED = ("image", "label", "prediction", "confidence before", "confidence after", "temperature", "error", "flips")

# key, name, preserves, translation invariant, parameters, share of the miscalibration left, loss of Dice.
METHODS = (
    ("uncalibrated", "Uncalibrated", "order", True, 0, 1.0, 0.0),
    ("ts", "Temperature scaling", "order", True, 1, 0.42, 0.0),
    ("ets", "Ensemble temperature scaling", "order", True, 4, 0.4, 0.0),
    ("vs", "Vector scaling", None, False, 8, 0.35, 0.004),
    ("ms", "Matrix scaling", None, False, 20, 0.33, 0.012),
    ("cms-ap", "Conditional matrix scaling, argmax kept", "argmax", True, 32, 0.24, 0.0),
    ("cms-op", "Conditional matrix scaling, order kept", "order", True, 32, 0.22, 0.0),
    ("lts-ti", "Local temperature scaling, translation invariant", "order", True, 2401, 0.16, 0.0),
    ("histogram", "Histogram binning", None, True, 60, 0.5, 0.006),
)
METRICS = (
    ("nll", "NLL", "lower", 0.35, 0.4),
    ("ece", "ECE", "lower", 0.0, 0.09),
    ("ba-ece", "Boundary-aware ECE", "lower", 0.01, 0.14),
    ("brier", "Brier score", "lower", 0.12, 0.05),
    ("dsc", "Dice", "higher", 0.86, 0.0),
    ("accuracy", "Accuracy", "higher", 0.91, 0.0),
    ("confidence-balance", "NLL - entropy", "zero", 0.0, 0.3),
)
BANDS = (("band-0-3", 0.0, 3.0), ("band-3-7", 3.0, 7.0), ("band-7-15", 7.0, 15.0), ("band-15-inf", 15.0, None))


def document(cases=30, repeats=2, methods=9, classes=4, rank=3, regions=("everything", "boundary"), metrics=7, seed=0):
    """The whole of results.json; more methods and metrics than named above are copies under other names."""
    random = np.random.default_rng(seed)
    chosen = [METHODS[i] if i < len(METHODS) else (f"extra-{i}", f"Extra method {i}", *METHODS[1 + i % 8][2:])
              for i in range(methods)]  # fmt: skip
    measured = [METRICS[i] if i < len(METRICS) else (f"metric-{i}", f"Metric {i}", *METRICS[i % 7][2:])
                for i in range(metrics)]  # fmt: skip
    ids = [HOSTILE, *(f"patient_{i:03d}" for i in range(1, cases))]
    orders = [[ids[0], *(ids[i] for i in 1 + random.permutation(cases - 1))] for _ in range(repeats)]
    held_out = max(2, round(0.3 * cases))
    splits = [{"test": o[:held_out], "validation": o[held_out : held_out + held_out // 2],
               "calibration": o[held_out + held_out // 2 :]} for o in orders]  # fmt: skip
    hardness = {name: float(random.gamma(4, 0.25)) for name in ids}
    names = ["background", "liver", "tumour <b>", "vessel", *(f"class {k}" for k in range(4, classes))][:classes]

    keys = [m[0] for m in chosen]
    advised, best = (wanted if wanted in keys else keys[-1] for wanted in ("cms-op", "lts-ti"))

    result = {
        "format": "segcal.Study",
        "version": 1,
        "about": {
            "title": "Liver CT & tumours",
            "command": "segcal compare liver/ --methods all --repeats 2 -o report/",
            "seed": seed,
            "versions": {"segcal": "0.1.0", "python": "3.12.1", "torch": "2.13.0", "numpy": "2.1.0"},
            "data": {"name": "liver", "cases": cases, "num_classes": classes, "class_names": names,
                     "ignore_index": 255, "spatial_rank": rank, "members": None, "has_images": True,
                     "splits": f"{repeats} random splits"},
            "settings": {"methods": [m[0] for m in chosen[1:]], "repeats": repeats, "fractions": [0.5, 0.2, 0.3],
                         "tune": "path", "select": "nll", "regions": list(regions),
                         "metrics": [m[0] for m in measured], "pooling": [], "preserve": "order",
                         "translation_invariant": False},
        },
        "metrics": [{"id": m[0], "name": m[1], "better": m[2], "citation": "Guo et al., ICML 2017",
                     "definition": f"{m[1]} of the top label: sum_b |correct_b - confidence_b| / n over 15 bins.",
                     "bins": 15 if "ece" in m[0] else None}
                    for m in measured],
        "methods": [{"key": m[0], "id": m[0], "pooling": None, "name": m[1], "preserves": m[2],
                     "translation_invariant": m[3], "parameters": m[4], "status": "ok", "reason": None, "same_as": None}
                    for m in chosen],
        "splits": splits,
        "fits": [{"method": m[0], "repeat": r, "nll_before": 0.71, "nll_after": 0.36 + 0.3 * m[5], "converged": True,
                  "certificate": 1e-9, "iterations": 12, "voxels_used": 1_000_000, "notes": [], "tuning": None,
                  "validation_nll": {"mean": 0.36 + 0.3 * m[5], "standard_error": 0.02, "cases": 5}}
                 for m in chosen[1:] for r in range(repeats)],
        "recommendation": {
            "method": advised, "best": best, "shown": advised, "rule": "one standard error",
            "headline": [
                {"text": "The network is overconfident.", "tone": "plain"},
                {"text": f"{advised}, chosen by NLL on the validation cases, lowers NLL by 43% on the test cases and "
                 "changes no labels.", "tone": "plain"},
                {"text": "ECE falls by 78%, from 0.0970 to 0.0240.", "tone": "plain"},
            ],
            "sentences": [
                "The network is overconfident: on average it is surer than it is right.",
                "Conditional matrix scaling, order kept, lowers the calibration error from 0.097 to 0.024 and changes "
                "no label.",
                "Local temperature scaling is better still on validation cases, but by less than one standard error "
                "and with many more parameters.",
            ],
            "caveats": ["Class 'tumour <b>' has only 1210 voxels in the calibration part of repeat 0."],
            "candidates": [m[0] for m in chosen if m[2] == "order"],
            "validation_nll": {m[0]: {"mean": 0.36 + 0.3 * m[5], "standard_error": 0.02} for m in chosen},
            "file": "calibrator.safetensors",
        },
        "warnings": ["Class 'vessel' is absent from the calibration part of repeat 1."],
        "timings": {"total_seconds": 81.2, "created": "2026-11-15T12:00:00+00:00",
                    "per_method": {m[0]: {"fit_seconds": 3.2, "evaluate_seconds": 1.1, "peak_memory_mb": 810.0}
                                   for m in chosen}},
    }  # fmt: skip
    result["methods"].append(
        {"key": "meta-cal", "id": "meta-cal", "pooling": None, "name": "Meta-Cal", "preserves": None,
         "translation_invariant": False, "parameters": None, "status": "failed",
         "reason": "fit: no correct voxel of class 3 in the calibration part", "same_as": None}
    )  # fmt: skip
    _numbers(result, chosen, measured, regions, hardness, random)
    _pictures_of_bins(result, chosen, regions, classes, random)
    _extras(result, chosen, measured, random)
    result["classes"] = _classes(result, chosen)
    return result


def _numbers(result, chosen, measured, regions, hardness, random):
    result.update(cases=[], pooled=[], summary=[], differences=[], ranks=[])
    for region_index, region in enumerate(regions):
        for metric, _, better, floor, reach in measured:
            means = {}
            for key, _, _, _, _, left, loss in chosen:
                rows = []
                for repeat, split in enumerate(result["splits"]):
                    own = np.array([hardness[name] for name in split["test"]])
                    sign = 1 if better != "higher" else -0.06
                    values = (
                        floor + reach * left * own * (1 + 0.6 * region_index) + sign * 0.01 * random.random(len(own))
                    )
                    values = values - (loss + 0.04 * (own - 1) if better == "higher" else 0)
                    rows.append(values)
                    result["cases"].append({"method": key, "repeat": repeat, "region": region, "metric": metric,
                                            "values": [float(v) for v in values]})  # fmt: skip
                    result["pooled"].append({"method": key, "repeat": repeat, "region": region, "metric": metric,
                                             "value": float(values.mean()), "count": 40_000_000})  # fmt: skip
                values = np.concatenate(rows)
                mean, half = float(values.mean()), float(2 * values.std() / np.sqrt(len(values)))
                means[key] = mean
                result["summary"].append({"method": key, "region": region, "metric": metric, "mean": mean,
                                          "low": mean - half, "high": mean + half, "n": len(values),
                                          "pooled": 0.97 * mean, "pooled_low": 0.97 * mean - half,
                                          "pooled_high": 0.97 * mean + half})  # fmt: skip
                if key != "uncalibrated":
                    change = mean - means["uncalibrated"]
                    result["differences"].append(
                        {"method": key, "baseline": "uncalibrated", "region": region, "metric": metric, "mean": change,
                         "low": change - half / 2, "high": change + half / 2, "p": 0.0004, "p_adjusted": 0.0012,
                         "lower": len(values), "higher": 0, "verdict": _verdict(change, half / 2, better),
                         "n": len(values)}
                    )  # fmt: skip
            order = sorted(means, key=means.get, reverse=better == "higher")
            result["ranks"].append(
                {"metric": metric, "region": region, "friedman": {"statistic": 41.0, "p": 1e-6, "n": len(values)},
                 "mean_rank": {key: 1 + 0.9 * i for i, key in enumerate(order)}, "critical_difference": 2.3,
                 "groups": [order[i : i + 3] for i in range(0, len(order) - 2, 2)]}
            )  # fmt: skip
    result["scores"] = [
        {"method": key, "score": score, "pooled": whole + part * left, "calibration": part * left,
         "low": 0.9 * part * left, "high": 1.1 * part * left, "refinement": whole}
        for key, _, _, _, _, left, _ in chosen for score, whole, part in (("nll", 0.41, 0.12), ("brier", 0.17, 0.023))
    ]  # fmt: skip
    result["sum_rank"] = {m[0]: 10.0 + 3 * i for i, m in enumerate(chosen[::-1])}
    result["flips"] = [
        {"method": m[0], "compared": 40_000_000, "harmful": int(1e6 * m[6] * 30), "beneficial": int(1e6 * m[6] * 12),
         "neutral": int(1e6 * m[6])}
        for m in chosen
    ]  # fmt: skip


def _verdict(change, half, better):
    if better not in ("lower", "higher"):
        return None
    change = change if better == "lower" else -change
    return "better" if change + half < 0 else "worse" if change - half > 0 else "unclear"


def _pictures_of_bins(result, chosen, regions, classes, random):
    result["reliability"], result["bands"], result["diagnosis"] = [], [], {}
    centres = (np.arange(15) + 0.5) / 15
    for key, _, _, _, _, left, _ in chosen:
        for region in (*regions, *(band[0] for band in BANDS)):
            for label in (None, *range(classes)):
                count = np.floor(np.exp(4 + 9 * centres + random.normal(0, 0.3, 15))).astype(int)
                if label is not None:
                    count = count // (label + 2)
                count[0] = 0
                gap = 0.28 * left * np.sin(np.pi * centres**1.4) * (1 if label != 2 else -0.6)
                accuracy = np.clip(centres - gap, 0, 1)
                result["reliability"].append(
                    {"method": key, "region": region, "class": label, "bins": 15, "count": count.tolist(),
                     "confidence": (count * centres).tolist(),
                     "correct": np.round(count * accuracy).astype(int).tolist()}
                )  # fmt: skip
        for i, (band, low, high) in enumerate(BANDS):
            gap = 0.16 * left / (1 + 1.2 * i)
            result["bands"].append(
                {"method": key, "band": band, "low": low, "high": high, "unit": "mm", "count": 4_000_000 * (i + 1),
                 "ece": gap, "nll": 0.9 / (1 + 2 * i) + gap, "confidence": 0.7 + 0.08 * i + gap,
                 "accuracy": 0.7 + 0.08 * i}
            )  # fmt: skip

        def finding(balance):
            words = ("overconfident", "balanced", "underconfident")
            word = words[0] if balance > 0.01 else words[2] if balance < -0.01 else words[1]
            return {"balance": balance, "voxels": 1_000_000, "verdict": word}

        names = result["about"]["data"]["class_names"]
        result["diagnosis"][key] = {
            "threshold": 0.01,
            "set": finding(0.24 * left - 0.04),
            "images": {"overconfident": int(9 * left), "underconfident": 0, "balanced": 9 - int(9 * left),
                       "undefined": 0},
            "classes": {name: finding((0.3 - 0.12 * k) * left) for k, name in enumerate(names)},
            "bands": {band[0]: finding(0.3 * left / (1 + i)) for i, band in enumerate(BANDS)},
            "gauge": {"free_energy_std": 2.4, "risk": "high"},
        }  # fmt: skip


def _classes(result, chosen):
    """A row for each method and class, as ``compare`` writes them."""
    names = result["about"]["data"]["class_names"]
    return [
        {"method": m[0], "class": name, "voxels": 4_000_000 // (k + 1), "predicted": 3_900_000 // (k + 1),
         "ece": 0.02 * m[5] * (1 + k % 3), "dice": 0.9 - m[6] - 0.01 * (k % 7), "balance": (0.3 - 0.12 * k) * m[5]}
        for m in chosen for k, name in enumerate(names)
    ]  # fmt: skip


def _extras(result, chosen, measured, random):
    result["shift"] = [
        {"name": name, "summary": [{**row, "mean": row["mean"] * factor, "low": row["low"] * factor,
                                    "high": row["high"] * factor} for row in result["summary"]
                                   if row["region"] == "everything"],
         "differences": [{**row, "baseline": other} for row in result["differences"] if row["region"] == "everything"
                         for other in ("uncalibrated", "ts") if row["method"] != other],
         "flips": result["flips"], "reliability": [row for row in result["reliability"]
                                                   if row["region"] == "everything" and row["class"] is None]}
        for name, factor in (("fog mild", 1.2), ("fog strong", 1.7), ("scanner B", 1.35))
    ]  # fmt: skip
    left = {m[0]: m[5] for m in chosen}
    result["sensitivity"] = {
        "bins": [{"method": key, "bins": bins, "ece": 0.09 * share * (1 + 0.05 * np.log(bins))}
                 for key, share in left.items() for bins in (5, 10, 15, 20, 30, 50, 100)],
        "size": [{"method": key, "cases": n, "nll": 0.4 + 0.3 * share + 0.1 / n, "ece": 0.09 * share + 0.05 / n}
                 for key, share in left.items() for n in (2, 4, 8, 15)],
    }  # fmt: skip


def multi_label(study, names=("liver", HOSTILE)):
    """Make the study one of multi-label data, as the study would write it."""
    data = study["about"]["data"]
    data.update(class_names=["outside", "inside"], channel_names=list(names), num_classes=2)
    study["channels"] = [
        {"name": name, "summary": [{**row, "mean": row["mean"] * (1 + k)} for row in study["summary"]]}
        for k, name in enumerate(names)
    ]
    own = dict(zip(dict.fromkeys(row["class"] for row in study["classes"]), names, strict=False))
    study["classes"] = [{**row, "class": own[row["class"]]} for row in study["classes"] if row["class"] in own]
    tops = [row for row in study["reliability"] if row["class"] is None]
    study["reliability"] = [{**row, "channel": name} for row in tops for name in names]
    for entry in study["shift"]:
        entry["reliability"] = [{**row, "channel": name} for row in entry["reliability"] for name in names]
    for found in study["diagnosis"].values():
        own = [{**found, "set": {**found["set"], "balance": b, "verdict": v}}
               for b, v in ((0.2, "overconfident"), (-0.1, "underconfident"))]  # fmt: skip
        found.update(set={**found["set"], "verdict": "mixed"}, classes={}, channels=dict(zip(names, own, strict=True)))
    return study


def harm(study, method="cms-op", metric="ece", region="everything"):
    """Make a recommended method worse than none in one metric, as the study would say it."""
    mean = {row["method"]: row for row in study["summary"] if (row["metric"], row["region"]) == (metric, region)}
    up = 1.3 * mean["uncalibrated"]["mean"] - mean[method]["mean"]
    for name in ("mean", "low", "high"):
        mean[method][name] += up
    for row in (*study["differences"], *(row for entry in study["shift"] for row in entry["differences"])):
        if (row["method"], row["metric"], row["region"]) == (method, metric, region):
            row.update(mean=0.3 * mean["uncalibrated"]["mean"], low=0.002, high=0.05, verdict="worse")
            row.update(lower=0, higher=row["n"])
    for row in study["cases"]:
        if (row["method"], row["metric"], row["region"]) == (method, metric, region):
            row["values"] = [value + 10 * up for value in row["values"]]  # in every case
    words = f"ECE gets worse, from {mean['uncalibrated']['mean']:.4f} to {mean[method]['mean']:.4f}."
    study["recommendation"]["headline"][2] = {"text": words, "tone": "worse"}
    return study


def write(folder: Path, *, pictures=True, size=128, slices=3, **arguments) -> dict:
    """Write results.json and the pictures of the browser as a study would; returns the document."""
    result = document(**arguments)
    result["browser"] = []
    if pictures:
        (folder / "browser").mkdir(parents=True, exist_ok=True)
        shown = result["splits"][0]["test"][:4]
        for number, name in enumerate(shown):
            volume = result["about"]["data"]["spatial_rank"] == 3
            result["browser"].append({
                "case": name, "title": f"ECE rank {number + 1} of {len(shown)}, worst first", "shape": [40, size, size],
                "slices": [_slice(folder, number, i, 5 * i if volume else None, size)
                           for i in range(slices if volume else 1)],
                "numbers": {"ece before": 0.1 + 0.02 * number, "ece after": 0.02, "dsc before": 0.9, "dsc after": 0.9},
            })  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(result))
    return result


def _slice(folder, number, position, index, size):
    random = np.random.default_rng(100 * number + position)
    y, x = np.mgrid[:size, :size] / size
    organ = (x - 0.5) ** 2 + (y - 0.45) ** 2 < 0.08 + 0.01 * position
    tumour = (x - 0.6) ** 2 + (y - 0.5) ** 2 < 0.008
    edge = np.exp(-60 * np.abs(np.hypot(x - 0.5, y - 0.45) - 0.28))
    tone = {
        "image": 0.25 + 0.4 * organ + 0.2 * tumour + random.normal(0, 0.05, x.shape),
        "label": 0.5 * organ + 0.5 * tumour,
        "prediction": 0.5 * organ + 0.5 * np.roll(tumour, 3, 1),
        "confidence before": 1 - 0.3 * edge,
        "confidence after": 1 - 0.6 * edge,
        "temperature": 0.3 + 0.5 * edge,
        "error": (tumour ^ np.roll(tumour, 3, 1)).astype(float),
        "flips": np.zeros_like(x),
    }
    panels = []
    for which, name in enumerate(CHECKED):
        file = f"browser/{number}-{position}-{which}.png"
        Image.fromarray(np.uint8(255 * np.clip(tone[name], 0, 1))).save(folder / file)
        panels.append({"name": name, "file": file})
    return {"index": index, "panels": panels}
