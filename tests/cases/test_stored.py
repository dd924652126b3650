"""Scores that move to a device as they are stored, and become logits there."""

import numpy as np
import pytest
import torch

import segcal
from datasets import labels, logits, plain, softmax
from segcal.errors import SegcalError
from segcal.types import DeviceSource

CPU = torch.device("cpu")
# Where it is another device, conversions there round in another order.
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else CPU


def both(root, rows=slice(0, 9), **options):
    """Rows of a case as logits that are converted before they move, and after."""
    source = segcal.open_cases(root, **options)[0].source
    assert isinstance(source, DeviceSource)
    return source.logits(rows), source.logits_on(rows, DEVICE)


def assert_same(before, after):
    assert after.device == DEVICE
    assert after.dtype == torch.float32
    assert after.is_contiguous()
    if DEVICE == CPU:
        assert torch.equal(before, after)
    torch.testing.assert_close(after.cpu(), before, rtol=1e-6, atol=1e-6)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("kind", ["logits", "probs"])
def test_every_type_and_kind(tmp_path, kind, dtype):
    root = plain(tmp_path, count=1, kind=kind)
    scores = (softmax(logits()) if kind == "probs" else logits()).astype(dtype)
    np.save(root / kind / "case0.npy", scores)
    assert_same(*both(root))
    assert_same(*both(root, slice(2, 5)))


@pytest.mark.cuda
@pytest.mark.parametrize("pooling", ["logits", "probs"])
def test_members_are_pooled_there(tmp_path, pooling):
    root = plain(tmp_path, count=1)
    (root / "logits/case0.npy").unlink()
    for index in range(3):
        path = root / f"logits/fold{index}/case0.npy"
        path.parent.mkdir()
        np.save(path, logits(index).astype(np.float16))
    assert_same(*both(root, pooling=pooling))


@pytest.mark.cuda
def test_channels_and_transposed_volumes(tmp_path):
    root = plain(tmp_path, count=1, shape=(9, 6, 5))
    np.save(root / "labels/case0.npy", np.stack([labels(k, 2, (9, 6, 5)) for k in range(4)]))
    assert_same(*both(root, multilabel=True, class_names=list("abcd")))
    np.save(root / "logits/case0.npy", logits(0, 4, (5, 6, 9)).transpose(0, 3, 2, 1))
    np.save(root / "labels/case0.npy", labels(0, 4, (5, 6, 9)).T)
    assert_same(*both(root, slice(0, 5), axes="xyz"))


@pytest.mark.cuda
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bad_scores_are_the_same_error(tmp_path, value):
    root = plain(tmp_path, count=1)
    scores = logits()
    scores[1, 4, 3] = value
    np.save(root / "logits/case0.npy", scores)
    source, said = segcal.open_cases(root)[0].source, []
    for read in (source.logits, lambda rows: source.logits_on(rows, DEVICE)):
        with pytest.raises(SegcalError, match=r"case0.*\(4, 3\)") as error:
            read(slice(3, 6))
        said.append(str(error.value))
    assert said[0] == said[1]
