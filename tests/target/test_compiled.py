"""TorchScript and torch.export programs: their activations are traced, and they are left unchanged."""

import warnings

import model_files as files
import nets
import pytest
import torch
from torch import nn

from themis import ModelError, Target, UsageError, run


def script(net):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(net)


def seen_by(target, inputs):
    """Return every activation of a batch by name, and the output."""
    seen = {}
    with target.opened(), torch.no_grad():
        layers = {each.name: each for each in target.find_layers(inputs[0])}
        seen["output"] = target.forward(inputs, lambda name, each: seen.update({name: each.clone()}), layers)
    return seen


def test_an_activation_is_reported_before_it_is_overwritten():
    net, x = nets.InPlace().eval(), torch.rand(5, 4)
    seen = seen_by(Target(script(net)), x)
    assert list(seen) == ["relu()", "output"]
    assert torch.equal(seen["relu()"], torch.relu(net.a(x)).detach())
    assert torch.equal(seen["output"], net(x).detach())


def test_each_call_of_an_activation_is_a_layer():
    assert list(seen_by(Target(script(nets.Reused())), torch.rand(5, 4))) == [
        "relu()",
        "relu()#2",
        "relu()#3",
        "output",
    ]


def test_changed_weights_change_the_activations():
    module, x = script(nets.Reused()), torch.rand(5, 4)
    target = Target(module)
    seen_by(target, x)
    with torch.no_grad():
        module.a.weight.add_(1.0)
    with torch.no_grad():
        assert torch.equal(seen_by(target, x)["output"], module(x))


class Hidden(nn.Module):
    """Has one activation outside and one inside a branch that depends on the input."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        x = torch.sigmoid(self.a(x))
        if bool(x.sum() > 0):
            x = torch.relu(x)
        return self.b(x)


def test_activations_in_a_branch_are_left_out_with_a_single_warning():
    target = Target(script(Hidden()))
    with pytest.warns(RuntimeWarning, match="1 of its activations are computed inside a branch or a loop"):
        seen = seen_by(target, torch.rand(5, 4))
    assert list(seen) == list(seen_by(target, torch.rand(5, 4))) == ["sigmoid()", "output"]


class Counts(nn.Module):
    """Writes to its own buffer, so that its graph cannot be separated from the module."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls = self.calls + 1
        return torch.relu(self.a(x)) * 2.0


def test_a_program_that_cannot_be_traced_has_only_its_output_and_is_left_unchanged():
    module = script(Counts()).train()
    target = Target(module)
    with pytest.warns(RuntimeWarning, match="hides layers: .*; only its output is a layer"):
        assert list(seen_by(target, torch.rand(5, 4))) == ["output"]
    assert module.training
    assert module.calls.item() == 0


def test_a_program_in_training_mode_is_refused():
    net = files.make_net().train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(net, files.inputs()[:2], check_trace=False)
    with pytest.raises(ModelError, match="must give the same output for the same input"):
        run(Target(traced), files.inputs(), "gaussian", max_tests=20)


def test_a_scripted_module_in_training_mode_is_tested_in_evaluation_mode():
    module = script(files.make_net()).train()
    seen = seen_by(Target(module), files.inputs())
    assert torch.equal(seen["output"], files.expected()["output"])
    assert all(each.training for each in module.modules())


def test_further_arguments_of_a_program_get_their_defaults():
    class Scaled(nn.Module):
        def forward(self, x, scale: float = 2.0):
            return torch.relu(x) * scale

    x = torch.rand(5, 4)
    assert torch.equal(seen_by(Target(script(Scaled())), x)["output"], x * 2)


def test_a_program_in_memory_is_a_target():
    program = torch.export.export(
        files.make_net().eval(), (files.inputs()[:2],), dynamic_shapes=({0: torch.export.Dim("n")},)
    )
    with pytest.raises(UsageError, match=r"got ExportedProgram: pass program.module\(\)"):
        Target(program)
    assert list(seen_by(Target(program.module()), files.inputs())) == ["act", "tanh()", "output"]


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.places = nn.Linear(4, 3), nn.Embedding(3, 3)

    def forward(self, place, row, twice: bool = False):
        return torch.relu(30 * self.body(row - 0.5) + (9.0 if twice else 1.0)) + self.places(place)


class OfDict(TwoInputs):
    def forward(self, inputs):
        return super().forward(inputs["place"], inputs["row"])


PLACES, ROWS = torch.arange(12) % 3, torch.rand(12, 4, generator=torch.Generator().manual_seed(0))
NAMED, BY_POSITION = {"row": ROWS, "place": PLACES}, (PLACES, ROWS)
BATCH = {0: torch.export.Dim("batch")}


def program(net, args=(), kwargs=None, shapes=(BATCH, BATCH)):
    return torch.export.export(net, args, kwargs, dynamic_shapes=shapes).module()


@pytest.mark.parametrize(
    "make",
    [
        lambda: script(TwoInputs()),
        lambda: program(TwoInputs(), BY_POSITION),
        lambda: program(TwoInputs(), kwargs=NAMED, shapes={"row": BATCH, "place": BATCH}),
        lambda: program(OfDict(), ({"place": PLACES, "row": ROWS},), shapes=({"place": BATCH, "row": BATCH},)),
    ],
    ids=["script", "program of positions", "program of names", "program of a dict"],
)
def test_a_compiled_model_takes_several_inputs_per_example(make):
    check_several(Target(make()), NAMED)


def test_inputs_by_position_fit_programs_that_were_exported_with_positions():
    for net in (script(TwoInputs()), program(TwoInputs(), BY_POSITION)):
        check_several(Target(net), (BY_POSITION, None))
    named = program(TwoInputs(), kwargs=NAMED, shapes={"row": BATCH, "place": BATCH})
    with pytest.raises(UsageError, match="named inputs 'row', 'place', but those of the data have positions"):
        check_several(Target(named), (BY_POSITION, None))


def check_several(target, data):
    result = run(target, data, "gaussian", magnitude=1, max_tests=40)
    assert [layer.name for layer in result.start.layers] == ["relu()", "output"]
    assert len(result.faults)
    with torch.no_grad():
        for fault in list(result.faults)[:3]:
            replayed, place = fault.replay(), PLACES[fault.seed_id][None]
            assert replayed.is_same
            assert int(TwoInputs()(place, replayed.inputs[None]).argmax()) == fault.answer
