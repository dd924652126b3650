"""Parts of a dataset that are declared are used as declared, in every command."""

import json

import pytest

import segcal
from datasets import plain

NAMED = {"calibration": ["case0", "case3", "case4"], "validation": ["case1"], "test": ["case2", "case5"]}


@pytest.fixture
def root(tmp_path):
    return plain(tmp_path / "in", count=7, shape=(20, 24))


def declare(root, splits, groups=None):
    lines = [f"groups = '{groups}'"] if groups else []
    lines += ["[splits]", *(f"{part} = {names}" for part, names in splits.items())]
    (root / "segcal.toml").write_text("\n".join(lines))


def test_fit_uses_the_declared_parts(run, root, tmp_path, monkeypatch):
    declare(root, NAMED)
    seen = {}
    fit = segcal.CALIBRATORS["ts"].fit

    def noting(self, cases, **options):
        seen["calibration"], seen["validation"] = list(cases.ids), list(options["validation"].ids)
        return fit(self, cases, **options)

    monkeypatch.setattr(segcal.CALIBRATORS["ts"], "fit", noting)
    code, text, error = run("fit", root, "-o", tmp_path / "a.safetensors")
    assert (code, error) == (0, "")
    assert seen == {part: NAMED[part] for part in ("calibration", "validation")}
    assert "held out, the declared test part: 'case2', 'case5'" in text
    assert text.count("1 case is in no declared part and is left out: 'case6'") == 1


def test_what_fit_finds_is_what_the_library_finds(run, root, tmp_path):
    declare(root, NAMED)
    found = json.loads(run("fit", root, "-o", tmp_path / "a.safetensors", "--json")[1])
    cases = segcal.open_cases(root)
    expected = segcal.CALIBRATORS["ts"]().fit(cases.select(NAMED["calibration"]))
    assert segcal.load(tmp_path / "a.safetensors").temperature == pytest.approx(expected.temperature, rel=1e-9)
    assert found["held_out"]["names"] == NAMED["test"]
    test = segcal.evaluate(cases.part("test"), expected, metrics=("nll",))
    assert found["held_out"]["after"]["nll"] == pytest.approx(test.value("nll"), rel=1e-9)


@pytest.mark.parametrize(
    ("splits", "options", "says"),
    [
        (NAMED, ("--test", "0.5"), "segcal.toml declares the splits"),
        ({"test": ["case2"]}, (), "declares no calibration part"),
        ({"calibration": [], "test": ["case2"]}, (), "the declared calibration part is empty"),
        ({"calibration": ["zzz"]}, (), "splits.calibration names 'zzz': no such case"),
        ({"calibration": ["case1"], "test": ["case1"]}, (), "'case1' in splits.test and in splits.calibration"),
    ],
)
def test_fit_refuses_what_the_splits_do_not_allow(run, root, tmp_path, splits, options, says):
    declare(root, splits)
    code, text, error = run("fit", root, "-o", tmp_path / "a.safetensors", *options)
    assert (code, text) == (1, "")
    assert says in error
    assert not (tmp_path / "a.safetensors").exists()


def test_evaluate_takes_one_part(run, root, tmp_path):
    declare(root, NAMED)
    for part, names in NAMED.items():
        rows = json.loads(run("evaluate", root, "--split", part, "--metrics", "nll", "--json")[1])["rows"]
        assert {row[0] for row in rows} == {*names, None}
    run("fit", root, "-o", tmp_path / "a.safetensors")
    assert "--split test" in run("evaluate", root, "--calibrator", tmp_path / "a.safetensors")[1]
    (root / "segcal.toml").unlink()
    code, _, error = run("evaluate", root, "--split", "test")
    assert code == 1
    assert "declares no test part" in error


def test_check_lists_wrong_splits_and_notes_cases_in_no_part(run, root):
    declare(root, NAMED)
    code, text, _ = run("check", root)
    assert code == 0
    assert "1 case is in no declared part" in text
    declare(root, {"calibration": ["case1"], "test": ["case2"]}, groups="case")
    code, text, _ = run("check", root)
    assert code == 1
    assert "group 'case' is divided: 'case1' is in splits.calibration, 'case2' is in splits.test" in text


@pytest.mark.usefixtures("no_figures")
def test_compare_says_which_splits_it_used(run, root, tmp_path):
    quick = ("--methods", "ts", "--tune", "none", "--metrics", "nll", "--regions", "everything")
    declare(root, NAMED)
    text = run("compare", root, "-o", tmp_path / "one", *quick)[1]
    assert "7 cases, the splits that the dataset declares" in text
    (root / "segcal.toml").unlink()
    assert "7 cases, 3 random splits" in run("compare", root, "-o", tmp_path / "three", *quick)[1]


def test_fit_names_its_steps_the_map_and_the_cases_held_out(run, root, tmp_path):
    code, text, _ = run("fit", root, "-o", tmp_path / "a.safetensors", "--seed", "3")
    fitted = segcal.load(tmp_path / "a.safetensors")
    steps = fitted.fit_report.iterations
    assert code == 0
    assert f"ts: converged in {steps} steps" in text
    assert f"map: T = {fitted.temperature:.4g}" in text
    held_out = segcal.open_cases(root).split(0.7, 0.0, 0.3, seed=3).test.ids
    assert f"held out, drawn at random, seed 3: {', '.join(map(repr, held_out))}" in text
    found = json.loads(run("fit", root, "-o", tmp_path / "b.safetensors", "--method", "ets", "--json")[1])
    assert found["map"] == segcal.load(tmp_path / "b.safetensors").summary()
    assert found["map"].count("/") == 2
