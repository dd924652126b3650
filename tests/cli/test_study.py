"""A study in the terminal."""

import io

from rich.console import Console

import segcal.cli.compare
from report.example import document, harm
from segcal.study import Study


def printed(study, monkeypatch, tmp_path, width=200):
    """What the terminal shows, with its colours."""
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=width, highlight=False)
    for module in (segcal.cli.console, segcal.cli.compare):
        monkeypatch.setattr(module, "out", console)
    segcal.cli.compare.show_study(Study(study), tmp_path / "index.html")
    return console.file.getvalue()


def test_harm_is_marked_and_nothing_of_it_is_green(monkeypatch, tmp_path):
    text = printed(harm(document()), monkeypatch, tmp_path)
    table, _, words = text.partition("The network is overconfident")
    row = next(line for line in table.splitlines() if "cms-op *" in line)
    assert "\x1b[31m" in row  # red
    assert "!" in row
    assert "\x1b[32m" not in text
    assert "\x1b[1;32m" not in text
    assert "! worse than uncalibrated" in table
    assert "chosen by NLL on the validation cases" in table
    assert "\x1b[1;31mECE gets worse" in words


def test_rows_are_sorted_by_the_criterion_and_shifted_data_have_a_table_each(monkeypatch, tmp_path):
    study = document()
    lines = printed(study, monkeypatch, tmp_path).splitlines()
    nll = {row["method"]: row["mean"] for row in study["summary"] if row["metric"] + row["region"] == "nlleverything"}
    order = sorted(nll, key=nll.get)
    first = next(place for place, line in enumerate(lines) if order[0] in line)
    for key, line in zip(order, lines[first:], strict=False):
        assert key in line
        assert f"{nll[key]:.4f}" in line
    text = "\n".join(lines)
    for entry in study["shift"]:
        assert f"Shifted: {entry['name']}" in text
    assert text.count("NLL minus ts (95%)") == len(study["shift"])


def test_pooled_ece_stands_beside_ece_where_there_is_room(monkeypatch, tmp_path):
    study = document()
    for row in study["summary"]:
        row |= {"pooled_low": 0.9 * row["pooled"], "pooled_high": 1.2 * row["pooled"]}
    head, *lines = printed(study, monkeypatch, tmp_path).splitlines()[1:]
    assert head.index("ECE (95%)") < head.index("pooled ECE (95%)") < head.index("Boundary")
    row = next(row for row in study["summary"] if row["metric"] + row["region"] == "eceeverything")
    line = next(line for line in lines if row["method"] in line)
    assert f"{row['pooled']:.4f} {row['pooled_low']:.4f}-{row['pooled_high']:.4f}" in line
    assert "pooled ECE" not in printed(study, monkeypatch, tmp_path, width=80)
    del row["pooled_low"], row["pooled_high"]  # as in a study of an earlier version
    assert f"{row['pooled']:.4f}" in printed(study, monkeypatch, tmp_path)
