"""The page of a suite in a browser: accessible, as wide as the window, and names that look like markup are text."""

import pytest
from browsing import DESKTOP, PHONE, is_as_wide_as_the_window, need_browser, violations, visited
from suites import classifier, pictures

need_browser()
pytestmark = pytest.mark.xdist_group("browser")


@pytest.fixture(scope="module")
def suite_page(tmp_path_factory):
    import themis
    from themis.report.suite import write_suite_report

    net = classifier()
    members = [
        {"perturb": "gaussian", "magnitude": 0.4, "levels": 3, "note": "<img src=x onerror=window.hacked=1>"},
        {"perturb": "fog", "levels": 2},
        "brightness",
    ]
    out = tmp_path_factory.mktemp("page") / "suite"
    classes = ["cat", "dog", "<b>owl</b>", "emu"]
    suite = themis.run_suite(net, pictures(net), {"members": members}, out=out, max_tests=600, classes=classes)
    return write_suite_report(suite, errors=suite.corruption_errors(suite))


@pytest.mark.parametrize(("viewport", "scheme"), [(PHONE, "dark"), (DESKTOP, "light")], ids=["phone", "desktop"])
def test_the_page_is_accessible_and_fits_the_window(browser, suite_page, viewport, scheme):
    with visited(browser, suite_page, viewport=viewport, scheme=scheme) as page:
        page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
        assert is_as_wide_as_the_window(page)
        assert violations(page) == []
        assert page.evaluate("window.hacked") is None
        assert page.locator("#classes thead").inner_text().count("<b>owl</b>") == 1
        links = page.locator("#members tbody a").evaluate_all("all => all.map((link) => link.getAttribute('href'))")
        assert sorted(links) == ["brightness/report.html", "fog/report.html", "gaussian-0.4/report.html"]
        assert page.locator("#pictures img").count() >= 2
