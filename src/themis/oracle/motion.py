"""The motion of disturbed pictures, and of label maps, points and boxes with them.

A perturbation that moves pixels defines a `source`: where the content at each place of the disturbed picture comes
from. Positions are relative to the picture's centre, in shares of its shorter side; x grows to the right, y downwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from themis.compute.rng import Rng

Size = tuple[int, int]
"""Height and width of a picture in pixels."""
Source = Callable[[Tensor, Tensor, Tensor, Rng, Size], tuple[Tensor, Tensor]]
"""`source(x, y, theta [tests, dimensions], rng, size) -> (x, y)`: where the content at positions of the disturbed
picture (`[tests, ...]`, or `[1, ...]` for all tests) was before."""

NEGLIGIBLE_WEIGHT = 1 / 512
"""Weight of a pixel in an interpolation below which it is ignored: half a level of an 8-bit picture."""
NEWTON_STEPS = 12
"""Steps of Newton's method to find the place that a point moves to; affine maps need one step."""
NEWTON_TOLERANCE = 1e-16
"""Squared distance, in shares of the shorter side, at which Newton's method ends."""
SLOPE_STEP = 1e-4
"""Step of the finite differences that give the slope of a source, as a share of the shorter side."""
OUTLINE_POINTS = 32
"""Points on the outline of a box; after the motion, the box around them is the moved box."""


