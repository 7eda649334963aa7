"""The gallery of a real report: filters, sorting, pages and keyboard control."""

import re

import numpy as np
import pytest
import torch
from browsing import need_browser, visited

import themis
from themis.report.page import write_report
from themis.runs.source import Origin

need_browser()
pytestmark = pytest.mark.xdist_group("browser")


@pytest.fixture
def page(browser, digits_report):
    with visited(browser, digits_report) as opened:
        yield opened


@pytest.fixture(scope="module")
def shared_page(browser, digits_report):
    """A page for tests that leave it as they found it."""
    with visited(browser, digits_report) as opened:
        yield opened


@pytest.fixture(scope="module")
def view(shared_page):
    return shared_page.evaluate("JSON.parse(document.getElementById('view').textContent)")


def shown(page):
    """The ids of the visible faults."""
    titles = page.locator("#cards article h3").all_inner_texts()
    return [int(title.removeprefix("Fault ").partition(":")[0]) for title in titles]


def n_matching(page):
    found = re.search(r" of ([\d,]+), page", page.locator(".pages").first.inner_text())
    return int(found[1].replace(",", "")) if found else 0


def matching(view, **wanted):
    columns = view["faults"]["columns"]
    return [
        id for k, id in enumerate(columns["id"]) if all(columns[name][k] == value for name, value in wanted.items())
    ]


def test_the_most_telling_come_first_with_their_pictures(page, view):
    assert shown(page) == view["faults"]["columns"]["id"][:24]
    page.wait_for_function("() => [...document.images].every((each) => each.complete && each.naturalWidth > 1)")
    first = page.locator("#cards article").first
    assert first.locator("img").count() == 2
    page.wait_for_function("() => document.querySelector('#cards canvas').width === 28")
    is_drawn = "(c) => new Set(c.getContext('2d').getImageData(0, 0, 28, 28).data).size > 3"
    assert first.locator("canvas").evaluate(is_drawn)
    id = shown(page)[0]
    first.locator("summary").click()
    assert first.locator("code").inner_text() == f"themis replay {view['run']} {id}"
    theta = dict(zip([each["name"] for each in view["theta"]], view["faults"]["columns"]["theta"], strict=True))
    for name, values in theta.items():
        assert float(first.locator("dt", has_text=name).locator("+ dd").first.inner_text()) == pytest.approx(
            values[0], rel=0.01
        )


@pytest.mark.parametrize(("name", "column"), [("clean", "clean_answer"), ("answer", "answer"), ("layer", "layer")])
def test_a_filter_keeps_the_matching_faults(shared_page, view, name, column):
    page = shared_page
    values = view["faults"]["columns"][column]
    value = max(set(values), key=values.count)
    page.select_option(f"#filter-{name}", str(value))
    expected = matching(view, **{column: value})
    assert shown(page) == expected[:24]
    assert n_matching(page) == len(expected)
    page.select_option(f"#filter-{name}", "")
    assert n_matching(page) == view["faults"]["n_listed"]


def test_filters_are_combined_and_an_empty_result_is_reported(page, view):
    columns = view["faults"]["columns"]
    pairs = set(zip(columns["clean_answer"], columns["answer"], strict=True))
    clean, answer = columns["clean_answer"][0], columns["answer"][0]
    page.select_option("#filter-clean", str(clean))
    page.select_option("#filter-answer", str(answer))
    assert n_matching(page) == len(matching(view, clean_answer=clean, answer=answer))
    missing = next((a, b) for a in range(10) for b in range(10) if (a, b) not in pairs)
    page.select_option("#filter-clean", str(missing[0]))
    page.select_option("#filter-answer", str(missing[1]))
    assert shown(page) == []
    assert page.locator(".pages").first.inner_text() == "No fault matches."


def test_only_faults_with_inputs(page, view):
    page.check("#filter-pictures")
    assert n_matching(page) == len(view["inputs"]["disturbed"]) == 1000
    for _ in range(3):
        page.click("#next-above")
        assert page.locator("#cards article").count() == page.locator("#cards .pictures").count() == 24


SORTS = [("severity", "margin", 1), ("theta", "strength", 1), ("ssim", "ssim", -1)]


@pytest.mark.parametrize(("name", "column", "sign"), SORTS)
def test_sorting(shared_page, view, name, column, sign):
    page = shared_page
    page.select_option("#filter-sort", name)
    columns = view["faults"]["columns"]
    of = dict(zip(columns["id"], columns[column], strict=True))
    values = [sign * of[id] for id in shown(page)]
    assert values == sorted(values)
    assert values[0] == min(sign * each for each in of.values())
    page.select_option("#filter-sort", "telling")
    assert shown(page) == columns["id"][:24]


def test_pages_follow_one_another(page, view):
    ids = view["faults"]["columns"]["id"]
    assert page.is_disabled("#previous-above")
    page.click("#next-above")
    assert shown(page) == ids[24:48]
    page.click("#next-below")
    assert shown(page) == ids[48:72]
    page.click("#previous-above")
    assert shown(page) == ids[24:48]
    page.select_option("#filter-answer", str(view["faults"]["columns"]["answer"][0]))
    assert "page 1 of" in page.locator(".pages").first.inner_text()


