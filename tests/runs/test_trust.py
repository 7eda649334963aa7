"""The key of a user, the signature of a run, and what may run from folders that are not signed."""

import json
import os
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from signing import change_record, read_record
from torch import nn
from user_module import go_to
from warm_python import warm_python

import themis
from themis import plugins
from themis.errors import UsageError
from themis.oracle import Compare
from themis.perturb import Perturbation, Theta
from themis.runs.replay import Replayer
from themis.runs.source import Origin
from themis.runs.store.reader import Reader
from themis.runs.trust import KeyProblem, names_code, permit, read_key, sign, state_folder, why_not_ours

MODULE = """
import torch
from pathlib import Path
from torch import nn
from themis import Perturbation, Theta

with Path("imported").open("a") as file:
    file.write("x")

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))

def data():
    return torch.rand(30, 1, 8, 8, generator=torch.Generator().manual_seed(0))

def differs(clean, outputs, labels):
    return clean.argmax(1) != outputs.argmax(1)

def darken(inputs, theta, rng, context):
    return inputs * (1 - theta[:, :1, None, None])

DARKER = Perturbation("darker", (Theta("share", 0.0, 0.9),), darken)
"""
OPTIONS = {"magnitude": 0.5, "max_tests": 300, "tolerance": 1e-9, "plateau": None}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))


def data():
    return torch.rand(30, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def state(tmp_path, monkeypatch):
    folder = tmp_path / "state"
    monkeypatch.setenv("THEMIS_STATE", str(folder))
    return folder


@pytest.fixture
def home(tmp_path, monkeypatch):
    folder = tmp_path / "home"
    folder.mkdir()
    return go_to(folder, monkeypatch, MODULE, "signed_here")


def make(home, out="run", *, oracle="auto", perturbation="gaussian", **options):
    """A run whose model, data and more are named in its record."""
    origin = Origin(model="signed_here:net", data="signed_here:data", oracle=oracle, folder=str(home))
    target = origin.target()
    run = themis.run(target, origin.read(), perturbation, origin=origin, out=home / out, **OPTIONS, **options)
    assert len(run.faults)
    return home / out


def from_elsewhere(run):
    """The folder as if another machine had written it."""
    change_record(run, tag="0" * 64)
    Path("imported").unlink(missing_ok=True)
    sys.modules.pop("signed_here", None)
    return run


def refusal(act):
    with pytest.raises(UsageError) as raised:
        act()
    assert not Path("imported").exists()
    return str(raised.value)


# the key


def test_a_key_is_made_once_and_only_its_user_can_read_it(state):
    with pytest.raises(KeyProblem, match="there is no key"):
        read_key()
    key = read_key(creates=True)
    assert len(key) == 32
    assert read_key() == read_key(creates=True) == key
    assert os.listdir(state) == ["key"]
    assert stat.S_IMODE((state / "key").stat().st_mode) == 0o600
    assert stat.S_IMODE(state.stat().st_mode) == 0o700


def test_processes_that_make_a_key_at_once_agree(state):
    with ThreadPoolExecutor(16) as pool:
        keys = {*pool.map(lambda _: read_key(creates=True), range(64))}
    assert len(keys) == 1
    assert os.listdir(state) == ["key"]


def test_a_disk_without_hard_links_has_a_key_too(state, monkeypatch):
    def link(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    assert read_key(creates=True) == read_key()
    assert stat.S_IMODE((state / "key").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda key: key.write_bytes(b""), "is damaged: remove it"),
        (lambda key: key.write_bytes(bytes(33)), "is damaged: remove it"),
        (lambda key: key.chmod(0o640), "open to other users: chmod 600"),
        (lambda key: (key.unlink(), key.mkdir()), "cannot be used"),
    ],
)
def test_a_key_that_cannot_be_used_is_explained(state, spoil, problem):
    read_key(creates=True)
    spoil(state / "key")
    with pytest.raises(KeyProblem, match=problem):
        read_key(creates=True)


def test_the_key_is_in_the_state_folder_of_the_user(monkeypatch, tmp_path):
    monkeypatch.delenv("THEMIS_STATE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert state_folder() == tmp_path / ".local/state/themis"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert state_folder() == tmp_path / "xdg/themis"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")  # to be ignored, says the standard
    assert state_folder() == tmp_path / ".local/state/themis"


