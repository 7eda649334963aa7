"""Models that packages know by name; each package is replaced by a stub with the one function that is called."""

import sys
from types import ModuleType, SimpleNamespace

import model_files as files
import pytest

from themis import DataError, MissingExtraError, ModelError, UsageError
from themis.target.loaders import Trust, load_model


@pytest.fixture
def calls(monkeypatch):
    """Record the calls of the packages."""
    asked = []

    def make(name, *args, **options):
        asked.append((str(name), *args, options))
        if name == "nothing":
            raise OSError("no such model\nsecond line")
        return files.make_net()

    def put(name, **attributes):
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)

    put("torchvision")
    put("torchvision.models", get_model=make)
    put("timm", create_model=make)
    put("transformers", AutoModelForImageClassification=SimpleNamespace(from_pretrained=make))
    put("keras", backend=SimpleNamespace(backend=lambda: "torch"), saving=SimpleNamespace(load_model=make))
    return asked


NAMED = {
    "torchvision:resnet18": ("resnet18", {"weights": "DEFAULT"}),
    "torchvision:resnet18(weights=None, num_classes=10)": ("resnet18", {"weights": None, "num_classes": 10}),
    "timm:vit_tiny(in_chans=1)": ("vit_tiny", {"pretrained": True, "in_chans": 1}),
    "hf:google/vit-base": ("google/vit-base", {}),
}


@pytest.mark.parametrize("spec", NAMED)
def test_a_model_is_loaded_from_a_package(spec, calls):
    assert isinstance(load_model(spec, Trust()).model, files.Net)
    assert calls == [NAMED[spec]]


def test_no_weights_are_downloaded_if_the_user_has_weights(calls):
    load_model("torchvision:resnet18", Trust(), has_weights=True)
    load_model("timm:resnet18", Trust(), has_weights=True)
    assert [each[-1] for each in calls] == [{"weights": None}, {"pretrained": False}]


def test_an_error_of_a_package_is_shown_in_one_line(calls):
    with pytest.raises(ModelError, match=r"^--model: nothing raised OSError: no such model$"):
        load_model("hf:nothing", Trust())


def test_keras_loads_safely_unless_the_file_is_trusted(calls, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("net.keras", "net.h5"):
        (tmp_path / name).write_bytes(b"a model")
    load_model("keras:net.keras", Trust())
    load_model("net.keras", Trust(("net.keras",)))
    load_model("keras:net.h5", Trust(("net.h5",)))
    assert [each[-1] for each in calls] == [{"safe_mode": True}, {"safe_mode": False}, {"safe_mode": False}]
    with pytest.raises(DataError, match=r"net.h5 must be trusted, but it is an older Keras file"):
        load_model("keras:net.h5", Trust())
    monkeypatch.setattr(sys.modules["keras"].backend, "backend", lambda: "jax")
    with pytest.raises(UsageError, match="its backend is jax: set KERAS_BACKEND=torch"):
        load_model("net.keras", Trust())


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("torchvision", "torchvision:resnet18"),
        ("timm", "timm:resnet18"),
        ("transformers", "hf:x"),
        ("keras", "keras:net.keras"),
        ("onnxruntime", "net.onnx"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(name, spec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for each in ("net.keras", "net.onnx"):
        (tmp_path / each).write_bytes(b"")
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=f"pip install .*{name.replace('runtime', '')}"):
        load_model(spec, Trust())
