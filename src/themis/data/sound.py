"""Sound: WAV files, read one at a time, when they are needed."""

from __future__ import annotations

import io
import wave
from pathlib import Path

import numpy as np

from themis.data.files import Numbers, check_memory, data_errors, labelled_files, read_exactly, required_path
from themis.data.seeds import Seeds, from_reader
from themis.errors import DataError, UsageError

WAV_FORM = "a WAV file of uncompressed samples (PCM)"


def wav_seeds(path: Path | None = None, *, samples: int | str | None = None) -> Seeds:
    """A folder with one folder of WAV files per class, or of WAV files without labels.

    They become `[seeds, channels, samples]` in -1..1, so the bounds are -1,1. samples: the length of an input; the
    middle of longer files is taken, and shorter ones are followed by silence. All must have the same sampling rate.
    """
    folder = required_path(path, "wav").absolute()
    files, labels, classes = labelled_files(folder, (".wav",), "WAV files")
    if not files:
        raise DataError(f"{folder} must hold WAV files (.wav), but it has none: check the path")
    length = _parse_samples(samples)
    first, rate = read_wav(files[0])
    shape = _cut(first, length).shape
    if 0 in shape:
        raise DataError(f"{files[0]} must hold at least one sample of each channel, but it has none: replace the file")

    def read(k: int) -> Numbers:
        sound, own_rate = read_wav(files[k])
        if own_rate != rate:
            raise DataError(
                f"all files must have the same sampling rate, but {files[k]} has {own_rate} Hz and the first has "
                f"{rate} Hz: resample them"
            )
        cut = _cut(sound, length)
        if cut.shape != shape:
            raise DataError(
                f"all inputs must have the same shape [channels, samples], but {files[k]} is {list(cut.shape)} and the "
                f"first is {list(shape)}: cut them with ?samples={shape[1]}, and mix them to as many channels"
            )
        return cut

    return from_reader(read, shape, len(files), labels).with_classes(classes)


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


def _cut(sound: Numbers, length: int | None) -> Numbers:
    if length is None:
        return sound
    missing = max(0, length - sound.shape[1])
    first = max(0, sound.shape[1] - length) // 2
    return np.pad(sound[:, first : first + length], ((0, 0), (0, missing)))


def _parse_samples(samples: int | str | None) -> int | None:
    if samples is None:
        return None
    try:
        length = int(samples)
    except ValueError:
        length = 0
    if length < 1:
        raise UsageError(f"samples must be a positive whole number, got {samples!r}: write ?samples=16000")
    return length
