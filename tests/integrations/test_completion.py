"""Completion, in a real shell."""

import argparse
import shutil
import subprocess
import sys

import pytest

from themis import cli
from themis.cli import main
from themis.judge import JUDGES
from themis.oracle import ORACLES
from themis.perturb import PERTURBATIONS
from themis.search import POLICIES
from themis_integrations import completion

ASK = """
source ./themis.bash
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_shtab_themis themis "${{COMP_WORDS[COMP_CWORD]}}" "${{COMP_WORDS[COMP_CWORD-1]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def ask(tmp_path, monkeypatch, capsys):
    """The completions that bash offers for the last word of a command line."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "net.pt").touch()
    assert main(["completion", "bash"]) == 0
    (tmp_path / "themis.bash").write_text(capsys.readouterr().out)

    def ask(words: str) -> set[str]:
        done = subprocess.run([bash, "-c", ASK.format(words=words)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return set(done.stdout.split())

    return ask


def test_commands_options_names_and_files_are_completed(ask):
    assert ask("themis res") == {"resume"}
    assert ask("themis run --max-t") == {"--max-tests"}
    assert ask("themis run --perturb ''") == set(PERTURBATIONS)
    assert ask("themis run --model mine:net --policy s") == {"scheduled"}
    assert ask("themis run --weights n") == {"net.pt"}
    assert ask("themis run --out r") == {"runs"}
    assert ask("themis resume r") == {"runs"}
    assert ask("themis completion b") == {"bash"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_there_is_a_script_for_each_shell(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "resume" in script
    assert "--max-tests" in script or shell == "tcsh"  # for tcsh, shtab completes only the commands


def test_the_names_are_those_that_the_options_accept():
    names = {name: set(known) for name, known in completion.NAMES.items()}
    assert names["perturb"] == set(PERTURBATIONS)
    assert names["policy"] == set(POLICIES)
    assert names["judge"] == set(JUDGES)
    assert names["oracle"] == {"auto", *ORACLES}
    options = set()
    for command in ("run", "retrain"):
        parser = cli.options.Parser(prog=f"themis {command}")
        cli.configure_parser(parser, command)
        options |= {action.dest for action in parser._actions}
    assert set(names) <= options


def test_completion_needs_shtab_but_not_torch(monkeypatch, capsys):
    code = "import sys; from themis.cli import main; main(['completion', 'bash']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False"
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(ImportError, match=r'pip install "themis-dl\[completion\]"'):
        completion.execute(argparse.Namespace(shell="bash"))
    assert main(["completion", "bash"]) == 3
    assert capsys.readouterr().err.startswith("themis completion: completion needs shtab")
