"""The command line, as a user types it."""

import json
import os
import subprocess
import sys

import pytest
import torch
from user_module import TROUBLED, go_to

from themis import cli
from themis.cli import COMMANDS, main
from themis.cli import run as run_command
from themis.plugins import added

ADDED = [name for name, entry in added("themis.commands").items() if entry.module.startswith("themis_integrations.")]
ALL = [*COMMANDS, *ADDED]


@pytest.fixture
def here(tmp_path, monkeypatch):
    return go_to(tmp_path, monkeypatch, TROUBLED)


BASE = ["run", "--model", "mine:net", "--data", "mine:data", "--perturb", "gaussian", "--max-tests", "300"]


@pytest.mark.quick
def test_run_prints_progress_a_summary_the_stop_reason_and_next_steps(here, capsys):
    assert main([*BASE, "--magnitude", "0.3", "--out", "runs/first"]) == 0
    printed = capsys.readouterr().out
    assert "19 neurons in 2 layers, 30 of 30 seeds to test" in printed
    assert "round 1: coverage" in printed
    assert "\nUnder gaussian, the model breaks: agreement with the clean answer is " in printed
    assert "\nfault rate " in printed
    assert "\nleft to find " in printed
    assert "Stopped because" in printed
    assert not any(name in printed for name in ("residual risk", "neurons   ", "time  ", "normality", "proposals"))
    assert max(map(len, printed.splitlines())) <= 80
    assert printed.endswith("Report: runs/first/report.html\nList the faults: themis faults runs/first\n")
    summary = json.loads((here / "runs/first/summary.json").read_text())
    assert summary["tests"] == 300
    assert summary["faults"] > 0
    assert "magnitude: 0.3" in (here / "runs/first/config.yaml").read_text()
    assert json.loads((here / "runs/first/environment.json").read_text())["threads"] == torch.get_num_threads()


