"""Class names: where they come from, how they are given, and where they are shown."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

import themis
from themis.data.readers import read_data
from themis.data.seeds import read_seeds
from themis.errors import DataError, UsageError
from themis.report.page import read_view
from themis.runs.source import Origin

NAMES = ("dark", "<b>medium</b>", "bright")


class Named(Dataset):
    """Pictures by brightness, with names as torchvision's data sets have them."""

    def __init__(self):
        self.classes = list(NAMES)

    def __len__(self):
        return 30

    def __getitem__(self, k):
        return torch.full((1, 4, 4), 0.1 + 0.4 * (k % 3)), k % 3


class Brightness(nn.Module):
    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU()

    def forward(self, x):
        return -(self.relu(x).flatten(1).mean(1, keepdim=True) - torch.tensor([0.1, 0.5, 0.9])).abs()


@pytest.mark.parametrize(
    "data", [Named(), Subset(Named(), range(12)), DataLoader(Named(), 4)], ids=lambda d: str(type(d))
)
def test_class_names_are_taken_from_the_data_set(data):
    seeds = read_seeds(data, 9)
    assert seeds.classes == NAMES
    assert seeds[torch.arange(3)].in_memory().classes == NAMES


def test_the_first_of_several_synonyms_is_used_and_numbers_are_ignored():
    data = Named()
    data.classes = [("tench", "Tinca tinca"), ("goldfish",)]
    assert read_seeds(data).classes == ("tench", "goldfish")
    data.classes = [0, 1, 2]
    assert read_seeds(data).classes is None


def test_readers_take_class_names_from_files(tmp_path):
    from PIL import Image

    for name in ("owl", "cat"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "pictures" / name / "0.png")
    assert read_data(f"images:{tmp_path / 'pictures'}").classes == ("cat", "owl")
    assert read_data(f"images:{tmp_path / 'pictures' / 'cat'}").classes is None
    (tmp_path / "named.csv").write_text("a,b,class\n0,1,spam\n1,0,ham\n")
    (tmp_path / "numbered.csv").write_text("a,b,class\n0,1,1\n1,0,0\n")
    assert read_data(f"csv:{tmp_path / 'named.csv'}").classes == ("ham", "spam")
    assert read_data(f"csv:{tmp_path / 'numbered.csv'}").classes is None


def test_class_names_are_kept_when_features_are_set():
    seeds = (
        read_seeds((torch.rand(4, 2), torch.tensor([0, 1, 0, 1]))).with_classes(NAMES).with_feature_names(["a", "b"])
    )
    assert seeds.with_features(seeds.features).classes == NAMES


@pytest.mark.parametrize("wrong", ["abc", [1, 2]])
def test_class_names_must_be_strings(wrong):
    with pytest.raises(UsageError, match="classes must be names"):
        themis.run(Brightness(), torch.rand(4, 1, 4, 4), "brightness", classes=wrong)


def run(out, data, **options):
    return themis.run(Brightness(), data, "brightness", magnitude=2, max_tests=200, coverage=None, out=out, **options)


def test_a_run_and_its_report_show_the_names(tmp_path):
    found = run(tmp_path / "run", Named())
    assert found.start.classes == NAMES
    view = read_view(tmp_path / "run")
    assert view.outcomes == {k: NAMES[k] for k in {fault.answer for fault in found.faults}}
    inputs = torch.stack([Named()[k][0] for k in range(30)])
    themis.resume(tmp_path / "run", Brightness(), (inputs, torch.arange(30) % 3), max_tests=300)
    assert set(read_view(tmp_path / "run").outcomes.values()) <= set(NAMES)


def test_given_names_take_precedence(tmp_path):
    other = ("night", "dusk", "noon")
    assert run(tmp_path / "run", Named(), classes=other).start.classes == other
    assert themis.resume(tmp_path / "run", Brightness(), Named(), max_tests=300).start.classes == other
    assert themis.open_run(tmp_path / "run").start.classes == other
    assert run(None, (torch.rand(9, 1, 4, 4), None), classes=np.array(other)).start.classes == other
    assert (
        run(None, Named(), origin=Origin(model="mine:net", data="mine:data", classes=list(other))).start.classes
        == other
    )


def test_names_must_cover_all_classes():
    data = Named()
    data.classes = ["dark", "bright"]
    with pytest.warns(RuntimeWarning, match="one name for each of the model's 3 answers, got 2.*numbers are shown"):
        assert run(None, data).start.classes is None
    with pytest.raises(UsageError, match="one name for each of the model's 3 answers, got 2"):
        run(None, Named(), classes=["dark", "bright"])
    data.target_transform = {0: 0, 1: 4, 2: 4}.get
    assert read_seeds(data).classes is None  # names of other numbers
    target = themis.Target(nn.Sequential(nn.Flatten(), nn.Linear(16, 1)), oracle="regression:9")
    data = torch.rand(9, 1, 4, 4), torch.rand(9)
    with pytest.raises(
        UsageError, match="classes must be left out if the model's answers are not classes, got 3 names"
    ):
        themis.run(target, data, "brightness", classes=NAMES)


@pytest.mark.parametrize("labels", [np.array(1j), np.array([1j, 0, 0])])
def test_complex_labels_are_neither_names_nor_cut_to_real_numbers(labels):
    with pytest.raises(DataError, match="labels must be real numbers"):
        read_seeds((np.zeros((3, 2), np.float32), labels))
