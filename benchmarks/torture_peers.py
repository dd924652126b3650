"""The same hard inputs for segcal and its peers, in one run: who returns a wrong number without saying so.

``python benchmarks/torture_peers.py``. Peers that are not installed are left out: ``pip install torchmetrics monai
fiducio netcal probmetrics pandas``. Each question states its input and the value of a float64 computation; an answer is

- ok: within 1e-3 of it, relative to the larger of it and 1e-3;
- refuses: an exception that says what is wrong, which is as good;
- WRONG: any other number, NaN or infinity, returned as if it were the answer.

Each library gets the input that it asks for: float32 logits where it takes them, else their softmax.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import math
import tempfile
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

import segcal
from segcal import metrics
from segcal.statistics import VoxelStatistics

BINS, TOLERANCE, FLOOR = 15, 1e-3, 1e-3
PEERS = ("torchmetrics", "monai", "fiducio", "netcal", "probmetrics")
#: A metric or a fit of logits ``(n, C)`` and labels ``(n,)``; the answer is one number.
Answer = Callable[[Tensor, Tensor], Any]


class Question(NamedTuple):
    """One input, and the kind of answer that is asked for."""

    title: str
    kind: str
    logits: Tensor
    labels: Tensor
    expected: float | None  # None: there is no answer, and an error or NaN is right


# -- libraries --------------------------------------------------------------------------------------------------------


def ours() -> dict[str, Answer]:
    def measured(metric: Callable[..., float]) -> Answer:
        return lambda z, y: metric(VoxelStatistics(z.shape[1], (BINS,), classwise=False).update(z, y))

    def fitted(z: Tensor, y: Tensor) -> Tensor:
        return segcal.CALIBRATORS["ts"]().fit(z, y)(z)

    kinds = {"ece": metrics.ece, "nll": metrics.nll, "brier": metrics.brier}
    answers = {kind: measured(metric) for kind, metric in kinds.items()}
    return answers | scaling(fitted)


def scaling(log_probs: Answer) -> dict[str, Answer]:
    """Two questions for temperature scaling: the NLL that it reaches, and the share of labels that it moves."""

    def reached(z: Tensor, y: Tensor) -> float:
        log_p = torch.as_tensor(log_probs(z, y)).double()
        return float(-log_p.gather(1, y[:, None]).mean())

    def moved(z: Tensor, y: Tensor) -> float:
        return float((torch.as_tensor(log_probs(z, y)).argmax(1) != z.argmax(1)).double().mean())

    return {"ts": reached, "ts, float32": reached, "labels": moved}


def of_torchmetrics(module: ModuleType) -> dict[str, Answer]:
    functional = importlib.import_module("torchmetrics.functional.classification")

    def ece(z: Tensor, y: Tensor) -> Any:  # of probabilities: logits between 0 and 1 it would take for such
        return functional.multiclass_calibration_error(z.softmax(1), y, num_classes=z.shape[1], n_bins=BINS)

    return {"ece": ece}


def of_monai(module: ModuleType) -> dict[str, Answer]:
    """Its calibration error is per class: the mean over two classes is the ECE of two classes."""
    calibration = importlib.import_module("monai.metrics")

    def ece(z: Tensor, y: Tensor) -> Any:
        if z.shape[1] != 2:
            raise NotImplementedError
        metric = calibration.CalibrationErrorMetric(num_bins=BINS, calibration_reduction="expected", right=True)
        one_hot = torch.nn.functional.one_hot(y, 2).T[None, :, :, None]
        return metric(y_pred=z.softmax(1).T[None, :, :, None], y=one_hot).double().mean()

    return {"classwise": ece}


def of_fiducio(module: ModuleType) -> dict[str, Answer]:
    def fitted(z: Tensor, y: Tensor) -> Tensor:
        return module.TS().fit(z, y).decision_function(z).log_softmax(1)

    answers: dict[str, Answer] = {
        "ece": lambda z, y: module.expected_calibration_error(z.softmax(1), y, n_bins=BINS),
        "nll": lambda z, y: module.negative_log_likelihood(z.softmax(1), y),
        "brier": lambda z, y: module.brier_score(z.softmax(1), y),
    }
    return answers | scaling(fitted)


def of_netcal(module: ModuleType) -> dict[str, Answer]:
    confidence = importlib.import_module("netcal.metrics")
    methods = importlib.import_module("netcal.scaling")

    def fitted(z: Tensor, y: Tensor) -> Tensor:
        """In float64, as numpy has it; in float32 the fit stops where it starts, which is a question of its own."""
        return from_probabilities(z.double(), y)

    def from_probabilities(z: Tensor, y: Tensor) -> Tensor:
        p, method = z.softmax(1).numpy(), methods.TemperatureScaling()
        with tempfile.TemporaryDirectory() as folder:
            method.fit(p, y.numpy(), tensorboard=False, log_dir=folder)
        return torch.as_tensor(np.asarray(method.transform(p))).log()

    ece: dict[str, Answer] = {"ece": lambda z, y: confidence.ECE(BINS).measure(z.softmax(1).numpy(), y.numpy())}
    return ece | scaling(fitted) | {"ts, float32": scaling(from_probabilities)["ts"]}


def of_probmetrics(module: ModuleType) -> dict[str, Answer]:
    own = importlib.import_module("probmetrics.metrics")
    distributions = importlib.import_module("probmetrics.distributions")
    calibrators = importlib.import_module("probmetrics.calibrators")

    def measured(name: str) -> Answer:
        def answer(z: Tensor, y: Tensor) -> Any:
            truth = distributions.CategoricalDirac(y, z.shape[1])
            return own.Metrics.from_names([name]).compute_all(truth, distributions.CategoricalLogits(z))[name]

        return answer

    def fitted(z: Tensor, y: Tensor) -> Tensor:
        method = calibrators.TemperatureScalingCalibrator()
        method.fit_torch(distributions.CategoricalLogits(z), y)
        return method.predict_proba_torch(distributions.CategoricalLogits(z)).get_logits().log_softmax(1)

    answers = {"ece": measured("ece-15"), "nll": measured("logloss"), "brier": measured("brier")}
    return answers | scaling(fitted)


# -- questions --------------------------------------------------------------------------------------------------------


def voxels(n: int, classes: int, seed: int = 0, temperature: float = 2.0) -> tuple[Tensor, Tensor]:
    """Logits and labels of a network that is too sure by this temperature."""
    random = torch.Generator().manual_seed(seed)
    z = 3 * torch.randn(n, classes, generator=random)
    gumbel = -torch.log(-torch.log(torch.rand(z.shape, generator=random, dtype=torch.float64)))
    return z, (z.double() / temperature + gumbel).argmax(1)


def nll(z: Tensor, y: Tensor, beta: float = 1.0) -> float:
    scaled = (z.double() - z.double().amax(1, keepdim=True)) * beta
    return float(-scaled.log_softmax(1).gather(1, y[:, None]).mean())


def best_nll(z: Tensor, y: Tensor) -> float:
    """The NLL at the best temperature, from 1/1000 to 1000."""
    found = minimize_scalar(lambda power: nll(z, y, math.exp(power)), bounds=(-7, 7), method="bounded")
    return float(found.fun)


def ece(z: Tensor, y: Tensor) -> float:
    confidence, winner = z.double().softmax(1).max(1)
    bins = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
    gaps = torch.zeros(BINS).double().index_add_(0, bins, confidence - (winner == y).double())
    return float(gaps.abs().sum() / len(y))


def brier(z: Tensor, y: Tensor) -> float:
    p = z.double().softmax(1)
    return float((p - torch.nn.functional.one_hot(y, z.shape[1])).square().sum(1).mean())


def questions() -> list[Question]:
    z, y = voxels(20_000, 4)
    found = [
        Question("ECE, 20,000 voxels of 4 classes", "ece", z, y, ece(z, y)),
        Question("NLL, the same", "nll", z, y, nll(z, y)),
        Question("Brier score, the same", "brier", z, y, brier(z, y)),
        Question("NLL of the best temperature, the same", "ts", z, y, best_nll(z, y)),
        Question("NLL of the best temperature, float32 probabilities or logits", "ts, float32", z, y, best_nll(z, y)),
    ]
    many = torch.tensor([[1.0, 0.0]]).repeat(40_000_000, 1)
    half = torch.arange(len(many)) % 2
    found.append(
        Question("ECE, 40 million voxels of confidence 0.73, half right", "ece", many, half, ece(many[:2], half[:2]))
    )
    few, right = voxels(20_000, 2)
    found.append(Question("classwise ECE, 20,000 voxels of 2 classes", "classwise", few, right, _classwise(few, right)))
    found.append(
        Question("classwise ECE, 40 million as above", "classwise", many, half, _classwise(many[:2], half[:2]))
    )
    sure = torch.tensor([[0.0, -200.0]] * 10)
    label = torch.tensor([1] + [0] * 9)
    found.append(Question("NLL, logits 0 and -200, one label of ten wrong", "nll", sure, label, nll(sure, label)))
    found.append(Question("NLL, logits 0 and -20, all right", "nll", sure / 10, 0 * label, nll(sure / 10, 0 * label)))
    masked = torch.cat((z, torch.full((len(z), 1), -torch.inf)), 1)
    found += [
        Question("NLL, with a fifth class at -inf", "nll", masked, y, nll(masked, y)),
        Question("ECE, with a fifth class at -inf", "ece", masked, y, ece(masked, y)),
        Question("NLL of the best temperature, with a fifth class at -inf", "ts", masked, y, best_nll(masked, y)),
    ]
    large = torch.cat((z, torch.full((len(z), 1), -1e9)), 1)
    found.append(
        Question("NLL of the best temperature, with a fifth class at -1e9", "ts", large, y, best_nll(large, y))
    )
    moved = z + 4096
    found.append(Question("NLL of the best temperature, all logits + 4096", "ts", moved, y, best_nll(moved, y)))
    # The best temperature is that of the logits themselves, times 1e4.
    found.append(Question("NLL of the best temperature, all logits * 1e4", "ts", 1e4 * z, y, best_nll(z, y)))
    top = z.amax(1, keepdim=True)
    near = torch.where(
        torch.rand(z.shape, generator=torch.Generator().manual_seed(1)) < 0.3, torch.nextafter(top, -top), z
    )
    near = near.scatter(1, z.argmax(1, keepdim=True), top)
    found.append(Question("labels that temperature scaling moves, classes one ulp apart", "labels", near, y, 0.0))
    broken = z.clone()
    broken[7, 1] = torch.nan
    found += [
        Question(f"{kind.upper()}, one logit is NaN", kind, broken, y, None) for kind in ("ece", "nll", "brier", "ts")
    ]
    outside = y.clone()
    outside[3] = 4
    found += [
        Question(f"{kind.upper()}, one label is 4 of 0..3", kind, z, outside, None) for kind in ("ece", "nll", "brier")
    ]
    found += [Question(f"{kind.upper()}, no voxels", kind, z[:0], y[:0], None) for kind in ("ece", "nll", "brier")]
    return found


def _classwise(z: Tensor, y: Tensor) -> float:
    p, total = z.double().softmax(1), 0.0
    for k in range(z.shape[1]):
        bins = (p[:, k] * BINS).ceil().long().clamp(1, BINS) - 1
        gaps = torch.zeros(BINS).double().index_add_(0, bins, p[:, k] - (y == k).double())
        total += float(gaps.abs().sum() / len(y))
    return total / z.shape[1]


# -- the table --------------------------------------------------------------------------------------------------------


def verdict(question: Question, answer: Answer) -> tuple[str, str]:
    """What came, and what it is worth."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = float(answer(question.logits.clone(), question.labels.clone()))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:60] if str(error) else ''}", "refuses"
    if question.expected is None:
        return f"{found:.6g}", "ok" if math.isnan(found) else "WRONG"
    gap = abs(found - question.expected) / max(abs(question.expected), FLOOR)
    return f"{found:.6g}", "ok" if gap <= TOLERANCE else "WRONG"


def main() -> None:
    libraries = {"segcal": ours()}
    libraries["segcal"]["classwise"] = lambda z, y: metrics.cece(VoxelStatistics(z.shape[1], (BINS,)).update(z, y))
    versions = [f"segcal {segcal.__version__}", f"torch {torch.__version__}"]
    for name in PEERS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                libraries[name] = globals()[f"of_{name}"](importlib.import_module(name))
            except ImportError as error:
                versions.append(f"{name}: not installed ({error})")
                continue
        versions.append(f"{name} {importlib.metadata.version(name)}")
    print(", ".join(versions))
    wrong = dict.fromkeys(libraries, 0)
    for question in questions():
        expected = "an error, or NaN" if question.expected is None else f"{question.expected:.6g}"
        print(f"\n{question.title}: {expected}")
        for name, answers in libraries.items():
            if question.kind in answers:
                found, worth = verdict(question, answers[question.kind])
                wrong[name] += worth == "WRONG"
                print(f"  {name:<13} {worth:<8} {found}")
    print("\nwrong without saying so: " + ", ".join(f"{name} {count}" for name, count in wrong.items()))


if __name__ == "__main__":
    main()
