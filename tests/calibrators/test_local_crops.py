"""The crops that local temperatures are trained on, and what is summed over them, against plain loops."""

import math

import pytest
import torch
import torch.nn.functional as F

from calibrators.local_cases import Tensors, case_set, random_logits
from segcal.calibrators.local_crops import (
    IGNORED,
    Crops,
    CropSource,
    _boxes,
    _chances,
    _doubts,
    _window_sums,
    crop_sides,
)
from segcal.calibrators.local_network import TemperatureTree
from segcal.calibrators.local_training import _image_means, _Moments, _nll
from segcal.errors import InputError
from segcal.fitting.data import FitData, valid_rows

SIDES = (8, 16)


def cases(count=3, size=(21, 40), batch=1, seed=0, labelled=1.0):
    sources = []
    for index in range(count):
        z = random_logits(batch, 3, *size, seed=seed + index)
        y = torch.randint(0, 3, (batch, *size), generator=torch.Generator().manual_seed(seed + index))
        y[torch.rand(y.shape, generator=torch.Generator().manual_seed(9)) > labelled] = 255
        y[:, 5:8, 3:30] = 255
        sources.append(Tensors(f"{index}", z, y, None))
    return case_set(*sources)


def source(data, voxels="sample", per_image=False, share=1.0, seed=0):
    return CropSource(FitData(data, None, voxels, seed), 1.0, SIDES, TemperatureTree(3), per_image, share)


def valid_voxels(data):
    return sum(int((data[index].labels != 255).sum()) for index in range(len(data)))


@pytest.mark.parametrize("voxels", ["sample", "all"])
def test_crops_hold_every_voxel_once_with_its_own_scores(voxels):
    data = cases()
    found = source(data, voxels)
    assert found.voxels == valid_voxels(data)
    assert [len(part.owner) for part in found.parts()] == ([27] if voxels == "sample" else [9, 9, 9])
    seen = 0
    for crops in found.batches():
        assert crops.scores.shape[2:] == (SIDES[0] + 8, SIDES[1] + 8)
        assert len(crops.owner) <= 8
        seen += int((crops.labels != IGNORED).sum())
        assert int(crops.inside[:, 0, 0].sum()) == len(crops.owner)
    assert seen == found.voxels
    first = next(iter(found.batches()))
    assert torch.equal(first.scores[0, :, 4:12, 4:20], data[0].logits[0, :, :8, :16])
    assert torch.equal(first.scores[0, :, 3, 4:20], data[0].logits[0, :, 1, :16])  # mirrored at the border
    assert torch.equal(first.labels[0], data[0].labels[0, :8, :16].where(data[0].labels[0, :8, :16] != 255, IGNORED))
    assert first.inside[2].sum() == 8 * 8  # the last columns: 40 is two and a half windows


def test_windows_cover_the_space_once_and_know_their_labels():
    data = cases(1, size=(21, 40))
    boxes = _boxes((21, 40), SIDES)
    covered = torch.zeros(21 + 3, 40 + 8, dtype=torch.long)
    for (top, bottom), (left, right) in boxes:
        covered[top:bottom, left:right] += 1
    assert (covered == 1).all()
    case = data[0]
    case.source._all["labels"][:, :16, :16] = 255
    labels = F.pad(case.labels, (0, 8, 0, 3), value=255)[0]
    expected = [int((labels[top:bottom, left:right] != 255).sum()) for (top, bottom), (left, right) in boxes]
    assert _window_sums(case, SIDES, valid_rows(case)).flatten().tolist() == expected
    assert 0 in expected
    assert len(_boxes((4, 21, 40), SIDES)) == 4 * len(boxes)  # slices of a volume


def test_sums_over_windows_of_a_volume_are_those_of_plain_loops():
    values = torch.rand(2, 5, 21, 40, generator=torch.Generator().manual_seed(0)).double()
    case = Tensors("volume", torch.zeros(2, 3, 5, 21, 40), torch.zeros(2, 5, 21, 40), None)
    (case,) = case_set(case)
    for sides in ((2, 8, 16), (8, 16)):
        found = _window_sums(case, sides, [(slice(0, 3), values[:, :3]), (slice(3, 5), values[:, 3:])])
        plain = [values[(slice(None), *(slice(*one) for one in box))].sum() for box in _boxes((5, 21, 40), sides)]
        torch.testing.assert_close(found.flatten(), torch.stack(plain))


