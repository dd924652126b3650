"""segcal in MONAI: transforms, an inferer, a metric with its handler, and losses. Needs the extra ``monai``.

Scores are what networks give: ``(C, *S)`` for one item, ``(B, C, *S)`` for a batch. A calibrator of multi-label data
takes one sigmoid logit per channel, as MONAI's networks give them, and returns one score per channel.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from segcal.calibrators import Calibrator, load
from segcal.cases.tensors import Batch
from segcal.errors import InputError, MissingExtraError, check_name
from segcal.evaluation.measure import measure_case, reduced_rows
from segcal.evaluation.plan import LOCAL, Plan
from segcal.evaluation.results import POOLED
from segcal.integrations.processes import of_all_processes
from segcal.metrics import Column
from segcal.scores import KINDS, multilabel_view, presence, probabilities
from segcal.statistics import EVERYTHING, VoxelStatistics
from segcal.types import Kind

try:
    from monai.handlers import IgniteMetricHandler, from_engine
    from monai.inferers import Inferer
    from monai.metrics import CumulativeIterationMetric
    from monai.transforms import MapTransform, Transform
    from monai.utils import TransformBackends, convert_to_dst_type, convert_to_tensor
except ImportError:
    raise MissingExtraError("monai", "monai", "segcal.integrations.monai") from None

__all__ = [
    "Calibrated",
    "CalibratedD",
    "CalibratedDict",
    "CalibratedInferer",
    "Calibratedd",
    "CalibrationHandler",
    "CalibrationMetric",
    "MonaiLoss",
]


class Calibrated(Transform):  # type: ignore[misc, unused-ignore]
    """Calibrate the logits ``(C, *S)`` of one item, in place of ``Activations(softmax=True)``.

    The result has the type, dtype and device of the logits. A ``MetaTensor`` keeps its affine and applied operations.

    Args:
        calibrator: A fitted calibrator, or the file of one.
        output: ``probs``, or ``logits``: log-probabilities, or log-odds for multi-label data.

    Examples:
        >>> import segcal
        >>> ts = segcal.calibrators.TemperatureScaling().fit(torch.randn(500, 3), torch.randint(0, 3, (500,)))
        >>> Calibrated(ts)(torch.randn(3, 8, 8)).sum(0).allclose(torch.ones(8, 8))
        True
    """

    backend: ClassVar = [TransformBackends.TORCH]

    def __init__(self, calibrator: Calibrator | str | Path, output: Kind = "probs") -> None:
        self._map = _Map(calibrator, output)

    def __call__(self, img: Any, image: Any = None) -> Any:
        """Calibrated scores; ``image (channels, *S)`` is for calibrators that were fitted to images."""
        scores = convert_to_tensor(img, track_meta=False)
        seen = None if image is None else convert_to_tensor(image, track_meta=False).unsqueeze(0)
        return convert_to_dst_type(self._map(scores.unsqueeze(0), seen).squeeze(0), img)[0]


class Calibratedd(MapTransform):  # type: ignore[misc, unused-ignore]
    """``Calibrated`` for items that are dictionaries.

    Put it before ``Invertd``: the calibrator was fitted to the network's grid, and interpolated probabilities are
    probabilities, which cannot be said of softmaxes of interpolated log-probabilities.

    Args:
        keys: The logits to calibrate.
        calibrator: A fitted calibrator, or the file of one.
        output: ``probs``, or ``logits``: log-probabilities, or log-odds for multi-label data.
        image_key: The image, for calibrators that were fitted to images.
        allow_missing_keys: Skip keys that are missing.
    """

    backend: ClassVar = Calibrated.backend

    def __init__(
        self,
        keys: Any,
        calibrator: Calibrator | str | Path,
        output: Kind = "probs",
        image_key: Hashable | None = None,
        allow_missing_keys: bool = False,
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        self.converter, self.image_key = Calibrated(calibrator, output), image_key

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """The item with calibrated scores."""
        item = dict(data)
        image = None if self.image_key is None else item[self.image_key]
        for key in self.key_iterator(item):
            item[key] = self.converter(item[key], image)
        return item


CalibratedD = CalibratedDict = Calibratedd


class CalibratedInferer(Inferer):  # type: ignore[misc, unused-ignore]
    """Any inferer, calibrated: ``CalibratedInferer(SlidingWindowInferer(...), calibrator)``.

    The windows are blended first, as they were for the fit, and the blended logits are calibrated. By default the
    result are log-probabilities (log-odds for multi-label data), so that a softmax (sigmoid) or an argmax that follows
    in the pipeline stays right.

    Args:
        inferer: What runs the network.
        calibrator: A fitted calibrator, or the file of one.
        output: ``logits`` or ``probs``.
    """

    def __init__(self, inferer: Inferer, calibrator: Calibrator | str | Path, output: Kind = "logits") -> None:
        super().__init__()
        self.inferer, self._map = inferer, _Map(calibrator, output)

    def __call__(self, inputs: Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calibrated scores ``(B, C, *S)``."""
        logits = self.inferer(inputs, network, *args, **kwargs)
        if not isinstance(logits, Tensor):
            raise InputError(
                f"the network returns {type(logits).__name__}",
                expected="a tensor of logits, (B, C, *S)",
                fix='wrap the network: lambda x: network(x)["out"], or network(x)[0]',
            )
        image = _plain(inputs) if self._map.calibrator.image_channels else None
        return convert_to_dst_type(self._map(_plain(logits), image), logits)[0]


