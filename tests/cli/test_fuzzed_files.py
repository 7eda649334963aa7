"""Damaged model, data and configuration files: a command works, or refuses them in one line, and none hangs."""

import gzip
import json
import pickle
import shutil
import struct
from random import Random

import model_files
import numpy as np
import pytest
import yaml
from fuzzing import check_command, mutate_bytes, mutate_place, mutate_plain
from user_module import go_to

pytestmark = pytest.mark.xdist_group("fuzzed_files")

N_MUTATIONS, N_SLOW_MUTATIONS = 80, 4000
"""Mutations per test, in `make test` and in `make slow`."""
RUN = "run --perturb gaussian --magnitude 0.3 --max-tests 20 --quiet --no-report"
PICTURES, TABLES = "--model mine:net", "--model mine:table_net"
MODULE = f"""{model_files.MODULE}
from torch import nn

def net(): return make_net()
def colour_net(): return nn.Sequential(nn.Flatten(), nn.LazyLinear(3))
def table_net(): return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
def wide_net():
    torch.manual_seed(0)  # which answers some of the pictures correctly
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 4))
"""
CASES = {
    "data.npz": f"{RUN} {PICTURES} --data npz:data.npz",
    "packed.npz": f"{RUN} {PICTURES} --data npz:packed.npz",
    "data.npy": f"{RUN} {PICTURES} --data npy:data.npy",
    "data_labels.npy": f"{RUN} {PICTURES} --data npy:data.npy",
    "t10k-images-idx3-ubyte": f"{RUN} {PICTURES} --data idx:t10k-images-idx3-ubyte",
    "a-images-idx3-ubyte.gz": f"{RUN} {PICTURES} --data idx:a-images-idx3-ubyte.gz",
    "batch.bin": f"{RUN} --model mine:wide_net --data cifar:batch.bin",
    "batch": f"{RUN} --model mine:wide_net --data cifar:batch",
    "table.csv": f"{RUN} {TABLES} --data csv:table.csv",
    "features.csv": "check --perturb table_noise --model mine:table_net --data csv:table.csv --features features.csv",
    "table.parquet": f"{RUN} {TABLES} --data parquet:table.parquet",
    "pictures": f"{RUN} --model mine:net --data images:pictures",
    "photos/0.jpg": f"{RUN} --model mine:net --data images:photos",
    "photos/1.webp": f"{RUN} --model mine:net --data images:photos",
    "weights.pt": f"{RUN} --model mine:blank --weights weights.pt --data mine:data",
    "weights.safetensors": f"{RUN} --model mine:blank --weights weights.safetensors --data mine:data",
    "script.pt": f"{RUN} --model script.pt --trust script.pt --data mine:data",
    "whole.pt": f"{RUN} --model whole.pt --data mine:data",
    "net.onnx": f"{RUN} --model net.onnx --data mine:data",
    "config.yaml": "run --config config.yaml --max-tests 20 --quiet --no-report",
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder with a valid file of every kind."""
    folder = tmp_path_factory.mktemp("corpus")
    inputs = model_files.inputs().numpy()
    labels = model_files.make_net().eval()(model_files.inputs()).argmax(1).numpy()
    np.savez(folder / "data.npz", inputs=inputs, labels=labels)
    np.savez_compressed(folder / "packed.npz", inputs=inputs, labels=labels)
    np.save(folder / "data.npy", inputs)
    np.save(folder / "data_labels.npy", labels)
    pixels = (inputs * 255).astype(np.uint8)
    idx = struct.pack(">HBBIII", 0, 8, 3, 30, 6, 6) + pixels.tobytes()
    (folder / "t10k-images-idx3-ubyte").write_bytes(idx)
    (folder / "t10k-labels-idx1-ubyte").write_bytes(struct.pack(">HBBI", 0, 8, 1, 30) + labels.astype("u1").tobytes())
    (folder / "a-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx))
    noise = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)
    (folder / "batch.bin").write_bytes(b"".join(bytes([k]) + row.tobytes() for k, row in enumerate(noise)))
    (folder / "batch").write_bytes(pickle.dumps({b"data": noise, b"labels": [0, 1, 2, 3]}, protocol=2))
    rows = np.random.default_rng(0).random((30, 3)).round(3)
    lines = [",".join([*map(str, row), "yes" if row[0] > 0.5 else "no"]) for row in rows]
    (folder / "table.csv").write_text("\n".join(["a,b,c,label", *lines]))
    (folder / "features.csv").write_text(
        "name,kind,low,high,change\na,number,0,1,any\nb,number,0,1,raise\nc,,,,fixed\n"
    )
    _write_parquet(folder / "table.parquet", rows)
    _write_pictures(folder, pixels[:, 0], labels)
    model_files.state(folder / "weights.pt")
    model_files.safetensors(folder / "weights.safetensors")
    model_files.script(str(folder / "script.pt"))
    model_files.pickled(folder / "whole.pt")
    if _has("onnx") and _has("onnxruntime"):
        model_files.onnx(str(folder / "net.onnx"))
    config = {"model": "mine:net", "data": "mine:data", "perturb": "gaussian", "magnitude": 0.3, "coverage": None}
    config |= {"bounds": [0, 1], "layers": ["*"], "classes": ["a", "b", "c", "d"], "split": [0.5, 0.2, 0.3]}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def _has(name):
    try:
        __import__(name)
    except ImportError:
        return False
    return True


def _write_parquet(path, rows):
    if _has("pyarrow"):
        import pyarrow as pa
        from pyarrow import parquet

        columns = {name: rows[:, k] for k, name in enumerate("abc")}
        parquet.write_table(pa.table({**columns, "label": (rows[:, 0] > 0.5).astype(int)}), path)


def _write_pictures(folder, pixels, labels):
    if _has("PIL"):
        from PIL import Image

        for name in ("photos", *(f"pictures/{label}" for label in range(4))):
            (folder / name).mkdir(parents=True)
        for k, label in enumerate(labels.tolist()):
            Image.fromarray(pixels[k]).save(folder / f"pictures/{label}/{k}.{'bmp' if k % 2 else 'png'}")
        for name, row in {"0.jpg": 0, "1.webp": 1, "2.png": 2}.items():
            Image.fromarray(pixels[row]).save(folder / "photos" / name)


def mutate_file(path, rng):
    """Change a file, or one in a folder; returns the change in words."""
    if path.is_dir():
        path = rng.choice(sorted(file for file in path.rglob("*") if file.is_file()))
    if rng.random() < 0.1:
        return mutate_place(path, rng)
    structured = {".csv": mutate_csv, ".yaml": mutate_yaml, ".npy": mutate_npy, ".safetensors": mutate_header}
    if path.suffix in structured and rng.random() < 0.6:
        return structured[path.suffix](path, rng)
    content, change = mutate_bytes(path.read_bytes(), rng)
    path.write_bytes(content)
    return change


def mutate_csv(path, rng):
    """Change a cell or a row of a table."""
    rows = [line.split(",") for line in path.read_text().splitlines()]
    row = rng.randrange(len(rows)) if rng.random() < 0.7 else 0
    kind = rng.choice(["cell", "cell", "cell", "row", "shorter", "quote", "header", "line"])
    if kind == "cell":
        value = rng.choice(["", "x", "nan", "1e999", "-1", "1_0", "=1+1", "\0", "9" * 400, "\x1b[2J", '"', "0x10", "é"])
        rows[row][rng.randrange(len(rows[row]))] = value
        kind = f"cell {value!r:.30}"
    elif kind == "row":
        del rows[row]
    elif kind == "shorter":
        del rows[row][-1]
    elif kind == "quote":
        rows[row][0] = '"' + rows[row][0]
    elif kind == "header":
        rows = rows[:1]
    else:
        rows[row].append("1" * 200_000)
    path.write_text("\n".join(map(",".join, rows)))
    return f"{kind} in row {row}"


def mutate_yaml(path, rng):
    """Change a value of a configuration, or its text."""
    text = path.read_text()
    if rng.random() < 0.3:
        extra = rng.choice(
            ["a: &a [1]\nb: *a\n", "[" * 3000, "? [1, 2]\n: 3\n", "!!python/object:os.system x", "\t", "- 1"]
        )
        path.write_text(extra + text if rng.random() < 0.5 else text + extra)
        return f"added {extra[:20]!r}"
    value, change = mutate_plain(yaml.safe_load(text), rng)
    is_deep = "nest" in change
    path.write_text(json.dumps(value) if is_deep or rng.random() < 0.3 else yaml.dump(value))
    return change


def mutate_npy(path, rng):
    """Change the header of an array."""
    content = path.read_bytes()
    size = struct.unpack("<H", content[8:10])[0]
    values = [
        "(30,)",
        "()",
        "(-1, 36)",
        "(10**12,)",
        "(30, 1, 6, 6, 1)",
        "(0, 1, 6, 6)",
        "(2**62, 4)",
        "True",
        "(30.0,)",
    ]
    kinds = ["<f8", "|O", "<U4", "|b1", "<c8", "<M8[s]", "|V8", ">f4", "<f2", "nonsense"]
    header = {"descr": rng.choice(kinds), "fortran_order": rng.choice([True, False]), "shape": rng.choice(values)}
    text = f"{{'descr': {header['descr']!r}, 'fortran_order': {header['fortran_order']}, 'shape': {header['shape']}, }}"
    path.write_bytes(
        content[:8] + struct.pack("<H", size) + text.ljust(size - 1).encode() + b"\n" + content[10 + size :]
    )
    return text


def mutate_header(path, rng):
    """Change the header of a safetensors file."""
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    header.setdefault("__metadata__", {"themis_ledger": "AAAA", "themis_seeds": "1"})
    value, change = mutate_plain(header, rng)
    text = json.dumps(value).encode()
    path.write_bytes(
        struct.pack("<Q", len(text) if rng.random() < 0.8 else rng.choice([2**62, 0, 5])) + text + content[8 + size :]
    )
    return change


def fuzz(corpus, tmp_path, monkeypatch, capsys, n, seed):
    """Mutate a file `n` times and run a command on it each time."""
    rng = Random(seed)
    go_to(tmp_path, monkeypatch, MODULE)
    names = [name for name in CASES if (corpus / name).exists()]
    codes = []
    for k in range(n):
        name = names[k % len(names)]
        for entry in corpus.iterdir():
            if entry.is_dir():
                shutil.copytree(entry, tmp_path / entry.name, dirs_exist_ok=True)
            else:
                shutil.copy(entry, tmp_path / entry.name)
        change = mutate_file(tmp_path / name, rng)
        codes.append(check_command(CASES[name].split(), capsys, f"mutation {k} of {seed}, {name}: {change}"))
        path = tmp_path / name
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    return codes


def test_valid_files_are_read(corpus, tmp_path, monkeypatch, capsys):
    go_to(tmp_path, monkeypatch, MODULE)
    shutil.copytree(corpus, tmp_path, dirs_exist_ok=True)
    for name, command in CASES.items():
        if (corpus / name).exists() and name != "whole.pt":  # which runs code, and is not trusted
            assert check_command(command.split(), capsys, name) == 0, name


@pytest.mark.filterwarnings("ignore")
def test_damaged_files_are_read_or_refused(corpus, tmp_path, monkeypatch, capsys):
    codes = fuzz(corpus, tmp_path, monkeypatch, capsys, N_MUTATIONS, 0)
    assert {0, 3} <= set(codes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_damaged_files_are_read_or_refused(corpus, tmp_path, monkeypatch, capsys, seed):
    codes = fuzz(corpus, tmp_path, monkeypatch, capsys, N_SLOW_MUTATIONS // 4, seed)
    assert {0, 3} <= set(codes)