def test_two_cases_of_which_all_voxels_count_are_read_whole():
    data = cases(2)
    assert source(data, share=1e-4).voxels < valid_voxels(data)
    assert source(data, "all", share=1e-4).voxels == valid_voxels(data)


def test_an_image_with_one_temperature_has_32_crops_at_most():
    data = cases(2, size=(64, 160))  # 80 windows each
    for per_image, count in ((True, 32), (False, 80)):
        (part,) = source(data, per_image=per_image).parts()
        assert [int((part.owner == image).sum()) for image in (0, 1)] == [count, count]


def test_batches_of_images_end_once_they_are_large_enough():
    found = source(cases(5), per_image=True)  # 9 windows each, and a batch is 8
    assert [crops.owner.unique().tolist() for crops in found.batches()] == [[0], [1], [2], [3], [4]]


def test_batches_hold_eight_crops_and_the_last_one_the_rest():
    assert [len(crops.owner) for crops in source(cases()).batches()] == [8, 8, 8, 3]


def test_windows_of_one_labelled_voxel_each_are_drawn_from_like_others():
    labels = torch.full((1, 16, 32), 255)
    labels[:, 3::8, 5::16] = 1  # of four windows
    data = case_set(Tensors("sparse", random_logits(1, 3, 16, 32), labels, None))
    (part,) = source(data, share=1e-4).parts()
    assert len(part.owner) == 1
    (part,) = source(data).parts()
    assert len(part.owner) == 4


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_doubts_are_what_the_label_lacks_in_every_image(batch):
    (case,) = cases(1, batch=batch)
    found = torch.cat([doubts for _, doubts in _doubts(case, 0.7)], 1)
    valid = case.labels != 255
    p = (0.7 * case.logits).softmax(1).gather(1, case.labels.where(valid, 0)[:, None])[:, 0]
    torch.testing.assert_close(found, torch.where(valid, 1 - p, 0.0))


@pytest.mark.parametrize("count", range(1, 10))
def test_chances_are_in_proportion_but_for_windows_that_are_certain(count):
    random = torch.Generator().manual_seed(count)
    labelled, doubts = (torch.rand(12, generator=random, dtype=torch.float64) ** 4 for _ in range(2))
    chances = _chances(labelled, doubts, count)
    assert float(chances.sum()) == pytest.approx(count)
    assert float(chances.max()) <= 1
    ratio = chances / (labelled / labelled.sum() + doubts / doubts.sum())
    free = chances < 1
    assert float(ratio[free].max()) == pytest.approx(float(ratio[free].min()))
    assert bool((ratio[~free] <= ratio[free].max()).all())  # a certain window would have had more


def test_few_crops_are_used_again_until_there_were_sixteen_batches():
    found = source(cases(1, size=(8, 16)))  # one window
    assert len(list(found.batches(torch.Generator()))) == 1
    assert len(list(found.epoch(torch.Generator()))) == 16


def test_sides_are_those_of_the_largest_case():
    both = case_set(*(Tensors(str(n), torch.zeros(1, 3, n, 90), torch.zeros(1, n, 90), None) for n in (5, 30)))
    assert crop_sides(both, 2) == (30, 64)
    volume = case_set(Tensors("0", torch.zeros(1, 3, 20, 90, 7), torch.zeros(1, 20, 90, 7), None))
    assert crop_sides(volume, 3) == (16, 32, 7)
    assert crop_sides(volume, 2) == (64, 7)


def test_few_crops_are_a_sample_of_each_case():
    data = cases()
    few = source(data, share=1e-4)
    assert few.per_case == 1
    (part,) = few.parts()
    assert part.owner.tolist() == [0, 1, 2]
    one = source(cases(1, batch=2), "all")  # a single case is sampled also then
    (part,) = one.parts()
    assert part.owner.unique().tolist() == [0, 1]


