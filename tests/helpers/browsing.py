"""A page in headless Chromium, watched: what it logs, what it asks for, what axe says of it."""

import shutil
from contextlib import contextmanager

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HUNG = 120_000
"""Milliseconds after which a page does nothing any more, on a busy machine too."""
PHONE, DESKTOP = {"width": 375, "height": 812}, {"width": 1280, "height": 900}


def need_browser():
    """Skip the module that calls this where there is no browser, and say so."""
    pytest.importorskip("playwright.sync_api", reason="browser tests need playwright: pip install playwright")
    pytest.importorskip("axe_playwright_python", reason="browser tests need axe: pip install axe-playwright-python")
    if CHROMIUM is None:
        pytest.skip("browser tests need Chromium: apt-get install chromium", allow_module_level=True)


@contextmanager
def visited(browser, place, *, viewport=DESKTOP, scheme="light", **options):
    """A report opened as by a double click, or the address of a live one.

    Fails at the end if it logged an error or asked for anything but itself, and where it is live its own server.
    """
    is_live = isinstance(place, str)
    address, errors, asked = place if is_live else place.resolve().as_uri(), [], []
    own = address.partition("?")[0] if is_live else address
    context = browser.new_context(viewport=viewport, color_scheme=scheme, reduced_motion="reduce", **options)
    context.set_default_timeout(HUNG)

    def decide(route):
        url = route.request.url.partition("#")[0]
        if url == address or (is_live and url.startswith(own)):
            route.continue_()
        else:
            asked.append(route.request.url)
            route.abort()

    context.route("**/*", decide)
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    page.on("dialog", lambda dialog: (errors.append(f"dialog {dialog.message}"), dialog.dismiss()))
    try:
        page.goto(address)
        yield page
        page.wait_for_timeout(50)  # what was started may still fail
    finally:
        context.close()
    assert errors == []
    assert asked == []


def violations(page):
    """What axe finds serious or critical: rule, and where."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [
        (each["id"], node["target"], node["failureSummary"])
        for each in found
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


def is_as_wide_as_the_window(page):
    """Whether nothing makes the page scroll sideways."""
    return page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
