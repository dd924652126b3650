"""The calibrator ``trust``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from segcal.calibrators.base import Calibrator
from segcal.calibrators.temperature import TemperatureScaling
from segcal.calibrators.trust import fit as trust_fit
from segcal.calibrators.trust.features import NAMES, SUMMARY, log_odds
from segcal.calibrators.trust.guard import FEWEST_IMAGES, fit_guard, known
from segcal.calibrators.trust.levelling import BELOW, level
from segcal.calibrators.trust.losers import LIMITS, TEMPERATURE_LIMITS, columns, explain, fit_losers, loser_scores
from segcal.calibrators.trust.network import SMALLEST_SCALE, TrustNetwork, held_out_loss, network_shapes, train
from segcal.calibrators.trust.rising import apply_rising, bin_centres
from segcal.calibrators.trust.slopes import COLUMNS, Slopes, fit_slopes, linear_correction
from segcal.calibrators.trust.tiles import Images, Tile, by_class, images_at_once, tiles
from segcal.cases import CaseSet
from segcal.cases.shares import added, in_shares
from segcal.errors import InputError, naming
from segcal.fitting.data import FitData, Fitted
from segcal.fitting.limits import BETA, COUNT, SHARE, Limits
from segcal.fitting.measured import compared
from segcal.kernels import recording, trust_maps
from segcal.kernels.grid import LIMIT
from segcal.scores import at_least_float32, keep_argmax, pool
from segcal.types import Case, Kind

__all__ = ["TrustCalibration"]

# The reach of a calibrator that has seen few images.
_ANY_IMAGE = 1e6


class TrustCalibration(Calibrator):
    """``trust``: the probability q that the prediction is right, and how the losers share the rest. Ours.

    Any distribution is ``p_k = q`` for the winner k and ``p_j = (1 - q) r_j`` for the losers. Its NLL is that of q
    ("is the prediction right?", on all voxels) plus that of r (on wrong voxels only), so each is fitted on its own.

    - q: the log-odds of ``ts`` through an isotonic map, plus w times a correction, through a second isotonic map that
      is fitted out of fold. The correction is a linear map of each predicted class, plus small networks that see how
      confident and how uniform the neighbourhood is. w is the one of lowest out-of-fold NLL among those whose per-image
      ECE is within a standard error of the lowest.
    - r: convex maps of the margins, one for each predicted class, exactly fitted with an out-of-fold penalty.
    - Where a loser would reach the winner, the losers are levelled: lowered just enough (``levelling``).
    - An image unlike those of the fit is given the probabilities of ``ts``, the more the stranger it is.

    Keeps the argmax; translation invariant. With fewer than 8 cases (or groups) w = 0. Members of an ensemble, where
    the cases have them, add their disagreement to what the networks see. If the NLL is not below that of ``ts``, the
    calibrator is ``ts``.

    Examples:
        >>> import segcal
        >>> cases = segcal.synthetic.scenes(8, size=(48, 64), plant=[segcal.synthetic.SpatialTemperature()])
        >>> calibrator = TrustCalibration().fit(cases)
        >>> z = cases[0].logits
        >>> bool((calibrator(z).argmax(1) == z.argmax(1)).all()), calibrator.trust_map(z).shape
        (True, torch.Size([1, 48, 64]))
    """

    id = "trust"
    title = "Trust"
    translation_invariant = True
    preserves = "argmax"
    spatial = True
    beta: Tensor
    first: Tensor  # isotonic map of the log-odds of ts, at the centres of fine bins
    second: Tensor  # isotonic map of the corrected log-odds
    share: Tensor  # w
    slopes: Tensor  # the linear correction of every winner
    temperature: Tensor  # b, of the losers
    losers: Tensor  # A and B, of every winner
    usual: Tensor  # the images of the fit, as the guard describes them
    whiten: Tensor
    reach: Tensor
    fitted: Tensor  # 1, or 0 for ts
    members: Tensor  # how many members the cases had; 0 for a single model
    pooled_probs: Tensor  # 1 if they were pooled as probabilities

    def __init__(self) -> None:
        super().__init__()
        double = torch.float64
        for name, value in (
            ("beta", 1.0), ("share", 0.0), ("temperature", 1.0), ("reach", _ANY_IMAGE), ("fitted", 0.0),
            ("members", 0.0), ("pooled_probs", 0.0),
        ):  # fmt: skip
            self.register_buffer(name, torch.tensor(value, dtype=double))
        for name in ("first", "second"):
            self.register_buffer(name, bin_centres())
        self.register_buffer("losers", torch.zeros(0, 0, 0, dtype=double))
        self.register_buffer("slopes", torch.zeros(0, COLUMNS, dtype=double))
        self.register_buffer("usual", torch.zeros(SUMMARY, dtype=double))
        self.register_buffer("whiten", torch.eye(SUMMARY, dtype=double))

    def allocate(self, num_classes: int) -> None:
        """The odds of ``ts``, and networks that change nothing."""
        self.losers = self.losers.new_zeros(num_classes, num_classes, columns(num_classes))
        self.slopes = self.slopes.new_zeros(num_classes, COLUMNS)
        self.network = TrustNetwork(len(NAMES) + 1, num_classes, trust_fit.FOLDS).requires_grad_(False)

    def shapes(self, num_classes: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the maps, the losers and the networks."""
        own = {name: tuple(buffer.shape) for name, buffer in self.named_buffers(recurse=False)}
        network = network_shapes(len(NAMES) + 1, num_classes, trust_fit.FOLDS)
        return (
            own
            | {"losers": (num_classes, num_classes, columns(num_classes)), "slopes": (num_classes, COLUMNS)}
            | {f"network.{name}": shape for name, shape in network.items()}
        )

    def upgraded(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Earlier versions had no linear corrections."""
        if "slopes" in tensors or "losers" not in tensors:
            return tensors
        return {**tensors, "slopes": self.slopes.new_zeros(*tensors["losers"].shape[:1], COLUMNS)}

    def limits(self) -> dict[str, Limits]:
        """Rising maps, shares, and bounds of the fit."""
        rising, whole = Limits(-2 * LIMIT, 2 * LIMIT, rising=True), Limits(-torch.inf, torch.inf)
        return {
            "beta": BETA, "first": rising, "second": rising, "share": SHARE, "temperature": TEMPERATURE_LIMITS,
            "losers": LIMITS, "whiten": whole, "reach": COUNT, "fitted": SHARE, "members": COUNT,
            "pooled_probs": SHARE, "network.scale": Limits(SMALLEST_SCALE / 2, torch.inf),
        }  # fmt: skip

    def _summary(self) -> str:
        return f"T = {1 / float(self.beta):.4g}, w = {float(self.share):g}, {self.size():,} numbers"

    # -- fitting -------------------------------------------------------------------------------------------------------

    def _fit(self, data: FitData) -> Fitted:
        cases, classes = data.cases, data.cases.num_classes
        start = TemperatureScaling().fit(cases, seed=data.seed)
        assert start.fit_report is not None
        before, by_temperature = start.fit_report.nll_before, start.fit_report.nll_after
        notes = list(start.fit_report.notes)
        self.beta.copy_(start.beta)
        folds = trust_fit.fold_of(cases, data.seed)
        seen = trust_fit.survey(cases, self.beta, folds, data.seed)
        self.first.copy_(seen.odds.rising())
        self._remember_images(cases, seen.summaries)
        slopes = Slopes(self.slopes, 0.0, True)
        if folds is None:
            groups = len(set(cases.case_groups.values()))
            few = f"{groups} cases or groups are fewer than {trust_fit.FEWEST_GROUPS}"
            notes.append(f"{few}: w = 0, so q depends on the confidence alone, and one temperature serves all losers")
        else:
            slopes, said = self._fit_correction(cases, seen, folds, data.seed)
            notes += said
        if not seen.mistakes:
            notes.append("no voxel is wrong: nothing is known about the losers")
        found = fit_losers(seen.wrong, 0 if folds is None else trust_fit.FOLDS)
        self.temperature.fill_(found.temperature)
        self.losers.copy_(torch.from_numpy(found.change))
        notes.append(
            f"losers: {len(seen.wrong):,} of {seen.mistakes:,} wrong voxels, penalty {found.strength:g}, NLL "
            f"{found.nll_before:.4f} to {found.nll_after:.4f}, gradient {found.certificate:.1e}{explain(classes)}"
        )
        self.fitted.fill_(1.0)
        after, levelled = self._measure(cases)
        notes.append(f"{levelled / seen.voxels:.2%} of the voxels are levelled")
        if after > by_temperature:
            self.fitted.fill_(0.0)
            notes.append(f"NLL {compared(after, by_temperature)} that of ts, which is kept")
            after = by_temperature
        certificate = max(found.certificate, slopes.certificate)
        return Fitted(before, after, found.converged and slopes.converged, certificate, 1, seen.voxels, notes)

    def _remember_images(self, cases: CaseSet, summaries: Tensor) -> None:
        """What the images of the fit look like, and what their logits were pooled from."""
        if cases.num_members is not None:
            self.members.fill_(cases.num_members)
            self.pooled_probs.fill_(float(cases[0].pooling == "probs"))
        if len(summaries) >= FEWEST_IMAGES:
            for own, found in zip((self.usual, self.whiten, self.reach), fit_guard(summaries), strict=True):
                own.copy_(found)

    def _fit_correction(
        self, cases: CaseSet, seen: trust_fit.Survey, folds: dict[str, int], seed: int
    ) -> tuple[Slopes, list[str]]:
        """Fit the linear maps, train the networks on top of them and choose w; returns the linear maps and notes."""
        device = seen.sample.features.device
        notes = [] if device.type == "cpu" else [f"trained on {device}"]
        start = apply_rising(self.first, seen.sample.offset)
        sample = seen.sample._replace(offset=start)
        slopes = fit_slopes(sample, cases.num_classes, trust_fit.FOLDS)
        self.slopes.copy_(slopes.values.mean(0))
        offsets = torch.stack(
            [start + linear_correction(own, sample.features, sample.winner, start) for own in slopes.values]
        )
        if cases.num_members is not None:
            without = sample._replace(features=sample.features[:, :-1])
            train(self.network, without, offsets, seed)
            alone = held_out_loss(self.network, without, offsets)
        train(self.network, sample, offsets, seed)
        if cases.num_members is not None:
            gained = compared(held_out_loss(self.network, sample, offsets), alone)
            notes.append(f"with the members' disagreement, out-of-fold NLL of right or wrong {gained} that without")
        judges = trust_fit.Judges(self.first, slopes.values, self.network)
        chosen, tried = trust_fit.choose_share(cases, self.beta, folds, judges)
        self.share.fill_(chosen.share)
        self.second.copy_(chosen.values)
        every = (f"w = {one.share:g} {one.nll:.5f} and {one.ece:.5f}" for one in tried)
        notes.append(
            f"out-of-fold NLL of right or wrong and ECE: {', '.join(every)}; w = {chosen.share:g} is taken, the lowest "
            "NLL with an ECE within a standard error of the lowest"
        )
        return slopes, notes

    def _measure(self, cases: CaseSet) -> tuple[float, int]:
        """The NLL, and how many voxels are levelled."""
        nll, count, levelled = in_shares(_level_sums, cases, self, merge=added)
        return nll / count, levelled

    # -- applying ------------------------------------------------------------------------------------------------------

    def _known(self, tile: Tile) -> Tensor:
        """How far each image is judged by more than ``ts`` ``(N,)``."""
        return known(tile.summary, self.usual, self.whiten, self.reach) * self.fitted.to(tile.summary)

    def _odds(self, tile: Tile, judged: Tensor) -> Tensor:
        """Log-odds of the winner ``(N, rows, ...)``."""
        features = tile.features
        if (kernels := trust_maps(features)) is not None:
            share = float(self.share)
            correction = self.network.correction(features, tile.winner) if share else None
            maps = self.first, self.second, self.slopes
            found: Tensor = kernels.odds(features, tile.winner, correction, maps, share, judged)
            return found
        plain = log_odds(features)
        start = apply_rising(self.first, plain)
        correction = self.network.correction(features, tile.winner).to(plain)
        correction = correction + linear_correction(self.slopes, features, tile.winner, start)
        corrected = start + self.share.to(plain) * correction
        odds = torch.where(self.share.to(plain) > 0, apply_rising(self.second, corrected), corrected)
        return torch.lerp(plain, odds, _by_image(judged, plain))

    def _loser_scores(self, logits: Tensor, winner: Tensor, judged: Tensor) -> Tensor:
        """Scores of the losers: those of the fitted map, nearer to those of ``ts`` the less is known of an image."""
        change = torch.cat((self.beta * self.losers[:, :, :-1], self.losers[:, :, -1:]), 2)
        if not recording() and len(torch.unique(judged)) == 1:  # scores are linear in what the map is made of
            own = judged[0].to(change)
            return loser_scores(logits, winner, self.beta * (1 + own * (self.temperature - 1)), own * change)
        scores = loser_scores(logits, winner, self.beta * self.temperature, change)
        plain = loser_scores(logits, winner, self.beta, change[:, :, :0])
        return torch.lerp(plain, scores, _by_image(judged, plain)).masked_fill_(scores == -torch.inf, -torch.inf)

    def _level(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Log-probabilities ``(N, C, rows, ...)`` in float32 or float64, and where they were levelled."""
        judged, exact = self._known(tile), at_least_float32(tile.logits)
        odds, scores = self._odds(tile, judged), self._loser_scores(exact, tile.winner, judged)
        if (kernels := trust_maps(scores)) is None:
            return level(odds, scores, tile.winner)
        scores = scores.contiguous()  # as the loops have it, which write in place
        return scores, kernels.level(scores, odds, tile.winner, BELOW)

    def _log_probs(self, logits: Tensor | Sequence[Tensor], image: Tensor | None) -> Tensor:
        """``forward``; of members' logits also their disagreement is seen, which counts as average without them."""
        members: Sequence[Tensor] = ()
        if isinstance(logits, list | tuple):
            members = logits
            if len(members) != int(self.members):
                expected = f"{int(self.members)}, as the calibrator was fitted to" if self.members else "one tensor"
                raise InputError(f"{len(members)} ensemble members", expected=expected)
            space: Kind = "probs" if self.pooled_probs else "logits"
            logits = pool((at_least_float32(z) for z in members), space).to(members[0].dtype)
        return self.of_pooled(self._checked(logits, image), members)

    @torch.no_grad()
    def of_pooled(self, logits: Tensor, members: Sequence[Tensor] = ()) -> Tensor:
        """``forward`` of pooled logits ``(N, C, *spatial)``, with those of the members, if there are any, beside."""
        flat = logits.ndim == 2
        whole, *others = (z.unsqueeze(-1) if flat else z for z in (logits, *members))
        if recording():  # of any number of images
            result = self._of_batch(whole, others)
        else:
            # as many images at once as fit a tile, for tiles of rows need a halo
            count = images_at_once(whole.shape, whole.device)
            batches = zip(*(torch.split(z, count) for z in (whole, *others)), strict=True)
            parts = [self._of_batch(own, others) for own, *others in batches]
            result = torch.cat(parts) if len(parts) > 1 else parts[0]
        return result.squeeze(-1) if flat else result

    def _of_batch(self, logits: Tensor, members: Sequence[Tensor]) -> Tensor:
        rows_of_members = (lambda rows: [z[:, :, rows] for z in members]) if members else None
        images = Images(tuple(logits.shape), logits.device, lambda rows: logits[:, :, rows], rows_of_members)
        parts = [self._finish(tile) for tile in tiles(images, self.beta)]
        return torch.cat(parts, 2) if len(parts) > 1 else parts[0]

    def _finish(self, tile: Tile) -> Tensor:
        log_probs, dtype = self._level(tile)[0], tile.logits.dtype
        if log_probs.dtype == dtype and trust_maps(log_probs) is not None:
            return log_probs  # the compiled loop leaves the winner strictly the largest
        return keep_argmax(log_probs.to(dtype), tile.winner)

    def _scores(self, logits: Tensor) -> Tensor:
        return self._log_probs(logits, None)

    def _pieces(self, case: Case) -> Iterator[tuple[slice, Tensor]]:
        with naming(case=case.id):
            for tile in tiles(Images.of_case(case), self.beta):
                yield tile.rows, self._finish(tile)

    def trust_map(self, logits: Tensor | Sequence[Tensor]) -> Tensor:
        """q, the probability that each prediction is right ``(N, *spatial)``, in float32 at least.

        ``logits`` are those that ``forward`` takes.
        """
        exact = at_least_float32(logits) if isinstance(logits, Tensor) else [at_least_float32(z) for z in logits]
        return self(exact).amax(1).exp()  # type: ignore[no-any-return]


def _level_sums(cases: CaseSet, calibrator: TrustCalibration) -> tuple[float, int, int]:
    """The sum of the NLL, how many voxels there are, and how many are levelled."""
    nll, count, levelled = 0.0, 0, 0
    for case, tile, seen in trust_fit.tiles_of(cases, calibrator.beta):
        log_probs, moved = calibrator._level(tile)
        nll -= float(by_class(log_probs)[seen.labels, seen.where].double().sum())
        count += len(seen.where)
        levelled += int(moved.flatten()[seen.where].sum())
        del case
    return nll, count, levelled


def _by_image(numbers: Tensor, like: Tensor) -> Tensor:
    """Numbers ``(N,)`` that broadcast against ``like (N, ...)``, in its type."""
    return numbers.to(like).view(-1, *[1] * (like.ndim - 1))
