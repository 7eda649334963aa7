"""Trackers: what real campaigns log, read with the libraries of the trackers."""

import subprocess
import sys
from time import sleep

import pytest
from warm_python import warm_python

import themis
from themis import UsageError
from themis.report.tracking import TRACKERS, choose_trackers, close_trackers
from themis_integrations.trackers import TensorBoard, Wandb

pytestmark = pytest.mark.xdist_group("trackers")

OPTIONS = {"magnitude": 0.5, "max_tests": 1280, "policy": "random", "random_seed": 3}


def campaign(trained, **rest):
    target, held_out = trained
    return themis.run(target, held_out[range(0, 1000, 5)], "gaussian", **{**OPTIONS, **rest})


@pytest.fixture(scope="module")
def events(trained, tmp_path_factory):
    """A campaign logged to TensorBoard, and its events."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path_factory.mktemp("tb")
    run = campaign(trained, callbacks=[TensorBoard(folder / "events", n_pictures=3)])
    found = EventAccumulator(str(folder / "events"), size_guidance={"images": 0, "tensors": 0})
    found.Reload()
    return run, found


def text_of(found, tag):
    return found.Tensors(tag)[-1].tensor_proto.string_val[0].decode()


def test_tensorboard_shows_figures_by_tests(events):
    run, found = events
    for name, value in (
        ("distinct_faults", lambda each: each.distinct_faults),
        ("failing_seeds", lambda each: each.failing_seeds),
        ("coverage", lambda each: each.coverage.sampled),
        ("faults_per_test", lambda each: each.faults / each.tests),
    ):
        shown = found.Scalars(name)
        assert [each.step for each in shown] == [each.tests for each in run.rounds]
        assert [each.value for each in shown] == pytest.approx([value(each) for each in run.rounds])


def test_tensorboard_shows_pictures_of_faults_and_the_verdict(events):
    import io

    from matplotlib.image import imread

    run, found = events
    tags = [tag for tag in found.Tags()["images"] if tag.startswith("faults/")]
    assert len(tags) == 3
    drawn = imread(io.BytesIO(found.Images("faults/0")[0].encoded_image_string))
    assert drawn.shape[:2] == (112, 3 * 112 + 2 * 8)
    clean, disturbed = drawn[:, :112], drawn[:, 120:232]
    assert abs(clean - disturbed).max() > 0.05
    first = run.faults.most_telling(1)[0]
    assert f"seed {first.seed_id}, {first.clean_answer} answered as {first.answer}" in text_of(
        found, "faults/0/text_summary"
    )
    assert run.stop in text_of(found, "verdict/text_summary")
    assert "| policy | random |" in text_of(found, "config/text_summary")


def test_tensorboard_has_the_results_as_hyperparameter_metrics(events):
    run, found = events
    assert found.Scalars("result/fault_rate")[0].value == pytest.approx(run.fault_rate.value)
    assert found.Scalars("result/fault_rate_high")[0].value == pytest.approx(run.fault_rate.high)
    assert "_hparams_/session_start_info" in found.PluginTagToContent("hparams")


def test_wandb_writes_an_offline_run(trained, tmp_path):
    pytest.importorskip("wandb")
    out = tmp_path / "run"
    trackers = choose_trackers(["wandb"], out)
    run = campaign(trained, out=out, callbacks=trackers)
    (out / "extra.html").write_text("later")
    close_trackers(trackers, out / "extra.html")
    (folder,) = (out / "track/wandb/wandb").glob("offline-run-*")
    records = settled_records(next(folder.glob("*.wandb")))
    history = [
        {item.key or "/".join(item.nested_key): item.value_json for item in each.history.item}
        for each in records
        if each.WhichOneof("record_type") == "history"
    ]
    shown = [row for row in history if "distinct_faults" in row]
    assert [int(row["tests"]) for row in shown] == [each.tests for each in run.rounds]
    assert [int(row["distinct_faults"]) for row in shown] == [each.distinct_faults for each in run.rounds]
    config = {item.key: item.value_json for each in records for item in each.run.config.update}
    assert config["policy"] == '"random"'
    assert len(list((folder / "files/media/images").glob("*.png"))) == 8
    assert (folder / "files/extra.html").read_text() == "later"
    assert (folder / "files/summary.json").read_bytes() == (out / "summary.json").read_bytes()


def settled_records(path):
    """All records; the library's own process writes the last ones shortly after the run was finished."""
    for _ in range(6_000):
        records = list(read_records(path))
        if any(each.WhichOneof("record_type") == "exit" for each in records):
            return records
        sleep(0.05)
    return pytest.fail("the run was never finished")


