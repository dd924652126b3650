"""Temperatures that vary by voxel or by image: ``lts``, ``lts-ti`` and ``ibts``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

import segcal.calibrators.local_network as local_network
from segcal.calibrators.base import Calibrator, ParameterCount
from segcal.calibrators.local_training import Recipe, fit_network
from segcal.calibrators.module import renamed
from segcal.calibrators.precision import full_precision
from segcal.calibrators.temperature import HasTemperature, TemperatureScaling
from segcal.cases.device import values_at_once
from segcal.errors import InputError, check_name, check_whole, naming
from segcal.fitting.data import FitData, Fitted
from segcal.fitting.first_pass import hold_out
from segcal.fitting.limits import BETA, Limits
from segcal.fitting.measured import compared, mean_loss
from segcal.kernels import cuda_kernels, fast_maps, recording
from segcal.scores import DEPTH, at_least_float32, keep_argmax
from segcal.transfer import moved
from segcal.types import Case, row_slices

__all__ = ["ImageTemperatureScaling", "LocalTemperatureScaling", "TranslationInvariantLocalTemperature"]

# Scores in a tile: small enough for the cache, large enough that the halo costs little. A GPU has no such cache;
# there a score takes so many bytes while its tile is calibrated.
TILE_VALUES, _DEVICE_TILE_VALUES, _BYTES = 2**19, 2**25, 40

# Reads the logits and the image of some rows.
Reader = Callable[[slice], tuple[Tensor, Tensor | None]]


class LocalTemperatureScaling(HasTemperature, Calibrator):
    """``lts``: ``S(z / T(v))``, a temperature for every voxel from the logits around it (Ding et al., ICCV 2021).

    ``T(v)`` is the temperature of ``ts`` times the output of a ``TemperatureTree``, which Adam trains on crops of the
    cases until the NLL of held-out crops stops falling. If it does not beat ``ts`` there, the calibrator is ``ts``, and
    ``fit_report.notes`` say so. The order of the classes is kept. The network sees raw logits, including their offset;
    that of ``lts-ti`` does not.

    A voxel depends on neighbours up to 4 voxels away. Images are mirrored at their border, repeatedly if they are
    smaller than that. Logits without a plane, ``(N, C)`` or ``(N, C, L)``, are calibrated as if all neighbours were
    equal. Large inputs are processed in tiles of rows with a halo, which agrees with one pass to 1e-6 in probability:
    the order of a convolution's sums depends on the shape of its input.

    Args:
        image_channels: Channels of the cases' images, as further inputs of the network; 0 for no images.
        neighbourhood: ``"plane"`` treats volumes slice by slice, ``"volume"`` has kernels along all three axes.
        epochs: Passes over the crops, at most.
        learning_rate: Adam's, after a first epoch at a tenth of it. It holds for kernels of up to 100 inputs, and falls
            in proportion to their number beyond.
        weight_decay: Adam's, decoupled.

    Examples:
        >>> import segcal
        >>> plant = [segcal.synthetic.SpatialTemperature()]
        >>> cases = segcal.synthetic.scenes(8, size=(48, 64), plant=plant, coherence=0)
        >>> calibrator = LocalTemperatureScaling(epochs=5).fit(cases)
        >>> calibrator.temperature_map(cases[0].logits).shape
        torch.Size([1, 1, 48, 64])
    """

    id = "lts"
    title = "Local temperature scaling"
    translation_invariant = False
    preserves = "order"
    spatial = True
    inputs: local_network.Inputs = "logits"
    per_image: ClassVar[bool] = False

    @renamed(rate="learning_rate")
    def __init__(
        self,
        image_channels: int = 0,
        neighbourhood: local_network.Neighbourhood = "plane",
        epochs: int = 40,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        check_whole("image_channels", image_channels, 0)
        check_name("neighbourhood", neighbourhood, ("plane", "volume"))
        for name, value in (("epochs", epochs), ("learning_rate", learning_rate), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise InputError(f"{name} is {value}", expected="a number, zero or more")
        self.image_channels, self.neighbourhood = image_channels, neighbourhood
        self.epochs, self.learning_rate, self.weight_decay = epochs, learning_rate, weight_decay
        self.register_buffer("beta", torch.ones((), dtype=torch.float64))

    def allocate(self, num_classes: int) -> None:
        """Create the network."""
        self.network = local_network.TemperatureTree(
            num_classes, image_channels=self.image_channels, neighbourhood=self.neighbourhood
        )

    def _summary(self) -> str:
        return f"T = {self.temperature:.4g} times the output of a network of {self.size():,} parameters"

    def shapes(self, num_classes: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the temperature and of the network."""
        network = local_network.tree_shapes(num_classes, self.image_channels, self.neighbourhood)
        return {"beta": (), **{f"network.{name}": shape for name, shape in network.items()}}

    def limits(self) -> dict[str, Limits]:
        """The bounds of ``ts``, and standard deviations above zero."""
        deviation = Limits(local_network.SMALLEST_SCALE, torch.inf)
        images = {"network.image_scale": deviation, "network.image_mean": Limits(-torch.inf, torch.inf)}
        return {"beta": BETA, "network.scale": deviation, **images}

    @classmethod
    def parameter_count(cls, num_classes: int) -> ParameterCount:
        """``7 (25 C + 1)`` in the plane, without images."""
        count = (local_network.LEAVES + local_network.GATES) * (num_classes * local_network.TAPS**2 + 1)
        return ParameterCount(count, count)

    # -- fitting -------------------------------------------------------------------------------------------------------

    def _fit(self, data: FitData) -> Fitted:
        scaling = TemperatureScaling().fit(data.cases, seed=data.seed)
        alone = scaling.fit_report
        assert alone is not None
        self.beta.copy_(scaling.beta)
        parts, split_notes = hold_out(data)
        recipe = Recipe(self.inputs, self.per_image, self.epochs, self.learning_rate, self.weight_decay)
        found = fit_network(self.network, float(scaling.beta), parts, recipe)
        better, notes = found.nll_after < found.nll_before, [*alone.notes, *split_notes, *found.notes]
        nll = mean_loss(data.cases, self).nll if better else math.inf
        found = found._replace(nll_before=alone.nll_before, nll_after=nll, notes=notes)
        if nll <= alone.nll_after:
            return found
        self.network.reset()
        if better:
            beside = compared(nll, alone.nll_after)
            notes.append(f"NLL of all cases {beside} that with one temperature: no better, so this is ts")
        return found._replace(nll_after=alone.nll_after, certificate=alone.certificate)

    # -- applying ------------------------------------------------------------------------------------------------------

    def _log_probs(self, logits: Tensor | Sequence[Tensor], image: Tensor | None) -> Tensor:
        return _joined([_scaled(z, t) for z, t in self._parts(logits, image)])

    def _scores(self, logits: Tensor) -> Tensor:
        return self._log_probs(logits, None)

    def temperature_map(self, logits: Tensor, image: Tensor | None = None) -> Tensor:
        """The temperatures ``(N, 1, *spatial)`` that the logits are divided by, in float32 at least.

        Args:
            logits: ``(N, C, *spatial)``; for multi-label data ``(K, 2, *spatial)``, one item per channel.
            image: As ``forward`` takes it.
        """
        if self.channels is None:
            with full_precision():
                return _joined([t for _, t in self._parts(logits, image)])
        return torch.cat([own.temperature_map(z, seen) for own, z, seen in self._by_channel(logits, image)])

    def _parts(self, logits: Tensor | Sequence[Tensor], image: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows of the logits and their temperatures, or all of them if there is no plane."""
        logits = self._checked(logits, image)
        if self.image_channels:
            local_network.check_image(image, self.image_channels, tuple(logits.shape))
        if logits.ndim < 4:
            yield logits, self._point_temperature(logits)
            return

        def read(rows: slice) -> tuple[Tensor, Tensor | None]:
            return logits[:, :, rows], None if image is None else image[:, :, rows]

        for _, z, t in self._tiles(tuple(logits.shape), read, logits.device):
            yield z, t

    def _pieces(self, case: Case) -> Iterator[tuple[slice, Tensor]]:
        # Only some rows and their halo are in memory.

        def read(rows: slice) -> tuple[Tensor, Tensor | None]:
            return case.rows("logits", rows), moved(
                case.source.image(rows), case.device
            ) if self.image_channels else None

        if not case.source.sliceable:
            case.load()
        with naming(case=case.id):
            for rows, logits, temperatures in self._tiles(case.shape, read, case.tensor_device):
                yield rows, _scaled(logits, temperatures)

    def _tiles(
        self, shape: tuple[int, ...], read: Reader, device: torch.device
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Rows, their logits and their temperatures ``(N, 1, rows, ...)``."""
        (batch, _, *spatial), axes = shape, self.network.kernel_axes
        columns = [(0, length) for length in spatial[1:]]
        local_network.check_space(tuple(spatial), axes)
        for rows in _row_slices(shape, device):
            window = local_network.Window(((rows.start, rows.stop), *columns), tuple(spatial), axes)
            source, image = read(window.source)
            exact, padded_image = at_least_float32(source), None
            if self.image_channels:
                image = local_network.check_image(image, self.image_channels, tuple(source.shape))
                padded_image = window.padded(image.to(exact).expand(batch, *image.shape[1:]))
            factor = self.network(window.padded(local_network.network_inputs(exact, self.inputs)), padded_image)
            logits = window.inside(source)
            factor = factor.view(batch, 1, *logits.shape[2:])
            yield rows, logits, local_network.temperature(factor, self.beta.to(factor))

    def _point_temperature(self, logits: Tensor) -> Tensor:
        if self.image_channels:
            raise InputError(
                f"logits have shape {tuple(logits.shape)}", expected="a plane or a volume, as the network sees images"
            )
        points = local_network.network_inputs(at_least_float32(logits), self.inputs).movedim(1, -1)
        factor = self.network.at_points(points.reshape(-1, logits.shape[1]))
        return local_network.temperature(factor.view(logits.shape[0], 1, *logits.shape[2:]), self.beta.to(factor))


class TranslationInvariantLocalTemperature(LocalTemperatureScaling):
    """``lts-ti``: as ``lts``, but the network sees ``log S(z)``, so that offsets of the logits do not matter.

    Examples:
        >>> import segcal
        >>> cases = segcal.synthetic.scenes(4, size=(48, 64), plant=[segcal.synthetic.SpatialTemperature()])
        >>> calibrator = TranslationInvariantLocalTemperature(epochs=2).fit(cases)
        >>> z = cases[0].logits
        >>> bool(torch.allclose(calibrator(z), calibrator(z + 7.0), atol=1e-4))
        True
    """

    id = "lts-ti"
    title = "Translation invariant local temperature"
    translation_invariant = True
    inputs = "log-probs"


class ImageTemperatureScaling(LocalTemperatureScaling):
    """``ibts``: ``S(z / T_i)``, one temperature per image: the mean over it of the temperatures of ``lts``.

    The network sees ``log S(z)``, so the map is translation invariant; in the paper (Ding et al.) it sees raw logits.
    The mean takes an extra pass over the image.

    Args:
        inputs: ``"log-probs"``, or ``"logits"`` for the original.
        options: Those of ``lts``.

    Examples:
        >>> import segcal
        >>> cases = segcal.synthetic.scenes(8, size=(48, 64), plant=[segcal.synthetic.ImageTemperature()], coherence=0)
        >>> calibrator = ImageTemperatureScaling(epochs=5).fit(cases)
        >>> len(calibrator.temperature_map(cases[0].logits).unique())
        1
    """

    id = "ibts"
    title = "Image temperature scaling"
    translation_invariant = True
    per_image = True

    def __init__(self, inputs: local_network.Inputs = "log-probs", **options: Any) -> None:
        super().__init__(**options)
        check_name("inputs", inputs, ("logits", "log-probs"))
        self.inputs = inputs
        self.translation_invariant = inputs == "log-probs"

    def _tiles(
        self, shape: tuple[int, ...], read: Reader, device: torch.device
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        total, kind = torch.zeros(shape[0], dtype=torch.float64, device=device), torch.float32
        for _, _, temperatures in super()._tiles(shape, read, device):
            total, kind = total + temperatures.double().flatten(1).sum(1), temperatures.dtype
        means = (total / math.prod(shape[2:])).to(kind)
        for rows in _row_slices(shape, device):
            logits, _ = read(rows)
            yield rows, logits, means.view(-1, *[1] * (logits.ndim - 1)).expand(-1, 1, *logits.shape[2:])

    def _point_temperature(self, logits: Tensor) -> Tensor:
        temperatures = super()._point_temperature(logits)
        own = temperatures.double().flatten(1).mean(1).to(temperatures)
        return own.view(-1, *[1] * (logits.ndim - 1)).expand_as(temperatures)


def _row_slices(shape: tuple[int, ...], device: torch.device) -> Iterator[slice]:
    if recording():  # of an image of any size
        return iter((slice(0, shape[2]),))
    return row_slices(shape, values_at_once(device, TILE_VALUES, _DEVICE_TILE_VALUES, _BYTES))


def _joined(parts: list[Tensor]) -> Tensor:
    """The rows that ``LocalTemperatureScaling._parts`` gave one by one."""
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


def _scaled(logits: Tensor, temperatures: Tensor) -> Tensor:
    """``log S(z / T)`` in the dtype of the logits, with their argmax."""
    exact = at_least_float32(logits)
    # The difference from the maximum is exact; dividing large logits directly would round small margins away.
    gaps = exact - exact.amax(1, keepdim=True)
    gaps.masked_fill_(gaps < -DEPTH, -torch.inf)
    # No gap becomes so small that it vanishes.
    scaled = torch.minimum(gaps / temperatures, gaps.clamp(min=-torch.finfo(gaps.dtype).tiny))
    kernels = fast_maps(scaled) or cuda_kernels(scaled)
    if kernels is not None and logits.dtype == scaled.dtype:
        log_probs: Tensor = kernels.apply_temperature(scaled, 1.0)
        return log_probs
    return keep_argmax(scaled.log_softmax(1).to(logits.dtype), exact.argmax(1))
