"""Models, weights and data that cannot be tested: each is reported in one line with its exit code."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from wrong_use import PICTURE, enter, refused, run, weights_of_a_net, write


class Harmful:
    def __reduce__(self):
        return exec, ("open('harm', 'w')",)


def save(name: str, value, size: float = 1.0):
    """Create a weights file; `size` is the share of it that is written."""

    def setup():
        torch.save(value, name)
        content = Path(name).read_bytes()
        Path(name).write_bytes(content[: int(size * len(content))])

    return setup


def archive(size: float = 1.0, **arrays):
    """Create `data.npz`; `size` is the share of it that is written."""

    def setup():
        np.savez("data.npz", **arrays)
        content = Path("data.npz").read_bytes()
        Path("data.npz").write_bytes(content[: int(size * len(content))])

    return setup


def one_array():
    np.save("one.npy", np.zeros((9, 1, 4, 4)))


WRONG = {
    # models
    "no such module": (run("--model nowhere:net"), 2, "No module named 'nowhere'"),
    "a package with a typo": (run("--model torchvison:vgg11"), 2, "did you mean torchvision:vgg11?"),
    "no factory": (run("--model mine"), 2, "--model must be module:factory, got 'mine'"),
    "no such factory": (run("--model mine:nett"), 2, "no attribute 'nett': did you mean 'net'?"),
    "a file for a module": (run("--model mine.py:net"), 2, "got 'mine.py:net': write mine:net\n"),
    "a file without a factory": (run("--model mine.py"), 2, "got 'mine.py': write mine:FUNCTION\n"),
    "a path for a module": (run("--model src/mine:net"), 2, "write mine:net, in the folder src\n"),
    "a file of data for a module": (run("--data mine.py:data"), 2, "got 'mine.py:data': write mine:data\n"),
    "data in a file without a factory": (run("--data mine.py"), 2, "got 'mine.py': write mine:FUNCTION\n"),
    "a file of another kind": (
        run("--model net.joblib"),
        2,
        "a file that ends in .pt, .pth, .ts, .pt2, .keras, .onnx, got 'net.joblib': load it in a function of your own",
        write("net.joblib", ""),
    ),
    "safetensors for a model": (
        run("--model net.safetensors"),
        3,
        "holds weights, not the class of the model: pass --model module:factory, which makes the model, and --weights "
        "net.safetensors",
        write("net.safetensors", ""),
    ),
    "a checkpoint for a model": (
        run("--model last.ckpt"),
        3,
        "last.ckpt must be a model, but it holds weights, not the class of the model: pass --model module:factory",
        write("last.ckpt", ""),
    ),
    "module does not parse": (run("--model b:net"), 3, "importing it raised SyntaxError", write("b.py", "def net(:")),
    "module raises": (run("--model b:net"), 3, "importing it raised ZeroDivisionError", write("b.py", "1 / 0")),
    "module lacks a package": (run("--model b:net"), 2, "No module named 'absent'", write("b.py", "import absent")),
    "factory raises": (run("--model mine:raises"), 3, "raised ZeroDivisionError: no model today"),
    "factory leaves": (run("--model mine:leaves"), 3, "raised SystemExit: good bye"),
    "factory takes arguments": (run("--model mine:needs"), 3, "missing 1 required positional argument: 'width'"),
    "factory makes text": (
        run("--model mine:text"),
        2,
        "must be a PyTorch module, an estimator, a Target or a BlackBox, got str",
    ),
    "factory makes nothing": (run("--model mine:nothing"), 2, "a Target or a BlackBox, got NoneType"),
    "a target has its own bounds": (run("--model mine:target --bounds 0,2"), 2, "--bounds must be left out"),
    "first call raises": (run("--model mine:narrow"), 3, "the model raised RuntimeError on inputs [1, 1, 4, 4]"),
    "mid-campaign call raises": (run("--model mine:worn_out"), 3, "raised ZeroDivisionError on inputs [16, 1, 4, 4]"),
    "outputs nothing": (run("--model mine:gives_none"), 3, "the model must return a tensor"),
    "outputs text": (run("--model mine:gives_text"), 3, "the model must return a tensor"),
    "outputs NaN": (run("--model mine:gives_nan"), 3, "finite outputs on clean inputs, but 30 of 30 have a NaN"),
    "outputs one score": (
        run("--model mine:gives_one --oracle changed"),
        3,
        "scores [inputs, classes] with 2 classes or more",
    ),
    "outputs a mean": (run("--model mine:gives_a_mean"), 3, "the model must return one output per input"),
    "outputs too few rows": (run("--model mine:gives_fewer_rows"), 3, "the model must return one output per input"),
    # weights
    "weights missing": (run("--weights no.pt"), 3, "the weights file must exist, but no.pt is not a file"),
    "weights in a folder": (run("--weights ."), 3, "the weights file must exist, but . is not a file"),
    "weights of text": (run("--weights w.pt"), 3, "w.pt must be a state dict", write("w.pt", "hello\n")),
    "weights empty": (run("--weights w.pt"), 3, "w.pt must be a state dict", write("w.pt", "")),
    "weights half written": (
        run("--weights w.pt"),
        3,
        "w.pt must be a state dict",
        save("w.pt", {"a": torch.zeros(999)}, 0.5),
    ),
    "weights that run code": (
        run("--weights w.pt"),
        3,
        "w.pt must be a state dict",
        lambda: Path("w.pt").write_bytes(pickle.dumps(Harmful())),
    ),
    "weights are a tensor": (run("--weights w.pt"), 3, "must hold a state dict", save("w.pt", torch.zeros(3))),
    "weights of another net": (
        run("--weights w.pt"),
        3,
        "must match the model, missing ['fc1.weight'",
        save("w.pt", {"conv": torch.zeros(3)}),
    ),
    "weights of other sizes": (
        run("--weights net.pt"),
        3,
        "must match the model: Error(s) in loading state_dict for Net: size mismatch for fc1.weight: copying a param",
        weights_of_a_net(lambda value: value[:2]),
    ),
    "weights of NaN": (
        run("--weights net.pt"),
        3,
        "finite outputs on clean inputs",
        weights_of_a_net(lambda value: value * float("nan")),
    ),
    # data
    "unknown reader": (run("--data digit"), 2, "did you mean 'digits'?"),
    "no archive named": (run("--data npz"), 2, "write npz:PATH"),
    "archive missing": (run("--data npz:no.npz"), 3, "the data file must exist, but no.npz is not a regular file"),
    "archive half written": (
        run("--data npz:data.npz"),
        3,
        "data.npz must be a NumPy archive",
        archive(0.5, inputs=np.zeros((99, 1, 4, 4))),
    ),
    "archive is a picture": (
        run("--data npz:data.npz"),
        3,
        "data.npz must be a NumPy archive",
        write("data.npz", PICTURE),
    ),
    "archive is empty": (run("--data npz:data.npz"), 3, "data.npz must be a NumPy archive", write("data.npz", "")),
    "archive of one array": (run("--data npz:one.npy"), 3, "one.npy must be a NumPy archive of numbers", one_array),
    "archive of objects": (
        run("--data npz:data.npz"),
        3,
        "data.npz, array 'inputs' must be a NumPy array of numbers, but it holds object",
        archive(inputs=np.array([{}, []], dtype=object)),
    ),
    "archive of text": (run("--data npz:data.npz"), 3, "data.npz", archive(inputs=np.array(["cat", "dog"]))),
    "archive without inputs": (
        run("--data npz:data.npz"),
        3,
        "must hold an array named 'inputs', got ['x']",
        archive(x=np.zeros(3)),
    ),
    "an archive without its reader": (run("--data data.npz"), 2, "write npz:data.npz", archive(inputs=np.zeros(3))),
    "a folder without its reader": (
        run("--data pictures"),
        2,
        "write images:pictures",
        lambda: Path("pictures").mkdir(),
    ),
    "a reader with a typo": (run("--data image:photos"), 2, "No module named 'image'; did you mean images:photos?"),
    "a column beyond those listed": (
        run("--data csv:wide.csv?label=dgit"),
        2,
        "did you mean 'digit'? known: digit, p0",
        write("wide.csv", ",".join([*(f"p{k}" for k in range(60)), "digit"]) + "\n" + ",".join("0" * 61) + "\n"),
    ),
    "no data folder": (run("--data cifar10"), 2, "set THEMIS_DATA"),
    "pictures missing": (run("--data cifar10:nowhere"), 3, "nowhere/test_batch.webp is not a regular file"),
    "pictures of another kind": (
        run("--data cifar10:."),
        3,
        "test_batch.webp",
        write("test_batch.webp", "hello"),
    ),
    "NaN inputs": (run("--data mine:with_nan"), 3, "inputs must be finite, but seed"),
    "infinite inputs": (run("--data mine:with_infinity"), 3, "inputs must be finite, but seed"),
    "bytes": (run("--data mine:bytes_"), 3, "divide by 255 or pass"),
    "normalised inputs": (run("--data mine:normalised"), 3, "give raw inputs"),
    "no inputs": (run("--data mine:empty"), 3, "must hold at least one seed"),
    "flat inputs": (run("--data mine:flat"), 3, "the shape [seeds, ...], got shape [480]"),
    "inputs of another size": (run("--data mine:wide"), 3, "the model raised RuntimeError on inputs [1, 1, 9, 9]"),
    "labels too large": (run("--data mine:large_labels"), 3, "labels must lie in 0..2"),
    "negative labels": (run("--data mine:negative_labels"), 3, "labels must lie in 0..2"),
    "one-hot labels": (run("--data mine:one_hot"), 3, "pass whole numbers, not one-hot rows"),
    "labels between classes": (
        run("--data mine:half_labels"),
        3,
        "class numbers, one for each of 30 inputs, got 0.5",
    ),
    "too few labels": (run("--data mine:few_labels"), 3, "labels must be one per seed: 30 inputs, got"),
    "labels all wrong": (run("--data mine:wrong_labels"), 3, "must answer some clean inputs correctly, got 0 of 30"),
    "labels of text": (run("--data mine:text_labels"), 3, "must be (input, label), or"),
    "words for inputs": (run("--data mine:words"), 3, "got strings: text is not supported"),
    "no labels for wrong": (run("--oracle wrong"), 3, "oracle 'wrong' needs labels, got none"),
    "ragged inputs": (run("--data mine:ragged"), 3, "all inputs must have the same shape"),
    "a stream": (run("--data mine:stream"), 3, "an iterable without length"),
    "a number": (run("--data mine:number"), 3, "data must be"),
    "nothing": (run("--data mine:nothing"), 3, "data must be"),
    "data that cannot be read": (run("--data mine:torn"), 3, "item 0 raised OSError: disk gone"),
    "data that raises": (run("--data mine:raises"), 3, "raised ZeroDivisionError"),
    # memory
    "out of memory": (run("--model mine:huge"), 3, "out of memory on cpu with a batch of 1:"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_input_is_reported_in_one_line_with_its_exit_code(tmp_path, monkeypatch, capsys, name):
    enter(tmp_path, monkeypatch)
    words, code, message, *setup = WRONG[name]
    assert message in refused(words, code, setup, capsys)


def test_the_table_of_wrong_inputs_is_long():
    assert len(WRONG) >= 60