def test_the_last_page_ends_with_the_last_fault(page, view):
    values = view["faults"]["columns"]["clean_answer"]
    value = min(set(values), key=values.count)
    page.select_option("#filter-clean", str(value))
    expected = matching(view, clean_answer=value)
    while page.is_enabled("#next-above"):
        page.click("#next-above")
    assert shown(page)[-1] == expected[-1]
    assert len(shown(page)) == (len(expected) - 1) % 24 + 1


def test_a_cell_of_the_matrix_shows_its_faults(page, view):
    matrix = view["matrix"]
    r, c = max(
        ((r, c) for r in range(len(matrix["rows"])) for c in range(len(matrix["columns"]))),
        key=lambda at: matrix["distinct"][at[0]][at[1]],
    )
    page.locator("#matrix tbody tr").nth(r).locator("td").nth(c).locator("button").click()
    assert page.input_value("#filter-clean") == str(matrix["rows"][r])
    assert page.input_value("#filter-answer") == str(matrix["columns"][c])
    assert n_matching(page) == matrix["faults"][r][c]


def test_the_gallery_works_by_keyboard(page, view):
    ids = view["faults"]["columns"]["id"]
    page.focus("#filter-sort")
    page.keyboard.press("ArrowDown")
    assert page.input_value("#filter-sort") != "telling"
    page.keyboard.press("Home")
    assert page.input_value("#filter-sort") == "telling"
    page.focus("#next-above")
    page.keyboard.press("Enter")
    assert shown(page) == ids[24:48]
    assert page.evaluate("document.activeElement.id") == "next-above"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
    page.keyboard.press("Enter")
    assert page.locator("#cards article details[open]").count() == 1


def test_the_whole_page_can_be_reached_by_tab(page):
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the report"
    page.keyboard.press("Enter")
    assert page.evaluate("location.hash") == "#main"
    page.keyboard.press("Tab")
    is_inside = "document.querySelector('main').contains(document.activeElement)"
    assert page.evaluate(is_inside)
    page.focus("#theme")
    before = page.evaluate("document.documentElement.dataset.theme")
    page.keyboard.press("Space")
    assert page.evaluate("document.documentElement.dataset.theme") != before
    page.evaluate("window.seen = new Set()")
    for k in range(40):
        page.keyboard.press("Tab")
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle !== 'none'")
        assert page.evaluate("window.seen.add(document.activeElement).size") == k + 1


def test_faults_of_signals_are_shown_as_curves(browser, tmp_path):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(120, 3))
    themis.run(net, torch.rand(20, 2, 60), "signal_noise(snr=0:60)", max_tests=200, out=tmp_path / "run")
    with visited(browser, write_report(tmp_path / "run")) as page:
        assert "shown with curves, clean in grey and disturbed in red." in page.locator("#gallery").inner_text()
        page.wait_for_function("() => [...document.images].every((each) => each.complete && each.naturalWidth === 300)")
        first = page.locator("#cards article").first
        assert first.locator("figure.curves img").count() == 1
        assert first.locator("figure.curves img").get_attribute("alt").startswith("Clean and disturbed signal of fault")
        assert first.locator("canvas").count() == 0


def test_a_black_box_for_clips_has_only_what_applies_to_it(browser, tmp_path):
    def model(clips):
        mean = clips.mean((1, 2, 3, 4))
        return np.stack([0.5 - mean, mean - 0.5], 1)

    clips = 0.4 + 0.15 * torch.rand(12, 4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    target = themis.BlackBox(model, bounds=(0, 2))
    themis.run(target, clips, "brightness", max_tests=200, out=tmp_path / "run", origin=Origin(model="mine:model"))
    with visited(browser, write_report(tmp_path / "run")) as page:
        assert "All are shown with their frames." in page.locator("#gallery").inner_text()
        links = page.locator("nav a:visible").all_inner_texts()
        assert "Rounds" in links
        assert not {"Coverage", "Layers", "Normality"} & set(links)
        assert not page.locator("#layers").is_visible()
        assert page.locator("#filter-layer, #filter-pictures").count() == 0
        page.locator("#reproduce summary", has_text="Configuration").click()
        assert page.locator("#reproduce tr", has_text="bounds").inner_text().split() == ["bounds", "0,", "2"]


def test_a_segmentation_says_which_class_was_lost_and_what_is_left(browser, tmp_path):
    torch.manual_seed(0)
    target = themis.Target(torch.nn.Conv2d(1, 3, 3, padding=1), oracle="segmentation:0.1")
    run = themis.run(target, torch.rand(20, 1, 16, 16), "gaussian", magnitude=0.5, max_tests=100, out=tmp_path / "run")
    with visited(browser, write_report(tmp_path / "run")) as page:
        first = page.locator("#cards article").first
        fault = run.faults.by_id(shown(page)[0])
        assert first.locator("h3").inner_text() == f"Fault {fault.id}: as expected → class {fault.answer} lost"
        score = first.locator("dt", has_text="mean IoU").locator("+ dd").inner_text()
        assert float(score) == pytest.approx(fault.value, rel=0.01)
