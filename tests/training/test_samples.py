from dataclasses import replace

import numpy as np
import pytest
import torch

from segcal.training.data import hold, open_dataset
from segcal.training.samples import Draw, Samples, Schedule, augmented, resized, rotate
from training.scans import small, write_scans


def samples(root, views=1, **options):
    config = small(root, seed=3, **{"augment": (), **options})
    return Samples(list(open_dataset(config).scans.values()), config, 255, views)


def test_slices_of_volumes_are_the_volume(tmp_path):
    write_scans(tmp_path / "d", 2, (5, 8, 9), splits=False)
    found = samples(tmp_path / "d")
    assert len(found) == 10
    labels = np.load(tmp_path / "d" / "labels" / "volume-001.npy")
    image = np.load(tmp_path / "d" / "images" / "volume-001.npy")[0]
    assert torch.equal(found[[7]].labels[0], torch.from_numpy(labels[2].astype(np.int64)))
    expected = (image[2] - image.mean(dtype=np.float64)) / image.std(dtype=np.float64)
    torch.testing.assert_close(found[[7]].images[0, 0], torch.from_numpy(expected).float())


def test_augmentation_moves_image_and_labels_together(tmp_path):
    """An image that is its labels still is after augmentation, but where rotation interpolates between labels."""
    write_scans(tmp_path / "d", 3, (32, 40), splits=False)
    quadrants = np.kron([[0, 1], [2, 0]], np.ones((16, 20)))
    for path in (tmp_path / "d" / "labels").iterdir():
        np.save(path, quadrants.astype(np.uint8))
        np.save(tmp_path / "d" / "images" / path.name, quadrants.astype(np.float32))
    plain, moved = (samples(tmp_path / "d", augment=a, crop=(24, 36)) for a in ((), ("flip", "rotate")))
    changed = 0
    for epoch in range(6):
        plain.epoch = moved.epoch = epoch
        for index in range(3):
            image, labels = moved[[index]].images[0, 0], moved[[index]].labels[0]
            scan = moved.scans[index]
            values = image * scan.std[0] + scan.mean[0]
            wrong = (values - labels).abs()[labels != 255] > 0.05
            assert wrong.float().mean() < 0.2  # borders, blurred
            changed += not torch.equal(labels, plain[[index]].labels[0])
    assert changed > 9


def test_mirrored_images_keep_their_rows(tmp_path):
    write_scans(tmp_path / "d", 8, (16, 20), splits=False)
    plain, moved = (samples(tmp_path / "d", augment=a)[range(8)] for a in ((), ("mirror",)))
    mirrored = [torch.equal(new, old.flip(-1)) for new, old in zip(moved.images, plain.images, strict=True)]
    same = [torch.equal(new, old) for new, old in zip(moved.images, plain.images, strict=True)]
    assert any(mirrored)
    assert any(same)
    assert all(a or b for a, b in zip(mirrored, same, strict=True))


def test_contrast_changes_values_of_half_of_the_samples_and_no_labels(tmp_path):
    write_scans(tmp_path / "d", 24, (16, 20), splits=False)
    plain, moved = (samples(tmp_path / "d", augment=a)[range(24)] for a in ((), ("contrast",)))
    assert torch.equal(moved.labels, plain.labels)
    gain = moved.images.double().std((2, 3)) / plain.images.double().std((2, 3))
    shift = moved.images.double().mean((2, 3)) - gain * plain.images.double().mean((2, 3))
    expected = gain[..., None, None] * plain.images + shift[..., None, None]
    torch.testing.assert_close(moved.images.double(), expected, atol=1e-5, rtol=0)
    changed = (gain - 1).abs() + shift.abs() > 1e-6  # (24, channels)
    assert torch.equal(changed.any(1), changed.all(1))
    assert 5 < changed.any(1).sum() < 19  # 24 fair coins
    assert 2 / 3 < gain.min() < 0.8 < 1.2 < gain.max() < 1.5
    assert -0.5 < shift.min() < -0.2 < 0.2 < shift.max() < 0.5


