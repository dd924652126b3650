import os
import shutil

import pytest

from report.pages import STUDIES
from segcal.report import write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="session")
def browser():
    required = os.environ.get("SEGCAL_REQUIRE_CHROMIUM") == "1"
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        if required:
            raise
        pytest.skip("playwright is not installed: pip install playwright")
    if CHROMIUM is None:
        if required:
            pytest.fail("SEGCAL_REQUIRE_CHROMIUM is set, but there is no Chromium")
        pytest.skip("no Chromium is installed: apt-get install chromium")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="session")
def reports(tmp_path_factory):
    """Makes each report once: name to (address, document)."""
    made = {}

    def report(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            study = STUDIES[name](folder)
            made[name] = write_report(folder).as_uri(), study
        return made[name]

    return report
