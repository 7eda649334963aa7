"""Sound: WAV files, each of which is read when it is needed."""

import io
import wave
from pathlib import Path

import numpy as np

from themis.data.files import Numbers, check_memory, data_errors, labelled_files, parse_whole, read_exactly
from themis.data.seeds import Seeds, from_files
from themis.errors import DataError

WAV_FORM = "a WAV file of uncompressed samples (PCM)"


def wav_seeds(path: Path, *, samples: int | str | None = None) -> Seeds:
    """A folder with one folder of WAV files per class, or of WAV files without labels.

    They become `[seeds, channels, samples]` in -1..1, so the bounds are -1,1. samples: the length of an input; the
    middle of longer files is taken, and shorter ones are followed by silence. All must have the same sampling rate.
    """
    files, labels, classes = labelled_files(path.absolute(), (".wav",), "WAV files")
    length = parse_whole(samples, "samples", 1 << 40, 16000)
    first, rate = read_wav(files[0])
    if 0 in first.shape:
        raise DataError(f"{files[0]} must hold at least one sample of each channel, but it has none: replace the file")

    def read(file: Path) -> Numbers:
        sound, own_rate = read_wav(file)
        if own_rate != rate:
            raise DataError(f"files must have one sampling rate, but {file} has {own_rate} Hz, not {rate}: resample it")
        if length is None:
            return sound
        start = max(0, sound.shape[1] - length) // 2
        return np.pad(sound[:, start : start + length], ((0, 0), (0, max(0, length - sound.shape[1]))))

    remedy = "cut them with ?samples=, and mix them to as many channels"
    return from_files(files, read, labels, remedy).with_classes(classes)


def read_wav(path: Path) -> tuple[Numbers, int]:
    """The samples `[channels, samples]` in -1..1 as float32, and the sampling rate."""
    with data_errors(path, WAV_FORM), path.open("rb") as file:
        content = read_exactly(file, path.stat().st_size, path)
    with data_errors(path, WAV_FORM), wave.open(io.BytesIO(content.data)) as sound:
        channels, width, rate = sound.getnchannels(), sound.getsampwidth(), sound.getframerate()
        check_memory(4 * len(content) // width, str(path))
        frames = sound.readframes(sound.getnframes())
        if width == 1:
            values = np.frombuffer(frames, np.uint8).astype(np.float32) / 128 - 1
        elif width == 3:
            parts = np.frombuffer(frames, np.uint8).reshape(-1, 3)
            wide = np.zeros((len(parts), 4), np.uint8)
            wide[:, 1:] = parts
            values = wide.view("<i4")[:, 0].astype(np.float32) / 2**31
        else:
            values = np.frombuffer(frames, f"<i{width}").astype(np.float32) / 2.0 ** (8 * width - 1)
        return np.ascontiguousarray(values.reshape(-1, channels).T), rate
