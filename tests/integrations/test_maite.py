"""Perturbations as augmentations of MAITE, in its own workflows."""

import numpy as np
import pytest
import torch
from maite_cases import BlobDataset, Detector, ImageDataset, LinearClassifier

from themis import UsageError
from themis.oracle.boxes import overlap
from themis.perturb import disturb
from themis_integrations.maite import as_augmentation

pytest.importorskip("maite")

import maite.protocols.generic as generic
from maite.tasks import augment_dataloader, evaluate, predict


class Accuracy:
    """A metric of MAITE."""

    metadata = {"id": "accuracy"}  # noqa: RUF012

    def reset(self):
        self.hits = []

    def update(self, answers, targets, metadata):
        self.hits += [np.argmax(a) == np.argmax(t) for a, t in zip(answers, targets, strict=True)]

    def compute(self):
        return {"accuracy": float(np.mean(self.hits))}


def accuracy(augmentation, batch_size=16):
    figures, _, batches = evaluate(
        model=LinearClassifier(),
        metric=Accuracy(),
        dataset=ImageDataset(),
        batch_size=batch_size,
        augmentation=augmentation,
        return_augmented_data=True,
    )
    return figures["accuracy"], [datum for batch in batches for datum in zip(*batch, strict=True)]


def test_evaluate_disturbs_with_the_given_theta():
    augmentation = as_augmentation("gaussian", sigma=0.09)
    assert isinstance(augmentation, generic.Augmentation)
    assert augmentation.metadata == {"id": "themis gaussian (sigma=0.09)"}
    share, datums = accuracy(augmentation)
    assert share < accuracy(as_augmentation("gaussian", sigma=0))[0] == 1
    assert {datum[2]["theta_sigma"] for datum in datums} == {0.09}
    assert datums[0][0].dtype == np.uint8
    assert datums[0][2]["weather"] == "sun"  # what the data set says is kept


def test_a_datum_is_disturbed_alike_in_every_batch():
    first, second = (accuracy(as_augmentation("gaussian"), batch_size=size)[1] for size in (1, 7))
    for one, other in zip(first, second, strict=True):
        assert np.array_equal(one[0], other[0])
        assert one[2] == other[2]
    assert len({datum[2]["theta_sigma"] for datum in first}) == len(first)
    other_seed = accuracy(as_augmentation("gaussian", random_seed=1))[1]
    assert other_seed[0][2] != first[0][2]


def test_the_pictures_are_those_of_the_perturbation():
    [[picture], _, [metadata]] = as_augmentation("contrast", change=-0.5)(([np.full((3, 4, 4), 0.9)], [0], [{"id": 1}]))
    expected = disturb("contrast", torch.full((1, 3, 4, 4), 0.9), {"change": -0.5})[0]
    assert picture.dtype == np.float64
    assert np.allclose(picture, expected)
    assert metadata["theta_change"] == -0.5


def test_predict_and_augment_dataloader_take_it():
    data, model = BlobDataset(), Detector()
    shifted, batches = predict(
        model=model, dataset=data, augmentation=as_augmentation("shift", x=0.1, y=-0.05), return_augmented_data=True
    )
    for [answer], (_, [target], _) in zip(shifted, batches, strict=True):
        assert len(target.boxes)
        assert (overlap(target.boxes[None], answer.boxes[None])[0].amax(1) > 0.7).all()
    loader = [([datum[0]], [datum[1]], [datum[2]]) for datum in map(data.__getitem__, range(len(data)))]
    dimmed = list(augment_dataloader(augmentation=as_augmentation("brightness", shift=-0.2), dataloader=loader))
    assert torch.equal(dimmed[0][1][0].boxes, data[0][1].boxes)  # nothing has moved
    assert dimmed[0][0][0].mean() < data[0][0].mean()


BATCH = ([np.zeros((3, 8, 8))], [0], [{"id": 0}])
BRIGHT = ([np.full((3, 8, 8), 255.0)], [0], [{"id": 0}])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: as_augmentation("fgsm", epsilon=0.1), "cannot attack the model"),
        (lambda: as_augmentation("fog", depth=0.1), "theta 'depth' of 'fog' must be one it has"),
        (lambda: as_augmentation("fog", density=7)(BATCH), "must lie in 0..1.8, got 7"),
        (
            lambda: as_augmentation("fog")(([np.full((3, 8, 8), 255.0)], [0], [{"id": 0}])),
            r"must lie in \(0, 1\)",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()
