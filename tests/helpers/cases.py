"""Options to test every criterion with, and random streams of tests for all of them."""

import warnings
from dataclasses import dataclass, replace

import torch

from themis_lab.criteria import CRITERIA
from themis_lab.criteria.readings import Batch

N_TRAINING = 90
CLASSES = 3

SETTINGS = {
    "nc": [{"threshold": 0.5}],
    "kmnc": [{"k": 7}, {"k": 4, "neurons": "element"}],
    "nbc": [{}],
    "snac": [{}],
    "tknc": [{"k": 2}],
    "tknp": [{"k": 2}],
    "idc": [{"m": 3, "relevance": torch.tensor([3.0, 1.0, 2.0, 0.0, 5.0, 4.0])}],
    "lsa": [{"upper": 40.0, "buckets": 20}],
    "dsa": [{"upper": 3.0, "buckets": 20}],
    "mdsa": [{"buckets": 20}],
    "nlc": [{}],
    "cc": [{"threshold": 1.0}],
    "scc": [{}],
    "npc": [{"paths": 2, "buckets": 9}],
    "mcdc": [{"kind": kind} for kind in ("ss", "vs", "sv", "vv")],
    "tway": [{"t": 2}, {"t": 3, "max_neurons": 4}],
    "path": [{"kind": "sap"}, {"kind": "oap", "length": 3}, {"kind": "fsp", "max_neurons": 3}],
    "pairs": [{"max_neurons": 4}],
}


@dataclass(frozen=True)
class Case:
    """A criterion and its options."""

    name: str
    options: tuple[tuple[str, object], ...]

    def __str__(self):
        values = [str(value) for key, value in self.options if key in ("variant", "kind", "t", "neurons")]
        return "-".join([self.name, *values])

    def make(self):
        """The criterion, fitted."""
        criterion = CRITERIA[self.name](**dict(self.options))
        if not criterion.learns:
            return criterion
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # about classes with few inputs
            return criterion.fit(cut(training(), [30, 31]))


def cases():
    """Every variant of every criterion with each of its settings."""
    return [
        Case(name, tuple({**options, **({"variant": variant} if variant else {})}.items()))
        for name, kind in CRITERIA.items()
        for options in SETTINGS.get(name, [])
        for variant in (list(kind.variants) or [None])
    ]


def draw(seed, n, *, scale=1.0, is_broken=False):
    """Tests of an imaginary small net: values on a grid, so that some are equal, some 0, and some out of range.

    Clean inputs differ in few neurons, most of them in sign or by a large factor. `is_broken` adds non-finite values.
    """
    g = torch.Generator().manual_seed(seed)

    def layer(*shape):
        values = torch.randn(n, *shape, generator=g) * 1.5 * scale
        return (values * 8).round().div(8).relu()

    tests = {"conv": layer(4, 2, 2), "hidden": layer(6), "output": torch.randn(n, CLASSES, generator=g) * scale}
    tests["hidden"][:, 5] = 0  # never fires
    clean = {}
    for name, values in tests.items():
        is_other = torch.rand(values.shape[:2], generator=g) < 0.2
        is_other = is_other.view(*is_other.shape, *[1] * (values.ndim - 2))
        factor = torch.tensor([0.0, 0.3, 3.0])[torch.randint(3, (n, *[1] * (values.ndim - 1)), generator=g)]
        clean[name] = torch.where(is_other, torch.where(values > 0, values * factor, 1.0), values)
    if is_broken:
        where = torch.randint(max(n, 1), (3,), generator=g).tolist() if n else []
        for row, (name, bad) in zip(
            where, (("conv", torch.nan), ("hidden", torch.inf), ("output", -torch.inf)), strict=False
        ):
            tests[name][row, ..., 0] = bad
    return Batch(tests, clean, predicted=clean["output"].argmax(1))


def training():
    """The training inputs, which are always the same, with many per class."""
    batch = draw(12345, N_TRAINING)
    classes = torch.arange(N_TRAINING) % CLASSES
    return replace(batch, predicted=classes, labels=classes)


def rows(batch, at):
    """The tests of a batch at some rows."""
    tests, clean = ({name: each[at] for name, each in some.items()} for some in (batch.activations, batch.clean))
    return Batch(tests, clean, *(None if each is None else each[at] for each in (batch.predicted, batch.labels)))


def joined(*batches):
    """The batches concatenated."""

    def all_of(dicts):
        return {name: torch.cat([each[name] for each in dicts]) for name in dicts[0]}

    tests, clean = all_of([each.activations for each in batches]), all_of([each.clean for each in batches])
    return Batch(tests, clean, torch.cat([each.predicted for each in batches]))


def cut(batch, sizes):
    """A batch in parts of these sizes; the last part is the rest."""
    n, parts, start = len(batch.activations["output"]), [], 0
    for size in [*sizes, n]:
        parts.append(rows(batch, slice(start, min(start + size, n))))
        start = min(start + size, n)
    return [part for part in parts if len(part.activations["output"])]