def test_each_channel_has_a_contrast_of_its_own():
    images, labels = torch.ones(2, 3, 4, 5), torch.zeros(2, 4, 5, dtype=torch.long)
    changes = ((1.5, 0.1), (1.0, -0.2), (0.7, 0.0))
    draws = [Draw(None, (4, 5), (), None, own, ()) for own in (changes, None)]
    found = augmented(images, labels, draws, 255)[0][0]
    torch.testing.assert_close(found[0, :, 1, 2], torch.tensor([1.6, 0.8, 0.7]))
    assert torch.equal(found[1], images[1])


@pytest.mark.parametrize("size", [(20, 24), (6, 20, 24)])
def test_scaled_samples_have_the_size_of_the_crop_and_labels_move_with_the_image(tmp_path, size):
    write_scans(tmp_path / "d", 4, size, splits=False)
    for path in (tmp_path / "d" / "labels").iterdir():  # Two halves: a straight edge stays one.
        halves = np.broadcast_to(np.arange(size[-1]) >= size[-1] // 2, size)
        np.save(path, halves.astype(np.uint8))
        np.save(tmp_path / "d" / "images" / path.name, halves.astype(np.float32))
    found = samples(tmp_path / "d", augment=("scale",), crop=(16,) * len(size), dims=len(size))
    windows = set()
    for epoch in range(8):
        found.epoch = epoch
        batch = found[range(4)]
        assert batch.images.shape == (4, 1, *(16,) * len(size))
        windows |= {found.draw(index).window[-1] for index in range(4)}
        for image, labels, scan in zip(batch.images[:, 0], batch.labels, found.scans, strict=True):
            assert set(labels.unique().tolist()) <= {0, 1, 255}
            wrong = ((image * scan.std[0] + scan.mean[0]).round() != labels)[labels != 255]
            assert wrong.float().mean() < 0.1  # Next to what is padded, which is the mean.
    assert min(windows) >= 8
    assert max(windows) <= 32
    assert len(windows) > 9


@pytest.mark.parametrize("shape", [(6, 6), (3, 5, 5)])
def test_a_quarter_turn_is_exact(shape):
    image, labels = torch.randn(3, 2, *shape), torch.randint(0, 4, (3, *shape))
    labels[..., 0, 0] = 255
    turned, moved = rotate(image, labels, [90] * 3, 255)
    torch.testing.assert_close(turned, image.rot90(1, (-2, -1)), atol=1e-5, rtol=0)
    assert torch.equal(moved, labels.rot90(1, (-2, -1)))


def test_what_comes_from_outside_is_ignored():
    image, labels = rotate(torch.ones(1, 1, 9, 9), torch.zeros(1, 9, 9, dtype=torch.long), [45], 255)
    assert (labels[0, 0, 0], image[0, 0, 0, 0]) == (255, 0)
    assert labels[0, 4, 4] == 0


def test_randomness_follows_from_seed_epoch_and_sample_alone(tmp_path):
    write_scans(tmp_path / "d", 4, splits=False)
    options = {"augment": ("flip", "rotate"), "crop": (16, 16), "views": 2}
    one, other = samples(tmp_path / "d", **options), samples(tmp_path / "d", **options)
    one.epoch = other.epoch = 5
    _ = other[[0]], torch.rand(1)
    here = one[[3]]
    assert torch.equal(here.images, other[[3]].images)
    assert not torch.equal(here.images[0], here.images[1])
    together = one[[1, 3]]
    assert torch.equal(together.images[1::2], here.images)
    assert torch.equal(together.labels[1::2], here.labels)
    other.epoch = 6
    assert not torch.equal(here.images, other[[3]].images)


@pytest.mark.parametrize(
    ("size", "options"), [((24, 28), {}), ((4, 20, 24), {"crop": (16, 30)}), ((6, 16, 16), {"dims": 3})]
)
@pytest.mark.parametrize("views", [1, 2])
def test_held_scans_and_workers_give_the_same_batches(tmp_path, size, options, views):
    write_scans(tmp_path / "d", 6, size, splits=False, ignored=0.1)
    plain = samples(tmp_path / "d", views, augment=("flip", "rotate"), workers=1, **options)
    held = replace(plain, scans=hold(plain.scans, torch.device("cpu")))
    assert {scan.labels(slice(0, 1)).dtype for scan in held.scans} == {torch.uint8}
    plain.epoch = held.epoch = 2
    steps = [chosen for chosen, _ in Schedule(len(plain), 4, 3).of(2)]
    found = [list(one.batches(steps, pin=False)) for one in (plain, held)]
    for step, one, other in zip(steps, *found, strict=True):
        for here, there in zip(one, other, strict=True):
            assert torch.equal(here, there)
        # Padding apart, a sample does not depend on the others of its batch.
        alone = plain[step[:1]]
        assert torch.equal(one.images[0], alone.images[0])
        assert torch.equal(one.labels[0], alone.labels[0])


def test_too_much_to_hold_is_read(tmp_path):
    write_scans(tmp_path / "d", 2, splits=False)
    scans = samples(tmp_path / "d").scans
    bytes_needed = 2 * 24 * 28 * (3 * 4 + 1)
    assert hold(scans, torch.device("cpu"), bytes_needed)[0].held
    assert hold(scans, torch.device("cpu"), bytes_needed - 1) is scans


def test_batches_are_padded_with_ignored_voxels(tmp_path):
    write_scans(tmp_path / "a", 1, (20, 24), splits=False)
    write_scans(tmp_path / "b", 1, (24, 20), splits=False)
    first, second = (samples(tmp_path / name, views=2) for name in "ab")
    batch = replace(first, scans=[*first.scans, *second.scans])[[0, 1]]
    assert batch.images.shape == (4, 3, 24, 24)
    assert torch.equal(batch.labels[:2], batch.labels[2:])
    assert (batch.labels[0, 20:] == 255).all()
    assert (batch.labels[1, :, :20] != 255).all()


@pytest.mark.parametrize(("count", "batch", "world"), [(10, 4, 1), (10, 4, 2), (9, 8, 3), (5, 4, 4)])
def test_processes_share_every_step(count, batch, world):
    ranks = [list(Schedule(count, batch, 0, rank, world).of(2)) for rank in range(world)]
    seen = []
    for steps in zip(*ranks, strict=True):
        counted = [index for chosen, share in steps if share for index in chosen]
        seen += counted
        # The average over processes of share * mean is the mean over the step.
        values = torch.arange(count, dtype=torch.float64).square()
        average = sum(share * float(values[chosen].mean()) for chosen, share in steps) / world
        assert average == pytest.approx(float(values[counted].mean()))
        assert all(chosen for chosen, _ in steps)
    assert sorted(seen) == list(range(count))
    assert Schedule(count, batch, 0).steps == len(ranks[0])
    assert list(Schedule(count, batch, 0).of(1)) != list(Schedule(count, batch, 0).of(2))


@pytest.mark.parametrize("ignored", [255, -100, 2**31 - 1, 2**32 - 1, -(2**31)])
def test_any_label_may_be_ignored(ignored):
    labels = torch.randint(4, (2, 9, 11), generator=torch.Generator().manual_seed(0))
    labels[:, 2] = ignored
    images = torch.zeros(2, 1, 9, 11)
    assert torch.equal(rotate(images, labels, [0.0, 0.0], ignored)[1], labels)
    turned = rotate(images, labels, [30.0, 30.0], ignored)[1]
    assert set(turned.unique().tolist()) == {0, 1, 2, 3, ignored}
    assert torch.equal(resized(images[0], labels[0], (9, 11))[1], labels[0])
