"""`themis evaluate` as a user types it: all of it on digits, resumed, summarised, and what it refuses."""

import json
import re
import shutil

import pytest
import yaml

from themis.cli import main
from themis.errors import ModelError
from themis_lab.contest.cells import Contest
from themis_lab.evaluation.cells import CellWorker
from themis_lab.evaluation.figures import draw_shares
from themis_lab.evaluation.plans import smoke_plan
from themis_lab.evaluation.summary import Evaluation
from themis_lab.evaluation.theory import WAYS_TO_STOP

pytestmark = pytest.mark.xdist_group("evaluate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluation") / "smoke"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.getpriority", lambda which, who: 0, raising=False)  # times count, also where tests are nice
        assert main(["evaluate", "--smoke", "--out", str(folder), "--quiet"]) == 0
    return folder


def test_smoke_prints_what_a_person_reads(folder, capsys):
    assert main(["evaluate", "--smoke", "--out", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert sum(line.startswith(("holds", "does not hold", "undecided")) for line in lines) >= 3


def test_smoke_answers_every_question(folder):
    content = json.loads((folder / "evaluation.json").read_text())
    assert not content["failed"]
    assert not content["missing"]
    gaussian, fgsm = content["pairs"]
    for pair in (gaussian, fgsm):
        for budget, limit in (("passes", 300), ("tests", 100)):
            (grid,) = pair["budgets"][budget]
            assert {row["technique"] for row in grid["rows"]} == {
                "random",
                "corners",
                "paper-preset",
                "scheduled",
                "nc",
            }
            assert all(row["total"][budget][2] <= 3 * limit for row in grid["rows"])
            assert set(grid["ratios"]) == {"paper-preset", "scheduled"}
    assert fgsm["sensitivity"]["r"] > 0.7
    (done,) = content["done"]
    assert all(row["campaigns"] == 1 for row in done["techniques"].values())
    (theory,) = content["theory"]
    assert theory["reference"]["tests"] == 800
    assert 0 < theory["stability"]["model_deviation"] < 0.5
    (retraining,) = content["retraining"]
    names = [standing["technique"] for standing in retraining["standings"]]
    assert sorted(names) == ["corners", "nc", "paper", "random", "themis"]
    assert {record["technique"] for record in content["variants"]} == {"paper", "sample-50", "judge-exact"}
    (truth,) = content["truth"]
    assert truth["maps"][0]["failing_seeds"] > 50
    assert truth["mutants"]["mutants"] == 6
    assert all(0 < row["recall"][0]["seeds"] < 1 for row in truth["techniques"].values())
    assert all(0 < row["scores"][0]["score"] < 1 for row in truth["techniques"].values())


def test_the_page_has_a_section_for_every_question_and_figures(folder):
    page = (folder / "evaluation.md").read_text()
    titles = [line[3:] for line in page.splitlines() if line.startswith("## ")]
    assert titles == [
        "What holds, and what does not",
        "Fault detection capability",
        "Faults compared with rivals",
        "Faults when done",
        "Accuracy regained",
        "The theory",
        "Time",
        "Parameters",
        "Known faults",
        "What has been measured",
    ]
    cells = (folder / "evaluation-cells.md").read_text().splitlines()
    sections = {f"evaluation-cells.md#{line[3:].lower().replace(' ', '-')}" for line in cells if line.startswith("## ")}
    assert set(re.findall(r"\[All cells\]\((.*)\)", page)) == sections
    assert len(sections) == 4
    theory = json.loads((folder / "evaluation.json").read_text())["theory"]
    could_stop = any(record.get(way) for record in theory for way in WAYS_TO_STOP)
    drawn = {"correlations": True, "faults-over-baselines": False, "shares-at-full-coverage": could_stop}
    for name, is_drawn in drawn.items():  # one of the four baselines is no mean of them
        assert (f"({name}.png)" in page) is is_drawn
        assert (folder / f"{name}.png").exists() is is_drawn


def test_the_figure_of_shares_has_the_cells_in_which_a_campaign_could_stop(tmp_path):
    def draws(**stops):
        record = {"model": "net", "perturbation": "noise", "magnitude": 0.1, "reference": {"distinct_faults": 8}}
        return draw_shares(Evaluation({"theory": [{**record, **stops}]}), tmp_path / "shares.png")

    assert not draws()
    assert not (tmp_path / "shares.png").exists()
    assert draws(**{next(iter(WAYS_TO_STOP)): {"of_faults": 0.5}})
    assert (tmp_path / "shares.png").stat().st_size > 1000


def test_a_campaign_that_failed_is_not_one_that_a_technique_has_had(folder, tmp_path, monkeypatch):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for path in (copy / "cells/campaigns").rglob("nc/*.json"):
        path.unlink()
    run = CellWorker.run

    def fail_under_fgsm(worker, cell):
        if cell.perturbation == "fgsm":
            raise ModelError("out of memory")
        return run(worker, cell)

    monkeypatch.setattr(CellWorker, "run", fail_under_fgsm)
    words = ["evaluate", "--smoke", "--out", str(copy), "--quiet"]
    for words_of_call, n_failed in ((words, 3), ([*words, "--summarise"], 0)):
        assert main(words_of_call) == (3 if n_failed else 0)
        content = json.loads((copy / "evaluation.json").read_text())
        assert len(content["failed"]) == n_failed
        gaussian, fgsm = content["pairs"]
        assert "nc" in {row["technique"] for row in gaussian["budgets"]["passes"][0]["rows"]}
        assert "nc" not in {row["technique"] for row in fgsm["budgets"]["passes"][0]["rows"]}


def test_finished_cells_are_never_run_again(folder, capsys):
    before = {path: path.stat().st_mtime_ns for path in (folder / "cells").rglob("*.json")}
    content = json.loads((folder / "evaluation.json").read_text())
    for words in ([], ["--summarise"]):
        assert main(["evaluate", "--smoke", "--out", str(folder), "--json", *words]) == 0
        assert json.loads(capsys.readouterr().out) == {**content, "out": str(folder)}
    assert {path: path.stat().st_mtime_ns for path in (folder / "cells").rglob("*.json")} == before


TAMPERED = {
    "rates": [("grids", []), ("errors", {"0.1": [["x"]]}), ("magnitude", None)],
    "campaigns/nc": [("at", {}), ("campaign", 7)],
    "theory": [("stability", None), ("more", [1])],
    "kills/nc": [("score", "high"), ("sha256", 3)],
}


@pytest.mark.parametrize("place", TAMPERED)
def test_a_tampered_cell_is_refused_in_one_line(folder, tmp_path, capsys, place):
    copy = shutil.copytree(folder, tmp_path / "copy")
    kind, _, technique = place.partition("/")
    path = min((copy / "cells" / kind).rglob(f"{technique or '*'}/*.json"))
    content = path.read_text()
    for name, value in TAMPERED[place]:
        path.write_text(json.dumps({**json.loads(content), name: value}))
        assert main(["evaluate", "--smoke", "--summarise", "--out", str(copy), "--quiet"]) == 3
        message = capsys.readouterr().err
        assert re.fullmatch(rf"themis evaluate: {path} cannot be read: .*; remove it to create it again\n", message)


def test_a_cell_in_the_place_of_another_is_refused(folder, tmp_path, capsys):
    copy = shutil.copytree(folder, tmp_path / "copy")
    shutil.copy(min((copy / "cells/kills").rglob("nc/*.json")), min((copy / "cells/recall").rglob("nc/*.json")))
    assert main(["evaluate", "--smoke", "--out", str(copy), "--quiet"]) == 3
    assert "it was changed or is that of another cell; remove it" in capsys.readouterr().err


def test_a_folder_in_the_place_of_a_figure_is_refused(folder, tmp_path, capsys):
    copy = shutil.copytree(folder, tmp_path / "copy")
    for name in ("correlations.png", "evaluation.md", "evaluation.json"):
        content = (copy / name).read_bytes()
        (copy / name).unlink()
        (copy / name).mkdir()
        assert main(["evaluate", "--smoke", "--summarise", "--out", str(copy), "--quiet"]) == 2
        message = capsys.readouterr().err
        assert message.startswith(f"themis evaluate: {copy / name} must be a file, but it is a folder: ")
        (copy / name).rmdir()
        (copy / name).write_bytes(content)


def test_the_device_is_recorded_by_the_pairs_alone(folder, tmp_path):
    old = shutil.copytree(folder, tmp_path / "old")
    plan = json.loads((old / "plan.json").read_text())
    plan["environment"] |= {"device": "cpu", "device_name": "cpu"}  # as earlier versions recorded for every device
    (old / "plan.json").write_text(json.dumps(plan))
    assert main(["evaluate", "--smoke", "--out", str(old), "--quiet"]) == 0  # without a warning, which would raise
    content = json.loads((old / "evaluation.json").read_text())
    assert [pair["device"] for pair in content["pairs"]] == ["cpu", "cpu"]
    for environment in (content["environment"], json.loads((old / "plan.json").read_text())["environment"]):
        assert not {"device", "device_name"} & set(environment)
        assert environment["threads"] == 1
    assert content == json.loads((folder / "evaluation.json").read_text())


def test_an_interrupted_retraining_resumes_with_the_trainings_that_are_left(folder, tmp_path, monkeypatch):
    words = ["evaluate", str(tmp_path / "plan.yaml"), "--out", str(tmp_path / "out"), "--quiet"]
    plan = smoke_plan().restricted([], ["gaussian"]).as_dict()
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({**plan, "questions": "retraining"}))
    run, begun = Contest.run, []

    def interrupted(contest, cell):
        begun.append(cell)
        if len(begun) == 3:
            raise KeyboardInterrupt
        return run(contest, cell)

    monkeypatch.setattr(Contest, "run", interrupted)
    assert main(words) == 130
    assert main(words) == 0
    assert len(begun) == 6  # five trainings, of which one was interrupted
    assert begun[2] == begun[3]
    interrupted, whole = (json.loads((path / "evaluation.json").read_text()) for path in (tmp_path / "out", folder))
    assert interrupted["retraining"] == whole["retraining"]


def test_a_retraining_without_faults_is_finished_and_says_so(tmp_path, capsys):
    out = tmp_path / "out"
    words = ["evaluate", str(tmp_path / "plan.yaml"), "--out", str(out)]
    plan = smoke_plan().restricted([], ["gaussian"]).as_dict()
    nothing = {"questions": "retraining", "magnitudes": "1e-30,2e-30,3e-30", "retrain_passes": 250}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({**plan, **nothing}))
    assert main(words) == 0
    assert "Nothing to train on for digits gaussian 2e-30" in capsys.readouterr().out
    (path,) = (out / "cells" / "retraining").rglob("*.json")
    before = path.stat().st_mtime_ns
    assert main(words) == 0
    assert "1 campaign, 1 already finished" in capsys.readouterr().out
    assert path.stat().st_mtime_ns == before
    content = json.loads((out / "evaluation.json").read_text())
    assert not content["failed"]
    stored = json.loads(path.read_text())
    assert stored.pop("sha256")
    assert content["retraining"] == [stored]
    assert [(record["kind"], record["finished"]) for record in content["progress"]] == [("retraining", 1)]
    page = (out / "evaluation.md").read_text()
    assert "## Accuracy regained" not in page
    reason = "scheduled, which decides how many inputs to train on, found no fault within 250 passes"
    assert f"\nNothing to train on for digits gaussian 2e-30: {reason}.\n" in page


