"""The looks of a real report: light and dark, on a phone, on a desktop and on paper, and its accessibility."""

import re

import pytest
from browsing import DESKTOP, PHONE, is_as_wide_as_the_window, need_browser, violations, visited

need_browser()
pytestmark = pytest.mark.xdist_group("browser")


def opened_everywhere(page):
    """Unfold all details, including the tables of the figures."""
    page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    page.wait_for_function("() => document.querySelectorAll('.figure details table').length > 0")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_the_page_is_accessible_and_fits_the_window(browser, digits_report, viewport, scheme):
    with visited(browser, digits_report, viewport=viewport, scheme=scheme) as page:
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        assert is_as_wide_as_the_window(page)
        if viewport is PHONE:  # axe takes its time: unfolded on the one, folded on the other
            opened_everywhere(page)
            assert is_as_wide_as_the_window(page)
        assert violations(page) == []


def test_a_narrow_phone_and_a_wide_screen(browser, digits_report):
    for width in (320, 600, 768, 2560):
        with visited(browser, digits_report, viewport={"width": width, "height": 900}) as page:
            opened_everywhere(page)
            assert is_as_wide_as_the_window(page), width
            if width == 320:
                widths = "(all) => all.map((each) => Math.round(each.getBoundingClientRect().width))"
                assert len({*page.locator("#numbers .tile").evaluate_all(widths)}) == 1


def lightness(page):
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


def wait_for_theme(page, theme):
    page.wait_for_function("(theme) => document.documentElement.dataset.theme === theme", arg=theme)
    assert (lightness(page) > 128) == (theme == "light")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_follows_the_system_until_one_is_chosen(browser, digits_report, scheme):
    other = "dark" if scheme == "light" else "light"
    with visited(browser, digits_report, scheme=scheme) as page:
        wait_for_theme(page, scheme)
        page.emulate_media(color_scheme=other)
        wait_for_theme(page, other)
        page.get_by_role("button", name=re.compile("theme", re.I)).click()
        wait_for_theme(page, scheme)
        page.emulate_media(color_scheme=scheme)
        page.emulate_media(color_scheme=other)
        page.wait_for_timeout(100)
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        assert (lightness(page) > 128) == (scheme == "light")


def test_the_sections_are_in_order(browser, digits_report):
    with visited(browser, digits_report) as page:
        assert page.locator("main > section").evaluate_all("(all) => all.map((each) => each.id)") == [
            *("verdict", "numbers", "gates", "gallery", "matrix", "strength", "slices"),
            *("reproduce", "coverage", "layers", "time", "normality"),
        ]
        assert page.locator("h1").count() == 1
        assert all(text.strip() for text in page.locator("h2").all_inner_texts())
        text = page.locator("body").inner_text()
        assert "Stopped because" in page.locator("#verdict").inner_text()
        for wrong in ("undefined", "NaN", "null", "[object", "Infinity"):
            assert wrong not in text
        for link in page.locator("nav li:not([hidden]) a").all():
            link.click()
            assert page.evaluate("document.querySelector(location.hash) !== null")


def test_figures_have_names_and_their_data(browser, digits_report):
    with visited(browser, digits_report) as page:
        view = page.evaluate("JSON.parse(document.getElementById('view').textContent)")
        for chart in page.locator("svg.chart").all():
            named = chart.get_attribute("aria-labelledby").split()
            assert all(page.locator(f"#{id}").text_content().strip() for id in named)
        figure = page.locator("#coverage figure").first
        figure.locator("summary").click()
        figure.locator("tbody tr").first.wait_for()
        assert figure.locator("tbody tr").count() >= len(view["rounds"])
        assert "NaN" not in page.locator("main").evaluate("(main) => main.outerHTML.replace(/aria-[a-z]+=/g, '')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_printing(browser, digits_report, scheme):
    with visited(browser, digits_report, scheme=scheme) as page:
        page.emulate_media(media="print", color_scheme=scheme)
        assert lightness(page) == 255
        for gone in ("nav", ".filters", ".pager >> nth=0", "#theme"):
            assert page.locator(gone).is_hidden()
        assert page.locator("#verdict .verdict").is_visible()
        ink = page.evaluate("getComputedStyle(document.querySelector('.verdict')).color")
        assert max(map(int, re.findall(r"\d+", ink)[:3])) < 80
        assert page.pdf(format="A4").startswith(b"%PDF")


def test_the_configuration_is_unfolded_for_printing_only(browser, digits_report):
    with visited(browser, digits_report) as page:
        is_open = "(all) => all.map((each) => each.open)"
        assert page.locator("#reproduce details").evaluate_all(is_open) == [False] * 3
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert page.locator("#reproduce details").evaluate_all(is_open) == [True] * 3
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.locator("#reproduce details").evaluate_all(is_open) == [False] * 3


def test_a_scrolling_table_has_a_hint_until_its_end(browser, digits_report):
    with visited(browser, digits_report, viewport={"width": 280, "height": 800}) as page:
        box, hint = page.locator("#matrix .scrolling"), page.locator("#matrix .more")
        page.wait_for_function("() => document.querySelector('#matrix .scrolling').dataset.more")  # once it is laid out
        assert hint.inner_text() == "Scroll sideways for more →"
        assert box.evaluate("(box) => getComputedStyle(box).maskImage") != "none"
        box.evaluate("(box) => box.scrollTo(box.scrollWidth, 0)")
        page.wait_for_function("() => !document.querySelector('#matrix .scrolling').dataset.more")
        assert hint.is_hidden()
        left = "(box) => box.querySelector('tbody th').getBoundingClientRect().left - box.getBoundingClientRect().left"
        assert abs(box.evaluate(left)) < 2  # the rows' names stay
        page.set_viewport_size({"width": 1280, "height": 800})
        assert page.locator("#matrix .more").is_hidden()


def test_without_scripts_it_says_what_it_needs(browser, digits_report):
    with visited(browser, digits_report, java_script_enabled=False) as page:
        assert "allow scripts" in page.locator("noscript").inner_text()


def test_a_typical_report_is_small(digits_report):
    assert digits_report.stat().st_size < 5e6
