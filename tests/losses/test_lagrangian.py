"""The CRaC controller: what it learns, that its state survives, that ranks add up."""

import copy
import io

import pytest
import torch
from torch import nn

from reference import losses as reference
from segcal import losses
from segcal.errors import InputError
from segcal.losses.adaptive import constraint, violation_sums
from segcal.losses.callbacks import hook_nnunet, update_multipliers
from segcal.losses.checks import prepare


def scene(seed=0, images=2, classes=3, space=(12, 12)):
    random = torch.Generator().manual_seed(seed)
    labels = torch.zeros(images, *space, dtype=torch.long)
    labels[:, 3:8, 2:9] = 1
    labels[:, 8:11, 5:11] = 2
    labels[:, 0, :4] = 255
    return torch.randn(images, classes, *space, generator=random, dtype=torch.float64), labels


def test_sums_equal_the_reference():
    logits, labels = scene()
    expected, voxels = [[0.0] * 3, [0.0] * 3], [0, 0]
    for image, v, z, _ in reference.valid(reference.images(logits, labels)):
        region, h = reference.violations(image, v, z, 5.0, 3)
        voxels[region] += 1
        expected[region] = [a + b for a, b in zip(expected[region], h, strict=True)]
    sums, count = violation_sums(logits, labels, margin=5.0)
    torch.testing.assert_close(sums, torch.tensor(expected, dtype=torch.float64))
    assert count.tolist() == voxels
    assert min(voxels) > 0


def test_update_is_the_mean_derivative_of_the_penalty():
    logits, labels = scene()
    loss = losses.CRaC(3)
    loss.observe(logits, labels)
    sums, voxels = loss.multipliers.sums.clone(), loss.multipliers.voxels.clone()
    loss.update()
    torch.testing.assert_close(loss.multipliers.values, 1e-6 + 0.1 * sums / voxels[:, None])
    assert not loss.multipliers.sums.any()


def test_the_mean_over_all_voxels_counts_a_region_by_its_size():
    logits, labels = scene()
    loss = losses.CRaC(3, average="all")
    loss.observe(logits, labels)
    sums, voxels = loss.multipliers.sums.clone(), loss.multipliers.voxels.clone()
    loss.update()
    torch.testing.assert_close(loss.multipliers.values, 1e-6 + 0.1 * sums / voxels.sum())
    assert "average='all'" in repr(loss)
    with pytest.raises(InputError, match="average"):
        losses.CRaC(3, average="voxels")