def test_the_start_tells_what_is_to_come_and_how_to_stop_and_resume(folder, capsys):
    assert main(["evaluate", "--smoke", "--out", str(folder)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"Results go to {folder}. Ctrl-C stops the evaluation; the same command with --out {folder}" in printed
    assert "1 model under 2 perturbations: 2 error rates, then campaigns at the magnitudes" in printed


def test_a_summary_of_a_part_prints_its_verdicts(folder, tmp_path, capsys):
    part = shutil.copytree(folder, tmp_path / "part")  # its page and results would replace those of the whole
    assert main(["evaluate", "--smoke", "--perturbations", "fgsm", "--out", str(part), "--summarise"]) == 0
    printed = capsys.readouterr().out
    assert "1 model, 1 pair of a model and a perturbation" in printed
    assert "holds          Greater sensitivity comes with a higher error rate" in printed
    assert max(map(len, printed.splitlines()[:-1])) <= 100


def test_models_without_weights_are_named_with_what_helps(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("THEMIS_DATA", raising=False)
    (tmp_path / "imagenet_samples").mkdir()
    words = ["--data", str(tmp_path), "--models", "vgg19-imagenet,lenet5-mnist", "--out", str(tmp_path / "out")]
    assert main(["evaluate", *words]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Not measured: vgg19-imagenet, because there are no weights (none could be obtained" in printed
    assert "the same command with --models vgg19-imagenet runs it once they are there" in printed
    assert "then campaigns" not in printed  # nothing is to come
    assert "lenet5-mnist is left out: the data folder has no mnist" in printed


def test_the_plan_is_printed(capsys):
    assert main(["evaluate", "--print-plan", "--perturbations", "cw", "--models", "lenet5-mnist"]) == 0
    printed = capsys.readouterr().out
    assert "lenet5-mnist:" in printed
    assert "perturbations:\n- cw" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan.yaml", "--smoke"], "--smoke has its own plan"),
        (["--smoke", "--summarise"], "--summarise needs the folder of an evaluation"),
        (["--smoke", "--models", "vgg"], "models must be those of the plan, got 'vgg'"),
        (["--smoke", "--workers", "0"], "workers must be at least 1, got 0"),
    ],
)
def test_what_is_refused(words, message, capsys):
    assert main(["evaluate", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_is_refused_before_anything_is_said_of_results_in_it(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    for words in (["--out", str(tmp_path)], ["--out", str(tmp_path / "new"), "--workers", "0"]):
        assert main(["evaluate", "--smoke", *words]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert len(printed.err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def timeless(value):
    """Plain data without times."""
    if isinstance(value, dict):
        return {name: timeless(item) for name, item in value.items() if "seconds" not in name}
    return [timeless(item) for item in value] if isinstance(value, list) else value


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["local", "ray"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_workers_give_the_same_results(folder, executor, tmp_path):
    if executor == "ray":
        pytest.importorskip("ray")
    words = ["--out", str(tmp_path / "out"), "--quiet", "--workers", "2", "--executor", executor]
    assert main(["evaluate", "--smoke", *words]) == 0
    first, second = (json.loads((path / "evaluation.json").read_text()) for path in (folder, tmp_path / "out"))
    assert timeless(first) == timeless(second)
