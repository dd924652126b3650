"""Functions to minimise, written from their formulas, and a witness of what a solver asks them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import log_softmax


class Witness:
    """A function that remembers every point it was asked at."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.points: list[Any] = []

    def __call__(self, x: Any) -> Any:
        self.points.append(np.array(x))
        return self.function(x)

    def asked_twice(self) -> bool:
        return len({point.tobytes() for point in self.points}) < len(self.points)


def softmax_data(rows: int = 400, classes: int = 4, scale: float = 1.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Features (rows, classes + 1), the last one constant, and labels drawn from a softmax of a random map of them."""
    random = np.random.default_rng(seed)
    features = np.c_[2 * random.normal(size=(rows, classes)), np.ones(rows)]
    weights = np.c_[np.eye(classes), np.zeros(classes)] + 0.3 * random.normal(size=(classes, classes + 1))
    labels = (features @ weights.T + random.gumbel(size=(rows, classes))).argmax(1)
    features[:, :-1] *= scale
    return features, labels


def softmax_regression(
    features: np.ndarray, labels: np.ndarray, dtype: type = np.float64
) -> Callable[[np.ndarray], Any]:
    """Mean cross-entropy of softmax(W features), W (classes, features) flattened: value, gradient, Hessian.

    A constant added to a column of W changes nothing: the Hessian is singular everywhere. Probabilities are computed in
    ``dtype``, their sums in float64.
    """
    rows, size = features.shape
    classes = labels.max() + 1
    one_hot = np.eye(classes)[labels]

    def problem(x: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        scores = features.astype(dtype) @ x.astype(dtype).reshape(classes, size).T
        log_probs = log_softmax(scores, axis=1).astype(np.float64)
        probs = np.exp(log_probs)
        gradient = (probs - one_hot).T @ features / rows
        curvature = probs[:, :, None] * (np.eye(classes) - probs[:, None, :]) / rows
        hessian = np.einsum("nab,ni,nj->aibj", curvature, features, features, optimize=True)
        return -(one_hot * log_probs).sum() / rows, gradient.ravel(), hessian.reshape(x.size, x.size)

    return problem


def identity(classes: int) -> np.ndarray:
    """W of the identity map, flattened."""
    return np.c_[np.eye(classes), np.zeros(classes)].ravel()


def temperature(
    logits: np.ndarray, labels: np.ndarray, dtype: type = np.float64
) -> Callable[[float], tuple[float, float, float]]:
    """Mean cross-entropy of softmax(beta logits) and its two derivatives with respect to beta."""
    rows = np.arange(len(labels))

    def function(beta: float) -> tuple[float, float, float]:
        log_probs = log_softmax(dtype(beta) * logits.astype(dtype), axis=1).astype(np.float64)
        probs = np.exp(log_probs)
        means = (probs * logits).sum(1)
        variances = (probs * (logits - means[:, None]) ** 2).sum(1)
        return -log_probs[rows, labels].mean(), (means - logits[rows, labels]).mean(), variances.mean()

    return function


def least_squares(matrix: np.ndarray, target: np.ndarray) -> Callable[[np.ndarray], Any]:
    """|matrix x - target|^2 / 2: value, gradient, Hessian."""

    def problem(x: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        residual = matrix @ x - target
        return 0.5 * residual @ residual, matrix.T @ residual, matrix.T @ matrix

    return problem
