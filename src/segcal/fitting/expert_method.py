"""What the fits of expert maps ask of a calibrator."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from segcal.kernels import Features

FloatArray = NDArray[np.float64]


class ExpertMethod(Protocol):
    """A family of expert maps with parameters ``theta (E, K, J + 1)``: E experts, K outputs, J inputs and a bias."""

    off_diagonal: float
    bias_penalty: float
    shrinkage: float
    rate: float
    patience: int
    class_names: tuple[str, ...] | None

    @property
    def features(self) -> Features:
        """What an expert reads of the logits."""

    @property
    def routed(self) -> bool:
        """Whether every class has an expert of its own."""

    @property
    def constrained(self) -> bool:
        """Whether weights and biases are non-negative, so that decisions are preserved."""

    def __call__(self, logits: Tensor) -> Tensor:
        """Log-probabilities by the parameters that are set."""

    def shape(self, num_classes: int) -> tuple[int, int, int]:
        """``(E, K, J + 1)``."""

    def basis(self, num_classes: int) -> FloatArray | None:
        """The free directions of an expert's parameters ``(P, F)``; None where all are free but for the bounds."""

    def bounds(self, num_classes: int, experts: int) -> tuple[FloatArray, FloatArray]:
        """Of theta; equal where a parameter is not free."""

    def identity(self, num_classes: int, experts: int | None = None) -> FloatArray:
        """The theta that changes nothing."""

    def scaled_identity(self, num_classes: int, beta: float, experts: int | None = None) -> FloatArray:
        """Temperature scaling in these parameters, or the feasible map nearest to it."""

    def set_parameters(self, theta: FloatArray) -> None:
        """Take theta."""
