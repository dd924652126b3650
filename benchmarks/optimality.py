"""How far fits end from the optimum: ``python benchmarks/optimality.py [--images 50] [--volumes 6]``.

The optimum is found by scipy from the identity, on a float64 likelihood written here from the formulas, on the GPU
where there is one. Class-conditional maps are solved expert by expert. Bounds are those of segcal's constraint set. All
NLLs are evaluated by the same float64 code. fiducio's defaults are fitted beside them where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from scipy.optimize import OptimizeResult, minimize, minimize_scalar
from torch import Tensor

import segcal
from segcal.synthetic import ClassAffine, ClassConditional, scenes

LIMIT = 1e-6
BOUND = 100.0  # of segcal, for free maps of one class each; those of all classes stay far within it
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CHUNK = 2**18
FEW = 2**16 if DEVICE.type == "cuda" else 2**13  # voxels whose outer products are held at once
Array = NDArray[np.float64]


def make(kind: str, index: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """One image of 19 classes, or one volume of 5."""
    torch.set_num_threads(1)
    classes, size = (19, (256, 512)) if kind == "images" else (5, (32, 128, 128))
    random = np.random.default_rng(0)
    plant = [
        ClassConditional(list(random.uniform(1.2, 3, classes))),
        ClassAffine(list(random.uniform(0.8, 1.25, classes)), list(random.normal(0, 0.5, classes))),
    ]
    case = scenes(index + 1, size=size, num_classes=classes, plant=plant)[index]
    return case.logits[0].numpy(), case.labels[0].numpy()


class Experts:
    """The NLL of voxels ``x (n, J + 1)`` under ``scores = mix(theta x)``, its gradient and Hessian, float64."""

    def __init__(self, x: Tensor, target: Tensor, mix: Tensor, total: int) -> None:
        self.x, self.target, self.mix, self.total = x, target, mix, total

    def terms(self, theta: Array, curvature: bool = False) -> tuple[float, Array, Array]:
        """Sums over the voxels, divided by the number of all voxels of the set."""
        outputs, inputs = self.mix.shape[1], self.x.shape[1]
        weights = torch.from_numpy(theta.reshape(outputs, inputs)).to(self.x)
        value, slope = 0.0, torch.zeros(outputs, inputs).to(self.x)
        second = torch.zeros(outputs * inputs, outputs * inputs).to(self.x)
        for x, target in zip(self.x.split(CHUNK), self.target.split(CHUNK), strict=True):
            log_p = (x @ weights.T @ self.mix.T).log_softmax(1)
            value -= float(log_p.gather(1, target[:, None]).sum())
            p = log_p.exp()
            slope += ((p - torch.nn.functional.one_hot(target, p.shape[1])) @ self.mix).T @ x
            if curvature:
                for few in torch.arange(len(x), device=x.device).split(FEW):
                    own, q = x[few], p[few]
                    outer = ((q @ self.mix)[:, :, None] * own[:, None, :]).flatten(1)
                    second -= outer.T @ outer
                    for k in range(q.shape[1]):
                        block = own.T @ (own * q[:, k, None])
                        second += torch.kron(torch.outer(self.mix[k], self.mix[k]), block)
        return value / self.total, slope.flatten().cpu().numpy() / self.total, second.cpu().numpy() / self.total


def experts_of(method: str, z: Tensor, y: Tensor) -> list[Experts]:
    """The independent problems of a method, from logits ``(n, C)`` in float64."""
    n, classes = z.shape
    winner, one = z.argmax(1), torch.ones(n, 1).to(z)
    identity = torch.eye(classes).to(z)
    if method in ("vs", "ms", "ms-c"):
        return [Experts(torch.cat((z, one), 1), y, identity, n)]
    if method in ("dc", "cdc"):
        x = torch.cat((z.log_softmax(1), one), 1)
        if method == "dc":
            return [Experts(x, y, identity, n)]
        return [Experts(x[winner == k], y[winner == k], identity, n) for k in range(classes)]
    found = []
    for k in range(classes):
        own, target = z[winner == k], y[winner == k]
        others = [j for j in range(classes) if j != k]
        if method == "cms-ap":
            x, mix = own[:, k, None] - own[:, others], torch.zeros(classes, classes - 1).to(z)
            mix[others, torch.arange(classes - 1)] = -1
        else:
            falling, order = torch.sort(own, dim=1, descending=True, stable=True)
            x, mix = -falling.diff(dim=1), -torch.tril(torch.ones(classes, classes - 1), -1).to(z)
            target = (order == target[:, None]).long().argmax(1)
        found.append(Experts(torch.cat((x, one[: len(x)]), 1), target, mix, n))
    return found


def directions(method: str, classes: int) -> Array:
    """The free directions of a method without bounds, with the first class as the gauge, as columns."""
    unit = np.eye(classes * (classes + 1)).reshape(classes, classes + 1, -1)
    if method == "vs":
        return np.stack([*(unit[k, k] for k in range(classes)), *(unit[k, -1] for k in range(1, classes))], 1)
    if method == "ms-c":  # row k: off-diagonals are free, the diagonal makes the sum that of the first row, which is 0
        rows = [unit[k, j] - unit[k, k] for k in range(1, classes) for j in range(classes) if j != k]
        return np.stack([*rows, *(unit[k, -1] for k in range(1, classes))], 1)
    return unit[1:].reshape(-1, unit.shape[-1]).T


def solve_free(method: str, problem: Experts, classes: int) -> float:
    """Trust-region Newton of scipy; stops where the gradient is rounding."""
    basis = directions(method, classes)
    start = np.linalg.lstsq(basis, identity_of(method, classes), rcond=None)[0]
    return float(trust_exact(problem, basis, np.zeros(len(basis)), start, barrier=0.0, gtol=1e-8).fun)


def solve_boxed(problem: Experts, classes: int, beta: float) -> float:
    """The least NLL where no parameter exceeds ``BOUND``, by trust-region Newton of scipy and a logarithmic barrier.

    The columns of theta sum up to those of ``beta`` times the identity: no softmax sees the sum, but bounds do. The
    barrier leaves at most its strength for each of the bounds above the optimum, for the likelihood is convex.
    """
    unit = np.eye(classes * (classes + 1)).reshape(classes, classes + 1, -1)
    basis = np.linalg.qr((unit[1:] - unit[:1]).reshape(-1, unit.shape[-1]).T)[0]
    centre, x = beta * np.eye(classes, classes + 1).ravel(), np.zeros(basis.shape[1])
    for barrier in (1e-6, 1e-8, 1e-10, 1e-12):
        x = trust_exact(problem, basis, centre, x, barrier=barrier, gtol=barrier).x
    return problem.terms(centre + basis @ x)[0]


def trust_exact(
    problem: Experts, basis: Array, centre: Array, start: Array, barrier: float, gtol: float
) -> OptimizeResult:
    """The minimum over x of the NLL at ``theta = centre + basis x``, plus ``barrier`` times that of the bounds."""

    def terms(x: Array) -> tuple[float, Array]:
        theta = centre + basis @ x
        if barrier and np.abs(theta).max() >= BOUND:
            return np.inf, np.zeros_like(x)
        value, slope, _ = problem.terms(theta)
        if barrier:
            value -= barrier * float(np.log1p(-((theta / BOUND) ** 2)).sum())
            slope = slope + barrier * (1 / (BOUND - theta) - 1 / (BOUND + theta))
        return value, basis.T @ slope

    def curvature(x: Array) -> Array:
        theta = centre + basis @ x
        bend = barrier * (1 / (BOUND - theta) ** 2 + 1 / (BOUND + theta) ** 2) if barrier else np.zeros(len(theta))
        return np.asarray(basis.T @ (problem.terms(theta, curvature=True)[2] + np.diag(bend)) @ basis)

    return minimize(
        terms, start, jac=True, hess=curvature, method="trust-exact",
        options={"gtol": gtol, "maxiter": 200, "max_trust_radius": 100.0},
    )  # fmt: skip


def identity_of(method: str, classes: int) -> Array:
    """theta of the identity, or its equivalent with nothing in the first row."""
    theta = np.eye(classes, classes + 1)
    if method == "vs":
        return theta.ravel()
    return (theta - theta[:1]).ravel()


def solve_bounded(problem: Experts) -> float:
    """Trust-region Newton of scipy over ``u``, with the bounds met by ``theta = lower + width sin(u)^2``.

    Where the likelihood falls inwards from a bound the curvature in ``u`` is negative, which trust regions follow: they
    do not end there.
    """
    outputs = problem.mix.shape[1]
    lower, width = np.zeros((outputs, outputs + 1)), np.full((outputs, outputs + 1), 100.0)
    lower[:, -1], width[:, -1] = 1e-3, 20.0 - 1e-3
    start = np.arcsin(np.sqrt(np.maximum((np.eye(outputs, outputs + 1) - lower) / width, 1e-4))).ravel()
    lower, width = lower.ravel(), width.ravel()

    def terms(u: Array) -> tuple[float, Array]:
        value, slope, _ = problem.terms(lower + width * np.sin(u) ** 2)
        return value, slope * width * np.sin(2 * u)

    def curvature(u: Array) -> Array:
        _, slope, second = problem.terms(lower + width * np.sin(u) ** 2, curvature=True)
        rate = width * np.sin(2 * u)
        return second * np.outer(rate, rate) + np.diag(2 * width * np.cos(2 * u) * slope)

    found = minimize(
        terms, start, jac=True, hess=curvature, method="trust-exact",
        options={"gtol": 1e-9, "maxiter": 300, "max_trust_radius": 10.0},
    )  # fmt: skip
    return float(found.fun)


def optimum(method: str, z: Tensor, y: Tensor) -> float:
    """scipy's least mean NLL."""
    classes = z.shape[1]

    def nll(beta: float) -> float:
        return float(torch.nn.functional.cross_entropy(beta * z, y))

    beta = minimize_scalar(nll, bounds=(0.05, 5), options={"xatol": 1e-9}).x
    if method == "ts":
        return nll(beta)
    if method == "ets":
        parts = torch.stack(
            [
                (beta * z).log_softmax(1).gather(1, y[:, None])[:, 0].exp(),
                z.log_softmax(1).gather(1, y[:, None])[:, 0].exp(),
                torch.full_like(z[:, 0], 1 / classes),
            ]
        )

        def mixture(w: Array) -> tuple[float, Array]:
            weights = torch.from_numpy(w).to(z)
            mixed = (weights[:, None] * parts).sum(0)
            return -float(mixed.log().mean()), -(parts / mixed).mean(1).cpu().numpy()

        found = minimize(
            mixture,
            [0.9, 0.05, 0.05],
            jac=True,
            method="SLSQP",
            bounds=[(0, 1)] * 3,
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
            options={"ftol": 1e-14},
        )
        return float(found.fun)
    problems = experts_of(method, z, y)
    if method.startswith("cms"):
        return sum(solve_bounded(problem) for problem in problems)
    if method == "cdc":
        return sum(solve_boxed(problem, classes, beta) for problem in problems)
    return sum(solve_free(method, problem, classes) for problem in problems)


