"""Models and data as people bring them: `attempts.py` copies this file into an empty project, and commands name it.

Functions that a command needs nothing of but a file are called `write_...`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

CLASSES = 10


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """Pictures `[1797, 1, 8, 8]` of digits in 0..1, and which digit each is."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.images[:, None] / 16, dtype=torch.float32), torch.tensor(data.target)


def train(net: nn.Module, inputs: Any, labels: Tensor, epochs: int = 60) -> nn.Module:
    """Train a model on all inputs at once."""
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    for _ in range(epochs):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(*arguments), labels).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return net.eval()


def untrained_net() -> nn.Sequential:
    torch.manual_seed(0)
    convolution = (nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*convolution, nn.Linear(72, 32), nn.ReLU(), nn.Linear(32, CLASSES))


@functools.cache
def net() -> nn.Module:
    """A convolutional net that reads digits."""
    return train(untrained_net(), *digits())


def quantised() -> nn.Module:
    """The net with linear layers of eight bits, whose scale is that of each batch."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        quantise: Callable[..., nn.Module] = torch.ao.quantization.quantize_dynamic
        return quantise(net(), {nn.Linear}, dtype=torch.qint8)


def half() -> nn.Module:
    return net().to(torch.bfloat16)


def compiled() -> nn.Module:
    compiled = torch.compile(net())
    assert isinstance(compiled, nn.Module)
    return compiled


class ManyOutputs(nn.Module):
    """A net with 64 outputs for ten digits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))

    def forward(self, pictures: Tensor) -> Tensor:
        scores: Tensor = self.body(pictures)
        return scores


class TwoHeads(nn.Module):
    """A net that returns two kinds of scores."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.parity = net(), nn.Linear(64, 2)

    def forward(self, pictures: Tensor) -> dict[str, Tensor]:
        return {"digit": self.net(pictures), "parity": self.parity(pictures.flatten(1))}


def colour_digits() -> Tensor:
    """The digits as pictures `[300, 3, 32, 32]`."""
    return nn.functional.interpolate(digits()[0][:300], size=32).expand(-1, 3, -1, -1).contiguous()


def service() -> Any:
    """A function of arrays, as a client of a remote model would be."""
    import themis

    model = net()

    def predict(pictures: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            scores: Tensor = model(torch.from_numpy(pictures))
        return scores.numpy()

    return themis.BlackBox(predict, batch_size=32, workers=2, version="1")


def flowers() -> Any:
    """Measurements of 150 irises, with their species in the column `class`, as a DataFrame of pandas."""
    table = numbered_flowers()
    return table.assign(**{"class": np.array(["setosa", "versicolor", "virginica"])[table["class"]]})


def numbered_flowers() -> Any:
    """The same with species as numbers, which XGBoost requires."""
    from sklearn.datasets import load_iris

    return load_iris(as_frame=True).frame.rename(columns={"target": "class"})


def flowers_of_polars() -> Any:
    import polars

    return polars.from_pandas(flowers())


def _fit(estimator: Any, table: Any = None) -> Any:
    table = flowers() if table is None else table
    return estimator.fit(table.drop(columns="class"), table["class"])


def forest() -> Any:
    from sklearn.ensemble import RandomForestClassifier

    return _fit(RandomForestClassifier(50, random_state=0))


def pipeline() -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return _fit(make_pipeline(StandardScaler(), LogisticRegression()))


def xgboost() -> Any:
    import xgboost

    return _fit(xgboost.XGBClassifier(n_estimators=30), numbered_flowers())


def lightgbm() -> Any:
    import lightgbm

    return _fit(lightgbm.LGBMClassifier(n_estimators=30, verbose=-1))


def net_of_rows() -> nn.Module:
    """A net that tells irises by four measurements."""
    from sklearn.datasets import load_iris

    data = load_iris()
    torch.manual_seed(0)
    rows = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    return train(rows, torch.tensor(data.data, dtype=torch.float32), torch.tensor(data.target), epochs=100)


class PictureAndPlace(nn.Module):
    """A net of two inputs: a picture, and the number of the place where it was taken."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.places, self.head = nn.Linear(64, 32), nn.Embedding(4, 32), nn.Linear(32, CLASSES)

    def forward(self, picture: Tensor, place: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.relu(self.body(picture.flatten(1)) + self.places(place)))
        return scores


def places() -> Tensor:
    return torch.arange(len(digits()[0])) % 4


def digits_and_places() -> tuple[dict[str, Tensor], Tensor]:
    pictures, labels = digits()
    return {"picture": pictures, "place": places()}, labels


