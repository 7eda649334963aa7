"""Models and data sets of MAITE: those of its documentation, with weights that fit their data, and a detector."""

from dataclasses import dataclass

import numpy as np
import torch
from blobs import CLASSES, BlobDetector, blobs

SHAPE = (3, 8, 8)
NAMES = ("red", "green", "blue")


def rows(batch):
    return np.vstack([np.asarray(picture).flatten() for picture in batch]).astype(np.float64)


class LinearClassifier:
    """The example in MAITE's `image_classification.Model`, which finds the brightest colour; pictures are bytes."""

    def __init__(self, names=NAMES):
        self.metadata = {"id": type(self).__name__, "index2label": dict(enumerate(names))}
        order = [NAMES.index(name) for name in names]
        self.weights = np.repeat(np.eye(3)[:, order], 64, 0) * 0.2
        self.kinds = set()

    def __call__(self, batch):
        self.kinds |= {(type(picture), picture.dtype) for picture in batch}
        out = np.exp(rows(batch) / 255 @ self.weights)
        return [row / row.sum() for row in out]


class ImageDataset:
    """The example in MAITE's `image_classification.Dataset`: pictures by hour, and their brightest colour."""

    def __init__(self, n=60, convert=np.asarray):
        self.metadata = {"id": "colours", "index2label": dict(enumerate(NAMES))}
        draw, self.convert = np.random.default_rng(0), convert
        self.images = draw.integers(60, 120, (n, *SHAPE)).astype(np.uint8)
        self.targets = np.eye(3)[self.images.mean((2, 3)).argmax(1)]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, k):
        metadata = {"id": f"picture {k}", "weather": ("sun", "fog")[k % 2], "hour_of_day": k % 24, "place": (1, 2)}
        return self.convert(self.images[k]), self.targets[k], metadata


@dataclass
class ObjectTarget:
    """The example in MAITE's `object_detection.Dataset`."""

    boxes: object
    labels: object
    scores: object


class BlobDataset:
    """Pictures of blobs and their boxes."""

    def __init__(self, n=5):
        self.metadata = {"id": "blobs", "index2label": dict(enumerate(CLASSES))}
        self.pictures, self.labels = blobs(n)

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, k):
        found = self.labels[k][self.labels[k][:, 4] >= 0]
        target = ObjectTarget(found[:, :4], found[:, 4], np.ones(len(found)))
        return self.pictures[k], target, {"id": k}


class Detector:
    """A perfect detector of blobs, with a score per class."""

    def __init__(self, names=CLASSES):
        self.metadata = {"id": "blobs", "index2label": dict(enumerate(names))}
        self.net = BlobDetector()

    def __call__(self, batch):
        found = self.net(torch.stack(list(batch)))
        scores = [0.9 * torch.nn.functional.one_hot(each["labels"], 3) for each in found]
        return [ObjectTarget(each["boxes"], each["labels"], score) for each, score in zip(found, scores, strict=True)]
