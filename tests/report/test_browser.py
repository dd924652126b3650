"""The page in a real browser, as people use it: Debian's Chromium without a window.

Without Chromium these tests skip; where ``SEGCAL_REQUIRE_CHROMIUM=1`` they fail instead.
"""

import json
import re

import pytest
import torch

from report.example import HOSTILE, write
from report.pages import keys, means, opened, scroll_to_end
from segcal.report import write_report
from segcal.study.results.browser import _classes


@pytest.mark.parametrize("name", ["volumes", "images", "bare", "crowded", "channels"])
@pytest.mark.parametrize("width", [1280, 390])
def test_no_complaint_and_no_sideways_scrolling(browser, reports, name, width):
    with opened(browser, reports(name)[0], viewport={"width": width, "height": 844}) as page:
        for details in page.locator("details").all():
            details.evaluate("each => { each.open = true; }")
        scroll_to_end(page)
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        page.get_by_role("radio", name="All metrics").check()
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        beyond = page.evaluate(
            """() => [...document.querySelectorAll("main *")].filter((each) => {
                 if (each.closest(".scroll, .unseen") || !each.getClientRects().length) return false;
                 const box = each.getBoundingClientRect();
                 return box.right > document.documentElement.clientWidth + 1 || box.left < -1;
               }).map((each) => each.outerHTML.slice(0, 120))"""
        )
        assert beyond == []


def test_sections_come_in_order(browser, reports):
    with opened(browser, reports("volumes")[0]) as page:
        ids = page.locator("main > section").evaluate_all("all => all.map((each) => each.id)")
        assert ids == [
            "top", "methods", "pooled", "reliability", "classes", "boundary", "tradeoff", "cases", "browser",
            "diagnosis", "statistics", "shift", "sensitivity", "definitions",
        ]  # fmt: skip
        links = page.locator("nav a").evaluate_all("all => all.map((each) => each.hash.slice(1))")
        assert links == ids


def test_channels_are_shown_one_by_one(browser, reports):
    address, study = reports("channels")
    with opened(browser, address) as page:
        table = page.locator("#channels table")
        heads = table.locator("thead th").all_inner_texts()
        assert [head.split("\n")[0] for head in heads] == ["Method", "liver", "liver", HOSTILE, HOSTILE]
        (mean,) = (row["mean"] for row in study["channels"][1]["summary"]
                   if (row["method"], row["region"], row["metric"]) == ("ts", "everything", "nll"))  # fmt: skip
        assert f"{mean:.3f}" in table.locator("tbody tr").nth(1).inner_text()
        chooser = page.get_by_label("Channel", exact=True)
        assert chooser.locator("option").all_inner_texts() == ["liver", HOSTILE]
        chooser.select_option(index=1)
        assert "Pooled ECE" in page.locator("#reliability").inner_text()
        words = page.locator("#diagnosis .findings").inner_text()
        assert f"overconfident in liver; underconfident in {HOSTILE}" in words


def test_the_headline_says_what_how_and_how_sure(browser, reports):
    address, study = reports("volumes")
    with opened(browser, address) as page:
        text = page.locator("#top").inner_text()
        assert "The network is overconfident" in text
        assert "changes no label" in text
        for sentence in study["recommendation"]["sentences"] + study["recommendation"]["caveats"] + study["warnings"]:
            assert sentence in text
        assert "segcal apply calibrator.safetensors NEW_DATA/ -o calibrated/" in re.sub(r"\s+", " ", text)
        rows = {row["method"]: row for row in study["summary"] if row["region"] + row["metric"] == "everythingece"}
        for method in ("uncalibrated", "cms-op"):
            assert f"{rows[method]['mean']:.4f}" in text
            assert f"{rows[method]['low']:.4f} to {rows[method]['high']:.4f}" in text


