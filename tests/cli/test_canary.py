"""Looking at a run folder that someone sent imports nothing and calls nothing that the folder names.

A module that leaves a file behind when it is imported can be found from everywhere, and its name is planted in every
text of a run folder. Then all commands that read run in a process that watches every import and every new process.
"""

import json
import os
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
from signing import change_record, read_record
from user_module import SMALL
from warm_python import warm_python

import themis

CANARY = "canary_of_themis"
NAME = f"{CANARY}:sing"
MODULE = f"""{SMALL}
from pathlib import Path
Path({{trace!r}}).touch()

def sing(*arguments, **options):
    Path({{trace!r}}).write_text("called")
    return net()
"""
WATCHED = f"""
import sys
seen, run = [], ""

def hook(event, arguments):
    # importlib.import_module raises no "import", but the code of the module is executed and its file is opened
    is_named = event in ("import", "open") and {CANARY!r} + "." in str(arguments[0]) + "."
    is_executed = event == "exec" and {CANARY!r} in arguments[0].co_filename
    if is_named or is_executed or event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn"):
        seen.append((event, run))

sys.addaudithook(hook)
"""
COMMANDS = (
    WATCHED
    + """
import io, os, threading, urllib.request
from contextlib import redirect_stderr, redirect_stdout
from themis.cli import main

codes, whole = {}, ("everything", "a part of a sum")  # drawn and exported in all ways

def command(*words):
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as err:
        code = main(list(words))
    codes.setdefault(words[0], []).append((code, err.getvalue()))

for run in sys.argv[1:]:
    command("report", run)
    command("faults", run)
    for ending in ("csv", "json", "npz", "parquet", "png") if run in whole else ("npz",):
        command("faults", run, "--export", f"{run}.{ending}", "--force")
    command("groups", run)
    command("gate", run, "--max-fault-rate", "1", "--junit", run + ".xml", "--markdown", run + ".md")
    command("diff", run, run, "--kind", "techniques")
    command("run", "--config", run + "/config.yaml", "--print-config")
    if run in whole:
        command("report", run, "--out", run + ".html", "--force")
        command("report", run, "--evidence", run + " evidence")
        command("faults", run, "--json")
        command("faults", run, "--distinct", "--sort", "distance")
        command("groups", run, "--json")
        command("completion", "bash")

    from themis_integrations.browser.server import serve
    with serve(run, port=0) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            urllib.request.urlopen(server.url).read()
        except urllib.error.HTTPError:
            pass
        server.shutdown()

    import themis
    try:
        opened = themis.open_run(run)
    except (themis.ThemisError, TypeError, ValueError, KeyError) as error:
        codes.setdefault("open_run", []).append((1, repr(error)))
        continue
    codes.setdefault("open_run", []).append((0, ""))
    for shown in (opened, opened.faults, opened.faults[0]):
        repr(shown), shown._repr_html_()
    opened.faults.to_pandas()
    opened.summary()

import json
print(json.dumps({"seen": seen, "codes": codes}))
"""
)
REBUILDING = (
    WATCHED
    + """
from themis.cli import main
code = main(sys.argv[1:])
print("imported" if seen else "nothing", code)
"""
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of the command line with everything that a record may name."""
    home = tmp_path_factory.mktemp("made")
    (home / "maker_of_runs.py").write_text(SMALL)
    words = ["--model", "maker_of_runs:net", "--data", "maker_of_runs:data", "--perturb", "gaussian + rotate"]
    more = ["--magnitude", "0.5", "--max-tests", "300", "--max-stored", "40", "--criterion", "nc", "--quiet"]
    command = [warm_python(), "-m", "themis", "run", *words, *more, "--classes", "a,b,c", "--out", "run"]
    subprocess.run(command, cwd=home, check=True)
    return home / "run"


@pytest.fixture
def canary(tmp_path, monkeypatch):
    """The file that the module leaves behind; it can be imported from the folder, the run and the environment."""
    trace = tmp_path / "trace"
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / f"{CANARY}.py").write_text(MODULE.format(trace=str(trace)))
    (tmp_path / f"{CANARY}.py").write_text(MODULE.format(trace=str(trace)))
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join([str(Path(themis.__file__).parents[1]), str(tmp_path / "modules")])
    monkeypatch.setenv("PYTHONPATH", path)
    return trace


def planted(value, text=NAME, keep=()):
    """The same value with `text` in place of every text, except under these names."""
    if isinstance(value, dict):
        return {key: each if key in keep else planted(each, text, keep) for key, each in value.items()}
    if isinstance(value, list):
        return [planted(each, text, keep) for each in value]
    return text if isinstance(value, str) else value


def plant_files(run, keep=()):
    for name in ("summary.json", "environment.json"):
        path = run / name
        path.write_text(json.dumps(planted(json.loads(path.read_text()), NAME, keep)))
    (run / "config.yaml").write_text(json.dumps({"model": NAME, "data": NAME, "perturb": NAME, "oracle": NAME}))
    (run / f"{CANARY}.py").write_text((run.parent / f"{CANARY}.py").read_text())


STRUCTURE = ("name", "neurons", "settings", "stop_reason", "unit")
"""Names without which a folder cannot be opened, so that nothing further would be tried."""
ORIGIN = ("model", "weights", "data", "train", "features", "oracle", "folder", "zoo", "device", "against")


def plant_all(run):
    """Every text at once, except those that make a run a run."""
    record = read_record(run)
    keep = {"theta": record["theta"], "settings": {**record["settings"], "policy": NAME, "criterion": NAME}}
    texts = {name: planted(value, NAME, STRUCTURE) for name, value in record.items() if name not in keep}
    texts["origin"] = record["origin"] | dict.fromkeys(ORIGIN, NAME) | {"rivals": [NAME], "trust": [NAME]}
    change_record(run, **texts, **keep)
    plant_files(run, STRUCTURE)
    plant_perturbation(NAME)(run)


def plant_perturbation(spec):
    def plant(run):
        change_record(run, perturbation=spec, start=read_record(run)["start"] | {"perturbation": spec})
        with closing(sqlite3.connect(run / "run.sqlite")) as database, database:
            database.execute("UPDATE faults SET perturbation = ?", (spec,))

    return plant


def plant_origin(**values):
    return lambda run: change_record(run, origin=read_record(run)["origin"] | values)


def plant_start(**values):
    return lambda run: change_record(run, start=read_record(run)["start"] | values)


PLANTS = {
    "everything": plant_all,
    "a part of a sum": plant_perturbation(f"gaussian + rotate(angle=1)+{NAME}"),
    "the second part": plant_perturbation(f"gaussian + {NAME}"),
    "the first part": plant_perturbation(f"{NAME} + gaussian"),
    "ranges": plant_perturbation(f"gaussian(sigma=0:1) + {NAME}(x=0:1)"),
    "no spaces": plant_perturbation(f"gaussian+{NAME}"),
    "the model": plant_origin(model=NAME),
    "a call": plant_origin(model=f"os:system('touch trace') or {NAME}", data="os:system('touch trace')"),
    "a call of the standard library": plant_origin(model="os:system('touch trace')"),
    "the oracle": plant_start(oracle=NAME, oracle_asked="auto"),
    "the features": plant_origin(features=f"{CANARY}.py", folder="."),
}


def test_reading_commands_import_nothing_that_a_folder_names(made, canary):
    for name, plant in PLANTS.items():
        plant(Path(shutil.copytree(made, canary.parent / name)))
    done = subprocess.run([warm_python(), "-c", COMMANDS, *PLANTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["seen"] == []
    assert not canary.exists()
    for command in ("report", "faults", "groups", "gate", "completion", "open_run"):  # they did what they are for
        assert {code for code, _ in result["codes"][command]} == {0}, result["codes"][command]


def leaves(value, path=()):
    """The places of all texts."""
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(each, (*path, key))
    elif isinstance(value, str):
        yield path


def put(value, path, text):
    if not path:
        return text
    copy = value.copy()
    copy[path[0]] = put(value[path[0]], path[1:], text)
    return copy


def test_no_single_text_of_a_record_is_followed(made, canary):
    """One copy of the folder per text of its record."""
    record, runs = read_record(made), []
    for path in leaves(record):
        run = canary.parent / f"run{len(runs)}"
        shutil.copytree(made, run)
        change_record(run, **{path[0]: put(record[path[0]], path[1:], NAME)})
        runs.append(run.name)
    assert len(runs) > 30
    done = subprocess.run([warm_python(), "-c", COMMANDS, *runs], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["seen"] == []
    assert not canary.exists()


def test_the_canary_sings_if_the_folder_is_trusted(made, canary):
    """Without this, the tests above might watch nothing."""
    run = shutil.copytree(made, canary.parent / "run")
    change_record(run, origin=read_record(run)["origin"] | {"model": NAME, "data": f"{CANARY}:data"})
    with closing(sqlite3.connect(run / "run.sqlite")) as database:
        fault = str(database.execute("SELECT min(id) FROM faults").fetchone()[0])
    command = [warm_python(), "-c", REBUILDING, "replay", "run", fault]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.stdout == "nothing 2\n"
    assert f"it would run data '{CANARY}:data', model '{NAME}'" in refused.stderr
    assert not canary.exists()
    trusted = subprocess.run([*command, "--trust", "run"], capture_output=True, text=True)
    assert trusted.stdout.splitlines()[-1] == "imported 0", trusted.stderr
    assert canary.read_text() == "called"