def test_rho_grows_only_where_the_violation_does_not_shrink():
    multipliers = losses.Multipliers(2)
    for epoch in range(1, 31):
        shrinking = 0.8 ** (epoch // 10)
        multipliers.add(torch.tensor([[shrinking, 1.0], [1.0, 0.0]]), torch.tensor([1, 1]))
        multipliers.update()
        # The first check has nothing to compare with.
        growth = 1.2 ** max(epoch // 10 - 1, 0)
        expected = torch.tensor([[0.1, 0.1 * growth], [0.1 * growth, 0.1]], dtype=torch.float64)
        torch.testing.assert_close(multipliers.rho, expected)
    assert [entry["epoch"] for entry in multipliers.trace] == list(range(1, 31))


def test_values_stay_within_their_bounds():
    multipliers = losses.Multipliers(2)
    for _ in range(400):
        multipliers.add(torch.full((2, 2), 1e9), torch.tensor([1, 1]))
        multipliers.update()
    assert (multipliers.values == 1e6).all()
    assert (multipliers.rho == 10).all()


def test_a_region_without_voxels_keeps_its_values():
    loss = losses.CRaC(3)
    loss.observe(torch.randn(1, 3, 6, 6), torch.ones(1, 6, 6, dtype=torch.long))
    loss.update()
    assert (loss.multipliers.values[1] == 1e-6).all()
    assert (loss.multipliers.values[0] > 1e-6).all()


def test_harder_class_and_outer_region_end_higher():
    """Free logits that fit fixed targets and CRaC: those of class 2, and of the outer region, are pulled away more."""
    _, labels = scene()
    batch = prepare(torch.zeros(2, 3, 12, 12, dtype=torch.float64), labels)
    minus_tau, outer = constraint(batch, 1.0, 3)
    away = torch.tensor([1.0, 1.0, 3.0], dtype=torch.float64).view(1, 3, 1, 1) * (1 + outer)
    target, logits = away - minus_tau, torch.zeros_like(away, requires_grad=True)
    loss, optimizer = losses.CRaC(3, base=None), torch.optim.SGD([logits], 0.2 * logits.numel())
    for _ in range(30):
        optimizer.zero_grad()
        (loss(logits, labels) + ((logits - target) ** 2).mean()).backward()
        optimizer.step()
        loss.observe(logits, labels)
        loss.update()
    values = loss.multipliers.values
    assert (values[:, 2] > 1.5 * values[:, :2].amax(1)).all()
    assert (values[1] > 1.5 * values[0]).all()


def test_training_with_crac_shrinks_the_violation():
    logits, labels = scene()
    logits = (8 * logits).requires_grad_()
    loss, optimizer = losses.CRaC(3), torch.optim.Adam([logits], 0.1)
    for _ in range(60):
        optimizer.zero_grad()
        loss(logits, labels).backward()
        optimizer.step()
        loss.observe(logits, labels)
        loss.update()
    first, last = (torch.tensor(loss.multipliers.trace[i]["violation"]).mean() for i in (0, -1))
    assert last < 0.5 * first


def test_state_survives_a_checkpoint_exactly():
    logits, labels = scene()
    loss = losses.CRaC(3)
    for _ in range(12):
        loss.observe(logits, labels)
        loss.update()
    loss.observe(logits[:1], labels[:1])  # in the middle of an epoch
    file = io.BytesIO()
    torch.save(loss.state_dict(), file)
    file.seek(0)
    restored = losses.CRaC(3)
    restored.load_state_dict(torch.load(file, weights_only=True))
    for one in (loss, restored):
        one.observe(2 * logits, labels)
        one.update()
    assert restored.multipliers.trace == loss.multipliers.trace
    assert len(loss.multipliers.trace) == 13
    for name, tensor in loss.multipliers.named_buffers():
        torch.testing.assert_close(restored.multipliers.get_buffer(name), tensor, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(restored(logits, labels), loss(logits, labels))


def test_two_ranks_equal_one(monkeypatch):
    logits, labels = scene(images=4)
    whole, first, second = losses.CRaC(3), losses.CRaC(3), losses.CRaC(3)
    whole.observe(logits, labels)
    first.observe(logits[:1], labels[:1])
    second.observe(logits[1:], labels[1:])
    merged = copy.deepcopy(first)
    merged.multipliers.merge(second.multipliers)
    assert torch.equal(merged.multipliers.voxels, whole.multipliers.voxels)

    partner = {
        id(first.multipliers.sums): second.multipliers.sums.clone(),
        id(first.multipliers.voxels): second.multipliers.voxels.clone(),
    }
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: tensor.add_(partner[id(tensor)]))
    first.update()
    monkeypatch.undo()
    whole.update()
    merged.update()
    torch.testing.assert_close(merged.multipliers.values, whole.multipliers.values)
    torch.testing.assert_close(first.multipliers.values, whole.multipliers.values)


def test_without_validation_there_is_a_clear_error():
    loss = losses.CRaC(3)
    with pytest.raises(InputError, match="no validation voxel.*validation set.*observe"):
        loss.update()
    with pytest.raises(InputError, match="no validation voxel"):
        update_multipliers(loss, nn.Identity(), [])
    loss.observe(torch.randn(1, 3, 4, 4), torch.full((1, 4, 4), 255))
    with pytest.raises(InputError, match="no validation voxel"):
        loss.update()
    loss.observe(torch.full((1, 3, 4, 4), torch.nan), torch.zeros(1, 4, 4, dtype=torch.long))
    with pytest.raises(InputError, match="not finite"):
        loss.update()
    with pytest.raises(InputError, match="num_classes is 1"):
        losses.CRaC(1)


class Trainer:
    """What ``hook_nnunet`` needs of nnU-Net's trainer; ``tests/integrations`` has the real one."""

    def __init__(self, loss):
        self.loss, self.said = loss, []
        self.on_validation_epoch_end = self.save_checkpoint = self.load_checkpoint = self.said.append
        self.print_to_log_file = self.said.append


def test_a_hooked_trainer_observes_without_gradients_and_keeps_the_state_beside_its_checkpoints(tmp_path):
    logits, labels = scene()
    crac, direct = losses.CRaC(3), losses.CRaC(3)
    trainer = Trainer(crac)
    hook_nnunet(trainer, crac)
    trainer.loss(logits, labels)  # with gradients, so it is training
    assert not crac.multipliers.voxels.any()
    with torch.no_grad():
        trainer.loss(logits, labels)
    direct.observe(logits, labels)
    assert torch.equal(crac.multipliers.sums, direct.multipliers.sums)
    trainer.on_validation_epoch_end("outputs")
    direct.update()
    assert torch.equal(crac.multipliers.values, direct.multipliers.values)

    first = tmp_path / "first.pth"
    trainer.save_checkpoint(first)
    (tmp_path / "first.pth.crac").unlink()
    trainer.local_rank = 1  # another process writes
    trainer.save_checkpoint(first)
    trainer.local_rank, trainer.disable_checkpointing = 0, True
    trainer.save_checkpoint(first)
    assert not list(tmp_path.iterdir())
    trainer.disable_checkpointing = False
    trainer.save_checkpoint(first)
    assert [path.name for path in tmp_path.iterdir()] == ["first.pth.crac"]

    other = losses.CRaC(3)
    resumed = Trainer(other)
    hook_nnunet(resumed, other)
    resumed.load_checkpoint({"a loaded": "checkpoint"})
    resumed.load_checkpoint(tmp_path / "second.pth")
    assert not torch.equal(other.multipliers.values, direct.multipliers.values)
    assert "second.pth.crac is missing" in resumed.said[-1]
    said = len(resumed.said)
    resumed.load_checkpoint(str(first))
    assert torch.equal(other.multipliers.values, direct.multipliers.values)
    assert resumed.said[said:] == [str(first)]


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
def test_a_network_in_half_precision_leaves_the_multipliers_as_they_are(cast):
    """In bfloat16 a sum of a thousand stops growing."""
    loss = losses.CRaC(2)
    nn.ModuleList([loss]).to(cast)
    multipliers = next(own for own in loss.modules() if isinstance(own, losses.adaptive.Multipliers))
    for _ in range(2000):
        multipliers.add(torch.tensor([[2.0, 4.0], [9.0, 9.0]]), torch.tensor([2, 3]))
    multipliers.update()
    expected = 1e-6 + torch.tensor([[0.1, 0.2], [0.3, 0.3]], dtype=torch.float64)
    torch.testing.assert_close(multipliers.values, expected)


def test_parts_that_were_in_evaluation_mode_stay_in_it():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)).train()
    model[1].eval()  # frozen, as in fine-tuning
    update_multipliers(losses.CRaC(2), model, [(torch.randn(1, 1, 4, 4), torch.ones(1, 4, 4, dtype=torch.long))])
    assert (model.training, model[0].training, model[1].training) == (True, True, False)
