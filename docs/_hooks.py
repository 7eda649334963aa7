"""Adds files from outside docs/ to the site: the README as its home page, other documents, and the examples."""

import json
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
DOCUMENTS = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
LANGUAGES = {".py": "python", ".yml": "yaml", ".toml": "toml"}


def on_files(files: Files, *, config: MkDocsConfig) -> None:
    """Add the generated pages."""
    for name, page in DOCUMENTS.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text.replace("](docs/", "](")))
    files.append(File.generated(config, "examples.md", content=examples()))


def on_page_markdown(markdown: str, **_: object) -> str:
    """Let links to files outside docs/ lead to the pages made from them."""
    for name, page in DOCUMENTS.items():
        markdown = re.sub(rf"\]\((?:\.\./)?{re.escape(name)}", f"]({page}", markdown)
    markdown = re.sub(r"\]\((?:\.\./)?examples/?\)", "](examples.md)", markdown)
    markdown = re.sub(r"\]\((?:\.\./)?examples/plugin/?\)", "](examples.md#plugin-pyproject)", markdown)
    return re.sub(r"\]\((?:\.\./)?examples/([\w-]+)\.\w+\)", r"](examples.md#\1)", markdown)


def examples() -> str:
    """One page with every file of examples/."""
    parts = [
        "# Examples",
        "Each file of the folder `examples/` runs as it is; `plugin/` is a package that extends Themis.",
    ]
    folder = ROOT / "examples"
    for path in sorted([*folder.glob("*.*"), *(folder / "plugin").rglob("*.*")]):
        names = path.relative_to(folder).parts
        anchor = "-".join([*names[:1], path.stem] if len(names) > 1 else [path.stem])
        heading = f"## `{'/'.join(names)}` {{ #{anchor} }}"
        if language := LANGUAGES.get(path.suffix):
            parts += [heading, f"```{language}\n{path.read_text(encoding='utf-8').strip()}\n```"]
        elif path.suffix == ".ipynb":
            parts += [heading, *notebook_cells(path.read_text(encoding="utf-8"))]
    return "\n\n".join(parts) + "\n"


def notebook_cells(text: str) -> list[str]:
    """The cells of a notebook as Markdown, with their headings below that of the notebook."""
    cells = [("".join(cell["source"]), cell["cell_type"] == "code") for cell in json.loads(text)["cells"]]
    return [f"```python\n{cell}\n```" if is_code else re.sub("^#", "###", cell, flags=re.M) for cell, is_code in cells]
