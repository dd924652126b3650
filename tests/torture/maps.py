"""Errors of calibrators on hard inputs, as ``torture.errors`` has those of metrics and losses: maps and fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from reference import calibrators as naive
from segcal.calibrators import CALIBRATORS
from segcal.calibrators.base import Calibrator
from segcal.kernels import dispatch
from segcal.synthetic import ConfidentlyWrong, Temperature, scenes
from torture import inputs
from torture.errors import Found, error

T = TypeVar("T")
CLASSES, SPACE = 5, (20, 24)
#: Networks are not what is tested here.
OPTIONS = {name: {"epochs": 2} for name in ("lts", "lts-ti", "ibts")}
#: Families on which a map is its formula: nothing is impossible, and no offset is cut off.
PLAIN = ("ordinary", "flat", "sure", "subnormal", "ties", "one ulp")


def fitted(seed: int) -> dict[str, Calibrator]:
    """Every calibrator, fitted to scenes."""
    plants = [Temperature(1.7), ConfidentlyWrong()]
    cases = scenes(3, size=(32, 40), num_classes=CLASSES, plant=plants, ignored=0.05, seed=seed)
    return {name: cls(**OPTIONS.get(name, {})).fit(cases) for name, cls in CALIBRATORS.items()}


# -- formulas ---------------------------------------------------------------------------------------------------------


def formula(own: Calibrator) -> Callable[[Tensor], Tensor] | None:
    """The naive scores of logits ``(n, C)`` in float64; None for networks."""
    state = own.tensors()

    def expert(x: Tensor, bias: Tensor) -> Tensor:
        return torch.cat([torch.cat((w.flatten(), b)) for w, b in zip(x, bias, strict=True)])

    def without_winner(weight: Tensor) -> Tensor:
        """The parameters of ``cms-ap``, in which the winner has no row and no column."""
        rows = []
        for c, (w, b) in enumerate(zip(weight, state["bias"], strict=True)):
            others = [k for k in range(len(w)) if k != c]
            rows.append(torch.cat((w[others][:, others].flatten(), b[others])))
        return torch.cat(rows)

    def isotonic(z: Tensor) -> Tensor:
        centres = own.centres.numpy()  # type: ignore[union-attr]
        knots = np.maximum.accumulate(np.log(state["values"].numpy() + 1e-9 * np.exp(centres)))
        return torch.from_numpy(np.interp(z.log_softmax(1).numpy(), centres, knots))

    def histogram(z: Tensor) -> Tensor:
        bins = [
            torch.searchsorted(edges.contiguous(), column.contiguous())
            for edges, column in zip(state["edges"], z.log_softmax(1).T, strict=True)
        ]
        return torch.stack([values[i].log() for values, i in zip(state["values"], bins, strict=True)], 1)

    def meta_cal(z: Tensor) -> Tensor:
        log_p = z.log_softmax(1)
        rejected = -(log_p.exp() * log_p).sum(1, keepdim=True) > state["gamma"]
        return torch.where(rejected, z - z.amax(1, keepdim=True), z * state["beta"] * 1e10) * 1e-10

    identity = "fitted" in state and not float(state["fitted"])
    formulas: dict[str, Callable[[Tensor], Tensor]] = {
        "ts": lambda z: z * state["beta"],
        "ets": lambda z: naive.ets(state["weights"], z, float(state["beta"])),
        "vs": lambda z: naive.vs(torch.cat((state["weight"].flatten(), state["bias"].flatten())), z),
        "ms": lambda z: naive.ms(expert(state["weight"], state["bias"]), z),
        "ms-c": lambda z: naive.ms(expert(state["weight"], state["bias"]), z),
        "dc": lambda z: naive.dc(expert(state["weight"], state["bias"]), z),
        "cdc": lambda z: naive.by_winner(naive.dc)(expert(state["weight"], state["bias"]), z),
        "cms-ap": lambda z: naive.cms_ap(without_winner(state["weight"]), z),
        "cms-op": lambda z: naive.cms_op(expert(state["weight"], state["bias"]), z),
        "isotonic": (lambda z: z) if identity else isotonic,
        "histogram": (lambda z: z) if identity else histogram,
        "meta-cal": meta_cal,
    }
    return formulas.get(own.id)


# -- maps -------------------------------------------------------------------------------------------------------------


def image(z: Tensor) -> Tensor:
    """Logits ``(n, C)`` as an image ``(1, C, *SPACE)``."""
    return z.T.reshape(1, -1, *SPACE).contiguous()


def smooth(own: Calibrator, z: Tensor, expected: Tensor, eps: float) -> Tensor:
    """Voxels ``(1, *SPACE)`` where rounding the input moves the map little: elsewhere it jumps."""
    stays = torch.ones(1, *SPACE, dtype=torch.bool)
    gap = z - z.amax(1, keepdim=True)
    for share in (-8 * eps, 8 * eps):
        moved = own(torch.where(torch.isinf(z), z, z + share * gap.clamp(min=-1e3))).exp()
        stays &= ((moved - expected).abs() < 100 * eps).all(1)
    return stays


def some(choices: Sequence[T], turn: int, share: int) -> Sequence[T]:
    """Every ``share``-th choice, others with every turn: all of them in ``share`` rounds."""
    return choices[turn % share :: share]


def map_errors(seed: int, share: int = 4) -> Iterator[Found]:
    """Probabilities of every calibrator in every type, by torch and by compiled loops, from the float64 formula.

    Every ``share``-th family, others with every seed.
    """
    for turn, (name, own) in enumerate(fitted(seed).items()):
        naive_map = formula(own)
        for family in some(tuple(inputs.FAMILIES), turn + seed, share):
            for dtype in inputs.TYPES:
                z = image(inputs.logits(family, math.prod(SPACE), CLASSES, dtype, seed))
                expected = own(z.double()).exp()
                kept = smooth(own, z.double(), expected, max(torch.finfo(dtype).eps, 1e-12)).unsqueeze(1)
                given, path = f"{family}, {dtype}", str(dtype).removeprefix("torch.")
                if dtype == torch.float64:
                    if naive_map is not None and family in PLAIN:
                        scores = naive_map(z[0].flatten(1).T)
                        away = (image(scores.softmax(1)) - expected).abs()
                        yield Found(name, path, given, float(torch.where(kept, away, 0.0).max()))
                    continue
                for way in (path, "compiled") if dtype == torch.float32 else (path,):
                    away = (_applied(own, z, way == "compiled").double().exp() - expected).abs()
                    yield Found(name, way, given, float(torch.where(kept, away, 0.0).nan_to_num(torch.inf).max()))


def _applied(own: Calibrator, z: Tensor, compiled: bool) -> Tensor:
    """The map of a small image, by the loops of large ones if that is asked for."""
    before = dispatch._LARGE
    dispatch._LARGE = 0 if compiled else before
    try:
        return own(z)
    finally:
        dispatch._LARGE = before


# -- fits -------------------------------------------------------------------------------------------------------------


def fit_data(seed: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Logits ``(1, C, *SPACE)`` and labels that are hard to fit to."""
    n, classes = math.prod(SPACE), (2, CLASSES)[seed % 2]
    random = inputs.generator("fit", seed)
    z = inputs.normal(random, n, classes).float()
    gumbel = -torch.log(-torch.log(inputs.chance(random, n, classes)))
    y, winner = (z.double() / 1.7 + gumbel).argmax(1), z.argmax(1)
    noise = torch.randint(classes, (n,), generator=random)
    few = torch.arange(n) < 3
    yield "one voxel", z[:1], y[:1]
    yield "all background", z, torch.zeros_like(y)
    yield "separable", z, winner
    yield "nearly separable", z, torch.where(few, z.argmin(1), winner)
    yield "label noise", z, noise
    yield "always wrong", z, z.argmin(1)
    yield "all the same", torch.zeros_like(z), y
    yield "ties", z.round(), y
    for family in ("±1e4", "±3e38", "-inf", "subnormal", "offset"):
        hard = inputs.logits(family, n, classes, torch.float32, seed)
        yield family, hard, inputs.labels(hard, seed, deepest=1e3)


