"""Where modules of the user are looked up, and functions of Python itself that cannot be named."""

import os
import subprocess
import sys
from pathlib import Path

import model_files as files
import numpy as np
import pytest
from user_module import SMALL, go_to

import themis
from themis import user_code
from themis.cli import main
from themis.errors import UsageError
from themis.user_code import import_named, imported_anew, looked_up_in, working_in

PLANTED = ("PIL", "onnx", "yaml", "rich", "safetensors", "matplotlib", "tensorboard", "scipy", "sympy", "pandas")
"""Packages that Themis or PyTorch import late, some of them only if they are installed."""


STARTS = {
    "as it is installed": ["-c", "import sys; sys.path[0] = sys.prefix; from themis.cli import main; sys.exit(main())"],
    "as a module": ["-m", "themis"],
}


def themis_process(start, *words, folder):
    """`themis` as it is installed, where the script's folder comes first, or as `python -m themis`."""
    environment = {**os.environ, "PYTHONPATH": str(Path(themis.__file__).parents[1])}
    command = [sys.executable, *STARTS[start], *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return tmp_path


@pytest.mark.parametrize("start", STARTS)
def test_files_beside_a_model_do_not_take_the_place_of_packages(folder, start):
    files.script("net.pt")
    np.savez("data.npz", inputs=files.inputs().numpy(), labels=np.zeros(30, np.int64))
    for name in PLANTED:
        Path(f"{name}.py").write_text("open('harm', 'a').write(__name__)")
    words = ["--model", "net.pt", "--data", "npz:data.npz", "--perturb", "gaussian", "--max-tests", "50"]
    done = themis_process(start, "run", *words, folder=folder)
    assert done.returncode == 0, done.stderr
    assert not Path("harm").exists()


@pytest.mark.parametrize("start", STARTS)
def test_a_module_of_the_user_is_looked_up_last_and_named(folder, start):
    Path("mine.py").write_text(SMALL)
    for name in PLANTED:
        Path(f"{name}.py").write_text("raise SystemExit")
    done = themis_process(start, "check", "--model", "mine:net", "--data", "mine:data", folder=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"themis check: imported mine from {folder / 'mine.py'}\n"


def test_the_place_of_a_module_is_not_printed_beside_json(folder, capsys):
    Path("mine.py").write_text(SMALL)
    sys.modules.pop("mine", None)
    assert main(["check", "--model", "mine:net", "--data", "mine:data", "--json"]) == 0
    assert capsys.readouterr().err == ""


def test_an_installed_module_of_the_same_name_is_explained(folder, capsys):
    Path("yaml.py").write_text(SMALL)
    assert main(["check", "--model", "yaml:net", "--data", "digits"]) == 2
    printed = capsys.readouterr().err
    assert f"comes before the yaml in {folder}: rename yours" in printed


@pytest.mark.parametrize(
    "spec",
    [
        "os:system('touch harm')",
        "builtins:exec('1')",
        "subprocess:run('touch harm')",
        "posix:system('touch harm')",
        "importlib:import_module('mine')",
        "runpy:run_path('mine.py')",
        "ctypes.util:find_library('c')",
        "mine:system('touch harm')",
        "mine:run",
        "mine:exec",
    ],
)
@pytest.mark.parametrize("option", ["--model", "--data", "--perturb", "--oracle", "--train", "--rivals"])
def test_functions_of_python_itself_are_not_called(tmp_path, monkeypatch, capsys, spec, option):
    go_to(tmp_path, monkeypatch, f"{SMALL}\nfrom os import system\nfrom subprocess import run\nexec = exec\n")
    if option in ("--perturb", "--oracle"):
        spec = spec.partition("(")[0]
    options = {"--model": "mine:net", "--data": "mine:data", "--perturb": "gaussian", option: spec}
    more = {"--train": ["--criterion", "nc"], "--rivals": ["--policy", "deepxplore"]}.get(option, [])
    words = [word for pair in options.items() for word in pair]
    assert main(["run", *words, *more, "--max-tests", "20", "--out", "none", "--quiet"]) == 2
    printed = capsys.readouterr().err
    assert "is a module of Python's standard library, whose functions are not called" in printed
    assert not Path("harm").exists()


def test_objects_of_the_users_own_may_use_the_standard_library(folder):
    Path("mine_too.py").write_text("from functools import partial\nmake = partial(dict, a=1)\nclass Own(dict): pass\n")
    with looked_up_in(str(folder)):
        assert import_named("mine_too", ["make"], "--model")() == {"a": 1}
        assert import_named("mine_too", ["Own"], "--model")() == {}
    sys.modules.pop("mine_too")


def test_folders_are_searched_only_if_code_is_named_and_the_newest_first(folder):
    for name in ("a", "b"):
        Path(name).mkdir()
        Path(name, "twice.py").write_text(f"NAME = {name!r}")
    first, second = str(folder / "a"), str(folder / "b")
    before = list(sys.path)
    with looked_up_in(first):
        assert sys.path == before
        assert import_named("twice", ["NAME"], "--model") == "a"
        assert set(sys.path) - set(before) == {first}
    sys.modules.pop("twice")
    with looked_up_in(second):
        assert import_named("twice", ["NAME"], "--model") == "b"
    assert sys.path.index(second) < sys.path.index(first)
    with looked_up_in(first), imported_anew(first):
        assert import_named("twice", ["NAME"], "--model") == "a"
    assert sys.modules.pop("twice").NAME == "b"
    with pytest.raises(UsageError, match="standard library"):
        import_named("os", ["system"], "--model")


def test_a_folder_that_is_on_the_path_already_stays_where_it_is(folder, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    before = list(sys.path)
    with looked_up_in(str(folder)):
        user_code.make_importable()
    assert sys.path == before


def test_working_elsewhere_does_not_change_what_is_imported(folder, monkeypatch):
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "hijacked.py").write_text("")
    monkeypatch.setattr(sys, "path", ["", "lib", *sys.path])
    before = list(sys.path)
    with working_in(str(elsewhere)):
        assert Path.cwd() == elsewhere
        assert all(os.path.isabs(entry) for entry in sys.path)
        with pytest.raises(ModuleNotFoundError):
            __import__("hijacked")
    assert (sys.path, Path.cwd()) == (before, folder)