def test_pooled_values_stand_beside_those_per_case_and_scores_add_up(browser, reports):
    address, study = reports("volumes")
    with opened(browser, address) as page:
        table = page.locator("#pooled table")
        heads = [head.split("\n") for head in table.locator("thead th").all_inner_texts()]
        assert heads == [["Method"], ["ECE", "per case"], ["ECE", "pooled"],
                         *(["NLL", part] for part in ("pooled", "calibration", "refinement")),
                         *(["Brier score", part] for part in ("pooled", "calibration", "refinement"))]  # fmt: skip
        cells = [cell.split("\n") for cell in table.locator("tbody tr").nth(1).locator("td").all_inner_texts()]
        row = next(
            r for r in study["summary"] if (r["method"], r["region"], r["metric"]) == ("ts", "everything", "ece")
        )
        for (value, interval), names in zip(
            cells, (("mean", "low", "high"), ("pooled", "pooled_low", "pooled_high")), strict=False
        ):
            assert value == f"{row[names[0]]:.4f}"
            assert interval == f"{row[names[1]]:.4f} to {row[names[2]]:.4f}"
        for whole, calibration, refinement in (cells[2:5], cells[5:8]):
            assert float(whole[0]) == pytest.approx(float(calibration[0]) + float(refinement[0]), abs=1.1e-4)
            assert [len(whole), len(calibration), len(refinement)] == [1, 2, 1]
        text = page.locator("#pooled").inner_text()
        assert "right or wrong on all of it in one case" in text
        assert "calibration plus refinement" in text
        line = f"Pooled over all voxels: {0.97 * means(study, 'ece')['uncalibrated']:.4f} ("
        assert line in page.locator("#top").inner_text()


def test_a_study_of_an_earlier_version_shows_pooled_values_without_intervals(browser, tmp_path):
    study = write(tmp_path, cases=8, methods=3, metrics=2, pictures=False)
    del study["scores"]
    for row in study["summary"]:
        del row["pooled_low"], row["pooled_high"]
    (tmp_path / "results.json").write_text(json.dumps(study))
    with opened(browser, write_report(tmp_path).as_uri()) as page:
        cells = page.locator("#pooled tbody tr").first.locator("td").all_inner_texts()
        assert [len(cell.split("\n")) for cell in cells] == [2, 1]
        assert "refinement" not in page.locator("#pooled").inner_text()
        assert re.search(r"Pooled over all voxels: [\d.]+, then [\d.]+\.", page.locator("#top").inner_text())


def test_classes_are_shown_before_and_after(browser, reports):
    address, study = reports("volumes")
    rows = {(row["method"], row["class"]): row for row in study["classes"]}
    with opened(browser, address) as page:
        section = page.locator("#classes")
        section.get_by_label("After", exact=True).select_option("ts")
        names = section.locator("tbody th").all_inner_texts()
        assert names == study["about"]["data"]["class_names"]
        for line, name in zip(section.locator("tbody tr").all(), names, strict=True):
            before, now = rows["uncalibrated", name], rows["ts", name]
            found = [cell.replace("−", "-").replace(",", "") for cell in line.locator("td").all_inner_texts()]
            wanted = [own[key] for key in ("ece", "dice", "balance") for own in (before, now)]
            wanted += [before["voxels"], now["predicted"]]
            assert [float(cell) for cell in found] == pytest.approx(wanted, abs=6e-4)
        section.get_by_role("radio", name="Largest ECE first").check()
        worst = sorted(names, key=lambda name: -rows["uncalibrated", name]["ece"])
        assert section.locator("tbody th").all_inner_texts() == worst


def test_many_classes_are_shown_when_asked_for_and_channels_by_name(browser, reports):
    with opened(browser, reports("crowded")[0]) as page:
        section = page.locator("#classes")
        assert section.locator("tbody tr").count() == 30
        section.get_by_role("button", name="Show all 34 classes").click()
        assert section.locator("tbody tr").count() == 34
        assert section.get_by_role("button").count() == 0
    with opened(browser, reports("channels")[0]) as page:
        assert page.locator("#classes tbody th").all_inner_texts() == ["liver", HOSTILE]
        assert page.locator("#classes h2").inner_text() == "Inside each channel"


@pytest.mark.parametrize(("column", "field"), [("parameters", "parameters"), ("value", "mean"), ("name", "name")])
def test_the_table_sorts_both_ways(browser, reports, column, field):
    address, study = reports("volumes")
    working = [method for method in study["methods"] if method["status"] == "ok"]
    value = means(study, "nll") if field == "mean" else {method["key"]: method[field] for method in working}
    with opened(browser, address) as page:
        head = page.locator(f'#methods th[data-column="{column}"]')
        if head.get_attribute("aria-sort") is None:
            head.get_by_role("button").click()
        assert head.get_attribute("aria-sort") == "ascending"
        up = [value[key] for key in keys(page)[:-1]]
        head.get_by_role("button").press("Enter")
        assert head.get_attribute("aria-sort") == "descending"
        down = [value[key] for key in keys(page)[:-1]]
        fold = str.lower if column == "name" else lambda number: number
        assert up == sorted(value.values(), key=fold)
        assert down == sorted(value.values(), key=fold, reverse=True)
        assert keys(page)[-1] == "meta-cal"  # what failed stays last, with its reason
        assert "no correct voxel of class 3" in page.locator("#methods tr.failed").inner_text()