def fit_errors(seed: int, share: int = 4) -> Iterator[Found]:
    """The reported NLL before and after every fit, against a float64 sum over what it returns; and if it is worse.

    Of all data, every ``share``-th calibrator, others with every seed.
    """
    for turn, (given, z, y) in enumerate(fit_data(seed)):
        z = image(z) if len(z) > 1 else z[:, :, None, None]
        y = y.view(1, *z.shape[2:])
        before = _nll(z.double().log_softmax(1), y)
        for name in some(tuple(CALIBRATORS), turn + seed // 2, share):
            own = CALIBRATORS[name](**OPTIONS.get(name, {})).fit(z, y)
            report = own.fit_report
            assert report is not None
            yield Found(name, "before", given, error(report.nll_before, before))
            yield Found(name, "after", given, error(report.nll_after, _nll(own(z).double(), y)))
            yield Found(name, "worse", given, max(0.0, report.nll_after - report.nll_before))


def _nll(log_p: Tensor, y: Tensor) -> float:
    return math.fsum((-log_p.gather(1, y.unsqueeze(1))).flatten().tolist()) / y.numel()


CONVEX = ("vs", "ms", "ms-c", "dc", "cdc", "cms-ap", "cms-op")


def optimum_errors(seed: int) -> Iterator[Found]:
    """How far above scipy's optimum convex fits end, on data that are nearly separable or pure noise."""
    for given, z, y in fit_data(2 * seed):  # of two classes
        if given in ("nearly separable", "label noise", "ties"):
            for name in CONVEX:
                report = CALIBRATORS[name]().fit(z, y).fit_report
                assert report is not None
                yield Found(name, "optimum", given, max(0.0, report.nll_after - naive.best_nll(name, z, y)))
