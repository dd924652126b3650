"""The page as a text: what is in it, what can never be, and how it is written."""

import base64
import copy
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import segcal
from report.example import HOSTILE, document, write
from segcal.errors import DataError, OutputError
from segcal.report import write_report
from segcal.report.page import embed_pictures, embedded, pack_cases, page, payload

ASSETS = Path(segcal.__file__).parent / "report" / "assets"


class Tags(HTMLParser):
    """Every tag, with its attributes, and the text of the element that holds the data."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.data, self._inside = [], "", False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._inside = dict(attributes).get("id") == "study"

    def handle_data(self, text):
        if self._inside:
            self.data += text

    def handle_endtag(self, tag):
        self._inside = False


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("study")
    write(place, cases=12)
    write_report(place)
    return place


def test_the_page_loads_nothing(folder):
    text = (folder / "index.html").read_text()
    tags = Tags(text).tags
    assert {tag for tag, _ in tags} >= {"main", "script", "style"}
    addresses = [value for _, attributes in tags for name, value in attributes.items() if name in ("src", "href")]
    assert all(value.startswith(("#", "data:")) or value in ("tables.csv", "results.json") for value in addresses)
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", text)


def test_text_of_the_study_never_becomes_markup(folder):
    text = (folder / "index.html").read_text()
    parsed = Tags(text)
    assert [tag for tag, _ in parsed.tags].count("script") == 2
    assert "b" not in {tag for tag, _ in parsed.tags}
    assert HOSTILE not in text
    shown = json.loads(parsed.data)
    assert HOSTILE in shown["cases"]["ids"]
    assert "tumour <b>" in shown["about"]["data"]["class_names"]


@pytest.mark.parametrize(
    "text", ["</script>", "<!--", "{{script}}", "\u2028\u2029", "\ud800", "&amp;", "]]>", "$&", "\\1"]
)
def test_any_text_comes_back_as_it_was(text):
    written = page({"case": text}, title=text)
    assert json.loads(Tags(written).data) == {"case": text}
    written.encode()


def test_embedded_json_has_no_character_that_html_reads():
    assert not set("<>&\u2028\u2029") & set(embedded({"<>&": "\u2028<!--\u2029"}))


def test_scripts_never_parse_html():
    for script in ASSETS.glob("*.js"):
        text = script.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)
        assert "</script" not in text


def test_every_asset_is_in_the_page(folder):
    text = (folder / "index.html").read_text()
    scripts = sorted(ASSETS.glob("*.js"))
    assert scripts
    assert all(script.read_text() in text for script in scripts)


def test_same_study_same_page(folder, tmp_path):
    write(tmp_path, cases=12)
    assert write_report(tmp_path).read_bytes() == (folder / "index.html").read_bytes()


@pytest.mark.usefixtures("no_figures")
def test_five_hundred_cases_stay_small(tmp_path):
    study = write(tmp_path, cases=500, methods=20, repeats=3, pictures=False)
    assert write_report(tmp_path).stat().st_size < 1_500_000
    # The worst that can come: every metric, many regions and classes, and twelve volumes of noise.
    study = document(500, 3, 20, classes=19, regions=("everything", "boundary", "interior", "foreground"), metrics=24)
    noise = np.random.default_rng(0).integers(0, 255, (256, 256, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    panels = [{"name": str(i), "file": "noise.png"} for i in range(8)]
    slices = [{"index": i, "panels": panels} for i in range(8)]
    study["browser"] = [{"case": str(i), "title": "", "shape": [9, 9, 9], "slices": slices} for i in range(12)]
    (tmp_path / "results.json").write_text(json.dumps(study))
    size = write_report(tmp_path).stat().st_size
    assert 5_000_000 < size < 15_000_000


def test_figures_are_drawn_and_named(folder):
    names = json.loads(Tags((folder / "index.html").read_text()).data)["figures"]
    assert {"reliability-everything", "methods", "tradeoff", "bands"} <= set(names)
    for name in names:
        assert (folder / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (folder / "figures" / f"{name}.svg").read_text()


def test_figures_stay_in_their_folder(tmp_path):
    study = write(tmp_path / "report", cases=8, methods=2, metrics=2, regions=("../../out side",), pictures=False)
    assert study["summary"][0]["region"] == "../../out side"
    write_report(tmp_path / "report")
    assert (tmp_path / "report" / "figures" / "reliability--out-side.png").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"report"}


def test_it_works_without_torch(tmp_path):
    write(tmp_path, cases=8)
    code = f"""
