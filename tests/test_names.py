"""Names in the package: no two classes share one, no module hides a public function, public names are documented."""

import ast
import inspect
import re
from collections import defaultdict
from pathlib import Path

import pytest

import themis

PACKAGE = Path(themis.__file__).parent


def test_no_two_classes_have_the_same_name():
    modules = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                modules[node.name].append(str(path.relative_to(PACKAGE)))
    repeated = {name: paths for name, paths in modules.items() if len(paths) > 1}
    assert not repeated, f"classes of the same name: {repeated}"


def test_no_module_hides_a_public_function():
    """`import themis.run` would replace the function `themis.run` by the module."""
    modules = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert not modules & set(themis.__all__)


@pytest.mark.parametrize("name", [name for name in themis.__all__ if not name.startswith("__")])
def test_every_public_name_has_a_docstring_that_begins_with_a_sentence(name):
    text = inspect.getdoc(getattr(themis, name))
    assert text
    assert re.match(r"[A-Z`(].*[.:]$", text.splitlines()[0]), text
