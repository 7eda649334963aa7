"""Test an object detector: train a small one on synthetic pictures, then find what makes it lose objects."""

import torch
from torch import nn

import themis

SIDE, CELLS, CLASSES = 64, 8, ("disc", "square")


def draw(n, seed):
    """Pictures of discs and squares on a noisy ground, and their boxes (left, top, right, bottom, class)."""
    rng = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(SIDE) + 0.5, torch.arange(SIDE) + 0.5, indexing="ij")
    pictures = 0.25 + 0.15 * torch.rand(n, 3, SIDE, SIDE, generator=rng)
    boxes = torch.tensor([0.0, 0, 0, 0, -1]).repeat(n, 2, 1)  # class -1: there is no object in this row
    for picture, rows in zip(pictures, boxes, strict=True):
        for half in range(1 + int(torch.rand((), generator=rng) < 0.7)):  # one object in each half of the picture
            radius = 7 + 5 * torch.rand((), generator=rng)
            across, down = torch.rand(2, generator=rng)
            cx = 32 * half + radius + across * (32 - 2 * radius)
            cy = radius + down * (SIDE - 2 * radius)
            number = int(torch.rand((), generator=rng) < 0.5)
            apart = torch.stack([(x - cx).abs(), (y - cy).abs()])
            inside = (apart.norm(dim=0) if number == 0 else apart.amax(0)) < radius
            picture[:, inside] = 0.45 + 0.5 * torch.rand(3, 1, generator=rng)
            rows[half] = torch.tensor([cx - radius, cy - radius, cx + radius, cy + radius, number])
    return pictures.clamp(0, 1), boxes


class Detector(nn.Module):
    """One candidate per cell of a grid: its box and a score for each class, as YOLO returns them, `[n, 4 + 2, 64]`."""

    def __init__(self):
        super().__init__()
        layers, before = [], 3
        for channels in (16, 32, 48):
            layers += [nn.Conv2d(before, channels, 3, stride=2, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
            before = channels
        layers += [nn.Conv2d(before, 48, 3, padding=1), nn.ReLU()]
        self.body, self.head = nn.Sequential(*layers), nn.Conv2d(48, 4 + len(CLASSES), 1)
        place = (torch.arange(CELLS) + 0.5) * SIDE / CELLS
        self.register_buffer("centres", torch.cartesian_prod(place, place).flip(1).T)  # x, y of each cell

    def raw(self, pictures):
        return self.head(self.body(pictures)).flatten(2)

    def forward(self, pictures):
        raw = self.raw(pictures)
        centre = self.centres + 8 * raw[:, :2].tanh()
        size = SIDE / 4 * raw[:, 2:4].clamp(-3, 3).exp()
        return torch.cat([centre, size, raw[:, 4:].sigmoid()], 1)


def loss(detector, pictures, boxes):
    """The cell in the middle of an object learns its box; all cells learn which of them hold an object."""
    raw = detector.raw(pictures)
    centre, size = (boxes[..., :2] + boxes[..., 2:4]) / 2, boxes[..., 2:4] - boxes[..., :2]
    column, row = (centre * CELLS / SIDE).long().clamp(0, CELLS - 1).unbind(-1)
    cell, real = row * CELLS + column, boxes[..., 4] >= 0
    wanted = torch.zeros_like(raw[:, 4:])
    picture, which = real.nonzero(as_tuple=True)
    wanted[picture, boxes[picture, which, 4].long(), cell[picture, which]] = 1
    found = raw[picture, :4, cell[picture, which]]
    shift = (centre[picture, which] - detector.centres.T[cell[picture, which]]) / 8
    scale = (size[picture, which] * 4 / SIDE).log()
    box_loss = (found[:, :2].tanh() - shift).abs().mean() + (found[:, 2:] - scale).abs().mean()
    return nn.functional.binary_cross_entropy_with_logits(raw[:, 4:], wanted) * 30 + box_loss


torch.manual_seed(0)
detector = Detector()
pictures, boxes = draw(1000, seed=1)
optimiser = torch.optim.Adam(detector.parameters(), lr=3e-3)
for _ in range(8):
    for rows in torch.randperm(len(pictures)).split(50):
        optimiser.zero_grad()
        loss(detector, pictures[rows], boxes[rows]).backward()
        optimiser.step()

target = themis.Target(detector, output=themis.Detections("yolo", nms=0.5))
seeds = draw(150, seed=2)
run = themis.run(target, seeds, "shift + gaussian(sigma=0:0.1)", max_tests=2000, classes=CLASSES)
print(f"mAP on clean pictures: {run.start.clean_map:.2f}; {run.rounds[-1].distinct_faults} distinct faults")
print(run.stop)
for fault in run.faults.most_telling(5):
    print(f"seed {fault.seed_id}: {fault.outcome} at {', '.join(f'{k} {v:.2f}' for k, v in fault.theta.items())}")
