"""Keras models, saved and in memory."""

import numpy as np
import pytest
import torch

import themis
from themis.runs.source import Origin

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # Keras warns of many things

PICTURES = torch.rand(12, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_a_keras_file_is_tested_with_pictures(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "torch":
        pytest.skip("Keras was imported with another backend")
    monkeypatch.chdir(tmp_path)
    keras.utils.set_random_seed(0)
    layers = keras.layers
    net = keras.Sequential([keras.Input((8, 6, 3)), layers.Conv2D(4, 3, activation="relu"), layers.Flatten()])
    net.add(layers.Dense(3))
    net.save("net.keras")
    last = PICTURES[:, :, :8, :6].movedim(1, -1).numpy()
    np.savez("last.npz", inputs=last, labels=net.predict(last, verbose=0).argmax(1))
    origin = Origin(model="net.keras", data="npz:last.npz", neurons="channel")
    result = themis.run(origin.target(), origin.read(), "rotate", origin=origin, out="run", max_tests=200)
    assert result.start.clean_accuracy == 1
    assert [layer.n_neurons for layer in result.start.layers] == [4, 3]
    assert themis.open_run("run").faults[0].replay().is_same
    assert themis.run(net, last, "fgsm", max_tests=16).rounds[-1].tests == 16

    signals = np.random.default_rng(0).random((12, 20, 2), np.float32)
    filters = [keras.Input((20, 2)), layers.Conv1D(4, 3, activation="relu"), layers.Flatten(), layers.Dense(3)]
    of_signals = keras.Sequential(filters)
    result = themis.run(
        of_signals, (signals, of_signals.predict(signals, verbose=0).argmax(1)), "gaussian", max_tests=16
    )
    assert result.start.clean_accuracy == 1
