"""Examples of several inputs, one of which is perturbed."""

import numpy as np
import pytest
import torch
from torch import nn

import themis
from themis import BlackBox, DataError, Target, UsageError
from themis.campaign.preflight import check
from themis.cli.check import describe
from themis.data.seeds import read_seeds
from themis.runs.display.text import opening
from themis.settings import Settings

torch.manual_seed(0)
PICTURES, PLACES = torch.rand(40, 1, 6, 6), torch.randint(0, 3, (40,))
NAMED = {"picture": PICTURES, "place": PLACES}


class Net(nn.Module):
    """Its answer depends on the picture, and on the place by an embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.places, self.head = nn.Linear(36, 8), nn.Embedding(3, 8), nn.Linear(8, 3)

    def forward(self, picture, place):
        return self.head(torch.relu(self.body(picture.flatten(1)) + 2 * self.places(place)))


class OfDict(Net):
    def forward(self, inputs):
        return super().forward(inputs["picture"], inputs["place"])


class OfTuple(Net):
    def forward(self, inputs):
        return super().forward(*inputs)


with torch.no_grad():
    LABELS = Net()(PICTURES, PLACES).argmax(1)


class Examples(torch.utils.data.Dataset):
    def __len__(self):
        return len(PICTURES)

    def __getitem__(self, k):
        return {"picture": PICTURES[k], "place": PLACES[k]}, int(LABELS[k])


def run(target, data, perturbation="gaussian", **options):
    return themis.run(target, data, perturbation, **{"magnitude": 0.6, "max_tests": 300, **options})


def function(picture, place):
    with torch.no_grad():
        return Net()(torch.from_numpy(picture), torch.from_numpy(place)).numpy()


def function_of_dict(inputs):
    return function(**inputs)


TURNED = {"place": PLACES, "picture": PICTURES}
FORMS = {
    "names": (Net, (NAMED, LABELS)),
    "positions": (Net, ((PICTURES, PLACES), LABELS)),
    "arrays": (Net, ({name: value.numpy() for name, value in NAMED.items()}, LABELS.numpy())),
    "a dict": (OfDict, (NAMED, LABELS)),
    "a tuple": (OfTuple, ((PICTURES, PLACES), LABELS)),
    "a data set": (Net, Examples()),
    "a loader": (Net, torch.utils.data.DataLoader(Examples(), batch_size=8, shuffle=True)),
    "a function of names": (lambda: BlackBox(function), (TURNED, LABELS)),
    "a function of positions": (lambda: BlackBox(function, batch_size=7), ((PICTURES, PLACES), LABELS)),
    "a function of a dict": (lambda: BlackBox(function_of_dict), (TURNED, LABELS)),
}


@pytest.mark.parametrize("form", FORMS)
def test_one_input_is_perturbed_and_the_others_belong_to_their_examples(form):
    make, data = FORMS[form]
    net, target = Net(), make()
    result = run(target, data)
    assert result.start.clean_accuracy == 1
    assert [layer.name for layer in result.start.layers] == ["relu()", "output"][isinstance(target, BlackBox) :]
    for fault in list(result.faults)[:5]:
        replayed = fault.replay()
        assert replayed.is_same
        with torch.no_grad():
            answer = net(replayed.inputs[None], PLACES[fault.seed_id : fault.seed_id + 1]).argmax(1)
        assert int(answer) == fault.answer != int(LABELS[fault.seed_id])


@pytest.mark.parametrize("perturbation", ["fgsm", "rotate", "pgd"])
def test_attacks_and_samples_keep_examples_together(perturbation, tmp_path):
    data = (NAMED, LABELS)
    options = {"magnitude": None, "max_seeds": 30, "out": tmp_path / "run", "policy": "paper", "max_tests": 60}
    result = run(Net(), data, perturbation, **options)
    assert result.start.clean_accuracy == 1
    opened = themis.open_run(tmp_path / "run", Net(), data)
    assert all(fault.replay().is_same for fault in opened.faults.most_telling(3))
    resumed = themis.resume(tmp_path / "run", Net(), data, max_tests=90)
    assert resumed.rounds[-1].tests == 90
    moved = ({"picture": PICTURES, "place": PLACES.flip(0)}, LABELS)
    with pytest.raises(DataError, match="the data must be the same as in the run"):
        themis.resume(tmp_path / "run", Net(), moved, max_tests=120)


def test_the_input_to_perturb_is_an_option():
    class Both(nn.Module):
        def forward(self, first, second):
            return first[:, :3] + second.flatten(1)[:, :3]

    data = {"first": torch.rand(20, 3), "second": torch.rand(20, 1, 4, 4)}
    assert run(Both(), data).faults[0].replay().inputs.shape == (3,)
    result = run(Target(Both(), perturbed="second"), data)
    assert result.faults[0].replay().inputs.shape == (1, 4, 4)
    assert run(Target(Both(), perturbed="1"), (tuple(data.values()), None)).faults[0].replay().inputs.shape == (1, 4, 4)


def test_the_check_runs_with_several_inputs():
    result = check(Target(Net()), (NAMED, LABELS))
    assert (result.accuracy, result.problem) == (1, None)
    words = "input 'picture' is perturbed, and 'place' passed on unchanged"
    assert any(line.endswith(words) for line in describe(result, Settings()))
    assert words in opening(result.start)


class RandomForest:
    def predict(self, rows):
        return rows[:, 0]


def test_a_function_is_sent_equal_inputs_of_different_examples():
    pictures, places = torch.full((2, 1, 6, 6), 0.5), torch.tensor([0, 1])
    box = BlackBox(lambda inputs: inputs["place"][:, None].astype(np.float32), oracle="regression:1")
    result = run(box, {"picture": pictures, "place": places}, max_tests=10)
    assert result.rounds[-1].tests == 10
    box.side_inputs.others = read_seeds({"picture": pictures, "place": places}).others
    assert box.forward(pictures).flatten().tolist() == [0, 1]


def test_what_does_not_fit_is_explained():
    for target, data, error, message in (
        (Target(Net(), perturbed="place2"), NAMED, UsageError, "which has 'picture', 'place', got 'place2'"),
        (Target(Net(), perturbed="place"), PICTURES, UsageError, "but the data has one, got 'place': leave it out"),
        (RandomForest(), NAMED, UsageError, "need an nn.Module or a function, got Estimator, which takes one"),
        (Net(), {"picture": PICTURES, "place": PLACES[:5]}, DataError, "all inputs must have one row per example"),
    ):
        with pytest.raises(error, match=message):
            run(target, data)


def test_lists_of_numbers_are_one_input_still():
    class Numbers(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, k):
            return [0.1 * k, 0.2], 1

    seeds = read_seeds(Numbers())
    assert (seeds.shape, seeds.others) == ((4, 2), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_inputs_get_the_type_of_the_model(dtype):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.scale = nn.Linear(36, 8), nn.Linear(1, 8)

        def forward(self, picture, scale):
            return torch.relu(self.body(picture.flatten(1)) + self.scale(scale))

    scale = np.ones((40, 1))  # float64, as NumPy makes them
    assert run(Scaled().to(dtype), {"picture": PICTURES.numpy(), "scale": scale}).start.n_usable == 40
