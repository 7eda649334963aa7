"""The documents of the repository and the code blocks in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOP = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
DOCUMENTS = [*TOP, *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "lab").glob("*.md"))]
FILE = re.compile(r"# (\w+\.py)\n")


def blocks(path, language):
    found = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", path.read_text(), re.S | re.M)
    return [block for name, block in found if name == language]


NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
WITHIN, SLACK = 0.1, 1.0
"""How far a printed number may be from the document's: a share of it, and for small ones a number."""


def assert_printed(expected, printed, within=WITHIN):
    """Output in a document is what a command prints, but for line breaks and, on another machine, for numbers."""
    pattern = NUMBER.sub("#", " ".join(expected.split()))
    found = re.search(re.escape(pattern).replace("\\#", f"({NUMBER.pattern})"), " ".join(printed.split()))
    assert found, f"the document has:\n{expected}\nbut the command prints:\n{printed}"
    for before, now in zip(NUMBER.findall(expected), found.groups(), strict=True):
        shown, actual = (float(text.replace(",", "")) for text in (before, now))
        assert abs(shown - actual) <= max(SLACK, within * abs(shown)), f"{before} in\n{expected}\nbut {now} is printed"
