import json
import re
import subprocess
import sys

import numpy as np

import segcal.cli.commands
from datasets import labels, nnunet, plain


def test_help_teaches_every_command(run):
    code, text, _ = run("--help")
    assert code == 0
    commands = [command.name for command in segcal.cli.commands.app.registered_commands]
    assert len(commands) == 14
    for command in commands:
        assert command in text
        assert "Example: segcal" in run(command, "--help")[1]
    assert "[num_bins=50]" in run("evaluate", "--help")[1]


def test_help_of_all_commands_is_that_of_each_and_needs_no_torch(run):
    commands = segcal.cli.commands.app.registered_commands
    assert {own.name: own.callback.__doc__.partition("\n")[0] for own in commands} == segcal.cli.SUMMARIES
    script = (
        "import sys, segcal.cli; sys.argv = ['segcal', '--help']\ntry: segcal.cli.main()\nexcept SystemExit: pass\n"
    )
    script += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)
    assert run("--version")[1] == f"segcal {segcal.__version__}\n"


def test_scenes_then_check(run, tmp_path):
    assert run("scenes", tmp_path / "s", "--volumes")[0] == 0
    code, text, error = run("check", tmp_path / "s")
    assert (code, error) == (0, "")
    for word in ("cases", "12", "24 x 64 x 64", "overconfident", "speck", "ignored", "no problems"):
        assert word in text


def test_check_as_json_and_exit_code(run, tmp_path):
    root = plain(tmp_path)
    code, text, _ = run("check", root, "--json")
    assert code == 0
    assert json.loads(text)["cases"] == 3
    np.save(root / "labels" / "case1.npy", labels(1) + 9)
    (root / "labels" / "case2.npy").unlink()
    code, text, _ = run("check", root, "--json")
    assert code == 1
    assert len(json.loads(text)["problems"]) == 2
    code, text, _ = run("check", root)
    assert code == 1
    assert "2 problems" in text


def test_pack_and_resume(run, tmp_path):
    root = plain(tmp_path / "in")
    code, text, _ = run("pack", root, tmp_path / "out")
    assert code == 0
    assert "written  3 cases" in text
    assert np.load(tmp_path / "out" / "logits" / "case0.npy").dtype == np.float16
    code, _, error = run("pack", root, tmp_path / "out")
    assert code == 1
    assert "is not empty" in error
    assert "3 finished cases, verified" in run("pack", root, tmp_path / "out", "--resume")[1]


def test_pack_an_nnunet_folder_to_zarr(run, tmp_path):
    predictions, truth = nnunet(tmp_path)
    assert (
        run("pack", predictions, tmp_path / "out", "--layout", "nnunet", "--labels", truth, "--format", "zarr")[0] == 0
    )
    assert run("check", tmp_path / "out")[0] == 0


def test_evaluate_prints_writes_and_draws(run, tmp_path):
    root = plain(tmp_path / "in", shape=(20, 24))
    options = ("--metrics", "ece,ece[num_bins=50],hd95", "--regions", "everything,boundary,local")
    files = (
        "-o",
        tmp_path / "r.json",
        "--csv",
        tmp_path / "r.csv",
        "--plots",
        tmp_path / "p",
        "--maps",
        tmp_path / "m",
    )
    code, text, error = run("evaluate", root, *options, *files)
    assert (code, error) == (0, "")
    for word in ("ece[num_bins=50]", "boundary", "local-max", "hd95", "95% interval", "overconfident", "free-energy"):
        assert word in text
    assert json.loads((tmp_path / "r.json").read_text())["format"] == "segcal.Results"
    assert (tmp_path / "r.csv").read_text().startswith("case,region,metric")
    drawn = {str(path.relative_to(tmp_path / "p")) for path in (tmp_path / "p").rglob("*.png")}
    assert drawn >= {"reliability-everything.png", "classes-boundary.png", "boundary.png", "logits.png"}
    assert sum(name.startswith("cases/") for name in drawn) == 3  # maps of each; they are smaller than a patch
    assert np.load(tmp_path / "m" / "confidence" / "case0.npy").shape == (20, 24)


