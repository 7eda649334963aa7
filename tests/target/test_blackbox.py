"""Any function as a target."""

import numpy as np
import pytest
import torch
from torch import nn

import themis
from themis import BlackBox, ModelError, Perturbation, Target, Theta, UsageError
from themis.perturb.perturbation import column
from themis.target.target import AnyTarget

RNG = np.random.default_rng(0)
FIRST, LAST = RNG.normal(size=(16, 8)).astype("float32"), RNG.normal(size=(8, 3)).astype("float32")
DATA = torch.rand(30, 1, 4, 4, generator=torch.Generator().manual_seed(0))


def hidden(x):
    return np.tanh(x.reshape(len(x), -1) @ FIRST)


def predict(x):
    return hidden(x) @ LAST


def with_hidden(x):
    return predict(x), {"hidden": hidden(x)}


def as_module():
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))
    with torch.no_grad():
        net[1].weight.copy_(torch.from_numpy(FIRST.T))
        net[3].weight.copy_(torch.from_numpy(LAST.T))
    return net


def run(target, **options):
    options = {"magnitude": 0.4, "max_tests": 600, "tolerance": 1e-9, **options}
    return themis.run(target, DATA, options.pop("perturbation", "gaussian"), **options)


BOXES = {
    "arrays": lambda: BlackBox(with_hidden),
    "lists": lambda: BlackBox(lambda x: (predict(x).tolist(), {"hidden": hidden(x).tolist()})),
    "tensors": lambda: BlackBox(lambda x: (torch.from_numpy(predict(x)), {"hidden": torch.from_numpy(hidden(x))})),
}


@pytest.mark.parametrize("form", BOXES)
def test_a_function_is_tested_like_the_equivalent_module(form):
    box, net = run(BOXES[form]()), run(as_module())
    assert [each.n_neurons for each in box.start.layers] == [each.n_neurons for each in net.start.layers] == [8, 3]
    assert [fault.id for fault in box.faults] == [fault.id for fault in net.faults] != []
    assert box.faults[0].replay().is_same


def test_without_activations_the_output_is_the_only_layer():
    assert [each.name for each in run(BlackBox(predict)).start.layers] == ["output"]


def test_layers_and_channels_are_chosen_by_name():
    pictures = BlackBox(lambda x: (predict(x), {"a": x, "b": np.repeat(x, 2, 1)}), neurons="channel", layers=["b"])
    assert [(each.name, each.n_neurons) for each in run(pictures).start.layers] == [("b", 2)]
    with pytest.raises(UsageError, match="'c' matches none: known: a, b, output"):
        run(BlackBox(lambda x: (predict(x), {"a": x, "b": x}), layers=["c"]))


def test_the_normalisation_is_part_of_the_target():
    seen = []
    box = BlackBox(lambda x: (seen.append((x.dtype, float(x.min()))), predict(x))[1], preprocess=themis.Normalize(1, 1))
    run(box, max_tests=10)
    assert {dtype for dtype, _ in seen} == {np.dtype("float32")}
    assert min(least for _, least in seen) < -0.5


TWO = Perturbation(
    "two",
    (Theta("shift", -0.5, 0.5, identity=0.0), Theta("stretch", 0.5, 2.0, identity=1.0)),
    lambda inputs, theta, rng, context: (inputs - 0.5) * column(theta, 1, inputs) + 0.5 + column(theta, 0, inputs),
    is_random=False,
)


@pytest.mark.parametrize(("perturbation", "n_theta"), [("gaussian", 1), (TWO, 2)])
def test_a_policy_that_needs_gradients_uses_finite_differences(perturbation, n_theta, monkeypatch):
    """They are close to the gradients of the module, and cost two passes per dimension."""
    from themis_lab.policies.paper import Paper

    gradients, observe = {}, Paper.observe

    def keep(self, tests, results):
        if results.gradient is not None:
            gradients.setdefault(name, []).append((tests.theta, results.gradient))
        observe(self, tests, results)

    monkeypatch.setattr(Paper, "observe", keep)
    options = {"perturbation": perturbation, "policy": "paper", "uniform_share": 0.0, "max_tests": 30}
    options |= {"magnitude": None, "round_size": 30}
    passes = {}
    for name, target in (("box", BlackBox(with_hidden)), ("net", as_module())):
        passes[name] = run(target, **options).rounds[-1].passes
    (theta, by_difference), (same, by_autograd) = gradients["box"][0], gradients["net"][0]
    assert np.array_equal(theta, same)
    gap = np.abs(by_difference - by_autograd) / np.abs(by_autograd).max()
    assert np.quantile(gap, 0.9) < 0.02  # not all: clipping to the bounds and the absolute value have kinks
    assert passes["box"] - passes["net"] == 30 * (2 * n_theta - 2) - 6  # the net's gradient is probed


