import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from segcal.training.data import open_dataset
from segcal.training.samples import Samples, Schedule, rotate
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
    assert torch.equal(found[7].labels, torch.from_numpy(labels[2].astype(np.int64)))
    expected = (image[2] - image.mean(dtype=np.float64)) / image.std(dtype=np.float64)
    torch.testing.assert_close(found[7].images[0, 0], torch.from_numpy(expected).float())


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
            image, labels = moved[index].images[0, 0], moved[index].labels
            scan = moved.scans[index]
            values = image * scan.std[0] + scan.mean[0]
            wrong = (values - labels).abs()[labels != 255] > 0.05
            assert wrong.float().mean() < 0.2  # borders, blurred
            changed += not torch.equal(labels, plain[index].labels)
    assert changed > 9


@pytest.mark.parametrize("shape", [(6, 6), (3, 5, 5)])
def test_a_quarter_turn_is_exact(shape):
    image, labels = torch.randn(2, *shape), torch.randint(0, 4, shape)
    labels[..., 0, 0] = 255
    turned, moved = rotate(image, labels, 90, 255)
    torch.testing.assert_close(turned, image.rot90(1, (-2, -1)), atol=1e-5, rtol=0)
    assert torch.equal(moved, labels.rot90(1, (-2, -1)))


def test_what_comes_from_outside_is_ignored():
    image, labels = rotate(torch.ones(1, 9, 9), torch.zeros(9, 9, dtype=torch.long), 45, 255)
    assert (labels[0, 0], image[0, 0, 0]) == (255, 0)
    assert labels[4, 4] == 0


def test_randomness_follows_from_seed_epoch_and_sample_alone(tmp_path):
    write_scans(tmp_path / "d", 4, splits=False)
    options = {"augment": ("flip", "rotate"), "crop": (16, 16), "views": 2}
    one, other = samples(tmp_path / "d", **options), samples(tmp_path / "d", **options)
    one.epoch = other.epoch = 5
    _ = other[0], torch.rand(1)
    assert torch.equal(one[3].images, other[3].images)
    assert not torch.equal(one[3].images[0], one[3].images[1])
    workers = DataLoader(one, batch_sampler=[[3, 1]], collate_fn=one.collate, num_workers=1)
    here = one.collate([one[3], one[1]])
    (there,) = workers
    assert torch.equal(here.images, there.images)
    other.epoch = 6
    assert not torch.equal(one[3].images, other[3].images)


def test_batches_are_padded_with_ignored_voxels(tmp_path):
    write_scans(tmp_path / "a", 1, (20, 24), splits=False)
    write_scans(tmp_path / "b", 1, (24, 20), splits=False)
    parts = [samples(tmp_path / name, views=2) for name in "ab"]
    batch = parts[0].collate([part[0] for part in parts])
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
