"""The protocol of all criteria: what they read, what they reject, and how they keep their state."""

import pytest
import torch

from themis.errors import DataError, UsageError
from themis_lab.criteria import KMNC, NC, Batch, Laws
from themis_lab.criteria.readings import as_neurons

LAYERS = {"conv": torch.rand(6, 3, 4, 4), "fc": torch.rand(6, 5), "output": torch.rand(6, 4)}


def test_a_channel_is_its_mean_and_an_element_itself():
    conv = LAYERS["conv"]
    torch.testing.assert_close(as_neurons(conv, "channel"), conv.mean((2, 3)))
    torch.testing.assert_close(as_neurons(conv, "element"), conv.flatten(1))
    sequence = torch.rand(2, 7, 3)  # tokens, channels
    torch.testing.assert_close(as_neurons(sequence, "channel"), sequence.mean(1))
    torch.testing.assert_close(as_neurons(sequence, "channel", 1), sequence.mean(2))
    assert as_neurons(conv.half(), "channel").dtype == torch.float32
    assert as_neurons(conv.double(), "channel").dtype == torch.float64


def test_predicted_classes_are_the_largest_outputs_unless_passed():
    criterion = NC()
    assert criterion.read(LAYERS).predicted.tolist() == LAYERS["output"].argmax(1).tolist()
    given = torch.arange(6)
    assert criterion.read(Batch(LAYERS, predicted=given)).predicted is given
    assert criterion.read(LAYERS["fc"]).predicted is None


def test_only_the_requested_layers_are_read_in_forward_order():
    criterion = NC(layers=["output", "conv"])
    assert criterion.read(LAYERS).layout.names == ("conv", "output")
    with pytest.raises(UsageError, match="layers must be among those given, got 'fcc': did you mean 'fc'"):
        NC(layers="fcc").update(LAYERS)


WRONG = {
    "no layer": (lambda c: c.update({}), UsageError, "must have a layer, got an empty dict"),
    "no neurons": (lambda c: c.update(torch.rand(3)), UsageError, r"'layer' is \[3\]"),
    "no tensor": (lambda c: c.update({"a": [1.0]}), UsageError, "'a' is list"),
    "whole numbers": (lambda c: c.update(torch.ones(3, 2, dtype=torch.int64)), UsageError, "floating-point numbers"),
    "rows": (lambda c: c.update({"a": torch.rand(2, 3), "b": torch.rand(3, 3)}), DataError, "'b' has 3, not 2"),
    "classes": (lambda c: c.update(LAYERS, predicted=torch.zeros(5)), DataError, "got 5 for 6 inputs"),
    "clean layer": (lambda c: c.update(LAYERS, clean={"fc": LAYERS["fc"]}), DataError, "'conv' is missing"),
    "never fitted": (lambda c: KMNC().update(LAYERS), UsageError, "kmnc must be fitted on training data"),
    "nothing to learn from": (lambda c: KMNC().fit([]), DataError, "must see at least one training input"),
    "training that is not finite": (
        lambda c: KMNC().fit([{"a": torch.ones(2, 2), "b": torch.full((2, 2), torch.nan)}]),
        DataError,
        "layer 'b' has a NaN or an infinity",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_unreadable_input_is_rejected_with_an_explanation(name):
    use, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        use(NC())


def test_layers_that_differ_from_earlier_batches_are_rejected():
    criterion = NC()
    criterion.update(LAYERS)
    with pytest.raises(DataError, match="'fc' has 4 and had 5"):
        criterion.update({**LAYERS, "fc": torch.rand(6, 4)})
    with pytest.raises(DataError, match="'conv' has none and had 3"):
        criterion.update({"fc": LAYERS["fc"], "output": LAYERS["output"]})
    before = criterion.score()
    assert criterion.update(LAYERS).any().item() is False
    assert criterion.score() == before


def test_a_fit_that_fails_leaves_nothing_behind():
    criterion = KMNC(5).fit([LAYERS])
    with pytest.raises(DataError, match="must be finite"):
        criterion.fit([LAYERS, {**LAYERS, "fc": torch.full((6, 5), torch.inf)}])
    with pytest.raises(UsageError, match="must be fitted"):
        criterion.update(LAYERS)


def test_fitting_again_forgets_the_first_fit():
    criterion = KMNC(5).fit([LAYERS])
    criterion.update(LAYERS)
    other = {name: each * 0.5 for name, each in LAYERS.items()}
    criterion.fit([other])
    assert (criterion.score(), criterion.tests) == (0, 0)
    assert criterion.update(LAYERS).any()


def test_merging_needs_the_same_class_options_and_training():
    one = KMNC(5).fit([LAYERS])
    one.update(LAYERS)
    assert one.merge(one.fresh()).score() == one.score()
    with pytest.raises(UsageError, match="with the same options"):
        one.merge(KMNC(6).fit([LAYERS]))
    with pytest.raises(UsageError, match="have learned the same"):
        one.merge(KMNC(5).fit([{name: each * 2 for name, each in LAYERS.items()}]))


def test_an_empty_batch_raises_nothing():
    criterion = NC()
    assert criterion.update({name: each[:0] for name, each in LAYERS.items()}).tolist() == []
    assert criterion.score() == 0


def test_gradients_are_not_kept():
    criterion = NC()
    criterion.update({"a": torch.rand(3, 2, requires_grad=True)})
    assert not any(each.requires_grad for each in criterion.state.values())


def test_laws_belong_to_the_variant():
    assert KMNC().laws == Laws(bounded=True, monotone=True, order_free=True, mergeable=True)
    assert not KMNC(variant="deepimportance").laws.bounded
