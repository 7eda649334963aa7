"""The recipe checks its rules, its options are those of the command line, and rates and counts follow from them."""

from dataclasses import fields

import pytest

from themis.cli.options import Parser, add_fields, parse
from themis.errors import UsageError
from themis.perturb import choose_perturbation
from themis.retraining.recipe import Recipe


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mix": 1.5}, "mix must lie in"),
        ({"fresh": -0.1}, "fresh must lie in"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"epochs": 2.5}, "epochs must be a whole number, got 2.5"),
        ({"batches": 0}, "batches must"),
        ({"batch_size": 1}, "batch_size must be at least 2"),
        ({"optimiser": "lion"}, "optimiser must be one of sgd, adam, adamw, got 'lion'"),
        ({"learning_rate": 0}, "learning_rate must be a positive number"),
        ({"learning_rate": float("nan")}, "learning_rate must be a positive number"),
        ({"learning_rate": "fast"}, "learning_rate must be a number, got 'fast'"),
        ({"schedule": "linear"}, "schedule must be one of constant, cosine"),
        ({"weight_decay": -1}, "weight_decay must be 0 or more"),
        ({"statistics": "freeze"}, "statistics must be 'keep' or 'update'"),
        ({"hold_out": 0}, "hold_out must lie in"),
        ({"hold_out": 1}, "hold_out must lie in"),
        ({"share": 0}, "share must lie in"),
        ({"share": 1.5}, "share must lie in"),
        ({"tolerance": 1.5}, "tolerance must lie in"),
        ({"confidence": 1}, "confidence must lie in"),
        ({"steer": 2}, "steer must lie in"),
        ({"attack_steps": 0}, "attack_steps must be at least 1"),
        ({"distill": -1}, "distill must lie in"),
        ({"anchor": -1}, "anchor must be 0 or more"),
        ({"blend": 0.6}, "blend must lie in"),
        ({"accumulate": 100}, "accumulate must lie between 1 and batch_size"),
        ({"autocast": "bf16"}, "autocast must be true or false"),
        ({"patience": 0}, "patience must be at least 1, or None"),
        ({"random_seed": -1}, "random_seed must lie in"),
        ({"layers": []}, "layers must be glob patterns"),
        ({"layers": [3]}, "layers must be glob patterns"),
        ({"epochs": True}, "epochs must be a number"),
        ({"epochs": None}, "epochs must be a number"),
        ({"epoch": 3}, "unknown option 'epoch': did you mean 'epochs'"),
    ],
)
def test_options_that_break_a_rule_are_refused(options, words):
    with pytest.raises(UsageError) as refused:
        Recipe.of(**options)
    assert words in str(refused.value)


def test_every_option_is_a_flag_with_help():
    parser = Parser(prog="themis retrain")
    add_fields(parser, Recipe)
    arguments = parse(parser, ["--mix", "0.25", "--layers", "fc*,conv2.*", "--patience", "null", "--epochs", "1e1"])
    assert arguments.given.keys() == {"mix", "layers", "patience", "epochs"}
    recipe = Recipe(**arguments.given)
    assert recipe == Recipe(mix=0.25, layers=["fc*", "conv2.*"], patience=None, epochs=10)
    assert all(each.metadata["help"] for each in fields(Recipe))
    assert Recipe(**recipe.as_dict()) == recipe


def test_whole_numbers_and_single_names_are_converted():
    recipe = Recipe(epochs=1e1, layers="fc1.*")
    assert recipe.epochs == 10
    assert isinstance(recipe.epochs, int)
    assert recipe.layers == ["fc1.*"]


@pytest.mark.parametrize(
    ("mix", "fresh", "counts"),
    [
        (0.5, 0.5, (32, 16, 16)),
        (0.5, 0.0, (32, 32, 0)),
        (0.5, 1.0, (32, 0, 32)),
        (1.0, 0.25, (0, 48, 16)),
        (0.0, 1.0, (64, 0, 0)),
        (0.001, 0.0, (63, 1, 0)),
        (0.999, 0.0, (1, 63, 0)),
    ],
)
def test_a_batch_is_mixed_as_requested(mix, fresh, counts):
    assert Recipe(mix=mix, fresh=fresh, batch_size=64).counts() == counts


def test_learning_rates_follow_the_schedule():
    def rates(schedule):
        recipe = Recipe(schedule=schedule, learning_rate=0.1)
        return [recipe.rate(step, 90) for step in range(90)]

    assert rates("constant") == [0.1] * 90
    cosine = rates("cosine")
    assert cosine[0] == 0.1
    assert cosine[45] == pytest.approx(0.05)
    assert cosine == sorted(cosine, reverse=True)


@pytest.mark.parametrize(
    ("names", "options", "expected"),
    [
        (["pgd"], {}, True),
        (["gaussian", "apgd"], {}, True),
        (["gaussian", "fgsm", "cw"], {}, False),
        (["pgd"], {"attack_steps": 10}, False),
        (["pgd"], {"fresh": 0.0}, False),
    ],
)
def test_steps_matter_if_fresh_inputs_come_from_an_attack_of_more_steps(names, options, expected):
    assert Recipe.of(**options).shortens(choose_perturbation(name) for name in names) is expected