@functools.cache
def net_of_both() -> nn.Module:
    return train(PictureAndPlace(), (digits()[0], places()), digits()[1])


def service_of_both() -> Any:
    import themis

    model = net_of_both()

    def predict(picture: np.ndarray, place: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            scores: Tensor = model(torch.from_numpy(picture), torch.from_numpy(place))
        return scores.numpy()

    return themis.BlackBox(predict, version="1")


class Detector(nn.Module):
    """Finds the bright object on a dark ground, and returns its box as the detectors of torchvision do."""

    def forward(self, pictures: Tensor) -> list[dict[str, Tensor]]:
        results = []
        for picture in pictures.mean(1):
            rows, columns = (picture > 0.5).nonzero(as_tuple=True)
            none = len(rows) == 0
            edges = [0.0] * 4 if none else [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            box = torch.tensor([list(map(float, edges))])[: 0 if none else 1]
            results.append({"boxes": box, "labels": torch.ones(len(box)).long(), "scores": torch.ones(len(box))})
        return results


def _squares(n: int = 60, side: int = 32) -> tuple[Tensor, Tensor]:
    """Pictures `[n, 3, side, side]` of a bright square, and its left upper corner and size `[n, 3]`."""
    rng = torch.Generator().manual_seed(0)
    size = torch.randint(6, 12, (n,), generator=rng)
    corner = torch.stack([torch.randint(4, 16, (n,), generator=rng), torch.randint(4, 16, (n,), generator=rng)], 1)
    at = torch.arange(side)
    inside_x = (at >= corner[:, :1]) & (at < (corner[:, 0] + size)[:, None])
    inside_y = (at >= corner[:, 1:]) & (at < (corner[:, 1] + size)[:, None])
    inside = (inside_y[:, :, None] & inside_x[:, None, :])[:, None]
    return torch.where(inside, 0.8, 0.2).expand(-1, 3, -1, -1).contiguous(), torch.cat([corner, size[:, None]], 1)


def squares_with_boxes() -> tuple[Tensor, Tensor]:
    pictures, squares = _squares()
    left, top, size = squares.unbind(1)
    return pictures, torch.stack([left, top, left + size, top + size, torch.ones_like(size)], 1)[:, None].float()


class Segmenter(nn.Module):
    """Scores of two classes for every pixel: dark ground and bright object."""

    def forward(self, pictures: Tensor) -> Tensor:
        brightness = pictures.mean(1)
        return torch.stack([1 - brightness, brightness], 1)


def squares_with_maps() -> tuple[Tensor, Tensor]:
    pictures, _ = _squares()
    return pictures, (pictures.mean(1) > 0.5).long()


def tones() -> tuple[Tensor, Tensor]:
    """Signals `[300, 1, 128]` in -1..1 of a low or a high tone."""
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(300) % 2
    phase = torch.rand(300, 1, generator=rng)
    turns = torch.linspace(0, 1, 128) * (4 + 8 * labels[:, None]) + phase
    noise = 0.05 * torch.randn(300, 128, generator=rng)
    return (0.5 * (2 * torch.pi * turns).sin() + noise).clamp(-1, 1)[:, None], labels


def net_of_tones() -> Any:
    import themis

    torch.manual_seed(0)
    layers = (nn.Conv1d(1, 8, 9, stride=2), nn.ReLU(), nn.AdaptiveMaxPool1d(4), nn.Flatten(), nn.Linear(32, 2))
    return themis.Target(train(nn.Sequential(*layers), *tones()), bounds=(-1, 1))


def clips() -> tuple[Tensor, Tensor]:
    """Clips `[80, 4, 3, 32, 32]` of a square that grows brighter, or darker."""
    pictures, _ = _squares(80)
    labels = torch.arange(80) % 2
    steps = torch.linspace(0, 0.4, 4).view(1, 4, 1, 1, 1)
    change = torch.where(labels.view(-1, 1, 1, 1, 1) == 0, steps, 0.4 - steps)
    return pictures[:, None] * (0.6 + change), labels


class NetOfClips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv3d(3, 4, (2, 3, 3)), nn.Linear(4, 2)

    def forward(self, clips: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.relu(self.conv(clips.transpose(1, 2))).mean((2, 3, 4)))
        return scores


def net_of_clips() -> nn.Module:
    return train(NetOfClips(), *clips())


def cell() -> Any:
    """The weights of the net in a cell of MindSpore."""
    import mindspore
    from mindspore import nn as cells

    from themis_integrations.models.mindspore import black_box

    layers = (cells.Conv2d(1, 8, 3, pad_mode="valid", has_bias=True), cells.ReLU(), cells.MaxPool2d(2, 2))
    dense = (cells.Dense(72, 32), cells.ReLU(), cells.Dense(32, CLASSES))
    model = cells.SequentialCell(*layers, cells.Flatten(), *dense)
    for parameter, value in zip(model.get_parameters(), net().state_dict().values(), strict=True):
        parameter.set_data(mindspore.Tensor(value.numpy()))
    return black_box(model.set_train(False))


def sentences() -> list[str]:
    return ["the food was good", "the food was bad"]


def token_ids() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 1000, (50, 12)), torch.arange(50) % 2


def net_of_text() -> nn.Module:
    return nn.Sequential(nn.Embedding(1000, 8), nn.Flatten(), nn.Linear(96, 2))


def write_pictures() -> None:
    pictures, labels = digits()
    np.savez("digits.npz", inputs=pictures.numpy(), labels=labels.numpy())


def write_script() -> None:
    write_pictures()
    torch.jit.script(net()).save("net.ts")  # type: ignore[no-untyped-call]


def write_export() -> None:
    write_pictures()
    batch = torch.export.Dim("batch")
    program = torch.export.export(net(), (digits()[0][:2],), dynamic_shapes=({0: batch},))
    torch.export.save(program, "net.pt2")


def write_script_of_both() -> None:
    torch.jit.script(net_of_both()).save("both.ts")  # type: ignore[no-untyped-call]


def write_export_of_both() -> None:
    batch = torch.export.Dim("batch")
    inputs = (digits()[0][:2], places()[:2])
    program = torch.export.export(net_of_both(), inputs, dynamic_shapes=({0: batch}, {0: batch}))
    torch.export.save(program, "both.pt2")


def write_onnx() -> None:
    """Write the net as an ONNX file, node by node, as exporters need packages of their own."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    write_pictures()
    layers = dict(net().named_children())
    weights = {name: value.detach().numpy() for name, value in net().state_dict().items()}
    nodes = [
        helper.make_node("Conv", ["pictures", "0.weight", "0.bias"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MaxPool", ["b"], ["c"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["c"], ["d"]),
        helper.make_node("Gemm", ["d", "4.weight", "4.bias"], ["e"], transB=1),
        helper.make_node("Relu", ["e"], ["f"]),
        helper.make_node("Gemm", ["f", "6.weight", "6.bias"], ["scores"], transB=1),
    ]
    assert len(layers) == len(nodes)
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("pictures", TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", CLASSES])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), "net.onnx")


def write_keras() -> None:
    import keras

    layers = keras.layers
    stack = [keras.Input((8, 8, 1)), layers.Conv2D(8, 3, activation="relu"), layers.Flatten()]
    model = keras.Sequential([*stack, layers.Dense(32, activation="relu"), layers.Dense(CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(1e-2), loss=loss)
    pictures, labels = digits()
    last = pictures.movedim(1, -1).numpy()
    model.fit(last, labels.numpy(), epochs=3, batch_size=64, verbose=0)
    model.save("net.keras")
    np.savez("digits.npz", inputs=last, labels=labels.numpy())


def write_transformer() -> None:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=8
    )
    transformers.ViTForImageClassification(config).save_pretrained("vit")
    transformers.ViTImageProcessor(image_mean=[0.5] * 3, image_std=[0.25] * 3).save_pretrained("vit")


def write_lightning() -> None:
    import pytorch_lightning

    class Training(pytorch_lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.loss = untrained_net(), nn.CrossEntropyLoss(weight=torch.ones(CLASSES))

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss: Tensor = self.loss(self.model(batch[0]), batch[1])
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 1e-2)

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*digits()), batch_size=64, shuffle=True)
    trainer = pytorch_lightning.Trainer(max_epochs=3, logger=False, enable_progress_bar=False, accelerator="cpu")
    training = Training()
    trainer.fit(training, loader)
    trainer.save_checkpoint("last.ckpt")


def write_data_set() -> None:
    import datasets
    from PIL import Image

    pictures, labels = digits()
    shown = [Image.fromarray((255 * picture[0]).byte().numpy()) for picture in pictures[:200]]
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=[f"digit {k}" for k in range(CLASSES)])}
    )
    rows = {"image": shown, "label": labels[:200].tolist()}
    test = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"test": test}).save_to_disk("digits")


def write_table() -> None:
    flowers().to_csv("flowers.csv", index=False)


def write_text() -> None:
    Path("reviews.csv").write_text("text,label\n" + "".join(f"{text},{k}\n" for k, text in enumerate(sentences())))
