"""Rows of a table in 0..1 with features of every kind, the integers on axes of their own."""

import torch

from themis import Features

KINDS = ("number", "integer", "binary") * 12
CHANGES = ("any",) * 18 + ("raise",) * 6 + ("lower",) * 6 + ("fixed",) * 6
REACH = torch.tensor([20.0 if kind == "integer" else 1.0 for kind in KINDS])


class Scales:
    """Integers of 0..20 lie in 0..1."""

    def place(self, raw):
        return raw / REACH.to(raw)

    def value(self, places):
        return places * REACH.to(places)


names = tuple(f"{kind}_{change}_{k}" for k, (kind, change) in enumerate(zip(KINDS, CHANGES, strict=True)))
features = Features(names, KINDS, torch.zeros(36), REACH, CHANGES, Scales())


def rows(n):
    """Valid rows `[n, 36]`, always the same."""
    draw = torch.rand(n, 36, generator=torch.Generator().manual_seed(7))
    numbers = 0.1 + 0.8 * draw
    whole = (draw * (REACH + 1)).floor().clamp(max=REACH)
    is_number = torch.tensor([kind == "number" for kind in KINDS])
    return torch.where(is_number, numbers, Scales().place(whole))
