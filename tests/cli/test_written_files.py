"""Files that commands write: nothing of others is replaced, nothing is left half written, and signals lose nothing."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from user_module import SMALL, go_to
from warm_python import warm_python

from themis.cli import main
from themis.runs.store.reader import Reader

pytestmark = pytest.mark.xdist_group("written_files")
BASE = [
    "run",
    "--model",
    "mine:net",
    "--data",
    "mine:data",
    "--perturb",
    "gaussian",
    "--magnitude",
    "0.5",
    "--tolerance",
    "1e-9",
]
MODULE = f"""{SMALL}
def others():
    return torch.rand(30, 1, 8, 8, generator=torch.Generator().manual_seed(1))

def slow():
    import time
    class Slow(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()
        def forward(self, x):
            time.sleep(0.02)
            return self.net(x)
    return Slow()
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = go_to(tmp_path_factory.mktemp("made"), patch, MODULE)
        assert main([*BASE, "--max-tests", "300", "--out", "run", "--quiet"]) == 0
        assert main([*BASE, "--max-tests", "300", "--random-seed", "1", "--out", "other", "--quiet"]) == 0
        assert main(["shrink", "run", "--most", "2", "--curve", "--json"]) == 0
    return folder


@pytest.fixture
def here(made, tmp_path, monkeypatch):
    """A copy of two runs, as the current folder."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return go_to(tmp_path, monkeypatch, MODULE)


def files(folder):
    """Content and time of each file."""
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


DIFF = ["diff", "run", "other", "--tests", "20"]
COMMANDS = {
    "report.html": lambda: ["report", "run", "--out"],
    "gates.xml": lambda: ["gate", "run", "--max-fault-rate", "1", "--junit"],
    "diff.md": lambda: [*DIFF, "--out"],
    "diff.json": lambda: [*DIFF, "--out"],
    "faults.png": lambda: ["faults", "run", "--limit", "2", "--export"],
    "sheet.png": lambda: ["perturbations", "gaussian", "--sheet"],
    "sheet.svg": lambda: ["perturbations", "gaussian", "--sheet"],
    "sheet.pdf": lambda: ["perturbations", "gaussian", "--sheet"],
}
DATA = {
    "faults.csv": lambda: ["faults", "run", "--export"],
    "faults.json": lambda: ["faults", "run", "--export"],
    "faults.npz": lambda: ["faults", "run", "--export"],
    "faults.parquet": lambda: ["faults", "run", "--export"],
}


@pytest.mark.parametrize("name", [*COMMANDS, *DATA])
def test_a_file_of_somebody_else_is_replaced_only_on_request(here, capsys, name):
    words = {**COMMANDS, **DATA}[name]()
    Path(name).write_text("mine")
    assert main([*words, name]) == 2
    assert f"the file must be new, but {name} exists: choose another, or re" in capsys.readouterr().err
    assert Path(name).read_text() == "mine"
    if name == "gates.xml":
        Path(name).unlink()
    else:
        words = [words[0], "--force", *words[1:]]
    assert main([*words, name]) == 0
    assert Path(name).read_bytes() != b"mine"
    if name in COMMANDS:  # it carries the mark of Themis
        words = [word for word in words if word != "--force"]
        Path(name).write_bytes(Path(name).read_bytes() + b"\n")
        size = Path(name).stat().st_size
        assert main([*words, name]) == 0
        assert Path(name).stat().st_size == size - 1 or name.endswith((".pdf", ".svg", ".xml"))
    else:
        assert main([word for word in [*words, name] if word != "--force"]) == 2
    assert not list(here.glob(".themis-*"))


@pytest.mark.parametrize("name", ["report.html", "gates.xml", "faults.csv", "diff.md", "sheet.png"])
def test_a_link_is_refused_and_its_target_kept(here, capsys, name):
    Path("mine.txt").write_text("mine")
    Path(name).symlink_to("mine.txt")
    assert main([*{**COMMANDS, **DATA}[name](), name]) == 2
    assert f"{name} must not be a symbolic link" in capsys.readouterr().err
    assert Path("mine.txt").read_text() == "mine"


def test_the_users_configuration_is_safe(here, capsys):
    Path("mine").mkdir()
    Path("mine/config.yaml").write_text("model: mine:net\ndata: mine:data\nperturb: gaussian\nmax_tests: 100\n")
    before = files(here)
    assert main(["run", "--config", "mine/config.yaml", "--out", "mine", "--quiet"]) == 2
    assert "contains other files (config.yaml): choose another folder" in capsys.readouterr().err
    assert files(here) == before


def test_resume_does_not_read_a_summary_that_is_a_pipe(here, capsys):
    (here / "run/summary.json").unlink()
    os.mkfifo(here / "run/summary.json")
    assert main(["resume", "run", "--max-tests", "400", "--quiet"]) == 3
    assert "summary.json is damaged: it is a pipe" in capsys.readouterr().err


def test_resume_with_a_lower_limit_leaves_the_run_as_it_is(here, capsys):
    before = files(here / "run")
    for words in (["--max-tests", "100"], [], ["--json"]):
        assert main(["resume", "run", *words]) == 0
    assert "The run had already ended and was left unchanged" in capsys.readouterr().out
    assert files(here / "run") == before
    assert main(["resume", "run", "--max-tests", "400", "--quiet"]) == 0
    assert files(here / "run") != before


def test_resume_says_what_a_run_that_reached_its_goal_needs(here, capsys):
    words = ["--tolerance", "1e3", "--coverage", "0.5", "--recall", "null", "--max-tests", "2000", "--quiet"]
    assert main([*BASE, *words, "--out", "goal"]) == 0
    assert main(["resume", "goal", "--max-tests", "4000"]) == 0
    printed = capsys.readouterr().out
    assert "one that has reached its goal, with --coverage null or --plateau null too" in " ".join(printed.split())
    before = files(here / "goal")
    assert main(["resume", "goal", "--max-tests", "4000", "--coverage", "null", "--quiet"]) == 0
    assert files(here / "goal") != before


def test_files_with_names_of_themis_in_a_run_folder_are_kept(here, capsys):
    for name, words in {"report.html": ["report"], "shrunk.json": ["shrink"], "robustness.png": ["shrink"]}.items():
        (here / "run" / name).write_text("mine")
        assert main([words[0], "run", *(["--curve"] if name == "robustness.png" else [])]) == 2
        assert f"run/{name} exists: remove it" in capsys.readouterr().err
        assert (here / "run" / name).read_text() == "mine"
        (here / "run" / name).unlink()
        (here / "run" / name).symlink_to(here / "mine.py")
        assert main([words[0], "run", *(["--curve"] if name == "robustness.png" else [])]) == 2
        assert (here / "mine.py").read_text() == MODULE
        (here / "run" / name).unlink()
    (here / "run/report.html.part").symlink_to(here / "mine.py")
    assert main(["report", "run"]) == 0
    assert (here / "mine.py").read_text() == MODULE


def test_markdown_is_appended_to_any_file(here):
    Path("summary.md").write_text("# Mine\n")
    for _ in range(2):
        assert main(["gate", "run", "--max-fault-rate", "1", "--markdown", "summary.md"]) == 0
    assert Path("summary.md").read_text().startswith("# Mine\n## ")
    assert Path("summary.md").read_text().count("Themis:") == 2


EXPERIMENTS = {
    "compare": ["compare", "--model", "mine:net", "--data", "mine:data", "--perturb", "gaussian", "--workers", "1"],
    "retrain": ["retrain", "run", "--judge", "mine:others"],
    "contest": ["contest", "run", "--judge", "mine:others", "--techniques", "random"],
}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_does_not_begin_in_a_folder_with_other_files(here, capsys, name):
    Path("mine/cells").mkdir(parents=True)
    Path("mine/plan.json").write_text('{"format_version": "1.2", "planned_values": {}}')
    Path("mine/cells/plan.json").write_text("{}")
    Path("mine/lock").write_text("mine")
    before = files(here / "mine")
    assert main([*EXPERIMENTS[name], "--out", "mine"]) == 2
    assert "mine contains other files (cells, lock, plan.json)" in capsys.readouterr().err
    assert files(here / "mine") == before


FULL = """
import resource, sys
sys.dont_write_bytecode = True  # a module that is imported later would leave a truncated file of bytecode behind
from themis.cli import main
import torch, numpy, matplotlib.figure, pyarrow.parquet  # what is written when they are imported does not count
torch.set_num_threads(1)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(main(sys.argv[2:]))
"""


def with_full_disk(*words, limit=100):
    return subprocess.run([warm_python(), "-c", FULL, str(limit), *words], capture_output=True, text=True, timeout=300)


PAGES, TABLES = ["report.html", "gates.xml", "diff.json", "summary.md"], ["faults.csv", "faults.npz", "faults.parquet"]


@pytest.mark.parametrize("name", [*PAGES, *TABLES, "faults.png", "sheet.svg"])
def test_a_full_disk_is_one_line_and_leaves_nothing(here, name):
    gate = ["gate", "run", "--max-fault-rate", "1", "--markdown"]
    words = gate if name == "summary.md" else {**COMMANDS, **DATA}[name]()
    Path("summary.md").write_text("# Mine\n")
    before = {path.name for path in here.iterdir()}
    done = with_full_disk(*words, name)
    assert done.returncode == 3, done.stderr
    assert done.stderr.count("\n") == 1
    assert f"{name} cannot be written: " in done.stderr
    assert "File too large; free some space" in done.stderr
    assert {path.name for path in here.iterdir()} == before
    assert Path("summary.md").read_text() == "# Mine\n"


@pytest.mark.parametrize("name", ["report.html", "gates.xml", "diff.md", "faults.csv", "sheet.png"])
def test_a_folder_that_cannot_be_written_is_one_line(here, capsys, monkeypatch, name):
    def refuse(folder):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    words = {**COMMANDS, **DATA}[name]()
    monkeypatch.setattr("themis.runs.store.files._create_part", refuse)
    before = {path.name for path in here.iterdir()}
    assert main([*words, name]) == 3
    error = capsys.readouterr().err
    assert f"{name} cannot be written: Permission denied; choose a folder that you may write to\n" in error
    assert error.count("\n") == 1
    assert {path.name for path in here.iterdir()} == before


def test_a_full_disk_during_an_experiment_is_one_line(here):
    done = with_full_disk(*EXPERIMENTS["compare"], "--out", "compare", "--quiet", "--seeds", "10", limit=200)
    assert (done.returncode, done.stderr.count("\n")) == (3, 1), done.stderr
    assert "cannot be written: File too large; free some space" in done.stderr
    assert not Path("compare").exists()


def test_output_that_cannot_be_written_is_one_line(here):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "themis", "faults", "run", "--json"], stdout=full, stderr=-1)
    assert done.returncode == 3
    assert done.stderr.decode() == ("themis faults: the output cannot be read or written: No space left on device\n")


def test_two_reports_and_an_export_at_the_same_time_all_succeed(here):
    words = [["report", "run"], ["report", "run"], ["faults", "run", "--export", "run/faults.csv"]]
    running = [subprocess.Popen([warm_python(), "-m", "themis", *each], stdout=-3, stderr=-1) for each in words]
    errors = [process.communicate(timeout=300)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], errors
    assert not list((here / "run").glob(".themis-*"))


STOPS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


def wait_for(find):
    until = time.monotonic() + 240
    while not find():
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_stops_a_campaign_and_everything_is_kept(here, number):
    words = ["run", "--model", "mine:slow", *BASE[3:], "--max-tests", "100000", "--out", "stopped"]
    with subprocess.Popen([warm_python(), "-m", "themis", *words], stdout=-1, stderr=-1, text=True) as process:
        wait_for(lambda: (here / "stopped/run.sqlite").exists() and Reader("stopped", is_brief=True).rounds())
        process.send_signal(number)
        output, errors = process.communicate(timeout=240)
    assert process.returncode == STOPS[number]
    assert errors == f"themis run: imported mine from {here / 'mine.py'}\n"
    assert "Resume: themis resume stopped" in output
    summary = json.loads((here / "stopped/summary.json").read_text())
    why = "the user stopped it" if number == signal.SIGINT else f"the signal {number.name} stopped it"
    assert (summary["stop_reason"], summary["stop"]) == ("user", f"Stopped because {why}.")
    assert (here / "stopped/report.html").exists()
    assert main(["resume", "stopped", "--max-tests", str(summary["tests"] + 100), "--quiet"]) == 0


def test_a_signal_stops_a_comparison_and_finished_campaigns_are_kept(here):
    plan = "--seeds 10 --judge-seeds 10 --grid-seeds 5 --magnitudes paper --techniques random --max-passes 100"
    words = [*EXPERIMENTS["compare"], "--out", "compare", *plan.split(), "--campaigns", "500"]
    with subprocess.Popen([warm_python(), "-m", "themis", *words], stdout=-1, stderr=-1, text=True) as process:
        wait_for(lambda: process.poll() is not None or list((here / "compare/cells").rglob("*.json")))
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=240)
    assert process.returncode == 143, (output, errors)
    assert "campaigns are kept" in output


def test_signals_that_are_ignored_stay_ignored(here):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert main(["faults", "run", "--limit", "1"]) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
