"""Print how heavy the code is: lines, files, what one round runs through, and how many files a change touches.

`make shape` runs it. The limits are in `LIMITS`; tests/test_shape.py holds the code to those that must not rise again.
"""

from __future__ import annotations

import ast
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PACKAGES = ("themis", "themis_integrations", "themis_lab")
MANY = 7
"""Parameters of a function that are still easy to follow."""


def modules(package: str) -> dict[str, Path]:
    """The files of a package by the name of their module."""
    found = {}
    for path in sorted((SOURCE / package).rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text()) for package in PACKAGES for name, path in modules(package).items()}


def is_kernel(name: str) -> bool:
    return "cuda" in name or "kernel" in name


def wide_functions() -> list[str]:
    """Functions with more than `MANY` parameters, kernels aside."""
    found = []
    for name, tree in trees().items():
        for node in ast.walk(tree) if not is_kernel(name) else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                named = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                if len(named) - (named[:1] in (["self"], ["cls"])) > MANY:
                    found.append(f"{name}.{node.name} ({len(named)})")
    return found


def largest_class() -> tuple[str, int, int]:
    """The class with the most methods, with the number of its methods and attributes."""
    found = []
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
                found.append((f"{name}.{node.name}", len(methods), len(attributes(node))))
    return max(found, key=lambda each: each[1])


def attributes(node: ast.ClassDef) -> set[str]:
    """The names that the methods of a class assign to `self`, and its fields."""
    fields = {ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign)}
    stored = [each for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)]
    return fields | {each.attr for each in stored if ast.unparse(each.value) == "self"}


def imports(tree: ast.Module, known: set[str]) -> Iterator[str]:
    """The modules that a module imports, also inside functions; not those for type checking alone."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for each in node.names:
                full = f"{node.module}.{each.name}"
                if full in known or node.module in known:
                    yield full if full in known else node.module
        pending.extend(ast.iter_child_nodes(node))


def cycles() -> list[list[str]]:
    """Groups of modules that import each other, with imports inside functions."""
    parsed = trees()
    known = set(parsed)
    graph = {name: set(imports(tree, known)) - {name} for name, tree in parsed.items()}
    order: list[str] = []
    seen: set[str] = set()

    def visit(start: str, edges: dict[str, set[str]], take: Callable[[str], Any]) -> None:
        stack = [(start, iter(sorted(edges[start])))]
        seen.add(start)
        while stack:
            name, following = stack[-1]
            after = next((each for each in following if each not in seen), None)
            if after is None:
                stack.pop()
                take(name)
            else:
                seen.add(after)
                stack.append((after, iter(sorted(edges[after]))))

    for name in graph:
        if name not in seen:
            visit(name, graph, order.append)
    reverse: dict[str, set[str]] = {name: set() for name in graph}
    for name, targets in graph.items():
        for target in targets:
            reverse[target].add(name)
    seen.clear()
    groups = []
    for name in reversed(order):
        if name not in seen:
            group: list[str] = []
            visit(name, reverse, group.append)
            groups.append(sorted(group))
    return sorted((group for group in groups if len(group) > 1), key=len, reverse=True)


def traced_round() -> tuple[set[str], set[str]]:
    """The files and functions of Themis that the rounds of a plain campaign with a run folder run through."""
    import torch

    import themis
    from themis.campaign import loop

    files: set[str] = set()
    functions: set[str] = set()
    run_round = loop.run_round

    def profile(frame: Any, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and f"{os.sep}themis{os.sep}" in path and path.startswith(str(SOURCE)):
            files.add(path)
            functions.add(f"{path}:{frame.f_code.co_firstlineno}")

    def traced(*arguments: Any) -> None:
        sys.setprofile(profile)
        try:
            run_round(*arguments)
        finally:
            sys.setprofile(None)

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
    loop.run_round = traced  # type: ignore[assignment]
    try:
        with tempfile.TemporaryDirectory() as folder:
            data = torch.rand(200, 1, 8, 8)
            themis.run(
                net, data, "gaussian", magnitude=0.3, max_tests=4_000, recall=None, coverage=None, out=f"{folder}/run"
            )
    finally:
        loop.run_round = run_round
    return files, functions


def mentions(word: str, *, package: str = "themis", but: str = "\0") -> list[str]:
    """Source files of a package that mention a word, scripts of the page included."""
    found = []
    for path in sorted((SOURCE / package).rglob("*")):
        if path.suffix in (".py", ".js", ".html", ".c") and word in path.read_text().replace(but, ""):
            found.append(str(path.relative_to(SOURCE)))
    return found


def rows() -> Iterator[tuple[str, str, str]]:
    """What is measured, its value and the aim."""
    for package, lines, files in (
        ("themis", "42,000", "280"),
        ("themis_integrations", "-", "-"),
        ("themis_lab", "14,000", "-"),
    ):
        paths = modules(package).values()
        n_lines = sum(path.read_text().count("\n") for path in paths)
        yield f"lines / files of {package}", f"{n_lines:,} / {len(paths)}", f"{lines} / {files}"
    files_run, functions_run = traced_round()
    yield "files / functions that rounds run through", f"{len(files_run)} / {len(functions_run)}", "35 / 230"
    yield f"functions with more than {MANY} parameters", str(len(wide_functions())), "10"
    name, methods, n_attributes = largest_class()
    yield f"methods / attributes of {name.rpartition('.')[2]}", f"{methods} / {n_attributes}", "25 / 15"
    yield "files that know the fault column linf", str(len(mentions("linf", but="pgd_linf"))), "3"
    yield "files that know the policy deepxplore", str(len(mentions("deepxplore"))), "3"
    found = cycles()
    yield "import cycles / modules in the largest", f"{len(found)} / {max(map(len, found), default=0)}", "0 / 0"


def main() -> None:
    table = [("measured", "now", "aim"), *rows()]
    widths = [max(len(row[k]) for row in table) for k in range(3)]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if "-v" in sys.argv:
        for title, names in (("Many parameters", wide_functions()), ("deepxplore", mentions("deepxplore"))):
            print(f"\n{title}:", *names, sep="\n  ")
        for group in cycles():
            print("\nCycle:", *group, sep="\n  ")


if __name__ == "__main__":
    main()
