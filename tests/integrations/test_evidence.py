"""Evidence about a run: what its files say, that other programs accept them, and that no change to them is missed."""

import json
import shutil
import subprocess

import pytest
import torch

import themis
from themis import UsageError
from themis.cli import main
from themis_integrations.evidence.evidence import write_evidence
from themis_integrations.evidence.statement import FILES, hash_bytes, make_statement, verify_evidence

pytestmark = pytest.mark.xdist_group("evidence")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "run"
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    data = torch.rand(30, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    themis.run(net, data, "gaussian", magnitude=0.5, max_tests=600, out=out, random_seed=1)
    return out


@pytest.fixture(scope="module")
def written(made, tmp_path_factory):
    return write_evidence(made, tmp_path_factory.mktemp("written") / "evidence")


@pytest.fixture
def folder(written, tmp_path):
    return shutil.copytree(written, tmp_path / "copy")


@pytest.fixture(scope="module")
def summary(made):
    return json.loads((made / "summary.json").read_text())


def read(folder, name):
    return json.loads((folder / name).read_text())


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# What it says


def test_the_model_card_has_the_domain_the_rate_with_its_interval_and_what_was_not_tested(written, summary):
    card = (written / "model-card.md").read_text()
    rate = summary["fault_rate"]
    shown = f"| {100 * rate['value']:.2f}% | {100 * rate['low']:.2f}% to {100 * rate['high']:.2f}% |"
    assert f"| fault rate under random disturbance, averaged over inputs {shown}" in card
    assert "| figure | value | 95% interval |" in card
    assert "| theta sigma | 0 to 0.5 (share of the input range), uniform in random tests |" in card
    assert "- Disturbances other than gaussian, and values of theta outside of the ranges above." in card
    assert "Themis certifies nothing." in card
    assert read(written, "environment.json")["model_sha256"] in card


def test_results_and_environment_are_those_of_the_run(made, written):
    for name in ("summary.json", "environment.json"):
        assert (written / name).read_bytes() == (made / name).read_bytes()
    settings = read(written, "settings.json")
    assert settings["settings"]["random_seed"] == 1
    assert settings["perturbation"] == "gaussian"


def test_the_same_run_gives_the_same_evidence(made, written, tmp_path):
    assert files_of(write_evidence(made, tmp_path / "again")) == files_of(written)


def test_the_statement_is_over_model_data_settings_and_results(written):
    statement, environment = read(written, "statement.json"), read(written, "environment.json")
    hashes = {each["name"]: each["digest"]["sha256"] for each in statement["subject"]}
    assert hashes["model"] == environment["model_sha256"]
    assert hashes["data"] == environment["data_sha256"]
    assert {"summary.json", "model-card.md", "bom.cdx.json", "report.html"} < hashes.keys()
    assert [each["name"] for each in statement["predicate"]["configuration"]] == ["settings.json", "environment.json"]
    assert statement["predicate"]["result"] == "WARNED", "without limits, nothing has passed"
    assert statement["predicate"]["warnedTests"] == ["no limits were set"]


@pytest.mark.parametrize(("limit", "result"), [("1.0", "PASSED"), ("0.000001", "FAILED")])
def test_the_result_of_the_statement_is_that_of_the_gates(made, tmp_path, limit, result):
    run = shutil.copytree(made, tmp_path / "run")
    main(["gate", str(run), "--max-fault-rate", limit])
    folder = write_evidence(run, tmp_path / "evidence")
    predicate = read(folder, "statement.json")["predicate"]
    assert predicate["result"] == result
    assert ("max_fault_rate" in predicate["passedTests"]) == (result == "PASSED")
    assert ("max_fault_rate" in predicate["failedTests"]) == (result == "FAILED")
    assert verify_evidence(folder) == {}
    (folder / "gates.json").unlink()
    assert verify_evidence(folder) == {"gates.json": "missing"}


def test_a_campaign_that_was_completed_without_limits_has_passed_nothing():
    rows = [{"gate": "campaign", "has_passed": True}]
    predicate = json.loads(make_statement({}, {"rows": rows}, {}))["predicate"]
    assert (predicate["result"], predicate["warnedTests"]) == ("WARNED", ["no limits were set"])


def test_figures_in_operation_are_called_so(tmp_path):
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
    data = torch.rand(30, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    themis.run(net, data, "gaussian(sigma~beta(1,4))", max_tests=300, out=tmp_path / "run")
    card = (write_evidence(tmp_path / "run", tmp_path / "evidence") / "model-card.md").read_text()
    assert "| fault rate in operation |" in card
    assert "beta(1,4) in random tests" in card


# What other programs say


def test_the_hub_accepts_the_metadata(written, summary):
    hub = pytest.importorskip("huggingface_hub")
    card = hub.ModelCard.load(written / "model-card.md")
    results = card.data.eval_results
    [rate] = [each for each in results if each.metric_type == "fault_rate" and each.metric_config is None]
    assert rate.metric_value == summary["fault_rate"]["value"]
    assert rate.metric_args == {**{end: summary["fault_rate"][end] for end in ("low", "high")}, "confidence": 0.95}
    assert (rate.task_type, rate.dataset_config) == ("image-classification", "gaussian")
    classes = [each for each in results if each.metric_type == "fault_rate" and each.metric_config]
    assert [each.metric_value for each in classes] == [each["fault_rate"]["value"] for each in summary["slices"]]
    assert hub.ModelCard(str(card)).data.to_dict() == card.data.to_dict()


def test_cyclonedx_accepts_the_bom_with_slices_and_intervals(written, summary):
    json_validation = pytest.importorskip("cyclonedx.validation.json")
    from cyclonedx.schema import SchemaVersion

    text = (written / "bom.cdx.json").read_text()
    validator = json_validation.JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(text) is None
    assert validator.validate_str(text.replace('"confidenceInterval"', '"interval"')) is not None
    metrics = json.loads(text)["components"][0]["modelCard"]["quantitativeAnalysis"]["performanceMetrics"]
    sliced = [each for each in metrics if each.get("slice", "").startswith("class ")]
    assert len(sliced) == len(summary["slices"]) > 1
    for metric, of_class in zip(sliced, summary["slices"], strict=True):
        ends = metric["confidenceInterval"]
        shown = [float(text) for text in (metric["value"], ends["lowerBound"], ends["upperBound"])]
        assert shown == [of_class["fault_rate"][end] for end in ("value", "low", "high")]


def test_in_toto_accepts_the_statement(written):
    pytest.importorskip("in_toto_attestation")
    from google.protobuf.json_format import ParseDict
    from in_toto_attestation.predicates.test_result.v0 import test_result_pb2
    from in_toto_attestation.v1 import statement_pb2
    from in_toto_attestation.v1.statement import Statement

    plain = read(written, "statement.json")
    Statement.copy_from_pb(ParseDict(plain, statement_pb2.Statement())).validate()
    predicate = ParseDict(plain["predicate"], test_result_pb2.TestResult())
    assert predicate.result == "WARNED"


def test_sha256sum_checks_the_files(written):
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=written, check=True)


# What has changed


def test_evidence_that_nobody_touched_is_as_it_was(written, capsys):
    assert verify_evidence(written) == {}
    assert main(["verify", str(written)]) == 0
    assert capsys.readouterr().out == f"{written} is as it was written\n"


@pytest.mark.parametrize("name", [name for name in FILES if name != "gates.json"])
def test_a_changed_byte_is_found_in_the_file_that_has_it(folder, name):
    content = (folder / name).read_bytes()
    step = max(1, len(content) // 40)
    for position in {*range(0, len(content), step), len(content) - 1}:
        changed = bytearray(content)
        changed[position] ^= 1
        (folder / name).write_bytes(changed)
        assert verify_evidence(folder) == {name: "changed"}, position
    for changed in (content + b"\n", content[:-1], b""):
        (folder / name).write_bytes(changed)
        assert verify_evidence(folder) == {name: "changed"}
    (folder / name).unlink()
    assert verify_evidence(folder) == {name: "missing"}


def test_every_byte_of_the_statement_and_of_the_checksums_counts(folder):
    for name in ("statement.json", "SHA256SUMS"):
        content = (folder / name).read_bytes()
        for position in range(len(content)):
            (folder / name).write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
            assert verify_evidence(folder) == {name: "changed"}, (name, position)
        (folder / name).write_bytes(content)


@pytest.mark.parametrize("witness", ["statement.json", "SHA256SUMS"])
def test_a_file_that_was_changed_together_with_one_of_its_hashes_is_not_believed(folder, witness):
    before = hash_bytes((folder / "summary.json").read_bytes())
    (folder / "summary.json").write_text("{}")
    text = (folder / witness).read_text().replace(before, hash_bytes(b"{}"))
    (folder / witness).write_text(text)
    assert verify_evidence(folder)


def test_what_was_added_is_named(folder, capsys):
    (folder / "notes.txt").write_text("mine")
    (folder / "more").mkdir()
    (folder / "gates.json").write_text("{}")
    (folder / "report.html").rename(folder.parent / "report.html")
    (folder / "report.html").symlink_to(folder.parent / "report.html")
    assert main(["verify", str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:-1]] == [
        ["added", "gates.json"],
        ["added", "more"],
        ["added", "notes.txt"],
        ["changed", "report.html"],
    ]
    assert lines[-1].endswith("is not as it was written: 4 files differ")


# What is refused


def test_the_command_writes_evidence_and_says_how_to_check_it(made, tmp_path, capsys):
    out = tmp_path / "new" / "evidence"
    assert main(["report", str(made), "--evidence", str(out), "--most-pictures", "2"]) == 0
    assert capsys.readouterr().out == f"Evidence: {out} (to check it: themis verify {out})\n"
    assert {path.name for path in out.iterdir()} == {*FILES} - {"gates.json"}
    before = files_of(out)
    assert main(["report", str(made), "--evidence", str(out)]) == 2
    assert "must be a new or empty folder" in capsys.readouterr().err
    assert files_of(out) == before
    assert main(["report", str(made), "--evidence", str(tmp_path / "e"), "--out", str(tmp_path / "r.html")]) == 2
    assert "--out must not be given with --evidence" in capsys.readouterr().err


def test_a_run_that_has_not_ended_or_has_no_rate_is_refused(made, tmp_path):
    killed = shutil.copytree(made, tmp_path / "killed")
    (killed / "summary.json").unlink()
    with pytest.raises(UsageError, match=r"a campaign that has ended, but .* is killed"):
        write_evidence(killed, tmp_path / "evidence")
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
    data = torch.rand(10, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    themis.run(net, data, "gaussian", magnitude=0.5, max_tests=50, uniform_share=0.0, out=tmp_path / "none")
    with pytest.raises(UsageError, match="evidence must have a fault rate"):
        write_evidence(tmp_path / "none", tmp_path / "evidence")
    assert not (tmp_path / "evidence").exists()


def test_a_suite_and_a_folder_without_evidence_are_refused(made, tmp_path, capsys):
    (tmp_path / "suite.json").write_text("{}")
    assert main(["report", str(tmp_path), "--evidence", str(tmp_path / "evidence")]) == 2
    assert "is a suite: name the folder of one of its perturbations" in capsys.readouterr().err
    assert main(["verify", str(made)]) == 2
    assert "must be a folder that themis report --evidence wrote" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "nowhere")]) == 2
    assert "evidence must be a folder that can be read" in capsys.readouterr().err