def test_results_go_to_a_new_folder_unless_out_is_none(here, capsys, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda form: "now")
    assert main([*BASE, "--quiet", "--out", "none"]) == 0
    assert not (here / "runs/a").exists()
    for name in ("now", "now-2"):
        assert main([*BASE, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["out"] == f"runs/{name}"
        assert (here / "runs" / name / "summary.json").exists()


def test_run_can_print_only_json_or_nothing(here, capsys):
    assert main([*BASE, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tests"] == 300
    assert main([*BASE, "--quiet"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.quick
def test_options_come_from_a_file_and_flags_override_it(here, capsys):
    (here / "campaign.yaml").write_text(
        "model: mine:net\ndata: mine:data\nperturb: gaussian\nmax_tests: 100\npolicy: random\n"
    )
    assert main(["run", "--config", "campaign.yaml", "--max-tests", "200", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["tests"] == 200
    assert set(summary["kinds"]) == {"uniform"}


@pytest.mark.parametrize("command", ["run", "check", "compare"])
def test_a_printed_configuration_can_be_read_again(command, here, capsys):
    printed = []
    for words in (["--perturb", "gaussian", "--zoo", "lenet5-mnist"], ["--config", "printed.yaml"]):
        assert main([command, *words, "--print-config"]) == 0
        printed.append(capsys.readouterr().out)
        (here / "printed.yaml").write_text(printed[-1])
    assert printed[0] == printed[1]
    assert "zoo: lenet5-mnist" in printed[0]


def test_a_target_and_weights_can_be_given(here):
    import mine

    torch.save(mine.net().state_dict(), "weights.pt")
    assert main(["run", "--model", "mine:target", "--weights", "weights.pt", *BASE[3:], "--json"]) == 0


def test_a_preset_never_changes_explicit_options(here):
    arguments = ["run", *BASE[1:-2], "--preset", "paper", "--json", "--out"]
    assert main([*arguments, "a", "--max-tests", "20000", "--judge", "exact", "--coverage", "0.1"]) == 0
    config = (here / "a/config.yaml").read_text()
    assert "max_tests: 20000" in config
    assert "judge: exact" in config
    assert "policy: paper" in config
    assert main([*arguments, "b", "--coverage", "0.1"]) == 0
    assert "judge: gibbs" in (here / "b/config.yaml").read_text()


def test_a_stored_configuration_can_be_run_again(here, capsys, tmp_path_factory, monkeypatch):
    assert main([*BASE, "--quiet", "--out", "a"]) == 0
    first = json.loads((here / "a/summary.json").read_text())
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))  # the configuration names the folder of the modules
    assert main(["run", "--config", str(here / "a/config.yaml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["faults"] == first["faults"]


def test_one_layer_or_one_mean_needs_no_brackets(here):
    assert main([*BASE, "--quiet", "--layers", "1", "--mean", "0.5", "--std", "0.5"]) == 0


def test_a_rejected_run_leaves_no_folder(here, capsys):
    assert main([*BASE, "--quiet", "--out", "runs/a", "--bounds", "0.2,0.3"]) == 3
    assert "inputs must lie in bounds (0.2, 0.3)" in capsys.readouterr().err
    assert not (here / "runs/a").exists()


@pytest.mark.quick
def test_an_interrupted_run_is_kept_and_can_be_resumed(here, capsys):
    words = [*BASE[:1], "--model", "mine:Interrupted", *BASE[3:-2], "--tolerance", "1e-7", "--plateau", "5"]
    assert main([*words, "--out", "runs/a b"]) == 130
    printed = capsys.readouterr()
    assert "the user stopped it" in printed.out
    assert printed.out.endswith("Resume: themis resume 'runs/a b'\n")
    assert printed.err == f"themis run: imported mine from {here / 'mine.py'}\n"
    before = json.loads((here / "runs/a b/summary.json").read_text())["tests"]
    assert main(["resume", "runs/a b", "--max-tests", str(before + 1000), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tests"] == before + 1000
    seconds = json.loads((here / "runs/a b/summary.json").read_text())["seconds"]
    assert main(["resume", "runs/a b", "--verbose"]) == 0
    printed = capsys.readouterr().out
    assert "The run had already ended" in printed
    assert all(f"\n{name} " in printed for name in ("residual risk", "proposals", "time", "normality"))
    assert f"measure {seconds['measure']:.1f} s, judge" in printed  # its own time, without that of looking at it again


def test_a_failed_run_names_its_results_and_can_be_resumed(here, capsys, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda form: "now")
    words = [*BASE[:1], "--model", "mine:WornOut", *BASE[3:-2], "--tolerance", "1e-7"]
    assert main([*words, "--quiet"]) == 3
    printed = capsys.readouterr().err
    assert "the results so far are in runs/now, and themis resume runs/now continues;" in printed
    assert printed.endswith("; THEMIS_DEBUG=1 shows where\n")
    assert printed.count("\n") == 1
    assert main(["resume", "runs/now", "--max-tests", "3000", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tests"] == 3000


def test_a_run_can_be_resumed_after_its_model_has_moved(here, capsys, tmp_path_factory, monkeypatch):
    import mine

    torch.save(mine.net().state_dict(), "weights.pt")
    assert main([*BASE, "--weights", "weights.pt", "--tolerance", "1e-7", "--quiet", "--out", "a"]) == 0
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    (here / "weights.pt").rename(elsewhere / "moved.pt")
    (here / "mine.py").rename(elsewhere / "yours.py")
    words = ["--weights", "moved.pt", "--model", "yours:net", "--data", "yours:data", "--max-tests", "400", "--json"]
    assert main(["resume", str(here / "a"), *words]) == 0
    assert json.loads(capsys.readouterr().out)["tests"] == 400


def test_the_demo_trains_a_model_tests_it_and_draws_faults(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--max-tests", "1280"]) == 0
    printed = capsys.readouterr().out
    assert "Loaded LeNet-5 from" in printed
    assert "Most telling faults: runs/demo/faults.png" in printed
    from matplotlib.image import imread

    picture = imread(tmp_path / "runs/demo/faults.png")
    assert picture.shape[0] > 300
    assert picture.shape[1] > 1000
    assert picture[..., :3].std() > 0.1
    assert main(["demo", "--max-tests", "640", "--quiet"]) == 0
    assert (tmp_path / "runs/demo-2/summary.json").exists()


def test_themis_without_arguments_lists_the_commands(capsys):
    assert main([]) == 2
    alone = capsys.readouterr()
    assert alone.err == ""
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == alone.out
    assert all(f"  {name} " in alone.out for name in ALL)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("themis 0.")


@pytest.mark.parametrize("name", ["", *ALL])
def test_help_fits_80_columns_and_ends_with_examples(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*name.split(), "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("examples:") if name else len(lines)
    assert max(map(len, lines[:at])) < 80
    assert lines[0].startswith("usage: themis")
    if name:
        examples = lines[at + 1 :]
        assert len(examples) >= 2
        assert all(f"themis {name}" in each for each in examples)


def test_a_run_imports_no_more_than_it_needs(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def make_net():\n    return torch.nn.Linear(4, 3)\n"
        "def make_data():\n    return torch.rand(60, 4), torch.arange(60) % 3\n"
    )
    code = (
        "import gc, sys; from themis.cli import main\n"
        "options = '--model mine:make_net --data mine:make_data --perturb gaussian --max-tests 200 --out run'\n"
        "assert main(['run', *options.split()]) == 0 and gc.isenabled()\n"
        "heavy = {'scipy.stats', 'matplotlib', 'pandas', 'torchvision', 'sklearn', 'ray', 'torch._dynamo', 'sympy'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr


@pytest.mark.quick
def test_help_imports_nothing_heavy():
    code = (
        "import sys; from themis.cli import main\n"
        f"for name in {ALL}: main([name, '--help'])\n"
        "main(['--help'])\n"
        "print(sorted({'torch', 'numpy', 'scipy', 'rich', 'yaml', 'matplotlib', 'shtab'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert "--max-tests" in done.stdout


def raise_from(monkeypatch, error):
    def execute(arguments):
        raise error

    monkeypatch.setattr(run_command, "execute", execute)


@pytest.mark.parametrize("text", ["raise AttributeError('half installed')", "raise ImportError('no symbol')", "1 +"])
def test_a_package_that_cannot_be_imported_is_named(text, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("THEMIS_DEBUG", raising=False)
    (tmp_path / "shtab.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "shtab", raising=False)
    assert main(["completion", "bash"]) == 3
    printed = capsys.readouterr().err
    assert "report it" not in printed
    assert "shtab" in printed
    monkeypatch.delitem(sys.modules, "shtab", raising=False)


def test_an_unexpected_error_is_one_line_with_a_traceback_on_request(monkeypatch, capsys):
    monkeypatch.delenv("THEMIS_DEBUG", raising=False)
    raise_from(monkeypatch, KeyError("a\nb"))
    assert main(BASE) == 3
    printed = capsys.readouterr().err
    assert printed.startswith("themis run: unexpected KeyError: ")
    assert printed.endswith("; set THEMIS_DEBUG=1 for the traceback, and please report it\n")
    assert printed.count("\n") == 1
    monkeypatch.setenv("THEMIS_DEBUG", "1")
    assert main(BASE) == 3
    assert "Traceback" in capsys.readouterr().err


def test_a_broken_pipe_is_not_an_error(here):
    code = "import sys; from themis.cli import main; sys.exit(main())"
    pipe, end = os.pipe()
    os.close(pipe)
    done = subprocess.run([sys.executable, "-c", code, *BASE, "--out", "a"], stdout=end, stderr=subprocess.PIPE)
    os.close(end)
    assert (done.returncode, done.stderr.decode()) == (0, f"themis run: imported mine from {here / 'mine.py'}\n")
    assert json.loads((here / "a/summary.json").read_text())["tests"] == 300


def test_a_command_interrupted_at_the_start_exits_with_130(monkeypatch, capsys):
    raise_from(monkeypatch, KeyboardInterrupt())
    assert main(BASE) == 130
    assert capsys.readouterr().err == "themis run: interrupted\n"


def test_a_warning_from_themis_is_one_line(monkeypatch, capsys):
    def execute(arguments):
        cli.warnings.warn_explicit("something\nodd", RuntimeWarning, "campaign.py", 1, "themis.campaign.loop")
        cli.warnings.warn_explicit("old habits", DeprecationWarning, "other.py", 1, "other")
        return 0

    monkeypatch.delenv("THEMIS_DEBUG", raising=False)
    monkeypatch.setattr(sys, "warnoptions", [])
    monkeypatch.setattr(run_command, "execute", execute)
    assert main(BASE) == 0
    assert capsys.readouterr().err == "themis run: something odd\n"


@pytest.mark.parametrize(
    ("given", "kept"),
    [({}, "1000 None"), ({"GOMP_SPINCOUNT": "7"}, "7 None"), ({"OMP_WAIT_POLICY": "active"}, "None active")],
)
def test_waiting_threads_do_not_occupy_cores(given, kept):
    code = "import os, themis.cli; themis.cli.main(['--version']); env = os.environ.get; "
    code += "print(env('GOMP_SPINCOUNT'), env('OMP_WAIT_POLICY'))"
    own = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", code], env=own | given, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1:] == [kept]