def nll_of(predict: Callable[[Tensor], Tensor], logits: Tensor, labels: Tensor) -> float:
    """Mean NLL of log-probabilities, image by image, summed in float64."""
    total = 0.0
    for z, y in zip(logits, labels, strict=True):
        total += float(torch.nn.functional.nll_loss(predict(z[None].double()).double(), y[None], reduction="sum"))
    return total / labels.numel()


def study(kind: str, count: int, methods: list[str], peers: bool) -> bool:
    with ProcessPoolExecutor() as pool:
        made = list(pool.map(make, [kind] * count, range(count)))
    logits, labels = torch.from_numpy(np.stack([z for z, _ in made])), torch.from_numpy(np.stack([y for _, y in made]))
    del made
    flat = logits.flatten(2).transpose(1, 2).reshape(-1, logits.shape[1]).to(DEVICE).double()
    flat_labels = labels.flatten().to(DEVICE)
    print(f"\n{kind}: {tuple(logits.shape)}, {labels.numel():,} voxels", flush=True)
    heads = f"{'segcal NLL':>14}{'scipy NLL':>14}{'gap':>10}{'certificate':>13}{'s':>7}{'scipy s':>9}"
    print(f"{'':8}{heads}   fiducio's gap")
    fine = True
    for method in methods:
        started = time.perf_counter()
        calibrator = segcal.CALIBRATORS[method]().fit(logits, labels, voxels="all")
        middle = time.perf_counter()
        found = nll_of(calibrator, logits, labels)
        report = calibrator.fit_report
        before_scipy = time.perf_counter()
        best = optimum(method, flat, flat_labels)
        ended = time.perf_counter()
        fine &= found - best <= LIMIT
        peer = fiducio_gap(method, logits, labels, best) if peers else ""
        gap = f"{found - best:10.1e}{report.certificate:13.1e}"
        times = f"{middle - started:7.1f}{ended - before_scipy:9.1f}"
        print(f"{method:8}{found:14.8f}{best:14.8f}{gap}{times}   {peer}", flush=True)
    return fine