def test_evaluate_presets_json_and_mistakes(run, tmp_path):
    root = plain(tmp_path / "in", shape=(20, 24))
    code, text, _ = run("evaluate", root, "--preset", "crac", "--json")
    assert code == 0
    assert {row[2] for row in json.loads(text)["rows"]} >= {"hd95", "ece[num_bins=15]"}
    for options, says in (
        (("--preset", "nope"), "preset is 'nope'"),
        (("--preset", "crac", "--metrics", "ece"), "came with --metrics or --regions"),
        (("--preset", "crac", "--regions", "interior"), "came with --metrics or --regions"),
        (("--metrics", "nope"), "metric is 'nope'"),
        (("--regions", "nope"), "region is 'nope'"),
        (("--regions", ","), "nothing was asked for"),
    ):
        code, text, error = run("evaluate", root, *options, "-o", tmp_path / "r.json")
        assert (code, text) == (1, "")
        assert says in error
    assert not (tmp_path / "r.json").exists()


def test_fit_evaluate_and_apply(run, tmp_path):
    root = plain(tmp_path / "in", count=6, shape=(20, 24))
    cal = tmp_path / "cal.safetensors"
    code, text, error = run("fit", root, "-o", cal)
    assert (code, error) == (0, "")
    for word in ("ts: converged", "2 held-out cases", "before", "after", "flip"):
        assert word in text
    report = json.loads(run("fit", root, "-o", cal, "--test", "0", "--json")[1])
    assert report["fit"]["nll_after"] <= report["fit"]["nll_before"]
    assert "overconfident" not in run("evaluate", root, "--calibrator", cal)[1]
    code, text, _ = run("apply", cal, root, "-o", tmp_path / "out", "--confidence")
    assert code == 0
    assert "6 cases written" in text
    assert "every label kept" in text
    assert "is not empty" in run("apply", cal, root, "-o", tmp_path / "out")[2]
    assert "6 were finished already" in run("apply", cal, root, "-o", tmp_path / "out", "--resume")[1]
    assert "method is 'nope'" in run("fit", root, "-o", cal, "--method", "nope")[2]


def test_errors_go_to_standard_error_without_a_traceback(run, tmp_path):
    code, text, error = run("check", tmp_path / "nowhere")
    assert (code, text) == (1, "")
    assert "does not exist" in error
    assert "Traceback" not in error


def test_names_with_markup_are_shown_as_they_are(run, tmp_path):
    root = plain(tmp_path / "in", count=1)
    for folder in ("logits", "labels"):
        (root / folder / "case0.npy").rename(root / folder / "[red]x.npy")
    np.save(root / "labels" / "[red]x.npy", labels(0) + 9)
    assert "[red]x" in run("check", root)[1]


def test_demo_is_a_study_with_a_report_and_the_truth(run, tmp_path, monkeypatch):
    # As many methods and images as it takes to see that all of it runs; `make demo` has all of them.
    for name, value in (("_IMAGES", 8), ("_METHODS", ("ts", "histogram")), ("_REPEATS", 1)):
        monkeypatch.setattr(segcal.cli.demo, name, value)
    monkeypatch.setattr(segcal.cli.demo.os, "cpu_count", lambda: 1)
    folder = tmp_path / "d"
    for _ in range(2):  # The second one replaces the first, and needs no figures of its own.
        code, text, error = run("demo", "-o", folder)
        monkeypatch.setattr("segcal.report.figures.write_figures", lambda study, folder: [])
        assert (code, error) == (0, "")
        for word in ("no problems", "overconfident", "Use ts", "labels moved", "index.html"):
            assert word in text
    before, after = (float(found) for found in re.findall(r"KL (\S+) nats", text))
    assert after < before / 2
    assert (folder / "report" / "index.html").is_file()
    again = segcal.synthetic.demo_scenes()[0][:8]
    assert segcal.open_cases(folder / "scenes").ids == again.ids


def test_it_runs_from_a_shell():
    done = subprocess.run([sys.executable, "-m", "segcal", "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "segcal demo" in done.stdout
