"""Every task in a complete campaign: faults, replay, resume, and the output of the command line."""

import json
import math
import subprocess

import numpy as np
import pytest
import torch
from interruptions import StopAt, assert_same_end
from torch import nn
from warm_python import warm_python

import themis
from themis.cli import main
from themis.oracle import Compare
from themis.runs.display.fault import describe_fault
from themis.runs.display.text import opening
from themis.runs.replay import Replayer
from themis.runs.store.reader import Reader
from themis_integrations.pytest_plugin.robustness import describe_replay

OPTIONS = {"max_tests": 400, "round_size": 100, "max_stored": 20, "tolerance": 1e-12, "plateau": None}


def far(clean_outputs, outputs, labels):
    gap = (outputs - clean_outputs).abs()
    return gap.amax(1) > 0.1, gap.argmax(1), 0.1 - gap.amax(1)


def squared(outputs, clean_outputs):
    return ((outputs - clean_outputs + 1e-3) ** 2).sum(1)


FAR = Compare(far, loss_function=squared)


def net(n_outputs, *after):
    torch.manual_seed(0)
    first, last = nn.Linear(36, 16), nn.Linear(16, n_outputs)
    nn.init.zeros_(last.bias)
    with torch.no_grad():
        first.bias.copy_(-first.weight.sum(1) / 2)  # centred on inputs in 0..1, so that its answers vary
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), last, *after)


def painter():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1))


class Finder(nn.Module):
    """Three boxes whose scores depend on the input."""

    def __init__(self):
        super().__init__()
        self.net = net(3, nn.Sigmoid())

    def forward(self, x):
        scores = self.net(8 * (x - 0.5) + 0.5)
        corner = torch.arange(3.0, device=x.device)
        rows = torch.stack([corner, corner, corner + 2, corner + 2, corner, corner], 1).repeat(len(x), 1, 1)
        return torch.cat([rows[..., :4], scores[..., None], rows[..., 5:]], 2)


INPUTS = torch.rand(24, 1, 6, 6, generator=torch.Generator().manual_seed(1))
# Net, oracle, labels made from the clean outputs, and the settled oracle.
TASKS = {
    "wrong": (net(3), "auto", lambda outputs: outputs.argmax(1), "wrong"),
    "changed": (net(3), "auto", None, "changed"),
    "top": (net(4), "top2", None, "top2"),
    "top, labels": (net(4), "top2", lambda outputs: outputs.argmin(1).clamp(max=1), "top2"),
    "threshold": (net(1), "threshold:0.05", None, "threshold:0.05"),
    "threshold, labels": (net(1, nn.Sigmoid()), "auto", lambda outputs: outputs.round().long(), "threshold:0.5"),
    "multilabel": (net(4, nn.Sigmoid()), "multilabel", None, "multilabel:0.5"),
    "multilabel, labels": (net(4), "auto", lambda outputs: outputs.abs() > 0.05, "multilabel:0.0"),
    "regression": (net(1), "auto", None, "regression:"),
    "regression, flat": (net(1, nn.Flatten(0)), "regression:0.08", None, "regression:0.08"),
    "several numbers": (net(2), "auto", lambda outputs: outputs + 0.05, "regression:0.05"),
    "euclidean": (net(2), "euclidean:0.1", None, "euclidean:0.1"),
    "off": (net(1), "off:0.08", lambda outputs: outputs[:, 0] + 0.02, "off:0.08"),
    "segmentation": (painter(), "auto", None, "segmentation:0.1"),
    "segmentation, labels": (painter(), "segmentation:0.05", lambda outputs: outputs.argmax(1), "segmentation:0.05"),
    "keypoints": (net(4, nn.Unflatten(1, (2, 2))), "keypoints:0.1", None, "keypoints:0.1"),
    "keypoints, labels": (net(6, nn.Unflatten(1, (3, 2))), "auto", lambda outputs: outputs + 0.01, "keypoints:10.0%"),
    "detection": (Finder(), "auto", None, "detection:0.5,score=0.5"),
    "detection, labels": (Finder(), "detection:0.6", lambda outputs: outputs[..., [0, 1, 2, 3, 5]], "detection:0.6"),
    "compare": (net(3), FAR, None, f"{__name__}:far"),
}
HAS_ANSWER = ("wrong", "changed", "top", "threshold")
HAS_VALUE = ("threshold", "regression", "off", "segmentation", "keypoints", "detection")


