"""Commands that rebuild a model ask before they run what a run folder from elsewhere names."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from signing import change_record, read_record
from user_module import SMALL, go_to

from themis.cli import main
from themis.runs.store.reader import Reader
from themis.runs.trust import why_not_ours

MODULE = f"""{SMALL}
from pathlib import Path
Path(__file__).with_name("imported").touch()
"""
NAMED = ["--model", "sent_here:net", "--data", "sent_here:data"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The runs of somebody in their folder, and the module in it."""
    home = tmp_path_factory.mktemp("theirs")
    with pytest.MonkeyPatch.context() as patch:
        go_to(home, patch, SMALL, "sent_here")
        more = ["--perturb", "gaussian", "--magnitude", "0.5", "--max-tests", "300", "--tolerance", "1e-9"]
        more += ["--quiet", "--no-report"]
        assert main(["run", *NAMED, *more, "--out", "run"]) == 0
        assert main(["run", *NAMED, *more, "--random-seed", "1", "--out", "other"]) == 0
    sys.modules.pop("sent_here")
    return home


@pytest.fixture
def sent(made, tmp_path, monkeypatch):
    """Their folders as they were sent: signed by nobody here."""
    folder = go_to(Path(shutil.copytree(made, tmp_path / "sent")), monkeypatch, MODULE, "sent_here")
    for name in ("run", "other"):
        origin = read_record(folder / name)["origin"]
        change_record(folder / name, origin=origin | {"folder": str(folder)}, tag=None)
        options = yaml.safe_load((folder / name / "config.yaml").read_text()) | {"folder": str(folder)}
        (folder / name / "config.yaml").write_text(yaml.safe_dump(options))
        short = {key: options[key] for key in ("model", "data", "folder")}
        (folder / name / "short.yaml").write_text(yaml.safe_dump(short))
    return folder


FAULT = "FAULT"
COMMANDS = {
    "replay": ["replay", "run", FAULT],
    "resume": ["resume", "run", "--max-tests", "400", "--quiet", "--no-report"],
    "shrink": ["shrink", "run", FAULT],
    "locate": ["locate", "run"],
    "diff": ["diff", "run", "other", "--kind", "versions", "--tests", "20"],
    "gate": ["gate", "run", "--max-new-faults", "10000", "--baseline", "other"],
    "retrain": ["retrain", "run", "--judge", "idx:missing", "--out", "better", "--quiet"],
    "contest": ["contest", "run", "--techniques", "random", "--judge", "idx:missing", "--out", "better", "--quiet"],
    "run --config": ["run", "--config", "run/config.yaml", "--out", "new", "--quiet", "--no-report"],
    "check --config": ["check", "--config", "run/short.yaml"],
}


def words_of(name):
    fault = str(Reader("run").faults()[0].id)
    words = [fault if word == FAULT else word for word in COMMANDS[name]]
    if name.startswith(("retrain", "contest")):
        words[words.index("idx:missing")] = "npy:judge.npy"
        import numpy as np

        np.save("judge.npy", np.random.default_rng(0).random((9, 1, 8, 8), dtype=np.float32))
    return words


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_lists_what_it_would_run_and_runs_nothing(sent, name, capsys):
    assert main(words_of(name)) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "must be trusted before code that it names runs" in line
    assert "model 'sent_here:net'" in line
    assert "data 'sent_here:data'" in line
    assert "--trust " in line
    assert not Path("imported").exists()
    assert "sent_here" not in sys.modules


@pytest.mark.parametrize("name", COMMANDS)
def test_a_trusted_folder_is_run(sent, name, capsys):
    flags = ["--trust", "run", "--trust", "other"] if name in ("diff", "gate") else ["--trust", "run"]
    if name == "check --config":
        flags = ["--trust", "run/short.yaml"]
    code = main([*words_of(name), *flags])
    assert "must be trusted" not in capsys.readouterr().err
    assert Path("imported").exists()
    assert code == 0 or name in ("retrain", "contest")  # which needs labels


def test_a_list_of_folders_can_be_trusted(sent):
    assert main([*words_of("diff"), "--trust", "run,other"]) == 0


@pytest.mark.parametrize("trusted", ["run", "other"])
def test_each_of_two_folders_must_be_trusted(sent, trusted, capsys):
    untrusted = {"run": "other", "other": "run"}[trusted]
    for name in ("diff", "gate"):
        assert main([*words_of(name), "--trust", trusted]) == 2
        assert f"{untrusted} must be trusted" in capsys.readouterr().err


