"""Naive float64 maps of METHODS.md, section 2, from logits ``(n, C)`` to scores ``(n, C)``; loops over the classes.

Parameters are flat vectors, so that scipy can look for the best; every map has the parameters that its formula has.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

Map = Callable[[Tensor, Tensor], Tensor]

FLOOR, LARGEST, LARGEST_BIAS = 1e-3, 100.0, 20.0


def drawn(n: int, classes: int, seed: int = 0, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    """Logits and labels of a network whose fault depends on the winner, with a bias, and 3 % of pure noise."""
    random = np.random.default_rng(seed)
    z = scale * random.normal(size=(n, classes))
    z[:, 0] += 1.0
    winner = z.argmax(1)
    truth = z / (1.0 + 0.4 * winner[:, None]) + 0.5 * random.normal(size=classes) + 0.1 * z[:, ::-1]
    y = (truth + random.gumbel(size=z.shape)).argmax(1)
    noise = random.random(n) < 0.03
    y[noise] = random.integers(0, classes, int(noise.sum()))
    return torch.from_numpy(z).float(), torch.from_numpy(y)


def vs(x: Tensor, z: Tensor) -> Tensor:
    """``a z + b``."""
    a, b = x.chunk(2)
    return a * z + b


def ms(x: Tensor, z: Tensor) -> Tensor:
    """``W z + b``."""
    classes = z.shape[1]
    weight, bias = x[: classes**2].view(classes, classes), x[classes**2 :]
    return torch.stack([(weight[k] * z).sum(1) + bias[k] for k in range(classes)], 1)


def ms_c(x: Tensor, z: Tensor) -> Tensor:
    """``W z + b``, the rows of W summing to the last parameter."""
    classes = z.shape[1]
    weight = x[: classes**2].view(classes, classes)
    total, bias = x[-1], x[classes**2 : -1]
    columns = []
    for k in range(classes):
        others = [j for j in range(classes) if j != k]
        diagonal = total - weight[k, others].sum()
        columns.append(diagonal * z[:, k] + (weight[k, others] * z[:, others]).sum(1) + bias[k])
    return torch.stack(columns, 1)


def dc(x: Tensor, z: Tensor) -> Tensor:
    """``W log S(z) + b``."""
    return ms(x, z - z.logsumexp(1, keepdim=True))


def by_winner(expert: Map) -> Map:
    """An expert for each winner, with an equal share of the parameters."""

    def scores(x: Tensor, z: Tensor) -> Tensor:
        winner, out = z.argmax(1), torch.zeros_like(z)
        for c, own in enumerate(x.chunk(z.shape[1])):
            chosen = winner == c
            out = out.index_put((chosen.nonzero()[:, 0],), expert(own, z[chosen]))
        return out

    return scores


def cms_ap(x: Tensor, z: Tensor) -> Tensor:
    """The winner scores 0, the others ``-(A m + d)``; A and d of an expert are ``(C - 1) x (C - 1)`` and ``C - 1``."""
    classes = z.shape[1]
    winner, out = z.argmax(1), torch.zeros_like(z)
    for c, own in enumerate(x.chunk(classes)):
        rows = (winner == c).nonzero()[:, 0]
        others = [k for k in range(classes) if k != c]
        weight, bias = own[: (classes - 1) ** 2].view(classes - 1, classes - 1), own[(classes - 1) ** 2 :]
        margins = z[rows, c][:, None] - z[rows][:, others]
        for i, k in enumerate(others):
            out = out.index_put((rows, torch.tensor(k)), -((weight[i] * margins).sum(1) + bias[i]))
    return out


def cms_op(x: Tensor, z: Tensor) -> Tensor:
    """Sorted scores fall by ``A g + d`` of the gaps g; one expert for each winner."""
    classes = z.shape[1]
    winner, out = z.argmax(1), torch.zeros_like(z)
    for c, own in enumerate(x.chunk(classes)):
        rows = (winner == c).nonzero()[:, 0]
        weight, bias = own[: (classes - 1) ** 2].view(classes - 1, classes - 1), own[(classes - 1) ** 2 :]
        order = torch.sort(-z[rows], dim=1, stable=True).indices
        falling = z[rows].gather(1, order)
        gaps = falling[:, :-1] - falling[:, 1:]
        score = torch.zeros(len(rows), dtype=z.dtype)
        for rank in range(1, classes):
            score = score - ((weight[rank - 1] * gaps).sum(1) + bias[rank - 1])
            out = out.index_put((rows, order[:, rank]), score)
    return out


def ets(x: Tensor, z: Tensor, beta: float) -> Tensor:
    """``log(w1 S(beta z) + w2 S(z) + w3 / C)``, with weights ``w / sum w``."""
    w = x / x.sum()
    return torch.log(w[0] * (beta * z).softmax(1) + w[1] * z.softmax(1) + w[2] / z.shape[1])


MAPS: dict[str, Map] = {
    "vs": vs,
    "ms": ms,
    "ms-c": ms_c,
    "dc": dc,
    "cdc": by_winner(dc),
    "cms-ap": cms_ap,
    "cms-op": cms_op,
}


def start(name: str, classes: int) -> tuple[np.ndarray, list[tuple[float, float]]]:
    """Flat parameters of (about) the identity, and their bounds."""
    size = classes - 1 if name.startswith("cms") else classes
    one = np.concatenate((np.ones(classes) if name == "vs" else np.eye(size).ravel(), np.zeros(size)))
    bounds = [(-LARGEST, LARGEST)] * len(one)
    if name.startswith("cms"):
        one[size**2 :] = FLOOR
        bounds = [(0.0, LARGEST)] * size**2 + [(FLOOR, LARGEST_BIAS)] * size
    if name == "ms-c":
        one, bounds = np.append(one, 1.0), [*bounds, (-LARGEST, LARGEST)]
    routed = classes if name.startswith("c") else 1
    return np.tile(one, routed), bounds * routed


def nll(scores: Tensor, labels: Tensor) -> Tensor:
    """Mean of ``logsumexp(s) - s_y``."""
    return (scores.logsumexp(1) - scores.gather(1, labels[:, None])[:, 0]).mean()


def least(
    objective: Callable[[Tensor], Tensor], x: np.ndarray, bounds: list[tuple[float, float]]
) -> tuple[float, np.ndarray]:
    """The least value that L-BFGS-B finds, and where; derivatives by autograd."""

    def evaluate(x: np.ndarray) -> tuple[float, np.ndarray]:
        at = torch.tensor(x, dtype=torch.float64, requires_grad=True)
        value = objective(at)
        (slope,) = torch.autograd.grad(value, at)
        return value.item(), slope.numpy()

    options = {"maxiter": 5000, "maxfun": 20000, "ftol": 1e-14, "gtol": 1e-8, "maxcor": 30}
    found = minimize(evaluate, x, jac=True, bounds=bounds, method="L-BFGS-B", options=options)
    return float(found.fun), found.x


def best_nll(name: str, z: Tensor, labels: Tensor) -> float:
    """The least mean NLL of a map."""
    x, bounds = start(name, z.shape[1])
    exact = z.double()
    return least(lambda at: nll(MAPS[name](at, exact), labels), x, bounds)[0]