import sys
sys.modules["torch"] = None
from segcal.report import write_report
write_report({str(tmp_path)!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = json.loads(Tags((tmp_path / "index.html").read_text()).data)
    assert shown["figures"] == []
    assert "No figures" in shown["notes"][0]


# Values per case.


def decoded(block, shape):
    codes = np.frombuffer(base64.b64decode(block["codes"]), "<u2").reshape(shape).astype(float)
    values = block["low"] + block["step"] * codes
    values[codes == 65535], values[codes == 65534] = np.nan, np.inf
    return values


def test_packed_values_are_the_means_over_repeats():
    study = document(cases=20, repeats=3, methods=5)
    study["cases"][0]["values"][0] = None
    study["cases"][-1]["values"][1] = "inf"
    packed, left_out = pack_cases(study)
    assert left_out == 0
    ids, methods = packed["ids"], packed["methods"]
    for block in packed["blocks"]:
        expected = np.full((len(methods), len(ids)), np.nan)
        found = {}
        for row in study["cases"]:
            if (row["region"], row["metric"]) == (block["region"], block["metric"]):
                for name, value in zip(study["splits"][row["repeat"]]["test"], row["values"], strict=True):
                    if value is not None:
                        found.setdefault((row["method"], name), []).append(float(value))
        for (method, name), values in found.items():
            expected[methods.index(method), ids.index(name)] = sum(values) / len(values)
        got = decoded(block, expected.shape)
        assert np.array_equal(np.isnan(got), np.isnan(expected))
        assert np.array_equal(np.isinf(got), np.isinf(expected))
        finite = np.isfinite(expected)
        assert np.abs(got[finite] - expected[finite]).max() <= 0.5001 * block["step"]


def test_too_many_values_lose_later_regions_first():
    study = document(cases=20, methods=3, metrics=2)
    whole, _ = pack_cases(study)
    packed, left_out = pack_cases(study, most_bytes=2 * len(whole["blocks"][0]["codes"]))
    assert (len(packed["blocks"]), left_out) == (2, 2)
    assert {block["region"] for block in packed["blocks"]} == {"everything"}


def test_equal_and_missing_values_are_packed():
    study = document(cases=8, methods=2, metrics=1, regions=("everything",))
    for row in study["cases"]:
        row["values"] = [0.25 if row["method"] == "ts" else None] * len(row["values"])
    (block,) = pack_cases(study)[0]["blocks"]
    got = decoded(block, (3, len({name for split in study["splits"] for name in split["test"]})))
    assert np.isnan(got[[0, 2]]).all()
    assert (got[1] == 0.25).all()


def test_undefined_numbers_become_null(tmp_path):
    study = document(cases=8)
    study["summary"][0].update(mean=float("nan"), high=float("inf"))
    row = payload(study, tmp_path)["summary"][0]
    assert (row["mean"], row["high"]) == (None, "inf")


# Pictures.


def browser_of(*files):
    slices = [{"index": i, "panels": [{"name": "image", "file": file}]} for i, file in enumerate(files)]
    return [{"case": "a", "title": "t", "slices": slices}]


def test_only_pictures_of_the_folder_are_read(tmp_path):
    folder = tmp_path / "report"
    folder.mkdir()
    Image.new("L", (4, 4)).save(tmp_path / "outside.png")
    Image.new("L", (4, 4)).save(folder / "inside.png")
    (folder / "text.png").write_text("no picture")
    outside = str(tmp_path / "outside.png")
    shown, remarks = embed_pictures(browser_of("inside.png", "../outside.png", outside, "text.png", "none.png"), folder)
    assert [each["index"] for each in shown[0]["slices"]] == [0]
    assert remarks == ["4 pictures of cases are missing or are not PNG files."]


def test_large_volumes_keep_evenly_spaced_slices(tmp_path):
    Image.new("L", (4, 4)).save(tmp_path / "a.png")
    one = len(base64.b64encode((tmp_path / "a.png").read_bytes()))
    shown, remarks = embed_pictures(browser_of(*["a.png"] * 8), tmp_path, most_bytes=4 * one)
    assert [each["index"] for each in shown[0]["slices"]] == [1, 3, 5, 7]
    assert "left out" in remarks[0]
    shown, _ = embed_pictures(browser_of("a.png") * 5, tmp_path, most_bytes=3 * one)
    assert len(shown) == 3


def test_keys_have_the_colours_of_the_pictures():
    from segcal.study.results import browser

    text = (ASSETS / "browser.js").read_text()
    for colours in (browser._CONFIDENCE, browser._TEMPERATURE, browser._CLASSES):
        listed = ", ".join(f'"rgb({r:.0f} {g:.0f} {b:.0f})"' for r, g, b in colours.tolist())
        assert listed in re.sub(r"\s+", " ", text).replace("[ ", "[").replace(", ]", "]")
    for colour in (browser._IGNORED, browser._RED, browser._GREEN, browser._ORANGE):
        assert "rgb({} {} {})".format(*colour.tolist()) in text


# Bad input.


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not there; expected the results of segcal compare. To fix: run segcal compare first"),
        ('{"format": "segcal.Study", "version": 1, "about"', "is not complete JSON"),
        ("", "is not complete JSON"),
        (b"\xff\xfe\x00", "is not complete JSON"),
        ("[1, 2]", "holds 'list', not a study"),
        ('{"format": "segcal.Results", "version": 1}', "holds 'segcal.Results', not a study"),
        ('{"format": "segcal.Study", "version": 2}', "has version 2; expected version 1"),
        ('{"format": "segcal.Study", "version": 1}', "has no 'metrics'"),
    ],
)
def test_what_is_not_a_study_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "results.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=re.escape(message)) as raised:
        write_report(tmp_path)
    assert "results.json" in str(raised.value)
    assert not (tmp_path / "index.html").exists()