@dataclass(frozen=True)
class MotionStep:
    """One perturbation that moved the pictures: its source, its theta and the state of its random numbers."""

    source: Source
    theta: Tensor  # [tests, dimensions]
    noise_seed: Tensor  # [tests]
    drawn: int
    size: Size

    def trace_back(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Where the content at these positions was before the step."""
        return self.source(x, y, self.theta.to(x.dtype), Rng(self.noise_seed, self.drawn), self.size)


@dataclass(frozen=True)
class Motion:
    """How the pictures of some tests have moved, as a sequence of steps; without steps, they have not moved.

    Pixel coordinates of points and boxes are continuous: (0, 0) is the upper left corner of the picture,
    (width, height) the lower right corner, and (0.5, 0.5) the centre of the first pixel.
    """

    steps: tuple[MotionStep, ...] = ()

    def __bool__(self) -> bool:
        """Whether anything has moved."""
        return bool(self.steps)

    def __getitem__(self, rows: slice | Tensor) -> Motion:
        """The motion of some of the tests."""
        return Motion(
            tuple(replace(step, theta=step.theta[rows], noise_seed=step.noise_seed[rows]) for step in self.steps)
        )

    @staticmethod
    def joined(parts: Sequence[Motion]) -> Motion:
        """Join the motions of consecutive parts of the tests."""
        columns = zip(*(part.steps for part in parts), strict=True)
        return Motion(
            tuple(
                replace(
                    steps[0],
                    theta=torch.cat([step.theta for step in steps]),
                    noise_seed=torch.cat([step.noise_seed for step in steps]),
                )
                for steps in columns
            )
        )

    def maps(self, maps: Tensor, fill: int) -> Tensor:
        """Move label maps `[tests, ..., height, width]` like the pictures; they may have a lower resolution.

        A pixel of the disturbed picture is interpolated between pixels of the previous picture. If these have the same
        label, the pixel gets it; if their labels differ, or the pixel shows nothing of the picture, it gets `fill`.
        """
        for step in self.steps:
            maps = _sampled(step, maps, fill)
        return maps

    def points(self, points: Tensor) -> Tensor:
        """Move points `[tests, points, 2]` in pixels like the pictures; they may leave the pictures.

        The result is differentiable in the points and in theta.
        """
        for step in self.steps:
            points = _moved(step, points)
        return points

    def sources(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Where places `[tests, points, 2]` of the disturbed pictures, in pixels, were in the clean pictures.

        Also returns which places show the clean picture itself, rather than its mirror image beyond the edges.
        """
        is_inside = torch.ones(points.shape[:-1], dtype=torch.bool, device=points.device)
        for step in reversed(self.steps):
            points = _pixels(*step.trace_back(*_positions(points.double(), step.size)), step.size)
            is_inside &= are_within(points, step.size)
        return points, is_inside

    def boxes(self, boxes: Tensor, outline: Literal["box", "ellipse"] = "box") -> tuple[Tensor, Tensor]:
        """Move boxes `[tests, boxes, 4]` (left, top, right, bottom in pixels) like the pictures, and clip them.

        Returns the boxes, and the share of each box's area that is left after clipping, `[tests, boxes]`; the box of an
        object outside the picture is empty and has share 0. outline: what the moved box bounds, the box itself or the
        ellipse inside it, which is closer to the bounds of a rotated object.
        """
        if not self.steps:
            return boxes, torch.ones(boxes.shape[:-1], dtype=boxes.dtype, device=boxes.device)
        height, width = self.steps[0].size
        n, n_boxes = boxes.shape[:2]
        lines = _outline(boxes, outline)
        moved = self.points(lines.reshape(n, -1, 2)).view(n, n_boxes, lines.shape[2], 2)
        least, most = moved.amin(2), moved.amax(2)
        ends = (end[..., axis].clamp(0, length) for end in (least, most) for axis, length in enumerate((width, height)))
        clipped = torch.stack(list(ends), -1)
        area, left = (most - least).prod(-1), (clipped[..., 2:] - clipped[..., :2]).prod(-1)
        return clipped, torch.where(area > 0, left / area.clamp(min=torch.finfo(area.dtype).tiny), 0)


def are_within(points: Tensor, size: Size) -> Tensor:
    """Which points `[..., 2]` in pixels lie in a picture."""
    height, width = size
    across, down = points.unbind(-1)
    return (across >= 0) & (across <= width) & (down >= 0) & (down <= height)


def _positions(points: Tensor, size: Size) -> tuple[Tensor, Tensor]:
    """Convert points in pixels to positions."""
    height, width = size
    return (points[..., 0] - width / 2) / min(size), (points[..., 1] - height / 2) / min(size)


def _pixels(x: Tensor, y: Tensor, size: Size) -> Tensor:
    """Convert positions to points in pixels."""
    height, width = size
    return torch.stack([x * min(size) + width / 2, y * min(size) + height / 2], -1)


def _sampled(step: MotionStep, maps: Tensor, fill: int) -> Tensor:
    """The maps after one step."""
    (height, width), (rows, columns) = step.size, maps.shape[-2:]
    unit = min(step.size)

    def centres(n: int, length: int) -> Tensor:
        places = torch.arange(n, dtype=torch.float32, device=maps.device)
        return (places - (n - 1) / 2) * (length / n / unit)

    x, y = step.trace_back(centres(columns, width).view(1, 1, -1), centres(rows, height).view(1, -1, 1))
    shape = (len(maps), rows, columns)

    def neighbours(position: Tensor, n: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """The two pixels between which is interpolated, and whether the position is inside the map."""
        pixel = (position * (unit * n / length) + (n - 1) / 2).expand(shape)
        is_inside = (pixel >= -0.5 - NEGLIGIBLE_WEIGHT) & (pixel <= n - 0.5 + NEGLIGIBLE_WEIGHT)
        before = (pixel - (1 - NEGLIGIBLE_WEIGHT)).ceil().clamp(0, n - 1)
        after = (pixel + (1 - NEGLIGIBLE_WEIGHT)).floor().clamp(0, n - 1)
        return before.long(), after.long(), is_inside

    left, right, is_across = neighbours(x, columns, width)
    above, below, is_down = neighbours(y, rows, height)
    flat = maps.reshape(len(maps), -1, rows * columns)

    def read(row: Tensor, column: Tensor) -> Tensor:
        index = (row * columns + column).view(len(maps), 1, -1)
        return flat.gather(2, index.expand(-1, flat.shape[1], -1))

    label = read(above, left)
    is_same = (is_across & is_down).view(len(maps), 1, -1)
    for row, column in ((above, right), (below, left), (below, right)):
        is_same = is_same & (read(row, column) == label)
    return torch.where(is_same, label, fill).view(maps.shape)


def _moved(step: MotionStep, points: Tensor) -> Tensor:
    """The points after one step: the places whose source they are, found by Newton's method."""
    goal_x, goal_y = _positions(points.double(), step.size)

    def newton_step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The next estimate, and the squared distance of the source of the current one from the goal."""
        h = SLOPE_STEP
        back_x, back_y = step.trace_back(torch.cat([x, x + h, x - h, x, x], 1), torch.cat([y, y, y, y + h, y - h], 1))
        (back_x, *x_ends), (back_y, *y_ends) = back_x.chunk(5, 1), back_y.chunk(5, 1)
        error_x, error_y = back_x - goal_x, back_y - goal_y
        xx, xy, yx, yy = (
            ((high - low) / (2 * h)).detach() for ends in (x_ends, y_ends) for high, low in (ends[:2], ends[2:])
        )
        determinant = xx * yy - xy * yx
        scale = torch.where(determinant == 0, 0, 1 / torch.where(determinant == 0, 1, determinant))
        return (
            x - (yy * error_x - xy * error_y) * scale,
            y - (xx * error_y - yx * error_x) * scale,
            error_x.square() + error_y.square(),
        )

    with torch.no_grad():
        x, y = best_x, best_y = goal_x, goal_y
        least = torch.full_like(x, torch.inf)
        for _ in range(NEWTON_STEPS):
            next_x, next_y, error = newton_step(x, y)
            is_better = error < least
            best_x, best_y = torch.where(is_better, x, best_x), torch.where(is_better, y, best_y)
            least = torch.where(is_better, error, least)
            x, y = next_x, next_y
            # On a GPU, reading the error would take longer than the remaining steps.
            if not points.is_cuda and float(least.amax() if least.numel() else 0) < NEWTON_TOLERANCE:
                break
    x, y, _ = newton_step(best_x, best_y)  # one more step, with the gradient in the goal and in theta
    return _pixels(x, y, step.size).to(points.dtype)


def _outline(boxes: Tensor, outline: Literal["box", "ellipse"]) -> Tensor:
    """Points on the outline of each box, or of the ellipse inside it, `[tests, boxes, points, 2]`."""
    turns = (torch.arange(OUTLINE_POINTS, dtype=boxes.dtype, device=boxes.device) + 0.5) / OUTLINE_POINTS
    directions = torch.stack([(turns * 2 * torch.pi).cos(), (turns * 2 * torch.pi).sin()], -1)
    if outline == "box":  # half of the points lie on each pair of opposite sides, and the corners are added
        directions = directions / directions.abs().amax(-1, keepdim=True)
        side = torch.arange(-1, 2, 2, dtype=boxes.dtype, device=boxes.device)
        directions = torch.cat([directions, torch.cartesian_prod(side, side)])
    centre, half = (boxes[..., :2] + boxes[..., 2:]) / 2, (boxes[..., 2:] - boxes[..., :2]) / 2
    return centre[:, :, None] + directions * half[:, :, None]
