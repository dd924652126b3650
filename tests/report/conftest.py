import os
import shutil

import pytest

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