def test_best_comes_first_also_where_higher_is_better(browser, reports):
    address, study = reports("volumes")
    with opened(browser, address) as page:
        page.locator("#methods").get_by_label("Metric", exact=True).select_option("dsc")
        dice = means(study, "dsc")
        assert [dice[key] for key in keys(page)[:-1]] == sorted(dice.values(), reverse=True)


def test_choosers_change_the_table(browser, reports):
    address, study = reports("volumes")
    with opened(browser, address) as page:
        section = page.locator("#methods")
        section.get_by_label("Metric", exact=True).select_option("nll")
        section.get_by_label("Region", exact=True).select_option("boundary")
        cell = section.locator('tr[data-method="ts"] td').first
        assert float(cell.inner_text()) == pytest.approx(means(study, "nll", "boundary")["ts"], abs=6e-4)
        page.get_by_role("radio", name="All metrics").check()
        assert section.locator("table.matrix thead th").count() == 1 + len(study["metrics"])
        page.get_by_role("radio", name="One metric").check()
        assert section.locator("table.methods").count() == 1


def point_at(page, locator):
    """Moves the mouse to the middle of a mark, whatever lies above it."""
    box = locator.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)


def bins_of(study, method, label=None, region="everything"):
    return next(
        row for row in study["reliability"] if (row["method"], row["region"], row["class"]) == (method, region, label)
    )


def test_hovering_a_bin_shows_its_counts(browser, reports):
    address, study = reports("volumes")
    with opened(browser, address) as page:
        chart = page.locator('#reliability [data-panel="before"] .chart svg')
        chart.scroll_into_view_if_needed()
        shade = chart.locator(".bin").nth(6).locator(".shade")  # the first bin is empty and not drawn
        point_at(page, shade)
        tip = page.locator("#tooltip")
        count = bins_of(study, "uncalibrated")["count"][7]
        assert f"{count:,}" in tip.inner_text()
        assert "Confidence 46.7% to 53.3%" in tip.inner_text()
        assert "Accuracy" in tip.inner_text()
        page.mouse.move(5, 5)
        tip.wait_for(state="hidden")


def test_keys_walk_through_the_bins_and_are_spoken(browser, reports):
    address, study = reports("volumes")
    with opened(browser, address) as page:
        page.locator('#reliability [data-panel="after"] .chart svg').focus()
        counts = bins_of(study, "cms-op")["count"]
        page.keyboard.press("ArrowRight")
        first = page.locator("#spoken").inner_text()
        page.keyboard.press("ArrowRight")
        second = page.locator("#spoken").inner_text()
        assert first != second
        assert any(f"{count:,}" in second for count in counts)
        page.keyboard.press("Escape")
        page.locator("#tooltip").wait_for(state="hidden")


def test_reliability_by_class_region_and_method(browser, reports):
    address, study = reports("volumes")
    with opened(browser, address) as page:
        section = page.locator("#reliability")
        facts = section.locator('[data-panel="after"] .facts-row')
        seen = [facts.inner_text()]
        section.get_by_label("Predicted class").select_option("2")
        seen.append(facts.inner_text())
        section.get_by_label("Region", exact=True).select_option("band-0-3")
        seen.append(facts.inner_text())
        section.get_by_label("After", exact=True).select_option("ts")
        seen.append(facts.inner_text())
        assert len(set(seen)) == 4
        count = sum(bins_of(study, "ts", 2, "band-0-3")["count"])
        assert f"{float(f'{count / 1e3:.3g}'):g}k voxels" in seen[-1]
        # Shifted data has no classes: the chooser goes back to all of them.
        section.get_by_label("Region", exact=True).select_option("shifted: fog strong")
        assert section.get_by_label("Predicted class").input_value() == ""
        assert section.get_by_label("Predicted class").locator("option:disabled").count() == 4
        assert "confidence" in facts.inner_text()


