"""`themis faults`: finding one's way among the faults of a run."""

import json
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

import themis
from themis.cli import main
from themis.runs.faults import telling
from themis.runs.store.reader import Reader


class Wavering(nn.Module):
    """A small net whose answer breaks often; far from its clean inputs its output is not finite."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x):
        brightest = x.flatten(1).max(1, keepdim=True).values
        return self.net(x - 0.5) / (brightest < 0.99).float().where(brightest < 0.99, torch.nan)


DATA = torch.rand(30, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 0.6 + 0.1
LABELS = Wavering()(DATA).argmax(1)
HEADER = ["id", "seed", "sigma", "clean", "answer", "confidence", "distance", "ssim", "stream", "kept"]
OPTIONS = {"magnitude": 0.2, "max_tests": 900, "round_size": 300, "max_stored": 25, "coverage": 1.0, "tolerance": 1e-9}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A campaign with a folder."""
    out = tmp_path_factory.mktemp("runs") / "first"
    return out, themis.run(Wavering(), (DATA, LABELS), "gaussian", out=out, **OPTIONS)


@pytest.fixture
def listed(found, capsys):
    """Faults as printed by `--json`."""

    def ask(*arguments):
        assert main(["faults", str(found[0]), *map(str, arguments), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return ask


def ids(faults):
    return [each["id"] for each in faults]


def refused(capsys, *arguments):
    """The error message for these arguments, which must be one line."""
    assert main(["faults", *map(str, arguments)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    return line


def test_the_campaign_has_faults_for_every_filter(found):
    faults = found[1].faults
    assert len(faults) > 100
    assert {fault.stream for fault in faults} == {"uniform", "search"}
    assert {fault.round for fault in faults} == {1, 2, 3}
    assert {fault.answer for fault in faults} == {-1, 0, 1, 2}


def test_a_table_shows_the_most_telling_first(found, capsys):
    out, run = found
    assert main(["faults", str(out)]) == 0
    first, header, *rows = capsys.readouterr().out.splitlines()
    n = len(run.faults)
    assert first == f"{n} faults, {n} match, 20 shown; the campaign ended after 900 tests"
    assert header.split() == HEADER
    assert len(rows) == 20
    assert all(row.endswith("yes") for row in rows)
    assert {len(row.rstrip()) for row in [header, *rows]} <= {len(header), len(header) - 1}, "columns are aligned"


def test_the_order_is_that_in_which_tensors_are_kept(found, listed):
    columns = found[1].faults.columns
    score = dict(zip(columns["id"], telling(columns["distance"], columns["confidence"]), strict=True))
    faults = listed()
    assert sorted(ids(faults)) == columns["id"].tolist()
    assert [each["tensors"] is not None for each in faults] == [True] * 25 + [False] * (len(faults) - 25)
    places, seen = [], {}
    for each in faults:
        outcome = each["seed_id"], each["answer"]
        seen[outcome] = seen.get(outcome, 0) + 1
        places.append((seen[outcome], score[each["id"]]))
    assert places == sorted(places)
    assert ids(listed("--reverse")) == ids(faults)[::-1]


FILTERS = {
    "seed": (["--seed", 7], lambda fault: fault.seed_id == 7),
    "label": (["--label", 1], lambda fault: fault.label == 1),
    "clean answer": (["--clean-answer", 2], lambda fault: fault.clean_answer == 2),
    "answer": (["--answer", 0], lambda fault: fault.answer == 0),
    "answer that is not finite": (["--answer", -1], lambda fault: fault.answer == -1),
    "stream": (["--stream", "uniform"], lambda fault: fault.stream == "uniform"),
    "kind": (["--kind", "corner"], lambda fault: fault.kind == "corner"),
    "round": (["--round", 2], lambda fault: fault.round == 2),
    "confidence": (["--min-confidence", 0.5], lambda fault: not fault.confidence < 0.5),
    "ssim": (["--min-ssim", 0.8], lambda fault: fault.ssim >= 0.8),
    "distance": (["--max-distance", 1.2], lambda fault: fault.distance <= 1.2),
    "where": (["--where", "theta_sigma < 0.15 -- weak"], lambda fault: fault.theta["sigma"] < 0.15),
    "where with or": (
        ["--where", "answer = 1 or answer = 2", "--round", 1],
        lambda fault: fault.answer in (1, 2) and fault.round == 1,
    ),
    "two": (["--stream", "search", "--answer", 1], lambda fault: fault.stream == "search" and fault.answer == 1),
}


@pytest.mark.parametrize("name", FILTERS)
def test_faults_are_filtered(found, listed, name):
    arguments, holds = FILTERS[name]
    expected = [fault.id for fault in found[1].faults if holds(fault)]
    assert 0 < len(expected) < len(found[1].faults)
    assert ids(listed(*arguments, "--sort", "id")) == expected


def test_kept_faults_are_those_with_tensors(found, listed):
    assert set(ids(listed("--kept"))) == set(Reader(found[0]).tensors(found[1].faults.columns["id"].tolist()))


def test_distinct_faults_are_one_per_seed_and_answer_among_those_that_match(found, listed):
    assert sorted(ids(listed("--distinct"))) == sorted(fault.id for fault in found[1].faults.distinct())
    late = [fault for fault in found[1].faults if fault.round == 3]
    chosen = listed("--distinct", "--round", 3)
    assert len(chosen) == len({(fault.seed_id, fault.answer) for fault in late})
    nearest = {}
    for fault in late:
        key = fault.seed_id, fault.answer
        nearest[key] = min(nearest.get(key, fault.distance), fault.distance)
    assert {(each["seed_id"], each["answer"]): each["distance"] for each in chosen} == nearest


@pytest.mark.parametrize("column", ["id", "distance", "confidence", "ssim", "round", "theta_sigma", "kind"])
def test_faults_are_sorted_by_any_column_with_unknown_values_last(listed, column):
    values = [each[column] for each in listed("--sort", column)]
    known = [each for each in values if each is not None]
    assert values == sorted(known) + [None] * (len(values) - len(known))
    values = [each[column] for each in listed("--sort", column, "--reverse")]
    assert values == sorted(known, reverse=True) + [None] * (len(values) - len(known))


def test_the_sort_column_is_shown(found, capsys):
    assert main(["faults", str(found[0]), "--sort", "margin", "--limit", "3"]) == 0
    assert "margin" in capsys.readouterr().out.splitlines()[1]


def test_a_limit_applies_to_tables_and_json_and_zero_means_no_limit(found, listed, capsys):
    n = len(found[1].faults)
    assert len(listed()) == len(listed("--limit", 0)) == n
    assert ids(listed("--limit", 3)) == ids(listed())[:3]
    for limit, shown in ((3, 3), (0, n)):
        assert main(["faults", str(found[0]), "--limit", str(limit)]) == 0
        assert len(capsys.readouterr().out.splitlines()) == shown + 2


def test_json_is_valid_if_outputs_are_not_finite(found, listed):
    assert all(each["confidence"] is each["margin"] is None for each in listed("--answer", -1))
    signature = listed("--limit", 1, "--answer", 1)[0]["signature"]
    assert list(signature) == ["net.2", "output"]
    assert sum(signature.values()) == pytest.approx(1, abs=1e-5)
    assert listed("--where", "0") == []


def test_the_changed_features_of_a_table_row_are_listed(tmp_path, capsys):
    torch.manual_seed(0)
    rows = torch.rand(30, 6)
    out = tmp_path / "table"
    features = themis.Features.of(rows, list("abcdef"))
    options = {"features": features, "out": out, "max_tests": 200}
    result = themis.run(themis.Target(nn.Linear(6, 3)), rows, "edit(amount=0:1)", **options)
    fault = result.faults.most_telling(1)[0]
    shown = fault.replay()
    changed = [features.names[k] for k in (shown.inputs != shown.clean_inputs).nonzero().flatten().tolist()]
    assert main(["faults", str(out), str(fault.id)]) == 0
    printed = capsys.readouterr().out
    head, _, lines = printed.partition(f"{len(changed)} of 6 features changed:\n")
    assert sorted(line.split()[0] for line in lines.splitlines()) == sorted(changed)
    assert "ssim" not in head


def test_named_faults_are_described_in_detail(found, listed, capsys):
    out, run = found
    sure, lost = listed("--limit", 1, "--answer", 1)[0]["id"], listed("--sort", "ssim", "--limit", 1)[0]["id"]
    assert main(["faults", str(out), str(sure), str(lost)]) == 0
    printed = capsys.readouterr().out
    blocks = dict(re.findall(r"^fault (\d+)\n((?:  .*\n)+)", printed, flags=re.M))
    fault = next(each for each in run.faults if each.id == sure)
    fields = dict(line.partition("  (")[0].split(maxsplit=1) for line in blocks[str(sure)].splitlines())
    assert not {"position", "chunk", "raised", "value", "clean_value"} & set(fields), "they say nothing here"
    assert "(structural similarity to the clean picture; 1 is identical)" in blocks[str(sure)]
    for name in ("seed_id", "noise_seed", "round", "label", "clean_answer", "answer"):
        assert int(fields[name]) == getattr(fault, name)
    for name in ("confidence", "margin", "distance", "ssim"):
        assert torch.tensor(float(fields[name])) == torch.tensor(getattr(fault, name)), "to the bit"
    assert float(fields["theta_sigma"]) == pytest.approx(fault.theta["sigma"], rel=1e-8)
    largest = max(fault.signature, key=fault.signature.get)
    assert fields["signature"].startswith(f"{largest} {fault.signature[largest]:.1%}, ")
    assert fields["replay"] == f"themis replay {out} {sure}"
    assert fields["tensors"].startswith(f"{out}/tensors/0")
    assert "not kept" in blocks[str(lost)]
    assert ids(listed(lost, sure)) == [sure, lost]


WRONG = {
    "no run": (["nowhere"], "a run must be a folder with run.sqlite, but nowhere is not one"),
    "unknown column": (["--where", "theta_sigm < 1"], "no such column: theta_sigm: did you mean 'theta_sigma'?"),
    "no condition": (["--where", "answer ="], 'near ")": syntax error'),
    "two statements": (["--where", "1; DROP TABLE faults"], 'near ";": syntax error'),
    "two statements behind a bracket": (["--where", "1); DROP TABLE faults; --"], "SQL condition"),
    "a question mark": (["--where", "answer = ?"], "SQL condition"),
    "a condition that fails on the way": (["--where", "json(kind)"], "malformed JSON"),
    "sort": (["--sort", "distanc"], "did you mean 'distance'?"),
    "stream": (["--stream", "serch"], "did you mean 'search'?"),
    "limit": (["--limit", "-1"], "limit must be a whole number of at least 0, got -1"),
    "a number": (["--answer", "seven"], "answer must be a whole number"),
    "fault": (["-5"], "the run has no fault -5: its "),
    "no fault": (["first"], "FAULT must be a whole number, got 'first'"),
    "huge fault": ([str(10**30)], "its"),
    "json and a file": (["--json", "--export", "a.csv"], "cannot be combined"),
    "ending": (["--export", "a.parqet"], "must end in .csv, .json, .npz, .parquet or .png, got a.parqet"),
    "no ending": (["--export", "faults"], ".png, fiftyone:FOLDER or pictures:FOLDER, got faults"),
    "misspelt folder": (["--export", "picture:all"], "fiftyone:FOLDER or pictures:FOLDER, got picture:all"),
    "no folder": (["--export", "nowhere/a.csv"], "the file must be in an existing folder"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_is_reported_in_one_line(found, capsys, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    arguments, message = WRONG[name]
    run = [] if name == "no run" else [found[0]]
    assert message in refused(capsys, *run, *arguments)
    assert Reader(found[0]).count() == len(found[1].faults)
    assert list(tmp_path.iterdir()) == []


def test_the_error_for_an_unknown_fault_names_its_neighbours(found, capsys):
    known = found[1].faults.columns["id"].tolist()
    missing = next(each for each in range(known[0], known[-1]) if each not in known)
    near = sorted(sorted(known, key=lambda each: abs(each - missing))[:1])[0]
    line = refused(capsys, found[0], missing)
    assert str(near) in line
    assert line.endswith(f"its {len(known)} faults have numbers from {known[0]} to {known[-1]}")


def test_the_first_line_tells_the_state_of_the_campaign(tmp_path, capsys):
    out, printed = tmp_path / "a run", []

    class Look(themis.Callback):
        def on_round(self, done):
            main(["faults", str(out)])
            printed.append(capsys.readouterr().out.splitlines()[0])

    themis.run(Wavering(), DATA, "gaussian", out=out, callbacks=[Look()], **OPTIONS)
    assert re.fullmatch(r"\d+ faults, \d+ match, 20 shown; the campaign is still running after \d+ tests", printed[0])
    (out / "summary.json").unlink()
    main(["faults", str(out)])
    printed = capsys.readouterr().out
    assert f"; the campaign was killed after 900 tests: continue it with themis resume '{out}'\n" in printed


def test_the_first_line_tells_if_a_campaign_was_interrupted_or_failed(tmp_path, capsys):
    class Failing(Wavering):
        calls, error = 0, KeyboardInterrupt

        def forward(self, x):
            self.calls += 1
            if self.calls == 12:
                raise self.error
            return super().forward(x)

    themis.run(Failing(), DATA, "gaussian", out=tmp_path / "a", **OPTIONS)
    main(["faults", str(tmp_path / "a")])
    printed = capsys.readouterr().out
    assert re.search(r"; the campaign was interrupted after \d+ tests: continue it with themis resume ", printed)
    net = Failing()
    net.error = ZeroDivisionError("worn out")
    with pytest.raises(themis.ModelError):
        themis.run(net, DATA, "gaussian", out=tmp_path / "b", **OPTIONS)
    main(["faults", str(tmp_path / "b")])
    assert "; the campaign failed after " in capsys.readouterr().out


def test_a_run_without_faults_says_so(tmp_path, capsys):
    themis.run(Wavering(), DATA, "gaussian", out=tmp_path / "a", **{**OPTIONS, "magnitude": 1e-6, "recall": None})
    assert main(["faults", str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out == "0 faults, 0 match, 0 shown; the campaign ended after 300 tests\n"
    assert "it has no faults" in refused(capsys, tmp_path / "a", 3)


def test_listing_imports_nothing_heavy(found):
    code = (
        "import sys; from themis.cli import main\n"
        f"main(['faults', {str(found[0])!r}, '--limit', '1'])\n"
        "print(sorted({'torch', 'numpy', 'scipy', 'rich', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_table_fits_a_terminal_of_eighty_columns(found, capsys):
    main(["faults", str(found[0])])
    assert max(map(len, capsys.readouterr().out.splitlines()[1:])) <= 80