def fiducio_gap(method: str, logits: Tensor, labels: Tensor, best: float) -> str:
    """That of its defaults."""
    import fiducio

    name = {"ts": "TS", "ets": "ETS", "vs": "VS", "ms": "MS", "ms-c": "MSc", "dc": "DC", "cdc": "CDC"}.get(method)
    name = name or method.upper().replace("-", "")
    started = time.perf_counter()
    calibrator = getattr(fiducio, name)(device=str(DEVICE))
    calibrator.fit(logits, labels)
    seconds = time.perf_counter() - started
    found = nll_of(lambda z: calibrator.transform(z.float()).double().clamp(min=1e-300).log().cpu(), logits, labels)
    return f"{found - best:.1e} in {seconds:.0f} s on {DEVICE.type}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1)
    parser.add_argument("--volumes", type=int, default=2)
    parser.add_argument("--methods", default="ts,ets,vs,ms,ms-c,dc,cdc,cms-ap,cms-op")
    arguments = parser.parse_args()
    try:
        peers = importlib.metadata.version("fiducio")
    except importlib.metadata.PackageNotFoundError:
        peers = ""
    where = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    print(f"segcal {segcal.__version__}, scipy {scipy.__version__}, torch {torch.__version__}, fiducio {peers or 'no'}")
    print(
        f"{torch.get_num_threads()} threads; scipy's likelihood on {where}; goal: gaps up to {LIMIT:g} nats per voxel"
    )
    fine = True
    for kind, count in (("volumes", arguments.volumes), ("images", arguments.images)):
        if count:
            fine &= study(kind, count, arguments.methods.split(","), bool(peers))
    raise SystemExit(0 if fine else "a gap exceeds the goal")


if __name__ == "__main__":
    main()