class CalibrationMetric(CumulativeIterationMetric):  # type: ignore[misc, unused-ignore]
    """Metrics of ``segcal.METRICS`` in regions, pooled over all voxels: a few sums, however many images come.

    ``metric(y_pred, y)`` takes scores ``(B, C, *S)`` and labels ``(B, 1, *S)``, or lists of items. Labels are class
    indices, also as floats. It returns, and ``get_buffer`` keeps, the values of each image, ``(B, metrics)``.
    ``aggregate`` gives the pooled values of all processes, by name.

    Args:
        metrics: Ids, optionally with options, such as ``"ece[num_bins=50]"``. Metrics of surfaces are MONAI's.
        regions: Ids of ``segcal.REGIONS``, except ``local``.
        kind: What the scores are, ``logits`` (or log-probabilities) or ``probs``.
        ignore_index: The label of voxels to ignore.
        background: The class that some metrics leave out, or None.

    Examples:
        >>> metric = CalibrationMetric(("nll", "ece"))
        >>> per_image = metric(torch.randn(2, 3, 8, 8), torch.zeros(2, 1, 8, 8))
        >>> per_image.shape, list(metric.aggregate())
        (torch.Size([2, 2]), ['nll', 'ece'])
    """

    def __init__(
        self,
        metrics: Sequence[str | Column] = ("nll", "brier", "ece"),
        regions: Sequence[str] = (EVERYTHING,),
        *,
        kind: Kind = "logits",
        ignore_index: int = 255,
        background: int | None = 0,
    ) -> None:
        check_name("kind", kind, KINDS)
        self.kind, self.ignore_index = kind, ignore_index
        self.plan = Plan.make(metrics, regions, background=background)
        alone = [column for column in self.plan.columns if column not in self.plan.columns_of("pooled")]
        if alone or "uncalibrated" in self.plan.needs:
            wrong = alone[0].id if alone else "flip"
            raise InputError(
                f"metric '{wrong}' in region '{alone[0].region if alone else EVERYTHING}'",
                expected=f"metrics of voxels that can be pooled, in other regions than '{LOCAL}'",
                fix="segcal.evaluate has all metrics, monai.metrics those of surfaces",
            )
        super().__init__()

    def reset(self) -> None:
        """Forget all images."""
        super().reset()
        self.statistics: VoxelStatistics | None = None

    def _compute_tensor(self, y_pred: Tensor, y: Tensor | None = None, **_: Any) -> Tensor:
        if y is None:
            raise InputError("y is None", expected="labels (B, 1, *S)")
        batch = Batch.checked(_plain(y_pred), class_indices(y), None, self.kind)
        batch.check_values(self.ignore_index)
        values = []
        for index in range(len(batch)):
            case = batch.image(index).case(f"image {index} of the batch", self.ignore_index)
            rows, statistics = measure_case(self.plan, case, {"": None}, torch.get_num_threads())[""]
            self.statistics = statistics if self.statistics is None else self.statistics.merge(statistics)
            values.append([row.value for row in rows])
        return torch.tensor(values, dtype=torch.float64)

    def aggregate(self) -> dict[str, float]:
        """The pooled values of all images since the last reset, in all processes."""
        pooled = of_all_processes(self.statistics)
        if pooled is None:
            raise InputError("no images came", expected="metric(y_pred, y) before aggregate()")
        rows = reduced_rows(self.plan, POOLED, pooled, {})
        return {row.metric if row.region == EVERYTHING else f"{row.metric} in {row.region}": row.value for row in rows}


