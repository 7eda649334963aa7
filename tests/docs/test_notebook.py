"""The tutorial notebook runs from top to bottom, and is stored without results."""

import ast
import json

from documents import ROOT

NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"


def test_the_tutorial_runs(capsys):
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    space = {}
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, cell["id"], "exec"), space)
        if last is not None:  # a notebook displays the value of the last line
            value = eval(compile(ast.Expression(last.value), cell["id"], "eval"), space)
            shown = getattr(value, "_repr_html_", lambda value=value: repr(value))()
            assert value is None or shown
    printed = capsys.readouterr().out
    assert "replayed: the same" in printed
    assert "before and" in printed
    assert space["run"].rounds[-1].distinct_faults > 10


def test_the_tutorial_is_stored_without_results():
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