# the signature


def test_a_run_made_here_is_ours_wherever_it_is_moved(home, tmp_path):
    run = make(home)
    assert why_not_ours(read_record(run)) == ""
    moved = shutil.move(run, tmp_path / "moved")
    opened = themis.open_run(moved)
    assert opened.faults[0].replay().is_same
    resumed = themis.resume(moved, max_tests=400)
    assert resumed.rounds[-1].tests == 400
    assert why_not_ours(read_record(moved)) == ""


CHANGES = {
    "model": lambda record: record["origin"].update(model="os:system"),
    "data": lambda record: record["origin"].update(data="evil:data"),
    "train": lambda record: record["origin"].update(train="evil:data"),
    "rivals": lambda record: record["origin"].update(rivals=["evil:net"]),
    "reference": lambda record: record["origin"].update(against="evil:net"),
    "oracle": lambda record: record["origin"].update(oracle="evil:f"),
    "folder": lambda record: record["origin"].update(folder="/tmp"),
    "weights": lambda record: record["origin"].update(weights="/tmp/w.pt"),
    "trusted files": lambda record: record["origin"].update(trust=["/tmp/w.pt"]),
    "no origin": lambda record: record.update(origin=None),
    "perturbation": lambda record: record.update(perturbation="evil:x"),
    "code of the perturbation": lambda record: record.update(perturbation_code="other"),
    "policy": lambda record: record["settings"].update(policy="evil"),
    "criterion": lambda record: record["settings"].update(criterion="evil"),
    "settled oracle": lambda record: record["start"].update(oracle="evil:f"),
    "requested oracle": lambda record: record["start"].update(oracle_asked="evil:f"),
    "no tag": lambda record: record.pop("tag"),
    "empty tag": lambda record: record.update(tag=""),
    "tag of another type": lambda record: record.update(tag=5),
}


def test_every_name_of_code_is_signed(home):
    record = read_record(make(home))
    assert why_not_ours(record) == ""
    for name, change in CHANGES.items():
        copy = json.loads(json.dumps(record))
        change(copy)
        assert why_not_ours(copy), name


def test_a_run_of_another_user_is_not_ours(home, tmp_path, monkeypatch):
    record = read_record(make(home))
    monkeypatch.setenv("THEMIS_STATE", str(tmp_path / "other"))
    assert "there is no key in" in why_not_ours(record)
    read_key(creates=True)
    assert "by another user or on another machine" in why_not_ours(record)


