"""Names with markup are shown as text and never run, and a large report is drawn."""

import pytest
from browsing import need_browser, violations, visited

need_browser()
pytestmark = pytest.mark.xdist_group("browser")


def test_markup_is_text(browser, markup_report, markup):
    with visited(browser, markup_report) as page:
        for details in page.locator("details").all():
            details.evaluate("(each) => { each.open = true; }")
        page.wait_for_function("() => document.querySelectorAll('.figure details table').length > 0")
        assert page.evaluate("window.hacked") is None
        for place in ("#filter-clean", "#filter-answer", "#matrix", "#cards", "#run", "h1"):
            assert markup in page.locator(place).text_content(), place
        assert "<script>window.hacked=1" in page.locator("#matrix").text_content()
        assert "\"'&amp; plain" in page.locator("#matrix").text_content()
        assert "<b>bold<b>" in page.locator("#layers").text_content()
        assert markup in page.title()
        sources = page.locator("img").evaluate_all("(all) => all.map((each) => each.getAttribute('src'))")
        assert sources
        assert all(each.startswith("data:image/png;base64,") for each in sources)
        assert page.locator("script").count() == 2
        assert page.locator("main b, main i, main script").count() == 0
        assert violations(page) == []


def test_the_replay_command_of_a_path_with_markup_is_quoted(browser, markup_report):
    import shlex

    with visited(browser, markup_report) as page:
        card = page.locator("#cards article").first
        card.locator("summary").click()
        words = shlex.split(card.locator("code").inner_text())
        assert words[:3] == ["themis", "replay", str(markup_report.parent)]
        assert words[3].isdigit()


def test_a_filter_by_a_class_with_markup_works(browser, markup_report):
    with visited(browser, markup_report) as page:
        before = page.locator(".pages").first.inner_text()
        page.select_option("#filter-clean", "1")
        assert page.locator(".pages").first.inner_text() != before
        assert page.locator("#cards article").count() > 0


def test_ten_thousand_faults(browser, large_run):
    from themis.report.page import write_report

    report = write_report(large_run)
    assert report.stat().st_size < 20e6
    with visited(browser, report) as page:
        page.wait_for_selector("#cards article img")
        n = page.evaluate("JSON.parse(document.getElementById('view').textContent).faults.n_listed")
        assert n >= 10_000
        assert page.locator("#cards article").count() == 24
        page.select_option("#filter-answer", "8")
        assert " of " in page.locator(".pages").first.inner_text()
        page.select_option("#filter-sort", "ssim")
        assert page.locator("#cards article").count() == 24