def test_batches_for_training_are_shuffled_and_all_have_labels():
    data = cases(labelled=0.02)
    found = source(data)
    (part,) = found.parts()
    generator = torch.Generator().manual_seed(0)
    size = max(1, min(8, len(part.owner) // 16))
    batches = list(found.batches(generator))
    assert all(len(crops.owner) == size for crops in batches)
    assert all((crops.labels != IGNORED).any() for crops in batches)
    assert sum(int((crops.labels != IGNORED).sum()) for crops in batches) == found.voxels
    order = torch.cat([crops.owner for crops in batches])
    assert order.tolist() != sorted(order.tolist())
    assert len(list(found.epoch(generator))) >= 16


def test_the_crops_of_an_image_stay_together():
    found = source(cases(), per_image=True)
    for batches in (found.batches(), found.batches(torch.Generator().manual_seed(1))):
        owners = [set(crops.owner.tolist()) for crops in batches]
        assert sorted(owner for own in owners for owner in own) == [0, 1, 2]


@pytest.mark.parametrize(
    ("batch", "per_image", "name"), [(6, True, "images"), (6, False, "images"), (1, False, "windows")]
)
def test_a_fifth_is_held_out(batch, per_image, name):
    found = source(cases(1, batch=batch), per_image=per_image)
    train, held_out, note = found.divided()
    assert name in note
    assert train.voxels + held_out.voxels == found.voxels
    (mine,), (theirs,) = train.parts(), held_out.parts()
    units = (mine.owner.unique(), theirs.owner.unique()) if batch > 1 else (mine.owner, theirs.owner)
    assert len(units[1]) == math.ceil((len(units[0]) + len(units[1])) / 5)
    if batch > 1:
        assert not set(units[0].tolist()) & set(units[1].tolist())


def test_one_image_with_one_temperature_is_not_divided():
    found = source(cases(1), per_image=True)
    train, held_out, note = found.divided()
    assert train is held_out is found
    assert "validated on its training voxels" in note


def test_nothing_that_counts_is_refused():
    data = cases(1)
    data[0].source._all["labels"].fill_(255)
    with pytest.raises(InputError):
        source(data)


def crops_of(scores, labels, owner, inside=None):
    inside = torch.ones(labels.shape, dtype=torch.bool) if inside is None else inside
    return Crops(scores, None, labels, inside, torch.tensor(owner), torch.ones(len(owner), dtype=torch.float64))


@pytest.mark.parametrize("field", [False, True])
def test_the_nll_of_crops_is_that_of_their_middle(field):
    z = random_logits(2, 3, 4 + 8, 5 + 8)
    labels = torch.randint(0, 3, (2, 4, 5), generator=torch.Generator().manual_seed(0))
    labels[0, 1] = IGNORED
    z[0, :, 4 + 1] = torch.nan  # ignored voxels may hold anything
    beta = 0.5 + torch.rand(2, 4, 5) if field else torch.tensor(0.7)
    expected = 0.0
    for n, row, column in (labels != IGNORED).nonzero().tolist():
        scores = z[n, :, 4 + row, 4 + column].double() * float(beta[n, row, column] if field else beta)
        expected += float(scores.logsumexp(0) - scores[labels[n, row, column]])
    assert float(_nll(crops_of(z, labels, [0, 1]), beta)) == pytest.approx(expected, rel=1e-5)


def test_means_of_images_are_over_their_own_voxels():
    temperatures = 1 + torch.rand(4, 3, 5)
    inside = torch.rand(4, 3, 5) < 0.7
    owner = [7, 2, 7, 5]
    found = _image_means(temperatures, crops_of(torch.zeros(0), torch.zeros(4, 3, 5), owner, inside))
    assert found.shape == temperatures.shape
    for image in (2, 5, 7):
        own = torch.tensor([number == image for number in owner])
        assert torch.allclose(found[own], temperatures[own][inside[own]].mean())


def test_in_the_mean_of_an_image_a_crop_counts_as_often_as_the_windows_it_stands_for():
    temperatures, inside = 1 + torch.rand(3, 2, 5), torch.rand(3, 2, 5) < 0.7
    crops = crops_of(torch.zeros(0), torch.zeros(3, 2, 5), [0, 0, 1], inside)
    found = _image_means(temperatures, crops._replace(weight=torch.tensor([1.0, 3.0, 2.5]).double()))
    often = [temperatures[0][inside[0]], *[temperatures[1][inside[1]]] * 3]
    assert torch.allclose(found[:2], torch.cat(often).mean())
    assert torch.allclose(found[2], temperatures[2][inside[2]].mean())


def test_moments_are_those_of_all_finite_voxels():
    parts = [1e4 + 3 * random_logits(2, 3, 6, 7, seed=seed) for seed in range(3)]
    parts[1][0, 1, 2, 3] = torch.inf
    moments = _Moments()
    for part in parts:
        moments.add(part)
    flat = torch.cat([part.movedim(1, 0).flatten(1) for part in parts], 1).double()
    flat = flat[:, flat.isfinite().all(0)]
    mean, scale = moments.result()
    assert moments.count == flat.shape[1] == 3 * 2 * 6 * 7 - 1
    torch.testing.assert_close(mean, flat.mean(1).float())
    torch.testing.assert_close(scale, flat.std(1, correction=0).float())
