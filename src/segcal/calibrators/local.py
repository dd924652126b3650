"""Temperatures that depend on the place, or on the image: ``lts``, ``lts-ti`` and ``ibts``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from segcal.calibrators.base import Calibrator, ParameterCount
from segcal.calibrators.local_network import (
    GATES,
    LEAVES,
    SMALLEST_SCALE,
    TAPS,
    Inputs,
    Neighbourhood,
    TemperatureTree,
    Window,
    check_image,
    check_space,
    network_inputs,
    temperature,
    tree_shapes,
)
from segcal.calibrators.local_training import Recipe, fit_network
from segcal.calibrators.module import renamed
from segcal.calibrators.temperature import TemperatureScaling
from segcal.errors import InputError, SegcalError
from segcal.fitting.data import FitData, Fitted
from segcal.fitting.held_out import hold_out
from segcal.fitting.limits import BETA, Limits
from segcal.fitting.measured import compared, mean_loss
from segcal.kernels import fast_maps
from segcal.scores import DEPTH, keep_argmax
from segcal.types import Case, row_slices

__all__ = ["ImageTemperatureScaling", "LocalTemperatureScaling", "TranslationInvariantLocalTemperature"]

# Scores of a tile: few enough for the core's cache, many enough that the halo costs little.
TILE_VALUES = 2**19

# Logits and image of some rows.
Reader = Callable[[slice], tuple[Tensor, Tensor | None]]


class LocalTemperatureScaling(Calibrator):
    """``lts``: ``S(z / T(v))``, a temperature for every voxel from the logits around it (Ding et al., ICCV 2021).

    ``T(v)`` is the temperature of ``ts`` times the output of a ``TemperatureTree``, trained by Adam on crops of the
    cases until the NLL of held-out crops stops falling. Where it does not beat ``ts`` there, the calibrator is ``ts``,
    and ``fit_report.notes`` say so. The order of the classes is kept. The network sees raw logits, and so their gauge:
    ``lts-ti`` does not.

    Voxels see neighbours up to 4 away; images are mirrored at their border, as often as it takes where they are smaller
    than that. Logits without a plane, ``(N, C)`` or ``(N, C, L)``, are calibrated as if all neighbours were alike.
    Large inputs are taken in tiles of rows with a halo, which gives the same as all at once, to 1e-6 in probability:
    the order in which a convolution adds up depends on the shape of its input.

    Args:
        image_channels: Channels of the cases' images, which the network then sees too; 0 leaves images out.
        neighbourhood: ``"plane"`` takes volumes slice by slice, ``"volume"`` has kernels in all three axes.
        epochs: Passes over the crops at most.
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
    inputs: Inputs = "logits"
    per_image: ClassVar[bool] = False
    beta: Tensor

    @renamed(rate="learning_rate")
    def __init__(
        self,
        image_channels: int = 0,
        neighbourhood: Neighbourhood = "plane",
        epochs: int = 40,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        if image_channels < 0:
            raise InputError(f"image_channels is {image_channels}", expected="a number of channels, 0 for no image")
        if neighbourhood not in ("plane", "volume"):
            raise InputError(f"neighbourhood is {neighbourhood!r}", expected="'plane' or 'volume'")
        for name, value in (("epochs", epochs), ("learning_rate", learning_rate), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise InputError(f"{name} is {value}", expected="a number, zero or more")
        self.image_channels, self.neighbourhood = image_channels, neighbourhood
        self.epochs, self.learning_rate, self.weight_decay = epochs, learning_rate, weight_decay
        self.register_buffer("beta", torch.ones((), dtype=torch.float64))

    def allocate(self, num_classes: int) -> None:
        """A new network."""
        self.network = TemperatureTree(
            num_classes, image_channels=self.image_channels, neighbourhood=self.neighbourhood
        )

    def _summary(self) -> str:
        return f"T = {1 / float(self.beta):.4g} times the output of a network of {self.size():,} parameters"

    def shapes(self, num_classes: int) -> dict[str, tuple[int, ...]]:
        """Of one temperature and of the network."""
        network = tree_shapes(num_classes, self.image_channels, self.neighbourhood)
        return {"beta": (), **{f"network.{name}": shape for name, shape in network.items()}}

    def limits(self) -> dict[str, Limits]:
        """Those of ``ts``, and standard deviations that can be divided by."""
        deviation = Limits(SMALLEST_SCALE, torch.inf)
        images = {"network.image_scale": deviation, "network.image_mean": Limits(-torch.inf, torch.inf)}
        return {"beta": BETA, "network.scale": deviation, **images}

    @classmethod
    def parameter_count(cls, num_classes: int) -> ParameterCount:
        """``7 (25 C + 1)``, without images and in the plane."""
        count = (LEAVES + GATES) * (num_classes * TAPS**2 + 1)
        return ParameterCount(count, count)

    # -- fitting -------------------------------------------------------------------------------------------------------

    def _fit(self, data: FitData) -> Fitted:
        start = TemperatureScaling()
        start.fit(data.cases, seed=data.seed)
        assert start.fit_report is not None
        self.beta.copy_(start.beta)
        held = hold_out(data)
        recipe = Recipe(
            inputs=self.inputs,
            per_image=self.per_image,
            epochs=self.epochs,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            everything=data.voxels == "all",
            seed=data.seed,
        )
        found = fit_network(self.network, float(start.beta), held.cases, held.validation, recipe)
        fitted = Fitted(
            nll_before=start.fit_report.nll_before,
            nll_after=start.fit_report.nll_after,
            converged=found.converged,
            certificate=start.fit_report.certificate,
            iterations=found.iterations,
            voxels_used=found.voxels,
            notes=[*start.fit_report.notes, *held.notes, *found.notes],
        )
        nll = mean_loss(data.cases, self).nll if found.better else math.inf
        if nll <= fitted.nll_after:
            return fitted._replace(nll_after=nll, certificate=found.gradient)
        self.network.reset()
        if found.better:
            beside = compared(nll, fitted.nll_after)
            worse = f"NLL of all cases {beside} that with one temperature: no better, so this is ts"
            return fitted._replace(notes=[*fitted.notes, worse])
        return fitted

    # -- applying ------------------------------------------------------------------------------------------------------

    def _log_probs(self, logits: Tensor | Sequence[Tensor], image: Tensor | None) -> Tensor:
        if not isinstance(logits, Tensor):
            return super()._log_probs(logits, image)
        self._check(logits, image)
        if logits.ndim < 4:
            return _scaled(logits, self._point_temperature(logits))
        means = self._image_temperature(tuple(logits.shape), _reader(logits, image))
        tiles = self._tiles(tuple(logits.shape), _reader(logits, image), means)
        return torch.cat([_scaled(z, t) for _, z, t in tiles], 2)

    def _scores(self, logits: Tensor) -> Tensor:
        return self._log_probs(logits, None)

    def temperature_map(self, logits: Tensor, image: Tensor | None = None) -> Tensor:
        """The temperatures ``(N, 1, *spatial)`` that the logits are divided by, in float32 at least.

        Args:
            logits: ``(N, C, *spatial)``.
            image: As ``forward`` takes it.
        """
        self._check(logits, image)
        if logits.ndim < 4:
            return self._point_temperature(logits)
        means = self._image_temperature(tuple(logits.shape), _reader(logits, image))
        return torch.cat([t for _, _, t in self._tiles(tuple(logits.shape), _reader(logits, image), means)], 2)

    def _pieces(self, case: Case) -> Iterator[tuple[slice, Tensor]]:
        # Only some rows with their halo are in memory.

        def read(rows: slice) -> tuple[Tensor, Tensor | None]:
            return case.rows("logits", rows), case.source.image(rows) if self.image_channels else None

        if not case.source.sliceable:
            case.load()
        try:
            check_space(case.shape[2:], self.network.kernel_axes)
            means = self._image_temperature(case.shape, read)
            for rows, logits, temperatures in self._tiles(case.shape, read, means):
                yield rows, _scaled(logits, temperatures)
        except SegcalError as error:
            raise error.at(case=case.id) from None

    def _image_temperature(self, shape: tuple[int, ...], read: Reader) -> Tensor | None:
        """One temperature for each image ``(N,)``, where there is one."""
        return None

    def _tiles(
        self, shape: tuple[int, ...], read: Reader, means: Tensor | None
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Rows, their logits and their temperatures ``(N, 1, rows, ...)``."""
        for rows in row_slices(shape, TILE_VALUES):
            if means is None:
                logits, temperatures = self._tile(rows, shape, read)
            else:
                logits, _ = read(rows)
                temperatures = means.view(-1, *[1] * (logits.ndim - 1)).expand(-1, 1, *logits.shape[2:])
            yield rows, logits, temperatures

    def _tile(self, rows: slice, shape: tuple[int, ...], read: Reader) -> tuple[Tensor, Tensor]:
        batch, _, *spatial = shape
        window = Window.of_rows(rows, tuple(spatial), self.network.kernel_axes)
        source, image = read(window.source)
        if self.image_channels:
            image = check_image(image, self.image_channels, tuple(source.shape))
        factor = self.network(
            window.padded(network_inputs(_exact(source), self.inputs)),
            None if image is None else window.padded(image.to(_exact(source)).expand(batch, *image.shape[1:])),
        )
        logits = window.inside(source)
        return logits, temperature(factor.view(batch, 1, *logits.shape[2:]), self.beta.to(factor))

    def _point_temperature(self, logits: Tensor) -> Tensor:
        if self.image_channels:
            raise InputError(
                f"logits have shape {tuple(logits.shape)}", expected="a plane or a volume, as the network sees images"
            )
        points = network_inputs(_exact(logits), self.inputs).movedim(1, -1)
        factor = self.network.at_points(points.reshape(-1, logits.shape[1]))
        return temperature(factor.view(logits.shape[0], 1, *logits.shape[2:]), self.beta.to(factor))

    def _check(self, logits: Tensor, image: Tensor | None) -> None:
        if self.num_classes is None:
            raise SegcalError("the calibrator has not been fitted", fix="call fit, or segcal.load a fitted one")
        if logits.ndim < 2 or logits.shape[1] != self.num_classes:
            raise InputError(
                f"logits have shape {tuple(logits.shape)}", expected=f"(N, {self.num_classes}, *spatial), as fitted"
            )
        if logits.ndim > 3:
            check_space(tuple(logits.shape[2:]), self.network.kernel_axes)
        if image is not None and not self.image_channels:
            raise InputError("an image came", expected="none, as the calibrator was fitted without images")
        if self.image_channels:
            check_image(image, self.image_channels, tuple(logits.shape))


class TranslationInvariantLocalTemperature(LocalTemperatureScaling):
    """``lts-ti``: as ``lts``, but the network sees ``log S(z)``, so that the gauge of the logits does not matter.

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
    """``ibts``: ``S(z / T_i)``, one temperature per image: the mean over it of what the network of ``lts`` gives.

    The network sees ``log S(z)``, and the map is translation invariant; the original (Ding et al.) had it see raw
    logits. The mean takes a pass over the image of its own, before the one that calibrates.

    Args:
        inputs: ``"log-probs"``, or ``"logits"`` for the original.
        image_channels: As for ``lts``, and so are the others.

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

    @renamed(rate="learning_rate")
    def __init__(
        self,
        inputs: Inputs = "log-probs",
        image_channels: int = 0,
        neighbourhood: Neighbourhood = "plane",
        epochs: int = 40,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(image_channels, neighbourhood, epochs, learning_rate, weight_decay)
        if inputs not in ("logits", "log-probs"):
            raise InputError(f"inputs is {inputs!r}", expected="'logits' or 'log-probs'")
        self.inputs = inputs
        self.translation_invariant = inputs == "log-probs"

    def _image_temperature(self, shape: tuple[int, ...], read: Reader) -> Tensor:
        tiles = [self._tile(rows, shape, read)[1] for rows in row_slices(shape, TILE_VALUES)]
        return torch.cat([tile.flatten(1) for tile in tiles], 1).double().mean(1).to(tiles[0])

    def _point_temperature(self, logits: Tensor) -> Tensor:
        temperatures = super()._point_temperature(logits)
        own = temperatures.double().flatten(1).mean(1).to(temperatures)
        return own.view(-1, *[1] * (logits.ndim - 1)).expand_as(temperatures)


def _exact(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _reader(logits: Tensor, image: Tensor | None) -> Reader:
    return lambda rows: (logits[:, :, rows], None if image is None else image[:, :, rows])


def _scaled(logits: Tensor, temperatures: Tensor) -> Tensor:
    """``log S(z / T)`` in the type of the logits, with their argmax."""
    exact = _exact(logits)
    # The difference to the maximum is exact; a quotient of large logits would round away small margins.
    gaps = exact - exact.amax(1, keepdim=True)
    gaps.masked_fill_(gaps < -DEPTH, -torch.inf)
    # No quotient of a gap is so small that it vanishes.
    scaled = torch.minimum(gaps / temperatures, gaps.clamp(min=-torch.finfo(gaps.dtype).tiny))
    kernels = fast_maps(scaled)
    if kernels is not None and logits.dtype == scaled.dtype:
        log_probs: Tensor = kernels.apply_temperature(scaled, 1.0)
        return log_probs
    return keep_argmax(scaled.log_softmax(1).to(logits.dtype), exact.argmax(1))
