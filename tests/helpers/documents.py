"""The documents of the repository and the code blocks in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOP = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
DOCUMENTS = [*TOP, *sorted((ROOT / "docs").glob("*.md"))]
FILE = re.compile(r"# (\w+\.py)\n")


def blocks(path, language):
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.S)
