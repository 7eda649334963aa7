"""Weights of a model that are part of a larger module's, as in a checkpoint of Lightning."""

import warnings

import pytest
import torch
from torch import nn

from themis import ModelError
from themis.target.loaders import load_weights


def net():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def save(path, *parts):
    """Save the weights of a model under each of the prefixes."""
    torch.manual_seed(1)
    model, state = net(), {}
    for prefix in parts:
        state |= {f"{prefix}{name}": value for name, value in model.state_dict().items()}
    torch.save({"state_dict": state, "epoch": 3, "pytorch-lightning_version": "2.6"}, path)
    return model


@pytest.mark.parametrize(
    ("parts", "left_out"),
    [
        (["model."], ""),
        (["net.", "loss."], ", and left out 7 weights of other parts, such as 'loss.0.weight'"),
        (["learner.model."], ""),
        (["ema.", "model."], ", and left out 7 weights of other parts, such as 'ema.0.weight'"),
    ],
)
def test_the_prefix_of_an_attribute_is_removed_with_a_warning(parts, left_out, tmp_path):
    saved, loaded, path = save(tmp_path / "a.ckpt", *parts), net(), tmp_path / "a.ckpt"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_weights(loaded, path)
    chosen = next(part for part in parts if part in ("model.", "net.", "learner.model."))
    assert str(caught[-1].message) == f"{path}: removed {chosen!r} from the names{left_out}"
    assert torch.equal(loaded[0].weight, saved[0].weight)


def test_weights_that_are_there_twice_are_refused(tmp_path):
    save(tmp_path / "a.ckpt", "student.", "teacher.")
    with (
        pytest.warns(RuntimeWarning, match="under 'state_dict' of a checkpoint"),
        pytest.raises(ModelError, match=r"must hold the model once, but it is there under 'student\.' and 't"),
    ):
        load_weights(net(), tmp_path / "a.ckpt")


def test_other_weights_are_still_refused(tmp_path):
    torch.save({"model.0.weight": torch.ones(3, 4)}, tmp_path / "a.pt")
    with pytest.raises(ModelError, match="must match the model, missing"):
        load_weights(net(), tmp_path / "a.pt")
