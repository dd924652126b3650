"""Tensors, arrays, loaders and generators as cases: what they give is what files with the same content give."""

import gc
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import segcal
from segcal.calibrators import TemperatureScaling
from segcal.errors import DataError, InputError
from segcal.evaluation.check import check
from segcal.losses import nacl
from segcal.statistics import VoxelStatistics

METRICS = ("nll", "ece", "cece", "ba-ece", "dsc")


def data(count=7, classes=3, shape=(12, 10), seed=0):
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count, *shape), generator=random)
    noise = torch.randn((count, classes, *shape), generator=random)
    logits = 2 * noise + 2 * torch.nn.functional.one_hot(labels, classes).movedim(-1, 1)
    labels[:, 0, :2] = 255
    return logits, labels


def rows(results):
    return [(str(row.case), row.metric, row.region, row.value) for row in results.rows]


def write(folder, logits, labels, masks=None):
    for name in ("logits", "labels", *(() if masks is None else ("masks",))):
        (folder / name).mkdir()
    for i in range(len(logits)):
        np.save(folder / "logits" / f"image {i:03d}.npy", logits[i])
        np.save(folder / "labels" / f"image {i:03d}.npy", np.asarray(labels[i], np.uint8))
        if masks is not None:
            np.save(folder / "masks" / f"image {i:03d}.npy", masks[i])
    return segcal.open_cases(folder)


class Counted:
    """Batches, and how many passes over them began and how many were taken."""

    def __init__(self, logits, labels, size):
        self.batches = list(zip(logits.split(size), labels.split(size), strict=True))
        self.passes = self.taken = 0

    def __iter__(self):
        self.passes += 1
        for batch in self.batches:
            self.taken += 1
            yield batch


class Named(Dataset):
    def __init__(self, logits, labels):
        self.logits, self.labels = logits, labels

    def __len__(self):
        return len(self.logits)

    def __getitem__(self, i):
        return {"logits": self.logits[i], "labels": self.labels[i], "mask": self.labels[i] != 1, "id": f"p{i // 2}_{i}"}


@pytest.mark.parametrize("shape", [(12, 10), (5, 6, 7)], ids=["2D", "3D"])
def test_every_source_equals_files_bit_for_bit(tmp_path, shape):
    z, y = data(shape=shape)
    expected = rows(segcal.evaluate(write(tmp_path, z.numpy(), y.numpy()), metrics=METRICS))
    sources = {
        "batches of 1": DataLoader(TensorDataset(z, y), batch_size=1),
        "batches of 3": DataLoader(TensorDataset(z, y), batch_size=3),
        "a list": [(z[:4], y[:4]), (z[4:], y[4:])],
        "channel axis": DataLoader(TensorDataset(z, y[:, None]), batch_size=2),
        "a pair": (z, y),
        "numpy": {"logits": z.numpy(), "labels": y.numpy().astype(np.uint16)},
    }
    for name, source in sources.items():
        assert rows(segcal.evaluate(source, metrics=METRICS)) == expected, name
    with pytest.warns(UserWarning, match="read only once: its 7 images"):
        found = segcal.evaluate(((z[i : i + 2], y[i : i + 2]) for i in range(0, 7, 2)), metrics=METRICS)
    assert rows(found) == expected


def test_numpy_float16_read_only_and_probabilities(tmp_path):
    z, y = data()
    half = z.numpy().astype(np.float16)
    half.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = segcal.evaluate((half, y.numpy()), metrics=METRICS)
    assert rows(found) == rows(segcal.evaluate(write(tmp_path, half, y.numpy()), metrics=METRICS))
    probs = z.softmax(1)
    cases = segcal.cases_from(probs, y, kind="probs")
    assert torch.equal(cases[2].logits, probs[2:3].log())
    assert torch.equal(segcal.cases_from([{"probs": probs, "labels": y}])[2].logits, cases[2].logits)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64], ids=str)
@pytest.mark.parametrize("ignored", [-1, 255])
def test_labels_of_any_integer_type(dtype, ignored):
    z, y = data()
    mask = y != 255
    expected = rows(segcal.evaluate(segcal.cases_from(z, y, mask=mask), metrics=METRICS))
    y = y.where(mask, 100).to(dtype)  # masked, so it need be no class, and the type need not hold the ignored label
    assert rows(segcal.evaluate(segcal.cases_from(z, y, mask=mask, ignore_index=ignored), metrics=METRICS)) == expected


