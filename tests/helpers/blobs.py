"""Pictures of bright blobs whose colour is their class, and detectors of them: a perfect one, and one that recalls."""

import numpy as np
import torch
from scipy import ndimage
from torch import nn

CLASSES = ("red", "green", "blue")


def blobs(n=8, size=(64, 80), n_objects=3, random_seed=0):
    """Pictures `[n, 3, height, width]` of rectangles and ellipses, and their boxes `[n, objects, 5]`."""
    draw = torch.Generator().manual_seed(random_seed)
    height, width = size
    pictures = 0.15 + 0.1 * torch.rand(n, 3, height, width, generator=draw)
    labels = torch.tensor([0.0, 0, 0, 0, -1]).repeat(n, n_objects, 1)
    y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    for k in range(n):
        is_taken = torch.zeros(size, dtype=torch.bool)
        for j in range(n_objects):
            for _ in range(100):
                wide, high = torch.randint(10, 24, (2,), generator=draw).tolist()
                left = int(torch.randint(0, width - wide + 1, (1,), generator=draw))
                top = int(torch.randint(0, height - high + 1, (1,), generator=draw))
                around = slice(max(0, top - 3), top + high + 3), slice(max(0, left - 3), left + wide + 3)
                if not is_taken[around].any():
                    break
            else:
                continue
            is_inside = (x > left) & (x < left + wide) & (y > top) & (y < top + high)
            if torch.rand((), generator=draw) < 0.5:
                is_inside = ((x - left - wide / 2) / wide) ** 2 + ((y - top - high / 2) / high) ** 2 <= 0.25
            number = int(torch.randint(0, 3, (1,), generator=draw))
            pictures[k, :, is_inside] = 0.1
            pictures[k, number, is_inside] = 0.9
            is_taken |= is_inside
            labels[k, j] = torch.tensor([left, top, left + wide, top + high, number])
    return pictures, labels


class BlobDetector(nn.Module):
    """Perfect: each connected area in which one colour is bright is an object, wherever it is."""

    def __init__(self):
        super().__init__()
        self.look = nn.ReLU()

    def forward(self, pictures):
        return [self.find(picture) for picture in self.look(pictures)]

    def find(self, picture):
        boxes, numbers = [], []
        for number, colour in enumerate(picture):
            areas, _ = ndimage.label((colour > 0.5).cpu().numpy(), structure=np.ones((3, 3)))
            for rows, columns in ndimage.find_objects(areas):
                if (rows.stop - rows.start) * (columns.stop - columns.start) >= 4:
                    boxes.append([columns.start, rows.start, columns.stop, rows.stop])
                    numbers.append(number)
        return {
            "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
            "scores": torch.full((len(boxes),), 0.9),
            "labels": torch.tensor(numbers, dtype=torch.int64),
        }


class RecallingDetector(BlobDetector):
    """Finds the objects where they were in the most similar of the pictures that it knows."""

    def __init__(self, pictures):
        super().__init__()
        self.register_buffer("known", pictures)

    def forward(self, pictures):
        colours = pictures.mean((2, 3))[:, None] - self.known.mean((2, 3))
        return [self.find(self.known[k]) for k in colours.square().sum(2).argmin(1)]