def test_a_run_is_written_where_no_key_can_be_made(home, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("THEMIS_STATE", str(tmp_path / "file" / "state"))
    with pytest.warns(
        RuntimeWarning, match=r"the run cannot be signed because the key in .* cannot be used: .*--trust"
    ):
        run = make(home)
    sys.modules.pop("signed_here")
    Path("imported").unlink()
    assert "it is not signed" in refusal(lambda: themis.open_run(run).faults[0].replay())
    assert themis.open_run(run, trust=True).faults[0].replay().is_same


def test_a_run_that_names_no_code_needs_no_key(tmp_path, monkeypatch, recwarn):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("THEMIS_STATE", str(tmp_path / "file" / "state"))
    themis.run(net(), data(), "gaussian", out=tmp_path / "run", **OPTIONS)
    assert not [warning for warning in recwarn if "signed" in str(warning.message)]
    assert themis.open_run(tmp_path / "run", net(), data()).faults[0].replay().is_same


# what may run


ACTS = {
    "replay": lambda run, **trust: themis.open_run(run, **trust).faults[0].replay(),
    "resume": lambda run, **trust: themis.resume(run, max_tests=400, **trust),
    "diff": lambda run, **trust: themis.diff(run, run, kind="versions", tests=50, **trust),
    "robustness": lambda run, **trust: themis.open_run(run, **trust).plot_robustness(),
    "retrain": lambda run, **trust: themis.retrain(run, judge=(torch.rand(9, 1, 8, 8), torch.zeros(9).long()), **trust),
}


@pytest.mark.parametrize("name", ACTS)
def test_a_folder_from_elsewhere_runs_nothing_until_it_is_trusted(home, name):
    run, act = from_elsewhere(make(home)), ACTS[name]
    message = refusal(lambda: act(run))
    assert "model 'signed_here:net'" in message
    assert "data 'signed_here:data'" in message
    assert f"--trust {run}" in message
    assert "by another user or on another machine, or was changed since" in message
    for trust in (True, run, [str(run)]):
        if name == "retrain":  # it warns once it has the model, and warnings are errors here
            with pytest.raises(RuntimeWarning, match="have no labels"):
                act(run, trust=trust)
        else:
            act(run, trust=trust)
        assert Path("imported").exists()
    refused = from_elsewhere(make(home, "other"))
    assert "must be trusted" in refusal(lambda: act(refused, trust=[run, "net.pt"]))


def test_a_model_and_data_of_the_user_replace_what_the_folder_names(home):
    run = from_elsewhere(make(home))
    opened = themis.open_run(run, net(), data())
    assert opened.faults[0].replay().is_same
    assert themis.resume(run, net(), data(), max_tests=400).rounds[-1].tests == 400
    assert not Path("imported").exists()
    own = Origin(model="signed_here:net", data="signed_here:data")
    assert themis.resume(run, origin=own, max_tests=500).rounds[-1].tests == 500


def test_a_perturbation_that_the_folder_names_is_not_imported(home):
    run = from_elsewhere(make(home, perturbation="signed_here:DARKER"))
    message = refusal(lambda: themis.open_run(run, net(), data()).faults[0].replay())
    assert "perturbation 'signed_here:DARKER'" in message
    own = Perturbation(
        "signed_here:DARKER",
        (Theta("share", 0.0, 0.9),),
        lambda inputs, theta, rng, context: inputs * (1 - theta[:, :1, None, None]),
    )
    assert themis.open_run(run, net(), data(), perturbation=own).faults[0].replay().is_same
    assert not Path("imported").exists()


def test_an_oracle_that_the_folder_names_is_not_imported(home):
    run = from_elsewhere(make(home, oracle="signed_here:differs"))
    assert "oracle 'signed_here:differs'" in refusal(lambda: themis.open_run(run, None, data()).faults[0].replay())
    change_record(run, start=read_record(run)["start"] | {"oracle_asked": "auto"})
    message = refusal(lambda: themis.open_run(run, net(), data()).faults[0].replay())
    assert "oracle 'signed_here:differs'" in message
    own = Compare(lambda clean, outputs, labels: clean.argmax(1) != outputs.argmax(1), "signed_here:differs")
    target = themis.Target(net(), oracle=own)
    assert themis.open_run(run, target, data()).faults[0].replay().is_same
    assert not Path("imported").exists()


def test_rivals_and_training_data_that_the_folder_names_are_not_imported(home):
    run = make(home, criterion="nc")
    origin = read_record(run)["origin"]
    change_record(run, origin=origin | {"rivals": ["signed_here:net"]})
    from_elsewhere(run)
    assert "rivals 'signed_here:net'" in refusal(lambda: themis.resume(run, net(), data(), max_tests=400))
    change_record(run, origin=origin | {"train": "signed_here:data"}, train_sha256="0" * 64)
    assert "train 'signed_here:data'" in refusal(lambda: themis.resume(run, net(), data(), max_tests=400))


def test_a_pickle_that_the_folder_trusts_is_not_unpickled(home, tmp_path):
    class Harmful:
        def __reduce__(self):
            return exec, ("open('imported', 'w').close()",)

    run = from_elsewhere(make(home))
    torch.save({"state": Harmful()}, "whole.pt")
    origin = read_record(run)["origin"] | {"model": "whole.pt", "trust": ["whole.pt"], "data": "digits"}
    change_record(run, origin=origin)
    assert "the pickled file 'whole.pt'" in refusal(lambda: themis.open_run(run).faults[0].replay())
    change_record(run, origin=origin | {"model": "signed_here:net", "weights": "whole.pt"})
    assert "the pickled file 'whole.pt'" in refusal(lambda: Replayer(Reader(run)).target)


@pytest.mark.parametrize("name", ["torchvision:resnet18", "timm:resnet18(checkpoint_path='x')", "hf:a/b"])
def test_models_that_a_package_downloads_are_code(home, name):
    run = from_elsewhere(make(home))
    change_record(run, origin=read_record(run)["origin"] | {"model": name, "data": "digits"})
    assert f"model {name!r}" in refusal(lambda: themis.open_run(run).faults[0].replay())


def test_what_is_built_in_needs_no_trust(home, trained):
    record = read_record(make(home))
    plain = {"model": "", "zoo": "lenet5-mnist", "data": "mnist", "rivals": ["lenet1-mnist"], "train": "digits"}
    plain |= {"oracle": "top5", "weights": "w.pt", "features": "f.csv", "trust": None}
    record |= {"origin": record["origin"] | plain, "perturbation": "rain(angle=-10:10) + fog", "tag": None}
    record["start"] |= {"oracle": "regression:0.1", "oracle_asked": "auto"}
    permission = permit("run", record)
    assert not permission.is_granted
    assert permission.code == ()
    for model in ("net.pt", "net.onnx", "folder/net.keras", "keras:net.keras"):
        record["origin"] |= {"model": model, "zoo": None}
        assert permit("run", record).code == ()


def test_a_model_file_that_another_package_reads_is_code(monkeypatch):
    of_themis = plugins.added
    added = {".tflite": EntryPoint(".tflite", "elsewhere:load", "themis.model_files")}
    monkeypatch.setattr(plugins, "added", lambda group: of_themis(group) | (added if group.endswith("files") else {}))
    assert names_code("model", "net.onnx") == []
    assert names_code("model", "net.tflite") == ["model 'net.tflite'"]


def test_a_run_does_not_vouch_for_names_of_a_folder_from_elsewhere(home, tmp_path):
    """Otherwise they would be signed as soon as the folder is resumed with a model of the user."""
    run = make(home)
    change_record(run, origin=read_record(run)["origin"] | {"train": "signed_here:data"})
    from_elsewhere(run)
    with_own = themis.resume(run, net(), data(), max_tests=400)
    assert with_own.rounds[-1].tests == 400
    assert why_not_ours(read_record(run))
    assert read_record(run)["origin"]["train"] is None
    replayer = Replayer(Reader(run))
    themis.run(net(), data(), "gaussian", origin=replayer.origin, out=tmp_path / "new", **OPTIONS)
    record = read_record(tmp_path / "new")
    assert why_not_ours(record) == ""
    assert (record["origin"]["model"], record["origin"]["data"], record["origin"]["train"]) == ("", "", None)


def test_a_trusted_folder_that_is_resumed_is_ours_from_then_on(home):
    run = from_elsewhere(make(home))
    themis.resume(run, max_tests=400, trust=True)
    assert why_not_ours(read_record(run)) == ""


def test_the_folder_of_an_untrusted_run_is_not_where_modules_are_looked_up(home, tmp_path, monkeypatch):
    evil = tmp_path / "evil"
    evil.mkdir()
    (evil / "signed_here.py").write_text("open('imported', 'w').close()")
    run = make(home)
    change_record(run, origin=read_record(run)["origin"] | {"folder": str(evil)})
    from_elsewhere(run)
    code = f"""
import os, sys
sys.path[:] = [entry for entry in sys.path if entry not in ("", {str(home)!r})]
from themis.cli import main
code = main(["replay", {str(run)!r}, sys.argv[1], "--model", "signed_here:net", "--data", "signed_here:data", "--json"])
print(code, os.path.dirname(sys.modules["signed_here"].__file__), {str(evil)!r} in sys.path)
"""
    fault = str(themis.open_run(run).faults[0].id)
    done = subprocess.run([warm_python(), "-c", code, fault], capture_output=True, text=True, cwd=home)
    assert done.stdout.splitlines()[-1] == f"0 {home} False", done.stderr
    assert not (evil / "imported").exists()


def test_a_signature_is_of_this_key_and_record_only(state):
    record = {"origin": None, "perturbation": "rain"}
    tag = sign(record)
    assert len(tag) == 64
    assert sign(record) == tag
    assert sign(record | {"perturbation": "fog"}) != tag
    (state / "key").unlink()
    assert sign(record) != tag
