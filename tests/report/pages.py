"""Pages of a report as the tests open them."""

import json
from contextlib import contextmanager

from report.example import harm, multi_label, write


@contextmanager
def opened(browser, address, **options):
    """A page that must neither complain, nor open a dialog, nor load anything but itself."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce"} | options)
    context.set_default_timeout(10_000)
    page = context.new_page()
    troubles = []
    page.on("console", lambda message: troubles.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("dialog", lambda dialog: (troubles.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: None if request.url == address else troubles.append(request.url[:200]))
    page.goto(address)
    page.locator("footer").wait_for()
    yield page
    troubles = [trouble for trouble in troubles if not trouble.startswith("data:")]
    context.close()
    assert troubles == []


def scroll_to_end(page):
    """Charts draw when they have a size; pass all of them."""
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    page.wait_for_function("[...document.querySelectorAll('.chart')].every(c => c.firstChild || !c.clientWidth)")


def volumes(folder):
    return write(folder, cases=24, slices=4)


def images(folder):
    return write(folder, cases=10, rank=2, methods=3, metrics=2)


def bare(folder):
    """The least a study can hold: nothing advised, one region, no pictures, all methods failed."""
    study = write(folder, cases=8, methods=1, metrics=1, regions=("everything",), pictures=False)
    study["recommendation"].update(method=None, best="uncalibrated", sentences=[], caveats=[], file=None)
    study.update(reliability=[], bands=[], diagnosis={}, ranks=[], sum_rank={}, warnings=[], shift=None, flips=[])
    study.update(sensitivity={}, cases=[], fits=[], timings={})
    del study["scores"], study["classes"]  # as in a study of an earlier version
    for row in study["summary"]:
        row.update(mean=None, low=None, high=None, pooled=None)
        del row["pooled_low"], row["pooled_high"]
    (folder / "results.json").write_text(json.dumps(study))
    return study


def harmful(folder):
    """What is recommended, by NLL, makes ECE worse."""
    study = harm(write(folder, cases=24, slices=1))
    (folder / "results.json").write_text(json.dumps(study))
    return study


def fallen_back(folder):
    """A method that is the same map as another, and cases in groups."""
    study = write(folder, cases=8, methods=3, metrics=1, pictures=False)
    next(method for method in study["methods"] if method["key"] == "ets")["same_as"] = "ts"
    for row in study["differences"]:
        if row["method"] == "ets":
            row.update(p=None, p_adjusted=None)
    study["about"]["data"]["groups"] = {"pattern": "^p", "cases": {}}
    (folder / "results.json").write_text(json.dumps(study))
    return study


def crowded(folder):
    """Long names, many methods, classes and warnings."""
    study = write(folder, cases=40, methods=20, classes=34, metrics=12, repeats=3)
    study["warnings"] = [f"Warning {i}: {'very ' * 30}long and {'unbroken' * 20}" for i in range(12)]
    for method in study["methods"][1:6]:
        method["name"] += " with a name that goes on and on, " * 3
    study["about"]["title"] = "A_title_without_any_space_" * 8
    study["about"]["command"] = "segcal compare " + "/a/very/long/path" * 20
    (folder / "results.json").write_text(json.dumps(study))
    return study


def channels(folder):
    """Multi-label data."""
    study = multi_label(write(folder, cases=12, methods=3, slices=1))
    (folder / "results.json").write_text(json.dumps(study))
    return study


# What could become markup, an address or a script in some place or other.
PAYLOADS = (
    "<img src=x onerror=alert(1)>", "</script><script>alert(2)</script>", "\"><svg onload=alert(3)>",
    "javascript:alert(4)",
    "' onmouseover='alert(5)", "<iframe srcdoc='<script>alert(6)</script>'>", "${alert(7)}", "{{constructor}}",
    "\u202ereversed",
)  # fmt: skip


def hostile(folder):
    """Every text that comes from a user's data is hostile: cases, classes, methods, metrics, the title, all words."""
    study = write(folder, cases=10, methods=4, metrics=2, slices=1)
    text = json.dumps(study)
    for k, name in enumerate(study["splits"][0]["test"][1:]):
        text = text.replace(json.dumps(name), json.dumps(f"{PAYLOADS[k % len(PAYLOADS)]} {k}"))
    study = json.loads(text)
    for k, row in enumerate((*study["methods"], *study["metrics"])):
        row["name"] = f"{PAYLOADS[k % len(PAYLOADS)]} {k}"
    about = study["about"]
    about["title"] = about["command"] = about["data"]["name"] = "".join(PAYLOADS)
    about["data"]["class_names"] = list(PAYLOADS[: about["data"]["num_classes"]])
    study["warnings"] = study["recommendation"]["sentences"] = list(PAYLOADS)
    study["methods"][-1]["reason"] = "".join(PAYLOADS)
    (folder / "results.json").write_text(json.dumps(study))
    return study


STUDIES = {make.__name__: make for make in (volumes, images, bare, harmful, fallen_back, crowded, channels, hostile)}


def means(study, metric, region="everything"):
    rows = [row for row in study["summary"] if (row["region"], row["metric"]) == (region, metric)]
    return {row["method"]: row["mean"] for row in rows}


def keys(page):
    return page.locator("#methods tbody tr").evaluate_all("all => all.map((each) => each.dataset.method)")
