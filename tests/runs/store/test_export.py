"""Faults as files: whoever reads them needs no Themis."""

import json
import shutil
import sqlite3
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from warm_python import warm_python

import themis
from themis.cli import main
from themis.runs.store import export as exporting
from themis.runs.store.reader import Reader

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A campaign on pictures without labels, some of whose outputs are not finite."""

    class Wavering(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 3))

        def forward(self, x):
            brightest = x.flatten(1).max(1, keepdim=True).values
            return torch.where(brightest < 0.99, self.net(x - 0.5), torch.nan)

    data = torch.rand(20, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 0.3 + 0.1
    out = tmp_path_factory.mktemp("runs") / "first"
    options = {"magnitude": 0.2, "max_tests": 600, "max_stored": 30, "tolerance": 1e-9}
    return out, themis.run(Wavering(), data, "gaussian", out=out, **options)


@pytest.fixture
def exported(found, tmp_path):
    """Exports to a file of some name; returns its path."""

    def export(name, *arguments):
        assert main(["faults", str(found[0]), "--export", str(tmp_path / name), *map(str, arguments)]) == 0
        return tmp_path / name

    return export


@pytest.fixture
def table(found):
    """The faults as pandas reads them from the database."""
    with sqlite3.connect(found[0] / "run.sqlite") as database:
        table = pd.read_sql("SELECT * FROM faults ORDER BY id", database)
    database.close()
    return table


def same(a, b):
    """Whether two tables hold the same values to the bit; None, NaN and nothing are one."""
    pd.testing.assert_frame_equal(a, b, check_dtype=False, check_exact=True)


def test_the_database_contains_what_the_campaign_found(found, table):
    columns = found[1].faults.columns
    assert len(table) == len(found[1].faults) > 100
    assert table["label"].isna().all()
    assert 0 < table["confidence"].isna().sum() < len(table)
    for name in ("id", "seed_id", "noise_seed", "confidence", "margin", "distance", "ssim", "position"):
        np.testing.assert_array_equal(table[name].to_numpy(columns[name].dtype), columns[name])
    np.testing.assert_array_equal(table["theta_sigma"].to_numpy(np.float32), columns["theta"][:, 0])
    np.testing.assert_array_equal(
        np.array(table["signature"].map(json.loads).tolist(), "f4") / 1e4, columns["signature"]
    )


def test_pandas_reads_the_parquet_file(found, exported, table, monkeypatch):
    monkeypatch.setattr("themis.runs.store.reader.ROWS_PER_FETCH", 7)
    read = pd.read_parquet(exported("faults.parquet", "--sort", "id"))
    np.testing.assert_array_equal(np.stack(read["signature"]), found[1].faults.columns["signature"])
    same(read.drop(columns="signature"), table.drop(columns="signature"))
    from pyarrow import parquet

    field = parquet.read_schema(exported("again.parquet")).field("signature")
    assert str(field.type) == "list<element: float>"
    assert json.loads(field.metadata[b"layers"]) == ["net.2", "output"]


def test_pandas_reads_the_csv_file(exported, table):
    read = pd.read_csv(exported("faults.csv", "--sort", "id"))
    same(read.drop(columns="signature"), table.drop(columns="signature"))
    signature = [[each / 10_000 for each in json.loads(text)] for text in table["signature"]]
    assert read["signature"].map(json.loads).tolist() == signature


def test_pandas_reads_the_json_file(found, exported, table):
    path = exported("faults.json", "--sort", "id")
    read = pd.DataFrame(json.loads(path.read_text()))
    first = found[1].faults[0]
    assert read["signature"][0] == pytest.approx(first.signature)
    finite = table.replace(-np.inf, np.nan)
    same(read.drop(columns="signature"), finite.drop(columns="signature"))
    assert len(pd.read_json(path)) == len(table)


def test_numpy_reads_columns_and_tensors(found, exported, table):
    out, run = found
    arrays = np.load(exported("faults.npz", "--sort", "distance"))
    assert (np.diff(arrays["distance"]) >= 0).all()
    order = np.argsort(arrays["id"])
    for name in table:
        if name not in ("signature", "tensors", "label", "clean_value", "value"):
            np.testing.assert_array_equal(arrays[name][order], table[name].to_numpy())
    assert (arrays["label"] == -1).all()
    assert np.isnan([arrays["clean_value"], arrays["value"]]).all()  # of a classifier
    np.testing.assert_array_equal(arrays["signature"][order], run.faults.columns["signature"])
    kept = Reader(out).tensors(arrays["tensors_id"].tolist())
    assert len(kept) == len(arrays["tensors_id"]) == 30
    for row, id in enumerate(arrays["tensors_id"].tolist()):
        for name in ("clean_inputs", "inputs", "outputs"):
            np.testing.assert_array_equal(arrays[name][row], getattr(kept[id], name)[0])
    faults = {fault.id: fault for fault in run.faults}
    for row, id in enumerate(arrays["tensors_id"].tolist()):
        np.testing.assert_array_equal(arrays["inputs"][row], faults[id].replay().inputs)


def test_a_picture_is_drawn_from_the_stored_tensors_alone(found, exported, capsys):
    path = exported("faults.png")
    assert path.read_bytes().startswith(PNG)
    assert f"Drew 12 of {len(found[1].faults)} faults in {path}" in capsys.readouterr().out
    some = Reader(found[0]).select("id", "tensors IS NOT NULL", limit=2)
    exported("two.PNG", "--where", f"id IN ({some[0][0]}, {some[1][0]})")
    assert "Drew 2 of 2 faults" in capsys.readouterr().out
    from matplotlib.image import imread

    assert imread(path).shape[0] > 2 * imread(path.with_name("two.PNG")).shape[0]


def test_filters_sort_and_limit_apply_to_files_too(found, exported, capsys):
    ids = pd.read_csv(exported("a.csv", "--answer", 1, "--sort", "ssim", "--limit", 5))["id"].tolist()
    expected = sorted((fault for fault in found[1].faults if fault.answer == 1), key=lambda fault: fault.ssim)
    assert ids == [fault.id for fault in expected[:5]]
    assert "Wrote 5 faults to " in capsys.readouterr().out
    assert len(pd.read_csv(exported("b.csv"))) == len(found[1].faults), "all without a limit"


@pytest.mark.parametrize("ending", ["csv", "parquet", "json", "npz"])
def test_a_file_without_faults_has_its_columns(exported, table, ending):
    path = exported(f"none.{ending}", "--where", "0")
    if ending == "json":
        assert json.loads(path.read_text()) == []
        return
    read = {"csv": pd.read_csv, "parquet": pd.read_parquet, "npz": np.load}[ending](path)
    assert set(read) >= set(table) - {"tensors"}
    assert all(len(read[name]) == 0 for name in read)


def test_a_picture_needs_a_stored_fault(found, tmp_path, capsys):
    for where, reason in (("tensors IS NULL", "that match, no input was kept"), ("0", "faults: no fault matches")):
        assert main(["faults", str(found[0]), "--where", where, "--export", str(tmp_path / "a.png")]) == 2
        assert reason in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_only_on_request(found, exported, tmp_path, capsys):
    path = exported("a.csv")
    path.write_text("mine")
    for name in ("a.csv", "."):
        assert main(["faults", str(found[0]), "--export", str(tmp_path / name)]) == 2
    assert "a.csv exists: choose another, or replace it with --force" in capsys.readouterr().err
    assert path.read_text() == "mine"
    exported("a.csv", "--force")
    assert path.read_text().startswith("id,seed_id,perturbation,theta_sigma")
    (tmp_path / "b.csv").mkdir()
    assert main(["faults", str(found[0]), "--export", str(tmp_path / "b.csv"), "--force"]) == 2


@pytest.mark.parametrize("ending", ["csv", "parquet", "json", "npz"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device"), ZeroDivisionError])
def test_an_interrupted_export_leaves_no_file(found, tmp_path, ending, error):
    def batches():
        yield Reader(found[0]).select(limit=3)
        raise error

    (tmp_path / f"a.{ending}").write_text("the old one")
    expected = themis.StoreError if isinstance(error, OSError) else error
    with pytest.raises(expected):
        exporting.export(Reader(found[0]), batches(), tmp_path / f"a.{ending}", replaces=True)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["the old one"]


def test_a_location_that_cannot_be_written_is_named(found, tmp_path, monkeypatch, capsys):
    def refuse(*arguments, **rest):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", refuse)
    assert main(["faults", str(found[0]), "--export", str(tmp_path / "a.csv")]) == 3
    assert "a.csv cannot be written: Permission denied" in capsys.readouterr().err


def test_a_missing_package_is_named_with_the_command_that_installs_it(found, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["faults", str(found[0]), "--export", str(tmp_path / "a.parquet")]) == 3
    assert 'pip install "themis-dl[tables]"' in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_files_can_be_exported_while_the_campaign_is_running(tmp_path):
    class Look(themis.Callback):
        sizes = ()

        def on_round(self, done):
            for ending in ("parquet", "npz"):
                path = tmp_path / f"{done.number}.{ending}"
                assert main(["faults", str(tmp_path / "run"), "--export", str(path)]) == 0
            arrays = np.load(path)
            self.sizes += ((done.faults, len(arrays["id"]), len(arrays["inputs"])),)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    look = Look()
    options = {"magnitude": 0.5, "max_tests": 600, "round_size": 100, "max_stored": 9, "tolerance": 1e-12}
    themis.run(net, torch.rand(30, 8), "gaussian", out=tmp_path / "run", callbacks=[look], **options)
    assert len(look.sizes) > 1
    for known, stored, kept in look.sizes:
        assert stored >= known
        assert kept == min(9, stored)


def test_no_model_is_needed(found, tmp_path):
    """The run folder alone, in a process that cannot import where it came from."""
    command = [warm_python(), "-m", "themis", "faults", str(found[0]), "--export", str(tmp_path / "a.png")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


def test_tensors_that_move_to_another_file_in_the_meantime_are_found(found, tmp_path, monkeypatch):
    from themis.runs.store import tensors

    out, read = shutil.copytree(found[0], tmp_path / "run"), tensors.read_tensors

    def move_first(path):
        if path.name != "999999.safetensors":
            path.rename(path.with_name("999999.safetensors"))
            with sqlite3.connect(out / "run.sqlite") as database:
                database.execute("UPDATE faults SET tensors = '999999.safetensors' WHERE tensors = ?", (path.name,))
            database.close()
        return read(path)

    [(file, _)] = Reader(out).select("tensors, count(*)", "tensors IS NOT NULL GROUP BY tensors", order="1", limit=1)
    ids = [id for (id,) in Reader(out).select("id", "tensors = ?", (file,))]
    monkeypatch.setattr(tensors, "read_tensors", move_first)
    assert sorted(Reader(out).tensors(ids)) == ids
