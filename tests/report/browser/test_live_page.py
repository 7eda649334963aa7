"""A campaign watched in the browser while it runs, from its folder only."""

import signal
import subprocess
from threading import Thread

import pytest
from browsing import HUNG, is_as_wide_as_the_window, need_browser, violations, visited
from warm_python import warm_python

need_browser()
pytestmark = pytest.mark.xdist_group("browser")

CAMPAIGN = """
import sys, torch
torch.set_num_threads(1)
import themis
from themis_lab.cli.demo import make_data, make_model
limits = {"coverage": None, "plateau": None, "max_tests": None, "max_seconds": 300}
themis.run(make_model(), make_data(), "gaussian", magnitude=0.5, policy="random", **limits, out=sys.argv[1])
"""


@pytest.fixture
def server(tmp_path):
    from themis_integrations.browser.server import serve

    with serve(tmp_path / "run") as opened:
        thread = Thread(target=opened.serve_forever, args=(0.02,))
        thread.start()
        yield opened
        opened.shutdown()
        thread.join()


COUNT = "Number(document.querySelector('#gallery .note').textContent.split(' ')[0].replaceAll(',', ''))"


def test_a_running_campaign_is_followed_and_filters_are_kept(browser, server, tmp_path, trained):
    with visited(browser, server.url) as page:
        assert "Waiting" in page.inner_text("h1")
        running = subprocess.Popen([warm_python(), "-c", CAMPAIGN, str(tmp_path / "run")])
        try:
            page.wait_for_selector("#cards article")
            assert page.locator("#state").inner_text() == "running"
            assert "So far" in page.locator("#verdict").inner_text()
            page.select_option("#filter-sort", "ssim")
            page.select_option("#filter-answer", "8")
            page.evaluate("scrollTo(0, 700)")
            before, at = page.evaluate(COUNT), page.evaluate("scrollY")
            page.wait_for_function(f"(before) => {COUNT} > before", arg=before)
            assert page.input_value("#filter-sort") == "ssim"
            assert page.input_value("#filter-answer") == "8"
            assert abs(page.evaluate("scrollY") - at) < 50
            running.send_signal(signal.SIGINT)
            page.wait_for_function("() => document.getElementById('state').textContent === 'interrupted'")
            assert page.input_value("#filter-answer") == "8"
            assert "Stopped because" in page.locator("#verdict").inner_text()
            assert is_as_wide_as_the_window(page)
            assert violations(page) == []
        finally:
            running.send_signal(signal.SIGINT)
            running.wait(240)


def test_the_page_says_when_the_server_has_gone(browser, digits_run):
    from playwright.sync_api import expect

    from themis_integrations.browser.server import serve

    opened = serve(digits_run)
    thread = Thread(target=opened.serve_forever, args=(0.02,))
    thread.start()
    context = browser.new_context()
    try:
        page = context.new_page()
        page.clock.install()
        page.goto(opened.url)
        expect(page.locator("#cards article").first).to_be_visible(timeout=HUNG)
        opened.shutdown()
        thread.join()
        opened.server_close()
        page.clock.fast_forward(10_000)  # when it asks again
        expect(page.locator("#state")).to_contain_text("no connection", timeout=HUNG)
        assert page.locator("#cards article").count() == 24
    finally:
        context.close()
