"""Pages of a report as the tests open them."""

from contextlib import contextmanager


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