def test_differences_at_the_bounds_stay_inside():
    seen = []

    def shifted(inputs, theta, rng, context):
        seen.append(theta.clone())
        return inputs + column(theta, 0, inputs) * 0.1

    from themis.search.policy import Corners

    class Climbing(Corners):
        needs_gradient = True

    edge = Perturbation("edge", (Theta("shift", 0.0, 1.0),), shifted, is_random=False)
    run(BlackBox(with_hidden), perturbation=edge, magnitude=None, policy=Climbing(), max_tests=30, uniform_share=0.0)
    theta = torch.cat(seen)
    assert theta.min() >= 0
    assert theta.max() == 1
    assert 0.99 - 1e-6 <= float(theta[theta < 1].max()) <= 0.99 + 1e-6


def test_max_passes_limits_finite_differences_too():
    box = BlackBox(with_hidden)
    result = run(box, policy="paper", uniform_share=0.0, max_tests=None, max_passes=200)
    assert 190 <= result.rounds[-1].passes <= 200


def test_an_attack_is_refused_before_anything_runs():
    calls = []
    with pytest.raises(UsageError, match="needs the model's gradient and this target gives none"):
        run(BlackBox(lambda x: calls.append(x)), perturbation="fgsm")
    assert calls == []


def test_a_custom_attack_is_refused_when_it_asks_for_the_gradient():
    attack = Perturbation(
        "mine", (Theta("r", 0, 1),), lambda inputs, theta, rng, context: inputs + context.loss_gradient(inputs)
    )
    with pytest.raises(UsageError, match="needs the model's gradient"):
        run(BlackBox(predict), perturbation=attack)

    class Detached(nn.Module):
        def forward(self, x):
            return as_module()(x).detach()

    with pytest.raises(UsageError, match="needs the model's gradient"):
        run(Detached(), perturbation=attack)


WRONG = {
    "raises": (lambda x: 1 / 0, "the model raised ZeroDivisionError on inputs [2, 1, 4, 4]"),
    "gives nothing": (lambda x: None, "the output of the model must be an array of numbers, got NoneType"),
    "gives text": (lambda x: ["cat"] * len(x), "must be an array of numbers, got list"),
    "gives a number": (lambda x: 5, "one output per input, got shape [] for 2 inputs"),
    "gives too few rows": (lambda x: predict(x)[:1], "one output per input, got shape [1, 3] for 2 inputs"),
    "gives ragged rows": (lambda x: [[1.0]] * (len(x) - 1) + [[1.0, 2.0]], "must be an array of numbers"),
    "gives NaN": (lambda x: predict(x) * np.nan, "finite outputs on clean inputs, but 30 of 30"),
    "names a layer output": (lambda x: (predict(x), {"output": x}), "a layer must not be named 'output'"),
    "gives text for a layer": (lambda x: (predict(x), {"a": np.full((len(x), 2), "cat")}), "layer 'a' of the model"),
    "gives other layers": (
        lambda x: (predict(x), {"a" if len(x) == 2 else "b": x}),
        "the model must compute the same layers for every batch",
    ),
    "gives no layer later": (
        lambda x: (predict(x), {"a": x} if len(x) < 4 else {}),
        "must compute each of its 2 layers once per forward pass, got 1",
    ),
    "gives a layer of another size": (
        lambda x: (predict(x), {"a": x if len(x) < 4 else x[..., :2]}),
        "layer 'a' must keep its shape",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_function_that_fails_is_explained(kind):
    function, message = WRONG[kind]
    with pytest.raises((ModelError, UsageError)) as caught:
        run(BlackBox(function))
    assert message in str(caught.value)


def test_wrong_arguments_are_refused():
    for options, message in (
        ({"bounds": (1, 0)}, "bounds must be finite and ascending"),
        ({"neurons": "pixel"}, "neurons must be"),
        ({"oracle": "wronng"}, "did you mean 'wrong'?"),
    ):
        with pytest.raises(UsageError) as caught:
            BlackBox(predict, **options)
        assert message in str(caught.value)
    with pytest.raises(UsageError, match="predict must be a function"):
        BlackBox("model.onnx")
    with pytest.raises(UsageError, match=r"an nn.Module or an estimator with a method predict, got function: pass a"):
        run(predict)


def test_a_run_is_only_resumed_with_the_same_function(tmp_path):
    out = tmp_path / "run"
    first = run(BlackBox(with_hidden, version="1"), max_tests=300, out=out, round_size=150)
    assert len(first.faults)
    with pytest.raises(ModelError, match="the model must be the same as in the run"):
        themis.resume(out, BlackBox(with_hidden, version="2"), DATA, max_tests=600)
    resumed = themis.resume(out, BlackBox(with_hidden, version="1"), DATA, max_tests=600)
    whole = run(BlackBox(with_hidden, version="1"), round_size=150)
    assert [fault.id for fault in resumed.faults] == [fault.id for fault in whole.faults]


def test_targets_and_black_boxes_implement_the_same_protocol():
    for target in (BlackBox(predict), Target(as_module())):
        assert isinstance(target, AnyTarget)
        assert len(target.fingerprint()) == 64
    assert not isinstance(as_module(), AnyTarget)
    assert BlackBox(predict).fingerprint() != BlackBox(hidden).fingerprint() == BlackBox(hidden).fingerprint()
