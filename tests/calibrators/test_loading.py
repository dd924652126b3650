"""Calibrator files: values within the limits of each map, and forged or damaged files of every kind refused."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import segcal
from segcal.calibrators import CALIBRATORS
from segcal.errors import DataError, InputError
from segcal.synthetic import scenes

CASES = scenes(2, size=(16, 20), num_classes=3)


@pytest.fixture(scope="module", params=["ts", "cms-op", "selective", "lts-ti", "histogram", "ensemble"])
def saved(request, tmp_path_factory):
    """Files of maps that differ in what they hold: the bytes, the tensors and the metadata."""
    options = {"lts-ti": {"epochs": 1}, "ensemble": {"base": "dc"}, "selective": {"base": "ts"}}
    path = tmp_path_factory.mktemp("saved") / "c.safetensors"
    CALIBRATORS[request.param](**options.get(request.param, {})).fit(CASES).save(path)
    with safe_open(path, framework="pt") as file:
        tensors, about = {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["segcal"])  # noqa: SIM118
    del about["digest"]  # What is forged here has no checksum, or a right one.
    return path.read_bytes(), tensors, {"segcal": json.dumps(about)}


def attempt(path):
    """Load a file that may be bad: whatever happens is either a calibrator or our error."""
    try:
        return segcal.load(path)
    except DataError:
        return None


BAD_VALUES = [None, True, -3, 0, 10**5, 10**30, 1.5, float("inf"), "x", "inf", [], [1], {}, {"x": 1}, {"id": "ts"}]


def paths_of(about, at=()):
    """All places in a JSON document."""
    yield at
    items = about.items() if isinstance(about, dict) else enumerate(about) if isinstance(about, list) else ()
    for key, value in items:
        yield from paths_of(value, (*at, key))


def replaced(about, at, value):
    if not at:
        return value
    copy = json.loads(json.dumps(about))
    inner = copy
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return copy


def test_forged_metadata_are_refused_or_harmless(saved, tmp_path):
    _, tensors, metadata = saved
    about, path, loaded = json.loads(metadata["segcal"]), tmp_path / "c.safetensors", 0
    for at in paths_of(about):
        for value in BAD_VALUES:
            save_file(tensors, path, {"segcal": json.dumps(replaced(about, at, value))})
            loaded += attempt(path) is not None
    assert loaded  # notes and the like may be other texts
    deep = "[" * 10**5 + "]" * 10**5
    for text in (deep, json.dumps(about)[:-1] + f', "arguments": {{"base": {deep}}}}}', "", "null", "NaN", "[]"):
        save_file(tensors, path, {"segcal": text})
        assert attempt(path) is None
    nested = {"id": "ts", "arguments": {}}
    for _ in range(300):
        nested = {"id": "selective", "arguments": {"base": nested}}
    save_file(tensors, path, {"segcal": json.dumps({**about, "id": "selective", "arguments": nested["arguments"]})})
    assert attempt(path) is None


def test_forged_tensors_are_refused(saved, tmp_path):
    _, tensors, metadata = saved
    path = tmp_path / "c.safetensors"
    for name, tensor in tensors.items():
        for forged in (
            tensor.to(torch.float8_e4m3fn), tensor.to(torch.float16), tensor.bool(), tensor.to(torch.complex64),
            tensor.long(), tensor[None], tensor.flatten()[:0], torch.cat((tensor.flatten(), tensor.flatten())),
            torch.full_like(tensor, torch.nan), torch.full_like(tensor, torch.inf), torch.zeros(2**20),
        ):  # fmt: skip
            try:
                save_file({**tensors, name: forged.contiguous()}, path, metadata)
            except KeyError:
                assert forged.is_complex()  # before safetensors 0.6.1
                continue
            assert attempt(path) is None
        save_file({other: t for other, t in tensors.items() if other != name}, path, metadata)
        assert attempt(path) is None
    save_file({**tensors, "other": torch.ones(3)}, path, metadata)
    assert attempt(path) is None


def test_no_flipped_bit_changes_the_map(saved, tmp_path):
    whole, path = saved[0], tmp_path / "c.safetensors"
    logits = 3 * torch.randn(1, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    path.write_bytes(whole)
    truth = segcal.load(path)(logits)
    start = 8 + int.from_bytes(whole[:8], "little")
    for place in np.random.default_rng(0).integers(8 * start, 8 * len(whole), 60).tolist():  # of the tensors
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(DataError, match="checksum does not match"):
            segcal.load(path)
    path.write_bytes(whole)
    assert torch.equal(segcal.load(path)(logits), truth)


def test_damaged_bytes_are_refused_or_harmless(saved, tmp_path):
    whole, _, _ = saved
    random, path = np.random.default_rng(0), tmp_path / "c.safetensors"
    header = 8 + int.from_bytes(whole[:8], "little")
    for turn in range(120):
        damaged = bytearray(whole)
        limit = 8 if turn < 20 else header if turn < 100 else len(whole)
        for place in random.integers(limit, size=random.integers(1, 4)):
            damaged[place] = random.integers(256)
        path.write_bytes(bytes(damaged[: random.integers(1, len(whole))] if turn % 7 == 0 else damaged))
        calibrator = attempt(path)
        if calibrator is not None:
            assert torch.isfinite(calibrator(torch.zeros(1, 3, 9, 9))).all()


#: What no fit returns, by calibrator: a tensor, a number to put there, and the range that the error names.
OUTSIDE = [
    ("ts", "beta", -1.0, "0.001 to 1000"),
    ("ts", "beta", 1e308, "0.001 to 1000"),
    ("ets", "beta", 0.0, "0.001 to 1000"),
    ("ets", "weights", -0.1, "0 to 1"),
    ("ets", "weights", 0.9, "expected 1"),
    ("vs", "weight", 1e4, "-100 to 100"),
    ("ms", "bias", -1e4, "-100 to 100"),
    ("ms-c", "weight", 5.0, "sums to"),
    ("ms-c", "weight", 1e4, "-300 to 300"),
    ("dc", "weight", 1e300, "-100 to 100"),
    ("cdc", "bias", 1e4, "-100 to 100"),
    ("cms-ap", "weight", -0.5, "0 to"),
    ("cms-ap", "bias", -0.5, "0 to"),
    ("cms-op", "weight", -0.5, "0 to 100"),
    ("cms-op", "bias", 21.0, "0 to 20"),
    ("lts", "beta", 0.0, "0.001 to 1000"),
    ("lts-ti", "network.scale", 0.0, "1e-06 to inf"),
    ("ibts", "network.weight", 1e30, "-1e+06 to 1e+06"),
    ("selective", "beta", 2.0, "1e-10 to 1"),
    ("selective", "counts", -1.0, "0 to inf"),
    ("meta-cal", "gamma", -1.0, "0 to 2.09861"),
    ("isotonic", "values", 1.5, "0 to 1"),
    ("isotonic", "values", 0.0, "rise along the last axis"),
    ("histogram", "values", -0.5, "0 to 1"),
    ("histogram", "edges", 1.0, "-inf to 0"),
    ("trust", "share", 1.5, "0 to 1"),
    ("trust", "first", -60.0, "rise along the last axis"),
    ("trust", "temperature", 0.0, "0.001 to 10"),
    ("trust", "losers", 1e4, "-20 to 20"),
    ("trust", "network.scale", 0.0, "0.0005 to inf"),
    ("ensemble", "members", -1.0, "0 to inf"),
]


def test_a_folder_or_an_impossible_name_is_no_calibrator(tmp_path):
    with pytest.raises(DataError, match="is a folder"):
        segcal.load(tmp_path)
    with pytest.raises(DataError, match="cannot be read"):
        segcal.load("a" * 300)


def test_every_calibrator_has_limits():
    assert {name for name, *_ in OUTSIDE} == set(CALIBRATORS)


@pytest.mark.parametrize(("name", "tensor", "value", "expected"), OUTSIDE)
def test_values_that_no_fit_returns_are_refused(name, tensor, value, expected, tmp_path):
    options = {"epochs": 1} if name in ("lts", "lts-ti", "ibts") else {}
    calibrator = CALIBRATORS[name](**options).fit(CASES)
    state, path = calibrator.state_dict(), tmp_path / "c.safetensors"
    state[tensor].reshape(-1)[-1] = value  # the tensor itself
    calibrator.save(path)
    with pytest.raises(DataError) as caught:
        segcal.load(path)
    for part in (str(path), f"'{tensor}'", expected):
        assert part in str(caught.value)
    with pytest.raises(InputError, match=f"'{tensor}'"):
        CALIBRATORS[name](**options).load_state_dict(state)


def test_shapes_are_those_of_what_is_allocated(fitted):
    for num_classes in (2, 3, 7):
        fresh = type(fitted)()
        shapes = fresh.shapes(num_classes)
        fresh.allocate(num_classes)
        assert shapes == {name: tuple(tensor.shape) for name, tensor in fresh.tensors().items()}


def test_a_state_dict_that_claims_many_classes_allocates_nothing(fitted):
    state = fitted.state_dict()
    claim = b'{"num_classes": 1000000, "class_names": null, "channel_names": null}'
    state["_extra_state"] = torch.tensor(list(claim), dtype=torch.uint8)
    fresh = type(fitted)()
    if fresh.shapes(6) != fresh.shapes(7):
        with pytest.raises(InputError, match="for 1000000 classes"):
            fresh.load_state_dict(state)
