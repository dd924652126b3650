"""How ``trust`` is fitted: one pass that draws samples, networks by folds, then passes that choose w."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.calibrators.trust.features import log_odds
from segcal.calibrators.trust.losers import WrongVoxels
from segcal.calibrators.trust.network import Sample, TrustNetwork
from segcal.calibrators.trust.rising import OddsHistogram, apply_rising
from segcal.calibrators.trust.slopes import linear_correction
from segcal.calibrators.trust.tiles import Images, Tile, by_class, tiles
from segcal.cases import CaseSet
from segcal.cases.shares import added, in_shares
from segcal.errors import InputError, naming
from segcal.fitting.data import case_seed, check_voxels
from segcal.fitting.first_pass import check_possible
from segcal.parallel.memory import give_back
from segcal.types import Case, FloatArray

#: Folds of cases, and the number of groups below which there are none.
FOLDS, FEWEST_GROUPS = 4, 8
#: The weights w of the network that are tried.
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
# Voxels that the networks are trained on, and logits of wrong voxels that the losers are fitted to, at most.
_TRAINED, _WRONG_VALUES = 300_000, 2**21
# Added to 1 - p1 when voxels are drawn in proportion to it, so that confident ones are seen too.
_CONFIDENT = 0.02
# Bins of the ECE by which w is chosen.
_BINS = 15


class Valid(NamedTuple):
    """The valid voxels of a tile: ``where (n,)`` they are, their labels, winner and temperature-scaled log-odds."""

    where: Tensor
    labels: Tensor
    winner: Tensor
    log_odds: Tensor

    @property
    def right(self) -> Tensor:
        """Whether the prediction is ``(n,)``."""
        return self.winner == self.labels


def fold_of(cases: CaseSet, seed: int) -> dict[str, int] | None:
    """The fold of every case by its id, with groups kept together; None where there are too few groups."""
    if len(set(cases.case_groups.values())) < FEWEST_GROUPS:
        return None
    folds = cases.folds(FOLDS, seed=seed)
    return {name: number for number, (_, held_out) in enumerate(folds) for name in held_out.ids}


def tiles_of(cases: CaseSet, beta: Tensor) -> Iterator[tuple[Case, Tile, Valid]]:
    """Every case, and its tiles with their valid voxels; raises where labels or logits are invalid."""
    for case in cases:
        with naming(case=case.id):
            for tile in tiles(Images.of_case(case), beta):
                yield case, tile, _valid(case, tile)
                if tile.rows.stop < case.shape[2]:
                    give_back()
        del case


def _valid(case: Case, tile: Tile) -> Valid:
    chunk = case.chunk(tile.rows)
    check_possible(chunk)
    where = chunk.valid.flatten().nonzero().squeeze(1)
    labels = chunk.labels.flatten()[where].long()
    if len(labels) and not bool(((labels >= 0) & (labels < case.shape[1])).all()):
        raise InputError("labels are out of range", expected=f"0..{case.shape[1] - 1}")
    return Valid(where, labels, tile.winner.flatten()[where], log_odds(tile.features[:, :1]).flatten()[where])


class Survey(NamedTuple):
    """What the first pass finds.

    Attributes:
        odds: Histogram of the temperature-scaled log-odds of the winner.
        sample: Voxels to train on; their ``offset`` are the same log-odds.
        wrong: A sample of wrong voxels.
        summaries: What the guard sees of every image ``(images, 6)``.
        voxels, mistakes: How many are valid, and wrong.
    """

    odds: OddsHistogram
    sample: Sample
    wrong: WrongVoxels
    summaries: Tensor
    voxels: int
    mistakes: int


class _Seen(NamedTuple):
    """What the first pass finds in some cases; voxels and summaries by case."""

    odds: OddsHistogram
    samples: dict[str, list[tuple[Tensor, ...]]]
    wrong: dict[str, list[tuple[Tensor, ...]]]
    summaries: dict[str, Tensor]
    voxels: int
    mistakes: int


def survey(cases: CaseSet, beta: Tensor, folds: dict[str, int] | None, seed: int) -> Survey:
    """One pass over all cases."""
    found = in_shares(_survey, cases, beta, folds, seed, len(cases), merge=added)
    check_voxels(found.voxels)
    sample = Sample(*_columns(cases, found.samples))
    logits, labels, own_folds, weights = _columns(cases, found.wrong)
    mistakes = WrongVoxels(logits, labels, own_folds.numpy(), weights.numpy())
    summaries = torch.cat([found.summaries[name] for name in cases.ids]).cpu()
    return Survey(found.odds, sample, mistakes, summaries, found.voxels, found.mistakes)


def _columns(cases: CaseSet, rows: dict[str, list[tuple[Tensor, ...]]]) -> Iterator[Tensor]:
    """What was drawn, in the order of the cases."""
    parts = [part for name in cases.ids for part in rows.get(name, ())]
    return (torch.cat(column) for column in zip(*parts, strict=True))


def _survey(cases: CaseSet, beta: Tensor, folds: dict[str, int] | None, seed: int, count: int) -> _Seen:
    """The first pass over some of ``count`` cases."""
    odds, voxels, mistakes = OddsHistogram(), 0, 0
    samples: dict[str, list[tuple[Tensor, ...]]] = {}
    wrong: dict[str, list[tuple[Tensor, ...]]] = {}
    summaries: dict[str, Tensor] = {}
    most_wrong = _WRONG_VALUES // cases.num_classes
    for case, tile, seen in tiles_of(cases, beta):
        if case.id not in summaries:
            random = np.random.default_rng(case_seed(seed, case.id))
        summaries[case.id] = tile.summary
        if not len(seen.where):
            continue
        right, part = seen.right, tile.winner.numel() / np.prod((case.shape[0], *case.shape[2:])) / count
        odds.add(seen.log_odds, right)
        fold = 0 if folds is None else folds[case.id]
        chosen, weights = _draw(seen.log_odds, _TRAINED * part, random)
        samples.setdefault(case.id, []).append((
            by_class(tile.features)[:, seen.where[chosen]].T.float(), seen.winner[chosen],
            seen.log_odds[chosen].float(), right[chosen].float(), weights, torch.full_like(chosen, fold),
        ))  # fmt: skip
        mistaken = (~right).nonzero().squeeze(1)
        order = torch.from_numpy(random.permutation(len(mistaken))[: int(most_wrong * part) + 1])
        kept = mistaken[order.to(mistaken.device)]
        wrong.setdefault(case.id, []).append((
            float(beta) * by_class(tile.logits)[:, seen.where[kept]].T.float(), seen.labels[kept],
            torch.full((len(kept),), fold), torch.full((len(kept),), len(mistaken) / max(1, len(kept))).double(),
        ))  # fmt: skip
        voxels, mistakes = voxels + len(right), mistakes + len(mistaken)
    return _Seen(odds, samples, wrong, summaries, voxels, mistakes)


def _draw(log_odds: Tensor, count: float, random: np.random.Generator) -> tuple[Tensor, Tensor]:
    """About ``count`` voxels, doubtful ones more often, and how many voxels each stands for."""
    doubt = _CONFIDENT + torch.sigmoid(-log_odds).double().cpu().numpy()
    chance = np.minimum(1, doubt * (count / doubt.sum()))
    chosen = np.flatnonzero(random.random(len(chance)) < chance)
    weights = torch.from_numpy(1 / chance[chosen]).float()
    return torch.from_numpy(chosen).to(log_odds.device), weights.to(log_odds.device)


class Choice(NamedTuple):
    """What was found of one w, out of fold: NLL of right or wrong, mean per-image ECE, and the second map.

    ``excess`` is by how much the mean ECE exceeds the lowest one, in standard errors of the paired difference.
    """

    share: float
    nll: float
    ece: float
    excess: float
    values: Tensor


class Judges(NamedTuple):
    """The first map, and for every fold linear maps ``(F, C, COLUMNS)`` and a network that did not see its cases."""

    first: Tensor
    slopes: Tensor
    network: TrustNetwork

    def mixtures(self, tile: Tile, seen: Valid, fold: int) -> Iterator[Tensor]:
        """Log-odds ``(n,)`` of the valid voxels for every w."""
        start = apply_rising(self.first, seen.log_odds.float())
        features = by_class(tile.features)[:, seen.where].T
        correction = self.network.correction(tile.features, tile.winner, fold).flatten()[seen.where]
        correction = correction + linear_correction(self.slopes[fold], features, seen.winner, start)
        return (start + share * correction for share in SHARES)


def choose_share(cases: CaseSet, beta: Tensor, folds: dict[str, int], judges: Judges) -> tuple[Choice, list[Choice]]:
    """The w of the lowest NLL among those whose mean ECE is within a paired standard error of the lowest one."""
    histograms = in_shares(_odds_of_shares, cases, beta, folds, judges, merge=added)
    maps = [histogram.rising() for histogram in histograms]
    nll, tables = in_shares(_bins_of_shares, cases, beta, folds, judges, maps, merge=added)
    return _chosen(nll, np.stack([tables[name] for name in cases.ids if tables[name][0, 0].any()]), maps)


def _odds_of_shares(cases: CaseSet, beta: Tensor, folds: dict[str, int], judges: Judges) -> tuple[OddsHistogram, ...]:
    """A histogram of the log-odds for every w."""
    histograms = tuple(OddsHistogram() for _ in SHARES)
    for case, tile, seen in tiles_of(cases, beta):
        for histogram, odds in zip(histograms, judges.mixtures(tile, seen, folds[case.id]), strict=True):
            histogram.add(odds, seen.right)
    return histograms


def _bins_of_shares(
    cases: CaseSet, beta: Tensor, folds: dict[str, int], judges: Judges, maps: list[Tensor]
) -> tuple[FloatArray, dict[str, FloatArray]]:
    """The NLL of every w, and the bins of every case."""
    nll, tables = np.zeros(len(SHARES)), {name: np.zeros((len(SHARES), 3, _BINS)) for name in cases.ids}
    for case, tile, seen in tiles_of(cases, beta):
        for place, odds in enumerate(judges.mixtures(tile, seen, folds[case.id])):
            loss, table = _binned(apply_rising(maps[place], odds), seen.right)
            nll[place] += loss
            tables[case.id][place] += table
    return nll, tables


def _binned(log_odds: Tensor, right: Tensor) -> tuple[float, NDArray[np.float64]]:
    """The NLL of right or wrong, and by bins of q: how many, the sum of q, how many are right ``(3, bins)``."""
    signed = torch.where(right, log_odds, -log_odds).double()
    q = torch.sigmoid(log_odds.double())
    bins = (torch.ceil(q * _BINS).long() - 1).clamp(0, _BINS - 1)
    nll, columns = -float(torch.nn.functional.logsigmoid(signed).sum()), (torch.ones_like(q), q, right.double())
    if q.is_cuda:  # where a histogram of real numbers would be summed in any order
        one_hot = torch.nn.functional.one_hot(bins, _BINS).double()
        return nll, (torch.stack(columns) @ one_hot).cpu().numpy()
    return nll, np.stack([torch.bincount(bins, own, _BINS).numpy() for own in columns])


def _chosen(nll: FloatArray, tables: FloatArray, maps: list[Tensor]) -> tuple[Choice, list[Choice]]:
    """From the NLL of every w, and tables ``(images, w, 3, bins)``."""
    counts = tables[:, 0, 0].sum(1)
    eces = np.abs(tables[:, :, 1] - tables[:, :, 2]).sum(2) / counts[:, None]
    beyond = eces - eces[:, [int(eces.mean(0).argmin())]]
    error = beyond.std(0, ddof=1) / np.sqrt(len(eces)) if len(eces) > 1 else np.zeros(len(SHARES))
    excess = beyond.mean(0) / np.maximum(error, np.finfo(float).tiny)
    found = [Choice(*row) for row in zip(SHARES, nll / counts.sum(), eces.mean(0), excess, maps, strict=True)]
    return min((choice for choice in found if choice.excess <= 1), key=lambda choice: choice.nll), found