class CalibrationHandler(IgniteMetricHandler):  # type: ignore[misc, unused-ignore]
    """``CalibrationMetric`` as a handler of MONAI's trainers and evaluators, which need ``pytorch-ignite``.

    With one metric, ``engine.state.metrics`` has its value under the name of the handler, which may then be the key
    metric. With several, it has them as ``name/metric``.

    Args:
        metrics: As in ``CalibrationMetric``.
        output_transform: Gets scores and labels; by default ``from_engine(["pred", "label"])``. Where postprocessing
            replaces the scores by labels, keep them under another key with ``CopyItemsd``.
        save_details: Put the values of each image into ``engine.state.metric_details``.
        options: Those of ``CalibrationMetric``.
    """

    def __init__(
        self,
        metrics: Sequence[str | Column] = ("nll", "brier", "ece"),
        output_transform: Callable[[Any], Any] | None = None,
        save_details: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(
            metric_fn=CalibrationMetric(metrics, **options),
            output_transform=output_transform or from_engine(["pred", "label"]),
            save_details=save_details,
        )

    def completed(self, engine: Any, name: str) -> None:
        """Put every value into the engine's metrics as a number: MONAI's loggers print nothing else."""
        values = self.compute()
        named = {f"{name}/{metric}": value for metric, value in values.items()}
        engine.state.metrics.update(named if len(values) > 1 else {name: next(iter(values.values()))})


class MonaiLoss(nn.Module):
    """A loss of segcal for MONAI's trainers, whose labels are floats ``(B, 1, *S)`` and tensors with metadata.

    Labels that are no whole numbers are an error: it means that a spatial transform has interpolated them.

    Examples:
        >>> import segcal
        >>> loss = MonaiLoss(segcal.losses.NACL())
        >>> loss(torch.zeros(1, 2, 8, 8), torch.zeros(1, 1, 8, 8))
        tensor(0.7431)
    """

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss of logits ``(B, C, *S)`` and labels ``(B, 1, *S)``."""
        value: Tensor = self.loss(_plain(input), class_indices(target))
        return value


def class_indices(labels: Tensor) -> Tensor:
    """Labels as integers without metadata; raises if they are not whole numbers.

    Examples:
        >>> class_indices(torch.tensor([0.0, 2.0]))
        tensor([0, 2])
        >>> class_indices(torch.tensor([0.0, 0.5]))
        Traceback (most recent call last):
        segcal.errors.InputError: labels contain 0.5; expected class indices. To fix: mode="nearest" for labels...
    """
    labels = _plain(labels)
    if not labels.is_floating_point():
        return labels
    broken = labels != labels.round()
    if bool(broken.any()):
        raise InputError(
            f"labels contain {labels[broken][0].item():.4g}",
            expected="class indices",
            fix='mode="nearest" for labels in the spatial transforms',
        )
    return labels.long()


class _Map:
    """A calibrator on batches ``(B, C, *S)`` of MONAI, whose multi-label networks give one channel for each label."""

    def __init__(self, calibrator: Calibrator | str | Path, output: Kind) -> None:
        check_name("output", output, KINDS)
        self.calibrator = calibrator if isinstance(calibrator, Calibrator) else load(calibrator)
        self.output = output

    def __call__(self, logits: Tensor, image: Tensor | None) -> Tensor:
        calibrator = self.calibrator.to(logits.device)
        if calibrator.channel_names is None:
            log_probs: Tensor = calibrator(logits, image)
            return log_probs if self.output == "logits" else probabilities(log_probs, log_probs.dtype)
        items = []
        for index in range(len(logits)):
            some = slice(index, index + 1)
            both = calibrator(multilabel_view(logits[some], "logits"), None if image is None else image[some])
            items.append(both[:, 1] - both[:, 0] if self.output == "logits" else presence(both, both.dtype))
        return torch.stack(items)


def _plain(tensor: Tensor) -> Tensor:
    """A tensor without metadata, which would be carried through every operation."""
    return tensor.as_subclass(Tensor)
