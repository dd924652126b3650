"""What the page advises: harm in plain words and colours, the criterion first, shifted data, names that can be read."""

import json
import re

import pytest

from report.example import write
from report.pages import keys, means, opened, scroll_to_end
from segcal.report import write_report


def colour(locator):
    return locator.evaluate("each => getComputedStyle(each).color")


def named(page, name):
    """A colour of the style sheet, as the browser has it."""
    return page.evaluate(
        """(name) => {
             const probe = document.body.appendChild(document.createElement("i"));
             probe.style.color = `var(--${name})`;
             const found = getComputedStyle(probe).color;
             probe.remove();
             return found;
           }""",
        name,
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_harm_is_said_and_never_shown_in_the_colour_of_success(browser, reports, scheme):
    address, study = reports("harmful")
    with opened(browser, address, color_scheme=scheme) as page:
        over, accent = named(page, "over"), named(page, "accent")
        cost = page.locator("#top .verdict.cost")
        assert cost.inner_text() == study["recommendation"]["headline"][2]["text"]
        assert colour(cost.locator("span")) == over
        cards = page.locator("#top .card").filter(has=page.locator(".now"))
        assert [card.locator("h3").inner_text().split(",")[0] for card in cards.all()] == ["NLL", "ECE"]
        nll, ece = (card.locator(".now") for card in cards.all())
        assert (colour(nll), colour(ece)) == (accent, over)
        tested = len({case for split in study["splits"] for case in split["test"]})
        assert f"Worse in {tested} of {tested} cases" in cards.nth(1).inner_text()
        section = page.locator("#methods")
        row = section.locator('tr[data-method="cms-op"]')
        assert colour(row.locator(".value")) != over
        calm = row.evaluate("each => getComputedStyle(each.firstChild).backgroundColor")
        section.get_by_label("Metric", exact=True).select_option("ece")
        assert colour(row.locator(".value")) == over
        assert "worse" in row.inner_text()
        assert row.evaluate("each => getComputedStyle(each.firstChild).backgroundColor") != calm
        page.get_by_role("radio", name="All metrics").check()
        worse = [row for row in study["differences"] if (row["region"], row["verdict"]) == ("everything", "worse")]
        assert section.locator("td.harm").count() == len(worse)


def test_the_methods_are_sorted_by_what_they_are_chosen_by(browser, reports):
    address, study = reports("harmful")
    with opened(browser, address) as page:
        nll = means(study, "nll")
        assert [nll[key] for key in keys(page)[:-1]] == sorted(nll.values())
        assert "chosen by NLL on the validation cases" in page.locator("#methods caption").inner_text()


def test_shifted_data_have_intervals_and_say_who_loses(browser, reports):
    address, study = reports("harmful")
    with opened(browser, address) as page:
        scroll_to_end(page)
        shown = page.locator("#shift .line-name").count()
        assert shown > 1
        assert page.locator("#shift .interval").count() == shown * (1 + len(study["shift"]))
        marks = page.locator("#shift .dot").evaluate_all("all => all.map((each) => each.getBoundingClientRect().x)")
        assert len({round(mark) for mark in marks}) >= shown * (1 + len(study["shift"]))  # side by side
        page.locator("#shift").get_by_label("Metric").select_option("ece")
        page.locator("#shift summary").click()
        cell = page.locator("#shift tbody tr").filter(has_text="order kept").locator("td").last
        assert "worse than uncalibrated" in cell.inner_text()
        assert "worse than ts" in cell.inner_text()


def test_a_study_of_an_earlier_version_is_still_shown(browser, tmp_path):
    study = write(tmp_path, cases=8, methods=3, metrics=2, pictures=False)
    for name in ("headline", "shown"):
        del study["recommendation"][name]
    for row in study["differences"]:
        for name in ("verdict", "lower", "higher"):
            del row[name]
    for entry in study["shift"]:
        del entry["differences"]
    (tmp_path / "results.json").write_text(json.dumps(study))
    with opened(browser, write_report(tmp_path).as_uri()) as page:
        scroll_to_end(page)
        assert "is recommended" in page.locator("#top .verdict").inner_text()
        assert page.locator("#shift .line-name").count() > 1


def test_every_case_that_is_listed_has_pictures(browser, reports):
    address, study = reports("volumes")
    with opened(browser, address) as page:
        listed = page.locator("#cases tbody tr th").all_inner_texts()
        assert listed
        assert set(listed) <= {entry["case"] for entry in study["browser"]}
        assert page.locator("#cases tbody tr th button").count() == len(listed)


@pytest.mark.parametrize("width", [1280, 390])
def test_names_in_the_trade_off_are_all_there_and_cover_no_other(browser, reports, width):
    address, study = reports("crowded")
    with opened(browser, address, viewport={"width": width, "height": 844}) as page:
        scroll_to_end(page)
        names = page.locator("#tradeoff .line-name")
        assert names.count() == sum(method["status"] == "ok" for method in study["methods"])
        boxes = names.evaluate_all(
            """all => all.map((each) => {
                 const { x, y, width, height } = each.getBBox();
                 return [x, y, x + width, y + height, each.textContent];
               })"""
        )
        for i, one in enumerate(boxes):
            for other in boxes[:i]:
                across = min(one[2], other[2]) - max(one[0], other[0])
                up = min(one[3], other[3]) - max(one[1], other[1])
                assert across <= 1 or up <= 2, (one, other)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_swatch_can_be_told_from_what_it_lies_on(browser, reports, scheme):
    def luminance(text):
        channels = [int(number) / 255 for number in re.findall(r"\d+", text)[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    with opened(browser, reports("volumes")[0], color_scheme=scheme) as page:
        found = page.locator("#browser .swatch").evaluate_all(
            """all => all.map((each) => [getComputedStyle(each).borderTopColor,
                 getComputedStyle(each.closest(".viewer")).backgroundColor])"""
        )
    assert found
    for border, ground in found:
        low, high = sorted((luminance(border), luminance(ground)))
        assert (high + 0.05) / (low + 0.05) >= 3  # WCAG's bound for what is no text


def test_the_number_of_bins_is_said(browser, reports):
    with opened(browser, reports("volumes")[0]) as page:
        assert "ECE, 15 bins" in page.locator("#top .cards").inner_text()
        page.locator("#methods").get_by_label("Metric", exact=True).select_option("ece")
        assert "15 bins" in page.locator("#methods caption").inner_text()
        assert "(15 bins)" in page.locator('#reliability [data-panel="after"] .facts-row').inner_text()
