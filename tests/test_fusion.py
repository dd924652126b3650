import pytest
import torch

from reference import fusion as reference
from segcal import fusion
from segcal.calibrators import TemperatureScaling
from segcal.errors import InputError
from segcal.synthetic import scene_of, scenes

SHAPES = [(5, 6, 7), (4, 3, 4, 5)]  # 2D, 3D


def drawn(shape, num_classes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    candidates = torch.randint(0, num_classes, shape, generator=generator)
    return candidates, torch.rand(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 2.0])
def test_joint_weights_are_those_of_the_inverse_matrix(shape, epsilon):
    _, probabilities = drawn(shape)
    weights = fusion.joint_weights(probabilities, epsilon=epsilon)
    for p, w in zip(probabilities.flatten(1).T.tolist(), weights.flatten(1).T.tolist(), strict=True):
        assert w == pytest.approx(reference.joint_weights(p, epsilon), rel=1e-9, abs=1e-12)


def test_joint_weights_do_not_blow_up_where_all_are_sure():
    for p in (torch.ones(3, 2), torch.zeros(3, 2)):
        assert torch.allclose(fusion.joint_weights(p, epsilon=1e-6), torch.full((3, 2), 1 / 3))


@pytest.mark.parametrize("shape", SHAPES)
def test_votes_are_those_of_a_loop(shape):
    candidates, probabilities = drawn(shape)
    found = {
        "plurality": fusion.plurality(candidates, 4),
        "majority": fusion.majority(candidates, 4),
        "weighted": fusion.weighted(candidates, probabilities, 4),
        "joint": fusion.joint(candidates, probabilities, 4),
    }
    for labels in found.values():
        assert labels.shape == shape[1:]
        assert labels.dtype == torch.int64
    flat = {name: labels.flatten().tolist() for name, labels in found.items()}
    for v, (own, p) in enumerate(
        zip(candidates.flatten(1).T.tolist(), probabilities.flatten(1).T.tolist(), strict=True)
    ):
        equal = reference.vote(own, [1.0] * len(own), 4)
        assert flat["plurality"][v] == equal.index(max(equal))
        assert flat["majority"][v] == (equal.index(max(equal)) if max(equal) > len(own) / 2 else 255)
        by_trust = reference.vote(own, p, 4)
        assert flat["weighted"][v] == by_trust.index(max(by_trust))
        together = reference.vote(own, reference.joint_weights(p, 0.1), 4)
        assert flat["joint"][v] == together.index(max(together))


def test_chunks_do_not_matter(monkeypatch):
    candidates, probabilities = drawn((5, 20, 30))
    whole = fusion.joint(candidates, probabilities, 4)
    monkeypatch.setattr(fusion, "_CHUNK_VALUES", 37)
    assert torch.equal(fusion.joint(candidates, probabilities, 4), whole)


def test_equal_trust_is_plurality():
    candidates, _ = drawn((5, 20, 30))
    trust = torch.full(candidates.shape, 0.7)
    assert torch.equal(fusion.weighted(candidates, trust, 4), fusion.plurality(candidates, 4))
    assert torch.equal(fusion.joint(candidates, trust, 4), fusion.plurality(candidates, 4))


def test_no_fusion_beats_the_bounds():
    candidates, probabilities = drawn((5, 40, 50))
    labels = drawn((1, 40, 50), seed=1)[0][0]

    def accuracy(fused):
        return float((fused == labels).double().mean())

    best = accuracy(fusion.best_fusion(candidates, labels, 4))
    assert best == pytest.approx(float((candidates == labels).any(0).double().mean()))
    known = accuracy(fusion.joint(candidates, fusion.best_calibration(candidates, labels, 4), 4))
    assert accuracy(fusion.joint(candidates, probabilities, 4)) < known <= best


def atlases(count, sharpness, noise, seed):
    """Scores ``(M, count, C, *spatial)`` of as many atlases as there are noise levels, and the labels."""
    sets = [list(scenes(count, size=(48, 64), seed=seed, members=len(noise), member_noise=level)) for level in noise]
    labels = torch.cat([case.labels for case in sets[0]])
    scores = [
        torch.stack([scale * scene_of(own[k]).members[i] for k in range(count)])
        for i, (own, scale) in enumerate(zip(sets, sharpness, strict=True))
    ]
    return torch.stack(scores), labels


@pytest.mark.parametrize("seed", [0, 1])
def test_calibrated_candidates_fuse_better(seed):
    """The recipe of docs/fusion.md: five atlases, the noisier the more overconfident."""
    scores, labels = atlases(6, sharpness=(1, 2, 4, 6, 8), noise=(1, 2, 3, 4, 5), seed=seed)
    calibrators = [TemperatureScaling().fit(own[:3], labels[:3]) for own in scores]
    scores, labels = scores[:, 3:], labels[3:]
    candidates = scores.argmax(2)
    raw = scores.softmax(2).amax(2)
    calibrated = torch.stack([c.predict_proba(own).amax(1) for c, own in zip(calibrators, scores, strict=True)])

    def accuracy(fused):
        return float((fused == labels).double().mean())

    before = accuracy(fusion.joint(candidates, raw, 6))
    after = accuracy(fusion.joint(candidates, calibrated, 6))
    bound = accuracy(fusion.joint(candidates, fusion.best_calibration(candidates, labels, 6), 6))
    assert accuracy(fusion.plurality(candidates, 6)) < after
    assert accuracy(fusion.weighted(candidates, raw, 6)) < accuracy(fusion.weighted(candidates, calibrated, 6))
    assert before + 0.005 < after < bound <= accuracy(fusion.best_fusion(candidates, labels, 6))


def test_what_does_not_fit_is_refused():
    candidates, probabilities = drawn((3, 4, 5))
    with pytest.raises(InputError, match="expected 0..2"):
        fusion.plurality(torch.full((3, 4), 3), 3)
    with pytest.raises(InputError, match="integers"):
        fusion.majority(probabilities, 4)
    with pytest.raises(InputError, match="probabilities have shape"):
        fusion.weighted(candidates, probabilities[:2], 4)
    with pytest.raises(InputError, match=r"values in \[0, 1\]"):
        fusion.joint(candidates, 2 + probabilities, 4)
    with pytest.raises(InputError, match="probabilities lie between nan"):
        fusion.joint(candidates, probabilities * torch.nan, 4)
    with pytest.raises(InputError, match="epsilon is 0"):
        fusion.joint(candidates, probabilities, 4, epsilon=0)
    with pytest.raises(InputError, match="labels have shape"):
        fusion.best_fusion(candidates, torch.zeros(4, 4, dtype=torch.int64), 4)
