"""Clips `[frames, channels, height, width]` as pictures: some of their frames side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

FRAMES = 6
"""Frames that are shown at most: the first, the last, and some between them."""
GAP = 1
"""Pixels between two frames."""


def is_clip(shape: tuple[int, ...]) -> bool:
    """Whether an input is a clip that can be drawn."""
    return len(shape) == 4 and min(shape[2:]) > 1


def side_by_side(clip: Tensor, gap: float) -> Tensor:
    """Frames of a clip as one picture `[channels, height, width]`; gap: the value between them."""
    import torch
    import torch.nn.functional as F

    chosen = torch.linspace(0, len(clip) - 1, min(FRAMES, len(clip))).round().long()
    frames = F.pad(clip[chosen.to(clip.device)], (0, GAP), value=gap)
    return torch.cat(list(frames), 2)[..., :-GAP]
