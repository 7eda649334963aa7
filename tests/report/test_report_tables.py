"""Tables in a report: the features that changed, in their original unit."""

from dataclasses import replace

import pytest
import torch
from wavering import ENDLESS, Wavering

import themis
from themis.data.features import Features
from themis.data.seeds import read_seeds
from themis.report.page import read_view
from themis.runs.store.reader import Reader
from themis_lab.zoo.datasets import FeatureAxes

NAMES = [f"column <{k}>" for k in range(12)]


def changes_of(out, seeds, perturbation, **options):
    """The kept inputs of the first fault of a run, and the changes that the report lists."""
    run = themis.run(Wavering(12), seeds, perturbation, out=out, max_tests=400, **ENDLESS, **options)
    view = read_view(out)
    assert view.inputs.kind == "features"
    folder = Reader(out)
    kept = folder.tensors([run.faults[0].id])[run.faults[0].id]
    folder.close()
    return kept, view.inputs.changes[run.faults[0].id]


def test_tables_show_which_features_changed(tmp_path):
    rows = torch.rand(80, 12, generator=torch.Generator().manual_seed(0)).round(decimals=2)
    kept, changes = changes_of(
        tmp_path / "run", read_seeds(rows).with_feature_names(NAMES), "table_noise", magnitude=0.8
    )
    moved = (kept.inputs[0] != kept.clean_inputs[0]).sum().item()
    assert (changes.n, changes.of) == (moved, 12)
    name, before, after = changes.rows[0]
    k = int((kept.inputs[0] - kept.clean_inputs[0]).abs().argmax())
    assert name == NAMES[k]
    assert (before, after) == pytest.approx((kept.clean_inputs[0, k].item(), kept.inputs[0, k].item()), rel=1e-5)


def test_values_on_axes_are_shown_as_they_were_recorded(tmp_path):
    raw = torch.randint(0, 900, (80, 12), generator=torch.Generator().manual_seed(0)).float()
    axes = FeatureAxes(raw)
    features = replace(Features.of(raw, tuple(NAMES)), axes=axes)
    kept, changes = changes_of(
        tmp_path / "run", read_seeds(axes.place(raw)).with_features(features), "edit", magnitude=3
    )
    assert changes.rows
    assert all(value == round(value) for _, *pair in changes.rows for value in pair)  # counts, not places
    for name, before, after in changes.rows:
        k = NAMES.index(name)
        places = torch.stack([kept.clean_inputs[0], kept.inputs[0]])
        assert [before, after] == pytest.approx(axes.value(places)[:, k].tolist(), rel=1e-4)