@pytest.mark.parametrize("name", ["about", "methods", "summary", "reliability", "recommendation"])
def test_a_study_without_a_part_is_refused(tmp_path, name):
    study = document(cases=8, methods=2, metrics=2)
    del study[name]
    (tmp_path / "results.json").write_text(json.dumps(study))
    with pytest.raises(DataError, match=f"has no '{name}'"):
        write_report(tmp_path)


def test_a_study_without_baseline_is_refused(tmp_path):
    study = document(cases=8, methods=2, metrics=2)
    del study["methods"][0]
    (tmp_path / "results.json").write_text(json.dumps(study))
    with pytest.raises(DataError, match="'uncalibrated'"):
        write_report(tmp_path)


@pytest.mark.usefixtures("no_figures")
def test_a_failed_write_leaves_the_old_page(folder, tmp_path, monkeypatch):
    write(tmp_path, cases=8, pictures=False)
    (tmp_path / "index.html").write_text("old")
    whole = Path.write_text

    def full_disk(self, text, *rest, **options):
        if not text.startswith("<!doctype html>"):
            return whole(self, text, *rest, **options)
        whole(self, text[: len(text) // 2], *rest, **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(OutputError, match="No space left"):
        write_report(tmp_path)
    assert (tmp_path / "index.html").read_text() == "old"
    assert not list(tmp_path.glob(".segcal-tmp-*"))


# Colours.


def luminance(colour):
    channels = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def themes():
    blocks = re.findall(r":root[^{]*\{([^}]*color-scheme: (?:light|dark);[^}]*)\}", (ASSETS / "style.css").read_text())
    return [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in blocks]


def test_both_ways_to_dark_are_the_same():
    light, chosen, system = themes()
    assert chosen == system
    assert light.keys() == chosen.keys()


@pytest.mark.parametrize("which", [0, 1])
def test_colours_have_enough_contrast(which):
    colours = themes()[which]
    grounds = [colours[name] for name in ("page", "surface")]
    texts = ["ink", "muted", "accent", "over", "under", "baseline", *(f"s{i}" for i in range(6))]
    # WCAG AA for text; lines and marks would need 3 only, but names are written in their colours.
    for name in texts:
        assert min(contrast(colours[name], ground) for ground in grounds) >= 4.5, name
    for name in ("accent-soft", "notice", "raised"):
        assert contrast(colours["ink"], colours[name]) >= 7, name
        assert contrast(colours["muted"], colours[name]) >= 4.5, name


def test_the_example_is_left_as_it_was():
    study = document(cases=8, methods=2, metrics=2)
    before = copy.deepcopy(study)
    payload(study, Path("nowhere"))
    assert study == before
