"""Models that return their own losses in training mode, as the detectors of torchvision do."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import themis
from themis.errors import ModelError, UsageError
from themis.oracle import choose_oracle
from themis.retraining.grading import choose_loss, own_loss
from themis.target.detections import Detections

SIDE, CELL = 24, 8


class Detector(nn.Module):
    """One object per cell of a grid, with torchvision's protocol: losses in training mode, otherwise detections."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()
        )
        self.head = nn.Conv2d(32, 7, 2, stride=2)  # objectness, the box, and two classes

    def forward(self, images, targets=None):
        found = self.head(self.features(torch.stack(list(images)))).movedim(1, 3)
        if self.training:
            return self.losses(found, targets)
        return [self.detections(cells) for cells in found.flatten(1, 2)]

    def losses(self, found, targets):
        has_object, boxes, classes = torch.zeros(found.shape[:3]), torch.zeros(*found.shape[:3], 4), None
        classes = torch.zeros(found.shape[:3], dtype=torch.int64)
        for k, target in enumerate(targets):
            assert target["boxes"].dtype == torch.float32
            for box, label in zip(target["boxes"], target["labels"], strict=True):
                column, row = ((box[:2] + box[2:]) / 2 / CELL).long().clamp(0, SIDE // CELL - 1).tolist()
                has_object[k, row, column], boxes[k, row, column], classes[k, row, column] = 1, box / SIDE, label - 1
        here = has_object > 0
        none = found.sum() * 0
        return {
            "loss_objectness": F.binary_cross_entropy_with_logits(found[..., 0], has_object),
            "loss_box": F.smooth_l1_loss(found[..., 1:5][here], boxes[here]) * 10 if here.any() else none,
            "loss_classifier": F.cross_entropy(found[..., 5:][here], classes[here]) if here.any() else none,
        }

    def detections(self, cells):
        chances, labels = cells[:, 5:].softmax(1).max(1)
        return {"boxes": cells[:, 1:5] * SIDE, "scores": cells[:, 0].sigmoid() * chances, "labels": labels + 1}


def squares(n, random_seed):
    """Pictures of one square of two sizes, which is the class."""
    rng = torch.Generator().manual_seed(random_seed)
    pictures, objects = 0.2 * torch.rand(n, 1, SIDE, SIDE, generator=rng), torch.zeros(n, 2, 5)
    objects[:, 1, 4] = -1  # an empty row
    for k in range(n):
        kind = int(torch.randint(2, (), generator=rng))
        size = (6, 10)[kind]
        left, top = torch.randint(SIDE - size, (2,), generator=rng).tolist()
        pictures[k, 0, top : top + size, left : left + size] += 0.5
        objects[k, 0] = torch.tensor([left, top, left + size, top + size, kind])
    return pictures, objects


def target_of(module):
    return themis.Target(module, oracle="detection", output=Detections("torchvision", first_class=1))


@pytest.fixture(scope="module")
def detector():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net, (pictures, objects) = Detector(), squares(400, 1)
        optimiser = torch.optim.Adam(net.parameters(), 5e-3)
        for _ in range(120):
            rows = torch.randint(400, (32,))
            optimiser.zero_grad()
            own_loss(target_of(net), pictures[rows], objects[rows]).backward()
            optimiser.step()
    return net.eval()


def test_a_detector_learns_from_its_own_losses(detector, tmp_path):
    data = squares(300, 2)
    before = {name: tensor.clone() for name, tensor in detector.state_dict().items()}
    run = themis.run(
        target_of(detector), data, "gaussian", magnitude=0.4, max_tests=600, split=(0.4, 0.3, 0.3), coverage=None
    )
    options = {"random_seeds": 1, "epochs": 4, "batches": 30, "draws": 2, "passes": 200, "batch_size": 32}
    result = themis.retrain(run, data=data, out=tmp_path / "better", **options)
    assert result.gain > 0.02
    assert result.outcomes[0].change.clean.difference > -0.03
    assert all(torch.equal(before[name], tensor) for name, tensor in detector.state_dict().items())
    again = themis.retrain(run, data=data, out=tmp_path / "better", **options)  # loaded
    assert again.gain == result.gain


def test_a_detector_gets_targets_as_those_of_torchvision_do():
    seen = []

    class Recorded(Detector):
        def forward(self, images, targets=None):
            seen.append((images, targets))
            return {"loss": torch.stack([image.mean() for image in images]).sum(), "other": torch.ones(())}

    target = themis.Target(
        Recorded(),
        oracle="detection",
        preprocess=lambda x: list(F.interpolate(x, scale_factor=2)),
        output=Detections("torchvision", first_class=1),
    )
    objects = torch.tensor([[[1.0, 2, 3, 4, 0], [5, 6, 7, 8, -3], [5, 6, 5, 8, 1], [0, 0, 0, 0, -1]]])
    loss = own_loss(target, torch.ones(1, 1, SIDE, SIDE), objects)
    assert float(loss) == 2
    [(images, [targets])] = seen
    assert images[0].shape == (1, 2 * SIDE, 2 * SIDE)
    assert targets["boxes"].tolist() == [[2, 4, 6, 8]]  # a crowd, a box without extent and an empty row are left out
    assert targets["labels"].tolist() == [1]


def test_detectors_without_losses_of_their_own_need_one():
    oracle = choose_oracle("detection")

    class Bare(nn.Module):
        def forward(self, images):
            return images

    with pytest.raises(UsageError, match="takes no targets"):
        choose_loss(oracle, None, Bare())
    assert choose_loss(oracle, None, Detector()) is None
    with pytest.raises(ModelError, match="a dict of losses in training mode"):
        own_loss(target_of(Detector().eval()), *squares(2, 0))
