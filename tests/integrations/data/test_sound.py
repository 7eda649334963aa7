"""WAV files as seeds."""

import wave

import numpy as np
import pytest

from themis import DataError, UsageError
from themis.data.readers import read_data

TONE = np.sin(np.arange(64) / 4)


def write(path, values=TONE, width=2, channels=1, rate=8000):
    path.parent.mkdir(parents=True, exist_ok=True)
    if width == 1:
        frames = np.rint(values * 127 + 128).astype(np.uint8).tobytes()
    else:
        whole = np.rint(values * (2 ** (8 * width - 1) - 1)).astype("<i8")
        frames = whole.view(np.uint8).reshape(-1, 8)[:, :width].tobytes()
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(frames)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_of_all_widths_are_read(tmp_path, width):
    write(tmp_path / "a.wav", width=width)
    seeds = read_data(f"wav:{tmp_path}")
    assert seeds.shape == (1, 1, 64)
    assert not seeds.has_labels
    np.testing.assert_allclose(seeds.inputs[0][0], TONE, atol=2 / 2 ** (8 * width - 1) + 1e-6)


def test_class_folders_channels_and_lengths(tmp_path):
    write(tmp_path / "no" / "a.wav", np.stack([TONE, -TONE], 1).ravel(), channels=2)
    write(tmp_path / "yes" / "a.wav", TONE[:40], channels=2)
    seeds = read_data(f"wav:{tmp_path}?samples=32")
    assert seeds.shape == (2, 2, 32)
    assert seeds.classes == ("no", "yes")
    assert seeds.labels.tolist() == [0, 1]
    np.testing.assert_allclose(seeds.inputs[0][0], TONE[16:48], atol=1e-4)
    assert float(seeds.inputs[1][0][20:].abs().max()) == 0, "silence follows a short file"


def test_what_does_not_fit_is_refused_in_words(tmp_path):
    with pytest.raises(DataError, match="the folder of WAV files must exist"):
        read_data(f"wav:{tmp_path / 'none'}")
    with pytest.raises(DataError, match=r"must hold WAV files \(\.wav\), but it has none"):
        read_data(f"wav:{tmp_path}")
    write(tmp_path / "a.wav")
    with pytest.raises(UsageError, match=r"samples must be a whole number .*, got 'few': write \?samples=16000"):
        read_data(f"wav:{tmp_path}?samples=few")
    write(tmp_path / "b.wav", TONE[:30])
    with pytest.raises(DataError, match=r"b.wav is \[1, 30\] and the first is \[1, 64\]: cut them with \?samples="):
        read_data(f"wav:{tmp_path}").in_memory()
    write(tmp_path / "b.wav", rate=16000)
    with pytest.raises(DataError, match=r"b.wav has 16000 Hz, not 8000: resample it"):
        read_data(f"wav:{tmp_path}").in_memory()
    (tmp_path / "a.wav").write_bytes(b"RIFF....no")
    with pytest.raises(DataError, match=r"a.wav must be a WAV file of uncompressed samples \(PCM\), but it cannot be"):
        read_data(f"wav:{tmp_path}")
    write(tmp_path / "a.wav", width=1, channels=65_535)
    with pytest.raises(DataError, match=r"a.wav must hold at least one sample of each channel, but it has none"):
        read_data(f"wav:{tmp_path}")
    write(tmp_path / "a.wav", np.zeros(2 * 65_535), 1, channels=65_535)
    write(tmp_path / "b.wav", np.zeros(2 * 65_535), 1, channels=65_535)
    assert read_data(f"wav:{tmp_path}").shape == (2, 65_535, 2)