def test_trusting_a_file_does_not_trust_the_folder(sent, capsys):
    assert main([*words_of("replay"), "--trust", "run/run.sqlite"]) == 2
    assert not Path("imported").exists()


@pytest.mark.parametrize("name", ["replay", "resume", "shrink", "locate"])
def test_names_of_the_user_replace_those_of_the_folder(sent, name, capsys):
    (sent / "yours.py").write_text(SMALL)
    sys.modules.pop("yours", None)
    assert main([*words_of(name), "--model", "yours:net", "--data", "yours:data"]) == 0
    assert not Path("imported").exists()
    sys.modules.pop("yours")


def test_one_name_of_the_user_does_not_permit_the_other(sent, capsys):
    assert main([*words_of("replay"), *NAMED[:2]]) == 2
    assert "data 'sent_here:data'" in capsys.readouterr().err
    assert not Path("imported").exists()


def test_names_on_the_command_line_are_the_users_own_even_if_the_folder_has_the_same(sent):
    assert main([*words_of("replay"), *NAMED]) == 0


def test_a_run_of_this_user_needs_no_flag(sent):
    for name in ("run", "other"):
        change_record(sent / name, signed=True)
    for name in ("replay", "shrink", "diff", "gate", "run --config"):
        assert main(words_of(name)) == 0, name


# config.yaml


def test_a_config_that_was_changed_in_a_run_of_this_user_is_not_trusted(sent, capsys):
    change_record(sent / "run", signed=True)
    path = sent / "run/config.yaml"
    options = yaml.safe_load(path.read_text())
    for change in ({"model": "sent_here:evil"}, {"junit": str(sent / "bashrc")}, {"perturb": "sent_here:evil"}):
        path.write_text(yaml.safe_dump({**options, **change}))
        assert main(words_of("run --config")) == 2
        assert "its config.yaml was changed since" in capsys.readouterr().err
    assert not Path("imported").exists()
    assert not (sent / "bashrc").exists()


def test_a_config_of_the_users_own_is_a_command_line(sent):
    shutil.copy("run/config.yaml", "campaign.yaml")
    assert main(["run", "--config", "campaign.yaml", "--out", "new", "--quiet", "--no-report"]) == 0


def test_flags_do_not_make_a_config_trusted(sent, capsys):
    (sent / "yours.py").write_text(SMALL)
    words = [*words_of("run --config"), "--model", "yours:net", "--data", "yours:data", "--folder", "."]
    assert main(words) == 2
    assert "or a copy of the file in a folder of your own" in capsys.readouterr().err
    shutil.copy("run/config.yaml", "campaign.yaml")
    words[words.index("run/config.yaml")] = "campaign.yaml"
    assert main(words) == 0
    assert not Path("imported").exists()
    sys.modules.pop("yours")


def test_a_config_beside_traces_of_a_run_is_that_of_a_run(sent, capsys):
    (sent / "run/run.sqlite").unlink()
    assert main(COMMANDS["run --config"]) == 2
    assert "it holds no run" in capsys.readouterr().err
    assert not Path("imported").exists()


def test_other_options_of_an_untrusted_config_are_refused(sent, capsys):
    path = sent / "run/config.yaml"
    plain = {"zoo": "lenet5-mnist", "perturb": "gaussian", "markdown": "notes.md"}
    path.write_text(yaml.safe_dump(plain))
    assert main(COMMANDS["run --config"]) == 2
    assert "config.yaml names no model or data, but other options" in capsys.readouterr().err
    assert not Path("notes.md").exists()


# what a resumed run records


def test_a_moved_model_is_recorded_and_signed(sent, capsys):
    change_record(sent / "run", signed=True)
    (sent / "yours.py").write_text(SMALL)
    words = ["--model", "yours:net", "--data", "yours:data", "--max-tests", "400", "--json", "--no-report"]
    assert main(["resume", "run", *words]) == 0
    record = read_record(sent / "run")
    assert (record["origin"]["model"], record["origin"]["data"]) == ("yours:net", "yours:data")
    assert why_not_ours(record) == ""
    capsys.readouterr()
    assert main([*words_of("replay"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["faults"][0]["is_same"]
    assert main(words_of("run --config")) == 0
    sys.modules.pop("yours")