def test_chips_add_and_remove_lines_everywhere(browser, reports):
    with opened(browser, reports("volumes")[0]) as page:
        scroll_to_end(page)
        names = {}
        for section in ("boundary", "shift", "sensitivity"):
            names[section] = page.locator(f"#{section} .line-name").all_text_contents()
            assert "vs" not in names[section]
        page.locator("#boundary").get_by_role("checkbox", name="vs", exact=True).check()
        page.locator("#boundary").get_by_role("checkbox", name="uncalibrated").uncheck()
        for section in names:
            shown = page.locator(f"#{section} .line-name").all_text_contents()
            assert "vs" in shown
            assert "uncalibrated" not in shown
        before = page.locator("#boundary .axis-name").all_text_contents()
        page.locator("#boundary").get_by_role("radio", name="NLL").check()
        assert page.locator("#boundary .axis-name").all_text_contents() != before


def test_every_method_is_in_the_trade_off(browser, reports):
    address, study = reports("volumes")
    with opened(browser, address) as page:
        chart = page.locator("#tradeoff svg")
        chart.scroll_into_view_if_needed()
        working = {method["key"] for method in study["methods"] if method["status"] == "ok"}
        assert set(chart.locator(".line-name").all_text_contents()) == working
        point_at(page, chart.locator(".series-after .dot"))
        assert page.locator("#tooltip strong").inner_text() == "Conditional matrix scaling, order kept"


def test_pairs_name_their_case_and_open_its_pictures(browser, reports):
    address, study = reports("volumes")
    tested = {name for split in study["splits"] for name in split["test"]}
    with opened(browser, address) as page:
        section = page.locator("#cases")
        section.scroll_into_view_if_needed()
        assert section.locator(".case").count() == len(tested)
        assert f"of {len(tested)} cases" in page.locator("#paired-words").inner_text()
        section.locator("svg").focus()
        names = set()
        for _ in tested:
            names.add(page.locator("#tooltip strong").inner_text())
            page.keyboard.press("ArrowRight")
        assert names == tested
        section.get_by_role("button", name=HOSTILE).click()
        assert HOSTILE in page.locator("#browser select option:checked").inner_text()


def test_the_browser_steps_through_cases_and_slices(browser, reports):
    address, study = reports("volumes")
    with opened(browser, address) as page:
        section = page.locator("#browser")
        chosen = section.locator("select option:checked")
        picture = section.locator("img").first
        cases = [entry["case"] for entry in study["browser"]]
        assert section.locator("img").count() == 8
        assert picture.evaluate("each => each.decode().then(() => each.naturalWidth)") == 128
        for name in (*cases[1:], cases[0]):
            page.locator("#next-case").click()
            assert chosen.inner_text().startswith(name)
        page.locator("#previous-case").click()
        assert chosen.inner_text().startswith(cases[-1])
        slider = page.locator("#slice")
        slider.fill("0")
        seen = [picture.get_attribute("src")]
        for _ in range(3):
            slider.press("ArrowRight")
            seen.append(picture.get_attribute("src"))
        assert len(set(seen)) == 4
        section.locator(".viewer").focus()
        page.keyboard.press("ArrowDown")
        assert picture.get_attribute("src") == seen[2]
        page.keyboard.press("ArrowRight")
        assert chosen.inner_text().startswith(cases[0])


def test_images_have_no_slice_slider(browser, reports):
    with opened(browser, reports("images")[0]) as page:
        assert page.locator("#browser img").count() == 8
        assert not page.locator("#slice").is_visible()


def test_every_class_has_the_colour_of_the_pictures_in_the_key(browser, reports):
    address, study = reports("crowded")
    with opened(browser, address) as page:
        swatches = page.locator("#browser .viewer > .swatches .swatch")
        shown = swatches.evaluate_all("all => all.map((one) => getComputedStyle(one).backgroundColor)")
    colours = [tuple(map(int, re.findall(r"\d+", text))) for text in shown]
    count = study["about"]["data"]["num_classes"]
    assert colours[:-1] == [tuple(colour) for colour in _classes(torch.arange(count)).tolist()]


def background(page):
    text = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", text)[:3])) / 3


