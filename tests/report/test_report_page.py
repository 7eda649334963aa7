"""The page: a single file that fetches nothing and shows data as text."""

import json
import re
from base64 import b64decode, b64encode
from hashlib import sha256
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from wavering import ENDLESS, Wavering, embedded, pictures

import themis
from themis.errors import UsageError
from themis.report.page import REPORT_FILE, read_view, render, write_report
from themis.runs.display.fault import MAX_PICTURE_SIDE, data_uri, png, to_pixels
from themis.runs.source import Origin

pytestmark = pytest.mark.xdist_group("report_page")

HOSTILE = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A run with markup in every name that a user can choose: folder, model, classes, perturbation, theta."""
    out = tmp_path_factory.mktemp("page") / "<img src=x onerror=alert(2)>"
    classes = ("<b>cat<", "<img src=x onerror=alert(3)>", "owl&<script>")

    def shift(inputs, theta, rng, context):
        return inputs + theta[:, :1, None, None]

    evil = themis.Perturbation(
        f"shift {HOSTILE}", (themis.Theta("by", -1, 1, unit="<i>grey</i>"),), shift, is_random=False
    )
    named = {"origin": Origin(model=f"mine:{HOSTILE}", data=f"images:{HOSTILE}"), "classes": classes}
    run = themis.run(Wavering(), pictures(), evil, out=out, **named, max_tests=300, **ENDLESS)
    assert len(run.faults) > 0
    return out


def test_markup_in_names_is_text_never_run(hostile):
    page = write_report(hostile).read_text()
    assert "<img" not in page
    assert "onerror=alert" in page  # it is there, as text
    assert page.count("<script") == 2
    assert page.count("</script>") == 2
    view = json.loads(embedded(page))
    assert view["run"] == str(hostile)
    assert view["perturbation"] == f"shift {HOSTILE}"
    assert set(view["outcomes"].values()) <= {"<b>cat<", "<img src=x onerror=alert(3)>", "owl&<script>"}
    assert "<" not in embedded(page)


def test_scripts_never_turn_data_into_markup():
    folder = Path(themis.__file__).parent / "report"
    for path in folder.glob("*.js"):
        text = path.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), path
    for path in [*folder.glob("*.js"), *folder.glob("*.css"), *folder.glob("*.html")]:
        found = re.findall(r"(?:https?:)?//[\w.]+\.[a-z]+[^\s'\"]*", path.read_text())
        assert [each for each in found if each != "http://www.w3.org/2000/svg"] == [], path


def test_the_policy_allows_only_the_script_of_the_page(hostile):
    page = render(read_view(hostile))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1].replace("&#x27;", "'")
    assert policy.startswith("default-src 'none'; img-src data:;")
    for tag, name in (("script", "script-src"), ("style", "style-src")):
        [content] = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = b64encode(sha256(content.encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}'" in policy
    assert "connect-src" not in policy
    assert '<link rel="icon" href="data:,">' in page  # else a browser would ask for one


def test_a_live_page_knows_the_address_of_its_view(hostile):
    view = read_view(hostile)
    assert 'data-live=""' in render(view)
    page = render(view, live='/view?token="<x>')
    assert 'data-live="/view?token=&quot;&lt;x&gt;"' in page
    assert "connect-src &#x27;self&#x27;" in page


def test_the_report_is_written_into_the_run_folder_or_to_another_file(hostile, tmp_path):
    assert write_report(hostile) == hostile / REPORT_FILE
    assert write_report(hostile, tmp_path / "other.html").read_text().startswith("<!DOCTYPE html>")
    with pytest.raises(UsageError, match="must be in an existing folder"):
        write_report(hostile, tmp_path / "none" / "x.html")


def test_sections_come_in_the_order_of_the_questions(hostile):
    sections = re.findall(r"^  (\w+): \['[\w ]+', draw\w+\],$", render(read_view(hostile)), re.MULTILINE)
    assert sections == [
        *("verdict", "numbers", "gates", "gallery", "matrix", "strength", "slices"),
        *("reproduce", "coverage", "layers", "time", "normality"),
    ]


def decoded(content):
    """The pixels of a PNG."""
    return np.array(Image.open(BytesIO(content), formats=["PNG"]))


@pytest.mark.parametrize("shape", [(1, 1), (28, 28), (32, 20, 3)])
def test_a_png_holds_its_pixels(shape):
    rng = np.random.default_rng(0)
    smooth = np.broadcast_to(np.arange(shape[0], dtype=np.uint8).reshape(-1, *[1] * (len(shape) - 1)), shape)
    for pixels in (rng.integers(0, 256, shape, dtype=np.uint8), smooth):
        assert (decoded(png(pixels)) == pixels).all()
    assert decoded(b64decode(data_uri(smooth).partition(",")[2])).shape == shape


def test_pictures_are_scaled_to_bytes_and_large_ones_down():
    picture = torch.tensor([-1.0, 0.0, 1.0, float("nan")]).view(1, 1, 2, 2)
    assert to_pixels(picture, (-1.0, 1.0))[0].tolist() == [[0, 128], [255, 0]]
    assert to_pixels(torch.rand(2, 3, 100, 200), (0.0, 1.0)).shape == (2, MAX_PICTURE_SIDE // 2, MAX_PICTURE_SIDE, 3)
    assert to_pixels(torch.rand(1, 5, 8, 8), (0.0, 1.0)).shape == (1, 8, 8)