@pytest.mark.parametrize("perturbation", ["gaussian", "fgsm"])
@pytest.mark.parametrize("name", TASKS)
def test_a_campaign_finds_stores_and_replays_its_faults(name, perturbation, tmp_path, capsys):
    model, oracle, make_labels, settled = TASKS[name]
    target, out = themis.Target(model, oracle=oracle), tmp_path / "run"
    with torch.no_grad():
        data = INPUTS if make_labels is None else (INPUTS, make_labels(model(INPUTS)))
    options = {**OPTIONS, "magnitude": 0.5}
    whole = themis.run(target, data, perturbation, **options)
    assert whole.start.oracle.startswith(settled)
    assert f"a fault is {whole.start.fault} (oracle" in opening(whole.start)
    assert 0 < len(whole.faults) < 400
    assert all(fault.margin <= 0 <= fault.answer for fault in whole.faults)
    assert all((fault.clean_answer is not None) == name.startswith(HAS_ANSWER) for fault in whole.faults)
    assert all((fault.value is not None) == name.startswith(HAS_VALUE) for fault in whole.faults)
    assert all(math.isnan(fault.confidence) != name.startswith(HAS_ANSWER) for fault in whole.faults)
    assert all(fault.replay().is_same for fault in whole.faults.most_telling(3))

    stopped = themis.run(target, data, perturbation, out=out, callbacks=[StopAt(2)], **options)
    assert stopped.stop_reason == "user"
    assert_same_end(whole, themis.resume(out, target, data))
    reader = Reader(out)
    stored = reader.faults(handle=Replayer(reader, target, data))
    for column, values in whole.faults.columns.items():
        np.testing.assert_array_equal(values, stored.columns[column], err_msg=column)
    kept = [id for (id,) in reader.select("id", "tensors IS NOT NULL")]
    for fault in [each for each in stored if each.id in kept[:3]] + stored[-2:]:
        replay = fault.replay()
        assert replay.is_same
        assert replay.output_gap in (0, None)
        assert replay.value == fault.value

    assert main(["faults", str(out), "--limit", "5"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()[1:]
    assert len(rows) == 5
    assert ("clean value" in head) == name.startswith(HAS_VALUE)
    assert ("confidence" in head) == name.startswith(HAS_ANSWER)
    assert "nan" not in " ".join(rows)
    assert main(["faults", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted(each["id"] for each in found) == [fault.id for fault in whole.faults]


def test_the_summary_names_the_chosen_oracle_and_the_quality_of_clean_answers():
    with torch.no_grad():
        answers = TASKS["regression"][0](INPUTS)
    run = themis.run(TASKS["regression"][0], (INPUTS, answers + 0.25), "gaussian", max_tests=20)
    assert (run.start.clean_accuracy, run.start.clean_iou) == (None, None)
    assert run.start.clean_error == pytest.approx(0.25)
    assert run.summary()["clean_error"] == pytest.approx(0.25)
    said = opening(run.start).splitlines()
    assert said[0].endswith("24 of 24 seeds to test (clean error 0.25 on average)")
    assert said[1] == (
        "a fault is an answer further than 0.25 (the model's median clean error, in the unit of the labels) from the "
        "clean one (oracle regression, chosen from the outputs and labels)"
    )
    maps = torch.randint(0, 3, (24, 6, 6), generator=torch.Generator().manual_seed(0))
    run = themis.run(TASKS["segmentation"][0], (INPUTS, maps), "gaussian", max_tests=20)
    assert 0 < run.start.clean_iou < 1
    assert f"(clean mean IoU {run.start.clean_iou:.3g})" in opening(run.start)
    with torch.no_grad():
        boxes = Finder()(INPUTS)[..., [0, 1, 2, 3, 5]]
    run = themis.run(Finder(), (INPUTS, boxes), "gaussian", max_tests=20)
    assert run.start.clean_map == run.summary()["clean_map"] == 1
    assert "(clean mAP 1)" in opening(run.start)


def test_an_output_that_is_not_finite_is_a_distinct_fault_in_every_task():
    class Fragile(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x):
            outputs = self.net(x)
            is_bright = x.flatten(1).amax(1) >= 0.9999
            return torch.where(is_bright.view(-1, *(1,) * (outputs.ndim - 1)), torch.nan, outputs)

    for name in (
        "top",
        "threshold",
        "multilabel",
        "regression",
        "regression, flat",
        "segmentation",
        "keypoints",
        "detection",
        "compare",
    ):
        model, oracle, _, _ = TASKS[name]
        run = themis.run(themis.Target(Fragile(model), oracle=oracle), INPUTS * 0.9, "gaussian", max_tests=200)
        broken = [fault for fault in run.faults if fault.answer == -1]
        assert broken, name
        assert all(fault.margin == -math.inf and fault.value is None for fault in broken)
        assert broken[0].replay().is_same


MINE = """
import torch
from torch import nn
from themis.oracle import Compare

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 1))

def data(): return torch.rand(24, 1, 6, 6, generator=torch.Generator().manual_seed(1))
def far(clean_outputs, outputs, labels): return (outputs - clean_outputs).abs().amax(1) > 0.1
def squared(outputs, clean_outputs): return ((outputs - clean_outputs + 1e-3) ** 2).sum(1)
FAR = Compare(far, loss_function=squared)
"""
LINES = {
    "auto": ("gaussian", "a fault is an answer further than"),
    "regression:0.1": ("gaussian", "a fault is an answer further than 0.1 from the clean one (oracle regression:0.1)"),
    "mine:far": ("gaussian", "a fault is what mine:far says (oracle mine:far)"),
    "mine:FAR": ("fgsm", "a fault is what mine:FAR says (oracle mine:FAR)"),
}


@pytest.mark.parametrize("oracle", LINES)
def test_the_command_line_runs_lists_and_replays_a_task_in_separate_processes(oracle, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    perturbation, said = LINES[oracle]

    def themis_says(*words):
        done = subprocess.run(
            [warm_python(), "-m", "themis", *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    source = ["--model", "mine:net", "--data", "mine:data", "--perturb", perturbation, "--oracle", oracle]
    assert said in themis_says("run", *source, "--magnitude", "0.5", "--max-tests", "200", "--out", "run")
    faults = json.loads(themis_says("faults", "run", "--json"))
    ids = [str(each["id"]) for each in faults[:2]]
    replayed = themis_says("replay", "run", *ids)
    assert "2 of 2 reproduced" in replayed
    if ":" not in oracle or oracle.startswith("regression"):
        direction = ("smaller", "larger")[faults[0]["answer"]]
        assert f"answer  clean {faults[0]['clean_value']:.6g}, recorded {faults[0]['value']:.6g}, " in replayed
        for command in ("faults", "groups", "shrink"):
            assert direction in themis_says(command, "run")
        assert f"{faults[0]['answer']}, {direction}  (the wrong outcome;" in themis_says("faults", "run", ids[0])
    assert "clean value" in themis_says("faults", "run") or oracle.startswith("mine")


SAID = {
    "regression": r"-?[0-9.]+$",
    "multilabel": "label [0-3] flipped",
    "threshold": r"[01] \([5-9]",
    "changed": r"[0-2] \([0-9.]+%\)$",
}


@pytest.mark.parametrize("name", SAID)
def test_faults_of_every_task_can_be_drawn_and_exported(name, tmp_path):
    import re

    import pandas as pd

    from themis.runs.display.fault import answers
    from themis_lab.cli.demo import draw_faults

    model, oracle, _, _ = TASKS[name]
    target = themis.Target(model, oracle=oracle)
    run = themis.run(target, INPUTS, "gaussian", magnitude=0.5, max_tests=200, out=tmp_path / "run")
    draw_faults(run, tmp_path / "faults.png", n=3)
    assert re.match(SAID[name], answers(run.faults[0])[1])
    assert main(["faults", str(tmp_path / "run"), "--sort", "id", "--export", str(tmp_path / "faults.parquet")]) == 0
    table = pd.read_parquet(tmp_path / "faults.parquet")
    assert table["value"].isna().all() == (not name.startswith(HAS_VALUE))
    np.testing.assert_array_equal(table["value"].to_numpy(np.float32), run.faults.columns["value"])


def test_a_message_has_the_numbers_of_a_regression():
    target = themis.Target(TASKS["regression"][0], oracle="regression:0.1")
    fault = themis.run(target, INPUTS, "gaussian", magnitude=0.5, max_tests=200).faults[0]
    assert f", {fault.clean_value:.6g} answered as {fault.value:.6g}; sigma" in describe_fault(fault)
    assert f"still a fault: now answered as {fault.value:.6g}, as recorded" in describe_replay(fault, fault.replay())


def test_another_oracle_may_judge_a_replay(tmp_path):
    model, data = TASKS["regression"][0], INPUTS
    run = themis.run(model, data, "gaussian", magnitude=0.5, max_tests=200, out=tmp_path / "run")
    fault, reader = run.faults[0], Reader(tmp_path / "run")
    lenient = themis.Target(model, oracle="regression:99")
    assert not Replayer(reader, lenient, data).replay(fault).is_fault
    assert Replayer(reader, themis.Target(model, oracle="regression:1e-6"), data).replay(fault).is_fault
    with pytest.raises(themis.ModelError, match="pass an absolute tolerance"):
        Replayer(reader, themis.Target(model, oracle="regression:3sd"), data).replay(fault)


def test_a_function_that_cannot_be_imported_must_be_passed_again(tmp_path):
    target = themis.Target(TASKS["changed"][0], oracle=Compare(lambda *outputs: far(*outputs), "nameless"))
    run = themis.run(target, INPUTS, "gaussian", magnitude=0.5, max_tests=200, out=tmp_path / "run")
    reader = Reader(tmp_path / "run")
    assert Replayer(reader, target, INPUTS).replay(run.faults[0]).is_same
    with pytest.raises(themis.UsageError, match="the run's oracle 'nameless' cannot be created here: pass a target"):
        Replayer(reader, themis.Target(TASKS["changed"][0]), INPUTS).replay(run.faults[0])