def test_dark_follows_the_system_and_the_choice_is_remembered(browser, reports):
    address = reports("images")[0]
    with opened(browser, address, color_scheme="light") as page:
        assert background(page) > 200
    with opened(browser, address, color_scheme="dark") as page:
        assert background(page) < 60
        page.get_by_role("button", name="Switch to light colours").click()
        assert background(page) > 200
        page.reload()
        page.locator("footer").wait_for()
        assert background(page) > 200
        page.get_by_role("button", name="Switch to dark colours").click()
        assert background(page) < 60


def test_statistics_and_sensitivity_switch(browser, reports):
    with opened(browser, reports("volumes")[0]) as page:
        scroll_to_end(page)
        section = page.locator("#statistics")
        before = section.locator(".row-name").all_text_contents()
        section.get_by_label("Metric and region").select_option("dsc\nboundary")
        assert section.locator(".row-name").all_text_contents() != before
        section = page.locator("#sensitivity")
        section.get_by_role("radio", name="Calibration cases").check()
        assert "Calibration cases" in section.locator(".axis-name").all_text_contents()


def test_every_control_has_a_name(browser, reports):
    with opened(browser, reports("volumes")[0]) as page:
        scroll_to_end(page)
        nameless = page.evaluate(
            """() => [...document.querySelectorAll("button, select, input, [tabindex='0']")].filter((each) =>
                 !each.getAttribute("aria-label") && !each.labels?.length && !each.textContent.trim()
               ).map((each) => each.outerHTML.slice(0, 100))"""
        )
        assert nameless == []
        charts = page.locator(".chart svg").evaluate_all("all => all.map((each) => each.getAttribute('aria-label'))")
        assert charts
        assert all(charts)


def test_print_has_no_controls_of_the_screen(browser, reports):
    with opened(browser, reports("volumes")[0], color_scheme="dark") as page:
        page.emulate_media(media="print", color_scheme="dark")
        assert background(page) > 200
        assert not page.locator("header.bar").is_visible()


def test_a_method_that_is_the_same_map_as_another_says_so(browser, reports):
    with opened(browser, reports("fallen_back")[0], viewport={"width": 1280, "height": 844}) as page:
        row = page.locator("tr[data-method=ets]").first
        assert "is ts here" in row.inner_text()
        assert "not tested" in row.inner_text()
        assert "is ts here" not in page.locator("tr[data-method=ts]").first.inner_text()
        assert "groups: p" in page.locator("#statistics").inner_text()


def test_hostile_names_are_shown_as_text(browser, reports):
    """``opened`` sees to it that no script of theirs runs, no dialog opens and nothing is loaded."""
    address, study = reports("hostile")
    with opened(browser, address) as page:
        for details in page.locator("details").all():
            details.evaluate("each => { each.open = true; }")
        scroll_to_end(page)
        for option in page.locator("#browser select option").all():
            page.locator("#browser select").select_option(option.get_attribute("value"))
        shown = page.locator("main").inner_text()
        assert all(method["name"] in shown for method in study["methods"][:4])
        assert page.title() == study["about"]["title"]
        assert page.locator("iframe, main img[src='x'], [onerror], [onload], a[href^='javascript']").count() == 0


def test_the_policy_stops_what_gets_into_the_page(browser, reports):
    """If markup of a study ever became part of the page, the browser would still refuse to run or load it."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(reports("images")[0])
    page.locator("footer").wait_for()
    stopped = page.evaluate(
        """async () => {
             const seen = [];
             addEventListener("securitypolicyviolation", (event) => seen.push(event.effectiveDirective));
             const add = (tag, own) => document.body.append(Object.assign(document.createElement(tag), own));
             add("script", { textContent: "window.hacked = 1" });
             add("style", { textContent: "body { display: none }" });
             add("img", { src: "http://example.invalid/x.png" });
             add("iframe", { src: "http://example.invalid/" });
             document.body.insertAdjacentHTML("beforeend", "<b onclick='window.hacked = 1'>x</b>");
             document.body.lastChild.click();
             await fetch("http://example.invalid/").catch(() => null);
             await new Promise((resolve) => setTimeout(resolve, 300));
             return [window.hacked ?? 0, getComputedStyle(document.body).display, seen];
           }"""
    )
    context.close()
    assert stopped[:2] == [0, "block"]
    wanted = {"script-src-elem", "script-src-attr", "style-src-elem", "img-src", "frame-src", "connect-src"}
    assert set(stopped[2]) == wanted
