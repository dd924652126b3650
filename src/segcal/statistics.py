"""The additive statistics of one pass over voxels; every metric is a small reduction of them.

Voxels fall into *atoms*: an atom holds all voxels that lie in exactly the same regions. Every voxel is in one atom and
is counted once, however many regions there are; a region (or an intersection of regions) is a sum of atoms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from segcal.checks import checked_labels, holding
from segcal.errors import InputError
from segcal.kernels import AffineMap, Backend, BinGrid, Tally, Voxels, tally
from segcal.kernels.atoms import add_distances, atoms_of, check_tensors, region_masks
from segcal.kernels.tally import Total

EVERYTHING = "everything"
#: A region, or several for their intersection.
Region = str | Sequence[str]
TACE_THRESHOLD = 1e-3  # of Nixon et al. 2019
_FORMAT, _VERSION = "segcal.VoxelStatistics", 1
_ARGUMENTS = ("num_classes", "bins", "regions", "classwise", "background", "threshold", "thresholds")
_MAX_REGIONS = 16  # keeps the table of all combinations small


class Layout(NamedTuple):
    """The order of atoms and the origin of energies. Statistics with the same layout add up tensor by tensor."""

    atoms: tuple[int, ...]
    energy_shift: float


class VoxelStatistics:
    """Additive, mergeable statistics of scores against labels: whole = sum of parts, over chunks, cases, machines.

    Sums are float64 and counts int64. For each region there are: the confusion matrix; sums of NLL, Brier score and
    entropy by predicted class; histograms of the confidence of right and wrong predictions (4096 equal-width bins and
    every requested number of bins, exact), also per predicted class; histograms of every class probability, and how
    often the class was the label; flips against the uncalibrated argmax; moments of the free energy; distances.
    Bins are ``(lo, hi]``, 0 in the first and 1 in the last.

    Memory: 8 (C^2 + 7 C M + 4 T) bytes for each way in which regions overlap, with C classes, M about 300 and T about
    4500 bins; twice that while an update runs, and once more for every thread after the first.

    Args:
        num_classes: C, at least 2.
        bins: The values of ``num_bins`` that metrics can use; their divisors, and for top-label metrics those of 4096,
            come for free.
        regions: Names of the regions that ``update`` gets; ``everything`` is always there.
        classwise: False leaves the per-class histograms out, which is faster, but ``sce``, ``cece``, ``ace-adaptive``
            and ``tace`` need them.
        background: The class that ``volume-dice`` leaves out, and ``dsc`` and ``miou`` on request; None for none.
        threshold: ``tace`` leaves class probabilities up to this out, unless it is given another threshold.
        thresholds: Other thresholds that ``tace`` may be given. The lowest class-probability bin ends at the lowest.
        backend: ``auto``, ``reference`` or ``numba``; see ``segcal.kernels.tally``.
        threads: Threads of the numba kernel; None means as many as torch uses.

    Examples:
        >>> stats = VoxelStatistics(num_classes=2)
        >>> stats.update(torch.tensor([[2.0, 0.0], [0.0, 2.0], [1.0, 1.0]]), torch.tensor([0, 0, 255]))
        VoxelStatistics(num_classes=2, voxels=2)
        >>> stats.total().confusion
        array([[1, 1],
               [0, 0]])
    """

    def __init__(
        self,
        num_classes: int,
        bins: Sequence[int] = (15, 50),
        *,
        regions: Sequence[str] = (),
        classwise: bool = True,
        background: int | None = 0,
        threshold: float = TACE_THRESHOLD,
        thresholds: Sequence[float] = (),
        backend: Backend = "auto",
        threads: int | None = None,
    ) -> None:
        if num_classes < 2:
            raise InputError(
                f"num_classes is {num_classes}",
                expected="at least 2",
                fix="turn a sigmoid output into two classes (segcal.scores.multilabel_view)",
            )
        for value in (threshold, *thresholds):
            if not 0 < value < 1:
                raise InputError(f"threshold is {value}", expected="a probability between 0 and 1")
        if background is not None and not 0 <= background < num_classes:
            raise InputError(f"background is {background}", expected=f"a class, 0 to {num_classes - 1}, or None")
        names = tuple(name for name in regions if name != EVERYTHING)
        if len(set(names)) < len(names) or len(names) > _MAX_REGIONS:
            raise InputError(f"regions are {names}", expected=f"at most {_MAX_REGIONS} different names")
        self.num_classes, self.bins, self.regions = num_classes, tuple(bins), names
        self.classwise, self.background = classwise, background
        self.threshold, self.thresholds = float(threshold), tuple(map(float, thresholds))
        self.backend, self.threads = backend, threads
        self.top_grid, self.class_grid = _grids(self.bins, (self.threshold, *self.thresholds), classwise)
        self.layout = Layout((), 0.0)  # order of atoms and origin of energies; see ``align``
        self._tally = _nothing(num_classes, self.top_grid, self.class_grid)

    def update(
        self,
        logits: Tensor,
        labels: Tensor,
        *,
        ignore_index: int | None = 255,
        mask: Tensor | None = None,
        regions: Mapping[str, Tensor] | Tensor | None = None,
        distance: Tensor | None = None,
        score_map: AffineMap | None = None,
        uncalibrated: Tensor | None = None,
    ) -> VoxelStatistics:
        """Add voxels. Nothing changes if this raises.

        Args:
            logits: Logits or log-probabilities ``(N, C, *spatial)`` or ``(N, C)``, any floating dtype, device and
                strides. ``-inf`` means that a class is impossible.
            labels: Integers ``(N, *spatial)``, or ``(N, 1, *spatial)``.
            ignore_index: Voxels with this label do not count.
            mask: ``(N, *spatial)`` bool, True where a voxel counts.
            regions: ``{name: (N, *spatial) bool}`` for exactly the regions given at construction; voxels may be in
                several. Or an integer tensor ``(N, *spatial)`` of indices into them, negative for none.
            distance: Distance to the nearest label boundary ``(N, *spatial)``, which ``ba-ece`` needs.
            score_map: A calibrator's affine map, applied within the pass. Its output are log-probabilities, whose free
                energy is 0.
            uncalibrated: The argmax before calibration ``(N, *spatial)``, to count flips when ``logits`` are calibrated
                already; with ``score_map`` it is known.

        Examples:
            >>> stats = VoxelStatistics(2, regions=("left",))
            >>> logits, labels = torch.zeros(1, 2, 4), torch.zeros(1, 4, dtype=torch.int64)
            >>> stats.update(logits, labels, regions={"left": torch.tensor([[True, True, False, False]])}).count("left")
            2
        """
        labels = holding(checked_labels(logits, labels), ignore_index)
        voxels = Voxels(
            logits=logits, labels=labels, top_grid=self.top_grid, class_grid=self.class_grid,
            ignore_index=ignore_index, mask=mask, uncalibrated=uncalibrated, score_map=score_map,
        )  # fmt: skip
        check_tensors(self.num_classes, voxels, distance)
        if isinstance(regions, Mapping):
            regions = {name: inside for name, inside in regions.items() if name != EVERYTHING}
        masks = region_masks(self.regions, labels, regions)
        atoms: tuple[int, ...] = (0,)
        if masks:
            atoms, slots = atoms_of(voxels, masks)
            voxels = dataclasses.replace(voxels, slots=slots, num_slots=len(atoms))
        result, shift = tally(voxels, self.backend, self.threads)
        if score_map is not None:
            result.energy[:], shift = 0.0, 0.0
        if distance is not None:
            add_distances(result, distance, voxels, self.threads)
        if self.layout.atoms:
            self._append(result, Layout(atoms, shift))
        else:
            self._tally, self.layout = result, Layout(atoms, shift)
        return self

    def merge(self, other: VoxelStatistics) -> VoxelStatistics:
        """Add the voxels of ``other``, which must have been made with the same arguments.

        Examples:
            >>> a, b = (VoxelStatistics(2).update(torch.zeros(3, 2), torch.tensor([0, 1, y])) for y in (0, 255))
            >>> a.merge(b).count()
            5
        """
        if self._arguments() != other._arguments():
            mine, theirs = self._arguments(), other._arguments()
            wrong = [name for name in mine if mine[name] != theirs[name]]
            raise InputError(
                "statistics differ in " + ", ".join(f"{name} ({mine[name]} and {theirs[name]})" for name in wrong),
                expected="statistics made with the same arguments",
            )
        self._append(other._tally, other.layout)
        return self

    def __add__(self, other: VoxelStatistics) -> VoxelStatistics:
        return self.empty_like().merge(self).merge(other)

    def empty_like(self) -> VoxelStatistics:
        """Statistics of nothing, with the same arguments."""
        return VoxelStatistics(**self._arguments(), backend=self.backend, threads=self.threads)

    def total(self, region: Region = EVERYTHING) -> Total:
        """The arrays of one region, or of the intersection of several, without the leading axis of atoms.

        Energies are relative to ``energy_shift``. Arrays are added up on first use: do not keep the result while these
        statistics change.
        """
        names = (region,) if isinstance(region, str) else tuple(region)
        code = 0
        for name in names:
            if name != EVERYTHING and name not in self.regions:
                raise InputError(
                    f"region is {name!r}",
                    expected=f"one of {', '.join((EVERYTHING, *self.regions))}",
                    fix=f"collect the statistics with regions=(..., {name!r})",
                )
            code |= 0 if name == EVERYTHING else 1 << self.regions.index(name)
        chosen = np.array([atom & code == code for atom in self.layout.atoms], dtype=bool)
        return Total(self._tally, chosen)

    def count(self, region: Region = EVERYTHING) -> int:
        """Voxels in the region."""
        return int(self.total(region).confusion.sum())

    @property
    def energy_shift(self) -> float:
        """The value that the energies of ``total`` are relative to."""
        return self.layout.energy_shift

    def align(self, *layouts: Layout) -> VoxelStatistics:
        """Bring these statistics to the union of the given layouts, in that order, with the first one's origin.

        After every process has aligned to everyone's layouts, an all-reduce (sum) of ``tensors`` merges them.
        """
        atoms = tuple(dict.fromkeys(atom for layout in layouts for atom in layout.atoms))
        if missing := set(self.layout.atoms) - set(atoms):
            raise InputError(
                f"atoms {sorted(missing)} are missing from the layouts",
                expected="the union of the layouts of all statistics that are added up",
            )
        mine, layout = self._tally, self.layout
        self.layout, self._tally = Layout(atoms, layouts[0].energy_shift), self._zeros(len(atoms))
        self._add(mine, layout)
        return self

    def tensors(self) -> dict[str, Tensor]:
        """The state as float64 and int64 tensors that share its memory."""
        return {name: torch.from_numpy(array) for name, array in self._tally._asdict().items()}

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able values, exact to the bit.

        Examples:
            >>> stats = VoxelStatistics(2).update(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
            >>> VoxelStatistics.from_dict(stats.to_dict()).to_dict() == stats.to_dict()
            True
        """
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "arguments": {name: list(v) if isinstance(v, tuple) else v for name, v in self._arguments().items()},
            "atoms": list(self.layout.atoms),
            "energy_shift": self.layout.energy_shift,
            "arrays": self._tally.packed(),
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> VoxelStatistics:
        """The inverse of ``to_dict``."""
        if state.get("format") != _FORMAT or state.get("version") != _VERSION:
            raise InputError(
                f"format is {state.get('format')!r}, version {state.get('version')!r}",
                expected=f"{_FORMAT!r}, version {_VERSION}",
            )
        stats = cls(**state["arguments"])
        stats.layout = Layout(tuple(state["atoms"]), float(state["energy_shift"]))
        stats._tally = Tally.unpacked(state["arrays"])
        if [a.shape for a in stats._tally] != [a.shape for a in stats._zeros(len(stats.layout.atoms))]:
            raise InputError("the arrays do not have the shapes of the arguments", expected="a complete to_dict()")
        return stats

    def __repr__(self) -> str:
        regions = f", regions={self.regions}" if self.regions else ""
        return f"VoxelStatistics(num_classes={self.num_classes}, voxels={self.count()}{regions})"

    def _arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _ARGUMENTS}

    def _zeros(self, atoms: int) -> Tally:
        return Tally.zeros(atoms, self.num_classes, self.top_grid, self.class_grid)

    def _append(self, other: Tally, layout: Layout) -> None:
        """``_add``, with the other's origin of energies if there are no voxels yet that chose one."""
        if not self._tally.confusion.any():
            self.layout = self.layout._replace(energy_shift=layout.energy_shift)
        self._add(other, layout)

    def _add(self, other: Tally, layout: Layout) -> None:
        """Add a tally whose slots are the atoms of ``layout``."""
        new = tuple(atom for atom in layout.atoms if atom not in self.layout.atoms)
        if new:
            self.layout = self.layout._replace(atoms=self.layout.atoms + new)
            grown = zip(self._tally, self._zeros(len(new)), strict=True)
            self._tally = Tally(*(np.concatenate(pair) for pair in grown))
        other = other.moved(layout.energy_shift - self.layout.energy_shift)
        if layout.atoms == self.layout.atoms:
            self._tally.add(other)
            return
        where = np.array([self.layout.atoms.index(atom) for atom in layout.atoms], dtype=np.intp)
        for mine, theirs in zip(self._tally, other, strict=True):
            mine[where] = mine[where] + theirs


@lru_cache(maxsize=32)
def _nothing(num_classes: int, top_grid: BinGrid, class_grid: BinGrid | None) -> Tally:
    """The tally of no atoms, whose arrays hold no numbers, so that all statistics may begin with the same."""
    return Tally.zeros(0, num_classes, top_grid, class_grid)


@lru_cache(maxsize=32)
def _grids(bins: tuple[int, ...], thresholds: tuple[float, ...], classwise: bool) -> tuple[BinGrid, BinGrid | None]:
    """The bins of confidences and those of class probabilities; making them takes longer than a pass on a GPU."""
    class_grid = BinGrid.classwise(bins, thresholds) if classwise else None
    return BinGrid.top_label(bins, class_grid), class_grid