def read_records(path):
    """Records of an offline run: LevelDB's log format, in blocks of 32 KiB after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the whole record, or its last part
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_named_with_its_extra(name):
    code = f"""
import sys
for each in ("tensorboard", "mlflow", "wandb"):
    sys.modules[each] = None
from themis import MissingExtraError
from themis.report.tracking import choose_trackers
try:
    choose_trackers(["{name}"], "run")
except MissingExtraError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f'the tracker {name} needs {name}, which is not installed: pip install "themis-dl[{name}]"' in done.stdout


def test_unknown_trackers_and_missing_places_are_refused():
    with pytest.raises(UsageError, match="unknown tracker 'tensorbord': did you mean 'tensorboard'"):
        choose_trackers(["tensorbord"], "run")
    with pytest.raises(UsageError, match="must have a place if the run has no folder: write wandb:FOLDER"):
        choose_trackers(["wandb"], None)


def test_a_tracker_can_write_to_another_place(tmp_path):
    pytest.importorskip("tensorboard")
    (tracker,) = choose_trackers([f"tensorboard:{tmp_path}/there"], None)
    assert str(tracker.folder) == f"{tmp_path}/there"
    assert tracker.run is None


def test_a_tracker_that_fails_loses_nothing(trained, tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "blocked").write_text("a file, where a folder is wanted")
    with pytest.warns(RuntimeWarning, match="callback TensorBoard raised .* in on_start and was dropped"):
        run = campaign(trained, callbacks=[TensorBoard(tmp_path / "blocked")])
    assert run.rounds[-1].tests == OPTIONS["max_tests"]
    assert len(run.faults) == run.rounds[-1].faults > 0


def test_a_campaign_on_tables_logs_everything_but_pictures(tmp_path):
    pytest.importorskip("tensorboard")
    import torch
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    options = {"magnitude": 0.5, "max_tests": 640, "callbacks": [TensorBoard(tmp_path / "events")]}
    run = themis.run(net, torch.rand(50, 8), "gaussian", **options)
    found = EventAccumulator(str(tmp_path / "events"))
    found.Reload()
    assert len(run.faults) > 0
    assert found.Tags()["images"] == []
    assert len(found.Scalars("coverage")) == len(run.rounds)


def test_importing_the_trackers_does_not_import_their_packages():
    names = ("torch", "mlflow", "wandb", "tensorboard")
    code = f"import sys, themis_integrations.trackers; print([each for each in {names} if each in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_wandb_is_offline_by_default(tmp_path):
    pytest.importorskip("wandb")
    assert Wandb(tmp_path).mode == "offline"


def test_the_command_line_logs_into_the_run_folder(tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def net():\n    torch.manual_seed(0)\n    net = torch.nn.Linear(8, 3, bias=False)\n"
        "    torch.nn.init.eye_(net.weight)\n    return torch.nn.Sequential(net)\n"
        "def data():\n    torch.manual_seed(1)\n    return torch.rand(30, 8)\n"
    )
    words = [
        "--model",
        "mine:net",
        "--data",
        "mine:data",
        "--perturb",
        "gaussian",
        "--max-tests",
        "320",
        "--out",
        "run",
        "--quiet",
    ]

    def themis_run(*more):
        options = {"cwd": tmp_path, "capture_output": True, "text": True}
        return subprocess.run([warm_python(), "-m", "themis", "run", *words, *more], **options)

    refused = themis_run("--track", "tensorbord")
    assert refused.returncode == 2
    assert "unknown tracker 'tensorbord': did you mean 'tensorboard'" in refused.stderr
    done = themis_run("--track", "tensorboard")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list((tmp_path / "run/track/tensorboard").glob("events.*"))