def test_a_batch_with_other_classes_is_not_blamed_on_its_labels():
    z, y = data()
    with pytest.raises(InputError, match="batch 1: logits have 2 classes; expected 3, as in the first batch"):
        segcal.evaluate([(z[:3], y[:3]), (z[3:, :2], y[3:])])


def test_masks_ids_and_groups(tmp_path):
    z, y = data()
    loader = DataLoader(Named(z, y), batch_size=3)
    segcal.write_dataset(segcal.cases_from(z, y, groups=[i // 2 for i in range(7)]), tmp_path / "listed")
    assert list(segcal.open_cases(tmp_path / "listed").case_groups.values()) == list("0011223")
    cases = segcal.cases_from(loader, groups=r"^p\d+")
    assert cases.ids == ("p0_0", "p0_1", "p1_2", "p1_3", "p2_4", "p2_5", "p3_6")
    assert cases.case_groups["p1_3"] == "p1"
    files = write(tmp_path, z.numpy(), y.numpy(), (y != 1).numpy())
    values = [row[1:] for row in rows(segcal.evaluate(cases, metrics=METRICS))]
    assert values == [row[1:] for row in rows(segcal.evaluate(files, metrics=METRICS))]
    listed = segcal.cases_from(z, y, mask=(y != 1)[:, None], ids=cases.ids, groups=[name[:2] for name in cases.ids])
    assert listed.case_groups == cases.case_groups
    assert rows(segcal.evaluate(listed, metrics=METRICS)) == rows(segcal.evaluate(cases, metrics=METRICS))
    other = segcal.cases_from(z, y.where(y != 255, -1), ignore_index=-1)
    assert segcal.evaluate(other).value("nll") == segcal.evaluate((z, y)).value("nll")


def test_a_pass_over_the_cases_is_one_pass_over_the_loader():
    z, y = data()
    source = Counted(z, y, 3)
    cases = segcal.cases_from(source, ids=[f"a{i}" for i in range(7)])
    for _ in range(2):
        for i, case in enumerate(cases):
            assert torch.equal(case.logits, z[i : i + 1])
    assert (source.passes, source.taken) == (2, 6)
    assert torch.equal(cases[6].labels, y[6:])  # the batch that is at hand
    assert torch.equal(cases[1].labels, y[1:2])  # starts again
    assert (source.passes, source.taken) == (3, 7)
    counted = Counted(z, y, 2)
    assert len(segcal.cases_from(counted)) == 7  # no length: counted by one pass
    assert counted.passes == 1
    assert len(segcal.cases_from(DataLoader(TensorDataset(z, y), batch_size=3, drop_last=True))) == 6


def test_a_loader_that_shuffles_is_warned_of_once_and_refused_with_ids():
    z, y = data(12)
    loader = DataLoader(TensorDataset(z, y), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))
    cases = segcal.cases_from(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(cases)  # one pass does no harm
    with pytest.warns(UserWarning, match="shuffle=False") as found:
        list(cases), list(cases)
    assert len(found) == 1
    with pytest.raises(InputError, match="a DataLoader that shuffles"):
        segcal.cases_from(loader, groups="(.*)")


def test_fit_tune_compare_and_plan_take_a_loader():
    z, y = data(10)
    loader = DataLoader(TensorDataset(z, y), batch_size=4)
    expected = TemperatureScaling().fit(z, y).temperature
    for arguments in ((loader,), ((z, y),), (z.numpy(), y.numpy()), (z, y[:, None])):
        found = TemperatureScaling().fit(*arguments, validation=loader).temperature
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert segcal.tune("vs", loader, (z, y), strengths=(1.0, 0.0)).num_classes == 3
    study = segcal.compare(loader, methods=("ts",), repeats=1, tune="none", metrics=("nll",), shifted={"same": loader})
    assert study.summary("nll")
    assert segcal.plan(loader, ("ts",), repeats=1).data.cases == 10
    report = check(loader)
    assert (report.cases, report.valid, report.problems) == (10, int((y != 255).sum()), [])


def test_gradients_can_be_taken_of_what_a_network_gave_in_inference_mode():
    z, y = data()

    def predictions():
        with torch.inference_mode():
            for i in range(7):
                yield z[i : i + 1] * 1.0, y[i : i + 1]

    class Loader:
        __iter__ = staticmethod(predictions)

    for case in segcal.cases_from(Loader()):
        assert not torch.is_inference_mode_enabled()
        assert not case.logits.is_inference()


def test_the_temporary_folder_goes_with_the_last_case_set():
    z, y = data()
    with pytest.warns(UserWarning, match="read only once"):
        cases = segcal.cases_from(iter([(z, y)]))
    folder = cases.refs[0].open.args[0].folder
    part = pickle.loads(pickle.dumps(cases))[2:4]
    del part
    gc.collect()
    case, half = cases[3], cases[:2]
    del cases
    gc.collect()
    assert folder.exists()
    assert torch.equal(half[1].logits, z[1:2])
    del half
    gc.collect()
    assert not folder.exists()
    assert torch.equal(case.logits, z[3:4])


def test_workers_get_a_loader_and_a_source_that_cannot_be_sent_is_an_error():
    z, y = data()
    cases = pickle.loads(pickle.dumps(segcal.cases_from(DataLoader(TensorDataset(z, y), batch_size=3))))
    assert [torch.equal(case.logits, z[i : i + 1]) for i, case in enumerate(cases)] == [True] * 7

    class Local(Counted):
        pass

    with pytest.raises(InputError, match="cannot be sent to worker processes .* workers=1"):
        pickle.dumps(segcal.cases_from(Local(z, y, 3)))


z, y = data(4)
BAD = {
    "nothing": ([], "yields no batch"),
    "a number": (5, "the source is of type int"),
    "a folder": ("study/", "segcal.open_cases opens a folder"),
    "logits alone": (z, "logits come without labels"),
    "three things": ([(z, y, y)], r"batch 0: the batch is a tuple of 3 \(Tensor, Tensor, Tensor\)"),
    "other names": ([{"image": z, "label": y}], "batch 0: the batch holds image, label; expected logits or probs"),
    "other classes": ([(z, y), (z[:, :2], y % 2)], "batch 1: logits have 2 classes; expected 3"),
    "another shape": ([(z, y), (z, y[:, 1:])], r"batch 1: labels have shape \(4, 11, 10\); expected \(4, 12, 10\)"),
    "one-hot": ([(z, torch.zeros_like(z).long())], r"batch 0: labels have the shape .* labels.argmax\(1\)"),
    "float labels": ([(z, y.float())], r"batch 0: labels have dtype torch.float32.* labels.long\(\)"),
    "no such class": ([(z, y), (z, y + 1)], "batch 1: label 3, 256 at "),
    "probabilities": ([(z.softmax(1), y)], "batch 0: .* look like probabilities.*kind='probs'"),
    "an empty batch": ([(z[:0], y[:0])], r"batch 0: logits have shape \(0, 3, 12, 10\)"),
    "equal ids": ([{"logits": z, "labels": y, "id": list("abca")}], "two images have the id 'a'"),
    "too few ids": ([{"logits": z, "labels": y, "id": ["a"]}], "batch 0: id is .* each of the 4 images"),
}


@pytest.mark.parametrize(("source", "message"), BAD.values(), ids=BAD)
def test_bad_sources_say_what_is_wrong(source, message):
    with pytest.raises((InputError, DataError), match=message):
        segcal.cases_from(source)


def test_bad_values_name_the_image_and_bad_counts_the_number():
    bad = z.clone()
    bad[2, 1, 3, 4] = torch.nan
    with pytest.raises(InputError, match=r"case 'image 002': NaN logits at voxel \(3, 4\)"):
        segcal.evaluate([(bad, y)])
    for count, found in ((3, "more"), (5, "only 4")):
        with pytest.raises(InputError, match=f"yields {found} images; expected {count} images"):
            list(segcal.cases_from([(z, y)], ids=[f"a{i}" for i in range(count)]))
    with pytest.raises(InputError, match="3 ids; expected 4"):
        segcal.cases_from(z, y, ids=["a", "b", "c"])


def test_labels_are_accepted_and_refused_alike_everywhere():
    modules = pytest.importorskip("segcal.metrics.modules")
    takers = {
        "fit": lambda y: TemperatureScaling().fit(z, y).temperature,
        "evaluate": lambda y: segcal.evaluate((z, y)).value("nll"),
        "statistics": lambda y: segcal.metrics.nll(VoxelStatistics(3).update(z, y)),
        "module": lambda y: modules.Calibration(3)(z, y)["nll"],
        "loss": lambda y: nacl(z, y),
    }
    one_hot = torch.nn.functional.one_hot(y % 3, 3).movedim(-1, 1)
    for name, take in takers.items():
        assert float(take(y[:, None])) == float(take(y)), name
        for bad, fix in (
            (one_hot, r"labels.argmax\(1\)"),
            (one_hot.float(), "argmax"),
            (y.float(), r"labels.long\(\)"),
        ):
            with pytest.raises(InputError, match=fix):
                take(bad)


@pytest.mark.parametrize(
    ("dtype", "ignored"), [(torch.uint8, 256), (torch.uint8, -1), (torch.int8, 255), (torch.int8, 300)]
)
def test_labels_of_a_small_type_do_not_wrap_to_the_ignored_label(dtype, ignored):
    logits, labels = data()
    labels[labels == 255] = 0
    small = labels.to(dtype)
    for update in (
        lambda y: VoxelStatistics(3).update(logits, y, ignore_index=ignored).count(),
        lambda y: TemperatureScaling().fit(logits, y, ignore_index=ignored).fit_report.voxels_used,
        lambda y: segcal.regions.valid_voxels(y, ignore_index=ignored).sum().item(),
        lambda y: segcal.evaluate(segcal.cases_from(logits, y, ignore_index=ignored)).value("nll"),
    ):
        assert update(small) == update(labels)
    assert VoxelStatistics(3).update(logits, small, ignore_index=ignored).count() == labels.numel()


def test_a_label_below_0_is_an_error_in_a_small_type_too():
    logits, labels = data()
    labels = labels.where(labels != 255, -1).to(torch.int8)  # where 255 would be -1
    with pytest.raises(InputError, match="label"):
        TemperatureScaling().fit(logits, labels)
    with pytest.raises(InputError, match="label -1"):
        VoxelStatistics(3).update(logits, labels)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("masked", [False, True])
def test_what_does_not_count_may_hold_anything(value, masked):
    logits, labels = data()
    mask, spoilt = labels != 255, logits.clone()
    spoilt[:, 1, 0, :2] = value
    given = {"logits": spoilt, "labels": labels.where(mask, 0) if masked else labels}
    given |= {"mask": mask} if masked else {}
    found = segcal.evaluate(given, metrics=METRICS)
    assert rows(found) == rows(segcal.evaluate({**given, "logits": logits}, metrics=METRICS))
    probs = {**given, "probs": spoilt.softmax(1)}
    del probs["logits"]
    assert segcal.evaluate(segcal.cases_from(probs, kind="probs"), metrics=("nll",)).value("nll") > 0
    spoilt[2, :, 5, 5] = value
    with pytest.raises(InputError, match=r"logits at voxel \(5, 5\)"):
        segcal.evaluate(given, metrics=METRICS)


def test_ignored_channels_may_hold_anything_and_others_may_not():
    z, y = torch.randn(3, 2, 8, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(3, 2, 8, 8).long()
    y[1, 0, 0] = 255
    expected = segcal.evaluate(segcal.cases_from(z, y, channel_names=("a", "b"))).value("nll")
    z[1, 0, 0] = torch.nan
    assert segcal.evaluate(segcal.cases_from(z, y, channel_names=("a", "b"))).value("nll") == expected
    z[1, 1, 0] = torch.nan
    with pytest.raises(InputError, match="NaN"):
        segcal.evaluate(segcal.cases_from(z, y, channel_names=("a", "b")))


def test_apply_takes_tensors(tmp_path):
    logits, labels = data()
    calibrator = TemperatureScaling().fit(logits, labels)
    report = segcal.apply(calibrator, (logits, labels), tmp_path / "out")
    assert (report.written, report.flips) == (7, 0)


def test_names_and_numbers_that_mean_nothing_are_refused():
    z, y = torch.randn(2, 2, 8, 8), torch.zeros(2, 2, 8, 8).long()
    with pytest.raises(InputError, match="2 different names, none empty"):
        segcal.cases_from(z, y, channel_names=("", "b"))
    for fit in (TemperatureScaling().fit, segcal.cases_from):
        with pytest.raises(InputError, match="ignore_index is None.*say -1"):
            fit(z, y[:, 0], ignore_index=None)
    with pytest.raises(InputError, match=r"the calibrator is <class.*TemperatureScaling\(\)\.fit"):
        segcal.evaluate((z, y[:, 0]), TemperatureScaling)
    cases = segcal.cases_from(z, y[:, 0], groups=lambda name: name[:1])
    with pytest.raises(InputError, match="the groups cannot be sent to worker processes"):
        segcal.evaluate(cases, workers=2)
