"""Data sets of the Hugging Face hub as seeds."""

import sys
import types

import numpy as np
import pytest
from data_files import PIXELS, assert_reads
from PIL import Image

from themis import DataError, MissingExtraError, UsageError
from themis.data.readers import read_data

LABELS = [0, 0, 1, 1, 1, 2]


class Hub:
    """Stands for a data set of the hub: columns by name, items by number."""

    column_names = ("image", "label")
    features = types.MappingProxyType({"image": None, "label": types.SimpleNamespace(names=["cat", "dog", "owl"])})

    def __len__(self):
        return 6

    def __getitem__(self, at):
        if isinstance(at, str):
            return LABELS
        return {"image": Image.fromarray(PIXELS[at].transpose(1, 2, 0)), "label": LABELS[at]}


def test_a_data_set_of_the_hub_is_read(monkeypatch):
    asked = []

    def load_dataset(*words, **options):
        asked.append((words, options))
        return Hub()

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert_reads("hf:some/pets?split=validation", PIXELS / np.float32(255), LABELS)
    assert asked == [(("some/pets", None), {"split": "validation"})]
    assert read_data("hf:some/pets").classes == ("cat", "dog", "owl")
    with pytest.raises(UsageError, match="did you mean 'image'"):
        read_data("hf:some/pets?image=imag")


@pytest.mark.parametrize("spec", ["hf:reviews", "hf:reviews?image=text", "hf:reviews?image=words"])
def test_a_data_set_of_text_is_refused(spec, monkeypatch):
    class Reviews(Hub):
        column_names = ("text", "words", "label")

        def __getitem__(self, at):
            return (
                {"text": "a good film", "words": ["a", "good", "film"], "label": 1} if isinstance(at, int) else LABELS
            )

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=lambda *_, **__: Reviews()))
    with pytest.raises(DataError, match=r"got text in the column '(text|words)' of hf:reviews: text is not supported"):
        read_data(spec)


def test_the_hub_needs_its_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r'pip install "themis-dl\[hf\]"'):
        read_data("hf:mnist")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the library warns of many things
def test_a_split_of_a_saved_data_set_is_named_in_brackets(tmp_path):
    datasets = pytest.importorskip("datasets")
    parts = {
        name: datasets.Dataset.from_dict({"x": [[float(k), 0.5] for k in range(n)], "label": [k % 2 for k in range(n)]})
        for name, n in (("train", 6), ("validation", 4))
    }
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    for spec, n in (("[train]", 6), ("?split=validation", 4), ("[train[2:5]]", 3)):
        assert len(read_data(f"hf:{tmp_path / 'saved'}{spec}")) == n
    with pytest.raises(UsageError, match="the split 'test' must be in hf:"):
        read_data(f"hf:{tmp_path / 'saved'}")
    with pytest.raises(UsageError, match="needs one split"):
        read_data(f"hf:{tmp_path / 'saved'}[train]?split=train")
