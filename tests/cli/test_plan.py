"""``segcal plan`` in the terminal."""

import json

from datasets import plain


def test_a_line_for_every_command(run, tmp_path):
    plain(tmp_path, count=10)
    code, text, _ = run("plan", str(tmp_path), "--methods", "ts,vs", "--repeats", "2")
    assert code == 0
    for line in (
        "10 cases, 630 voxels, 4 classes, float32 npy",
        "fit vs",
        "apply ts",
        "compare ts,vs",
        "2 random splits",
    ):
        assert line in text


def test_json_has_numbers(run, tmp_path):
    plain(tmp_path, count=10)
    code, text, _ = run("plan", str(tmp_path), "--methods", "ts", "--json", "--device", "cpu")
    assert code == 0
    found = json.loads(text)
    assert found["data"]["voxels"] == 630
    assert found["machine"]["device"] == "cpu"
    assert [row["command"] for row in found["rows"]] == ["evaluate", "fit ts", "apply ts", "compare ts"]
    assert all(row[name] > 0 for row in found["rows"] for name in ("seconds", "memory", "disk"))


def test_bad_input(run, tmp_path):
    code, _, text = run("plan", str(tmp_path / "nothing"))
    assert code == 1
    assert "nothing" in text
    plain(tmp_path, count=10)
    code, _, text = run("plan", str(tmp_path), "--methods", "nope")
    assert code == 1
    assert "nope" in text
