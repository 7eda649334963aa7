"""Attacks on models whose weakest point is known, and on the oracle of each task."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import themis
from themis import BlackBox, Compare, Target, UsageError
from themis.oracle import choose_oracle
from themis.perturb import PERTURBATIONS, Context, choose_perturbation, perturb
from themis.perturb.attack import ATTACKS, PGD_STEPS, checkpoints, with_steps
from themis_lab.zoo import lenet5

pytestmark = pytest.mark.xdist_group("attack")

ALL = [each.name for each in ATTACKS]
IN_A_BOX = ["fgsm", "pgd", "apgd"]
IN_A_BALL = [*IN_A_BOX, "pgd_l2"]
ATTACK = {each.name: each for each in ATTACKS}


class Linear(nn.Module):
    """Two classes of 40 features, whose decision boundary is known."""

    def __init__(self, scale=1.0):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.last = nn.Linear(40, 2)
        with torch.no_grad():
            self.last.weight.copy_(scale * torch.randn(2, 40, generator=draw))
            self.last.bias.copy_(-self.last.weight.sum(1) / 2)  # undecided in the middle of the input range

    def forward(self, x):
        return self.last(x.flatten(1))

    def away(self):
        """The decrease of the margin of class 0 per unit of each feature."""
        return (self.last.weight[0] - self.last.weight[1]).detach()


def near_the_middle(n=8):
    return 0.5 + 0.05 * torch.randn(n, 40, generator=torch.Generator().manual_seed(1))


def context_of(target, inputs, oracle="changed", labels=None):
    """A context as in a campaign: the reference answers are the clean ones, or the labels."""
    with torch.no_grad():
        clean = target.forward(inputs).float()
    settled = choose_oracle(oracle).settle(clean, labels)
    reference = settled.reference(clean, labels)
    return Context(
        target.bounds, target, reference, settled.loss, lambda outputs: settled.compare(clean, outputs, labels).margin
    )


def attack(name, inputs, theta, context, seeds=None):
    theta = torch.as_tensor(theta, dtype=torch.float32).expand(len(inputs)).reshape(-1, 1)
    seeds = torch.arange(len(inputs)) if seeds is None else seeds
    return perturb(ATTACK[name], inputs, theta, seeds, context)


def margin_at(inputs, context):
    with torch.no_grad():
        return context.margin(context.target.forward(inputs))


def to_the_edge(model, inputs, norm):
    """How far each input is from the other class: the margin over the dual norm of its slope."""
    with torch.no_grad():
        scores = model(inputs)
    return (scores[:, 0] - scores[:, 1]).abs() / model.away().norm(p={"max": 1, "l2": 2}[norm])


# Closed forms


@pytest.mark.parametrize("name", IN_A_BALL)
def test_a_linear_model_breaks_just_above_its_radius_and_not_below(name):
    model, inputs = Linear(), near_the_middle()
    context = context_of(Target(model), inputs)
    needed = to_the_edge(model, inputs, "l2" if name == "pgd_l2" else "max")
    above = 1.04 if name == "pgd_l2" else 1.001  # after ten steps, the starting point in the ball still matters
    assert bool((margin_at(attack(name, inputs, above * needed, context), context) < 0).all())
    assert bool((margin_at(attack(name, inputs, 0.999 * needed, context), context) > 0).all())


@pytest.mark.parametrize("confidence", [0.0, 1.0, 3.0])
def test_cw_finds_the_nearest_point_with_its_confidence(confidence):
    model, inputs = Linear(), near_the_middle()
    context = context_of(Target(model), inputs)
    found = attack("cw", inputs, confidence, context)
    nearest = (margin_at(inputs, context) + confidence) / model.away().norm()
    assert bool((margin_at(found, context) < -confidence).all())
    assert ((found - inputs).norm(dim=1) / nearest).max() < 1.02
    assert ((found - inputs).norm(dim=1) / nearest).min() >= 1


def test_cw_finds_the_nearest_point_inside_the_bounds():
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[4.0, 3.0], [0.0, 0.0]]))
        model.bias.copy_(torch.tensor([3.6, 0.0]))
    inputs = torch.tensor([[0.0, 0.0], [-0.9, 0.5]])
    context = context_of(Target(model, bounds=(-1.0, 1.0)), inputs)
    found = attack("cw", inputs, 0.0, context)
    # The first goes straight to the line 4 x + 3 y = -3.6; the second hits the bound x = -1 on the way.
    torch.testing.assert_close(found, torch.tensor([[-0.576, -0.432], [-1.0, 0.4 / 3]]), atol=0.01, rtol=0)


def test_each_test_has_its_own_radius():
    model, inputs = Linear(), near_the_middle()
    context = context_of(Target(model), inputs)
    radius = torch.linspace(0.001, 0.05, 8)
    for name in IN_A_BOX:
        reached = (attack(name, inputs, radius, context) - inputs).abs().amax(1)
        torch.testing.assert_close(reached, radius, atol=1e-6, rtol=0)
    torch.testing.assert_close((attack("pgd_l2", inputs, radius, context) - inputs).norm(dim=1), radius)


# On a net


@pytest.fixture(scope="module")
def net():
    """LeNet-5, briefly trained on blobs, with the blobs."""
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    classes = torch.rand(10, 1, 28, 28, generator=draw)
    labels = torch.arange(600) % 10
    inputs = (classes[labels] * 0.3 + 0.35 + 0.1 * torch.randn(600, 1, 28, 28, generator=draw)).clamp(0, 1)
    model = lenet5()
    optimiser = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(8):
        for rows in torch.randperm(600, generator=draw).view(-1, 60):
            optimiser.zero_grad()
            F.cross_entropy(model(inputs[rows]), labels[rows]).backward()
            optimiser.step()
    optimiser.zero_grad()
    target = Target(model.eval())
    with torch.no_grad():
        kept = (model(inputs).argmax(1) == labels).nonzero().squeeze(1)[:20]
    assert len(kept) == 20
    return target, inputs[kept], labels[kept]


@pytest.mark.parametrize("name", ALL)
def test_it_costs_the_passes_it_declares(name, net):
    target, inputs, labels = net
    context = context_of(target, inputs, "wrong", labels)
    attack(name, inputs, 0.02, context)
    assert context.passes == len(inputs) * ATTACK[name].passes


@pytest.mark.parametrize("name", IN_A_BALL)
def test_the_radius_is_never_exceeded_and_every_candidate_is_inside_the_bounds(name, net):
    target, inputs, labels = net
    inputs, radius = inputs * 255, torch.linspace(0, 0.3, len(inputs))
    tried = []

    def spy(x):
        tried.append(x.detach())
        return x / 255

    wide = Target(target.module, bounds=(0, 255), preprocess=spy)
    context = context_of(wide, inputs, "wrong", labels)
    found = attack(name, inputs, radius, context)
    assert len(tried) > 1
    for each in [*tried, found]:
        assert each.min() >= 0
        assert each.max() <= 255
        change = (each - inputs).flatten(1) / 255
        length = change.norm(dim=1) if name == "pgd_l2" else change.abs().amax(1)
        assert bool((length <= radius * (1 + 1e-5) + 1e-7).all())


def test_pgd_and_apgd_are_stronger_than_fgsm_and_success_grows_with_the_radius(net):
    target, inputs, labels = net
    context = context_of(target, inputs, "wrong", labels)
    success, loss = {}, {}
    for name in IN_A_BOX:
        found = [attack(name, inputs, radius, context) for radius in (0.0, 0.01, 0.02, 0.04, 0.08)]
        success[name] = [float((margin_at(each, context) < 0).float().mean()) for each in found]
        loss[name] = context.losses(target.forward(found[2])).detach()
        assert success[name] == sorted(success[name])
        assert success[name][0] == 0
        assert success[name][-1] > 0.9
    assert max(success["fgsm"]) <= max(success["pgd"])
    assert (loss["pgd"] > loss["fgsm"]).float().mean() > 0.9
    assert (loss["apgd"] >= loss["pgd"] - 1e-3).float().mean() > 0.9


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("name", ["pgd", "pgd_l2", "apgd"])
def test_fewer_steps_take_fewer_passes_and_still_raise_the_loss(name, steps, net):
    target, inputs, labels = net
    context = context_of(target, inputs, "wrong", labels)
    brief = with_steps(ATTACK[name].at(0.5), steps)
    theta = torch.full((len(inputs), 1), 0.02 if name != "pgd_l2" else 0.4)
    found = perturb(brief, inputs, theta, torch.arange(len(inputs)), context)
    assert context.passes == len(inputs) * brief.passes == len(inputs) * 3 * steps
    assert brief.theta == ATTACK[name].at(0.5).theta
    assert brief.code == ATTACK["pgd" if name == "apgd" else name].code
    change = (found - inputs).flatten(1)
    length = change.norm(dim=1) if name == "pgd_l2" else change.abs().amax(1)
    assert bool((length <= theta[:, 0] + 1e-6).all())
    clean, mine, full = (
        context.losses(target.forward(each)).detach()
        for each in (inputs, found, attack(name, inputs, theta[:, 0], context))
    )
    assert (mine - clean).mean() > 0.5 * (full - clean).mean() > 0


def test_only_attacks_of_more_steps_are_shortened(net):
    for name in ("fgsm", "cw"):
        assert with_steps(ATTACK[name], 1) is ATTACK[name]
    assert with_steps(PERTURBATIONS["gaussian"], 1) is PERTURBATIONS["gaussian"]
    assert with_steps(ATTACK["pgd"], PGD_STEPS) is ATTACK["pgd"]
    once = with_steps(ATTACK["pgd"], 2)
    assert with_steps(once, 2) is once


def test_cw_changes_less_than_the_others_need_and_more_for_more_confidence(net):
    target, inputs, labels = net
    context = context_of(target, inputs, "wrong", labels)
    length = []
    for confidence in (0.0, 3.0, 10.0):
        found = attack("cw", inputs, confidence, context)
        assert bool((margin_at(found, context) < -confidence).all())
        length.append((found - inputs).flatten(1).norm(dim=1))
    assert 1.4**2 * length[0].mean() < 1.4 * length[1].mean() < length[2].mean(), "each twice as long as the last"
    shorter = attack("pgd_l2", inputs, length[0] * 0.5, context)
    assert (margin_at(shorter, context) < 0).float().mean() < 0.25


def test_unreachable_confidence_gives_the_smallest_margin():
    def certain(x):
        return torch.stack([x[:, 0], 1 - x[:, 0]], 1)

    class Share(nn.Module):
        def forward(self, x):
            return certain(x)

    inputs = torch.tensor([[0.8, 0.5], [0.6, 0.5]])
    context = context_of(Target(Share()), inputs)
    found = attack("cw", inputs, 5.0, context)
    torch.testing.assert_close(found[:, 0], torch.zeros(2), atol=0.01, rtol=0)


@pytest.mark.parametrize("name", ALL)
def test_the_same_seed_gives_the_same_bits_and_the_model_is_not_changed(name, net):
    target, inputs, labels = net
    context = context_of(target, inputs, "wrong", labels)
    before = {key: value.clone() for key, value in target.module.state_dict().items()}
    one, again = (attack(name, inputs, 0.03, context, torch.arange(20) * 10**10) for _ in range(2))
    assert torch.equal(one, again)
    assert all(torch.equal(value, before[key]) for key, value in target.module.state_dict().items())
    assert all(each.grad is None or not each.grad.any() for each in target.module.parameters())


@pytest.mark.parametrize("name", ALL)
def test_theta_has_a_slope_up_the_loss(name, net):
    target, inputs, labels = net
    context = context_of(target, inputs, "wrong", labels)
    theta = torch.full((20, 1), 1.0 if name == "cw" else 0.02).requires_grad_()
    found = perturb(ATTACK[name], inputs, theta, torch.arange(20), context)
    loss = context.losses(target.forward(found))
    (slope,) = torch.autograd.grad(loss.sum(), theta)
    assert (slope > 0).float().mean() > 0.9
    if name == "cw":  # to first order the margin falls as the confidence grows
        found = perturb(ATTACK[name], inputs, theta, torch.arange(20), context)
        (slope,) = torch.autograd.grad(context.margin(target.forward(found)).sum(), theta)
        torch.testing.assert_close(slope, -torch.ones(20, 1), atol=0.05, rtol=0)


def test_checkpoints_of_auto_pgd_are_those_of_the_paper():
    assert checkpoints(100) == [0, 22, 41, 57, 70, 80, 87, 93, 99]


def test_a_model_that_returns_nan_along_the_way_does_not_produce_nan_inputs():
    class Fragile(Linear):
        def forward(self, x):
            scores = super().forward(x)
            return scores / (scores[:, :1] > 0.5).float()  # NaN and infinity elsewhere

    inputs = near_the_middle()
    inputs = inputs + 0.02 * Linear().last.weight[0].detach()
    context = context_of(Target(Fragile()), inputs)
    for name in ALL:
        assert bool(attack(name, inputs, 0.5, context).isfinite().all()), name


# Tasks


class Sum(nn.Module):
    """A number that falls fast and rises slowly."""

    def forward(self, x):
        total = x.flatten(1).sum(1, keepdim=True)
        return torch.where(total < 2, 4 * total - 6, total)


def test_a_number_is_pushed_to_the_side_where_it_fails():
    inputs = torch.full((6, 4), 0.5)
    context = context_of(Target(Sum()), inputs, "regression:1.0")
    found = attack("fgsm", inputs, 0.1, context)
    torch.testing.assert_close(found, torch.full_like(found, 0.4))
    assert context.passes == 6 * 5
    for name, theta in (("pgd", 0.1), ("apgd", 0.1), ("pgd_l2", 0.2), ("cw", 0.0)):
        seeds = torch.arange(64)
        many = torch.full((64, 4), 0.5)
        moved = (attack(name, many, theta, context_of(Target(Sum()), many, "regression:0.3"), seeds) - many).sum(1)
        assert bool((moved.abs() > 0.05).all()), name
        assert 10 < int((moved > 0).sum()) < 54, f"{name} goes both ways"


def painter(n_classes=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, n_classes, 3, padding=1))


def scorer(n_outputs):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, n_outputs))


def far(clean, outputs, labels):
    return (outputs - clean).norm(dim=1) > 0.2


TASKS = {
    "changed": (scorer(5), "changed"),
    "top2": (scorer(5), "top2"),
    "probabilities": (nn.Sequential(scorer(5), nn.Softmax(1)), "changed"),
    "threshold": (scorer(1), "threshold"),
    "a chance": (nn.Sequential(scorer(1), nn.Sigmoid()), "threshold"),
    "multilabel": (scorer(4), "multilabel"),
    "regression": (scorer(1), "regression:0.15"),
    "segmentation": (painter(), "segmentation:0.1"),
    "compare": (scorer(3), Compare(far, "far", lambda outputs, clean: (outputs - clean).norm(dim=1))),
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("task", TASKS)
def test_every_task_can_be_attacked(task, name):
    model, oracle = TASKS[task]
    inputs = torch.rand(24, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    context = context_of(Target(model), inputs, oracle)
    theta = torch.tensor({"cw": 0.02, "pgd_l2": 3.2}.get(name, 0.4)).repeat(24, 1).requires_grad_()
    found = perturb(ATTACK[name], inputs, theta, torch.arange(24), context)
    assert bool(torch.autograd.grad(found.sum(), theta)[0].isfinite().all())
    is_fault = margin_at(found.detach(), context) < 0
    if (task, name) != ("compare", "fgsm"):  # a norm has no slope at the clean answer, and no preferred side
        assert is_fault.float().mean() > 0.9  # all, at twice the radius that most need
    if name == "cw":
        aim = 0.0 if task == "compare" else 0.02  # it says whether there is a fault, not how far away it is
        assert (margin_at(found.detach(), context) < -aim).float().mean() > 0.8
        assert (found - inputs).flatten(1).norm(dim=1)[is_fault].mean() < 1.5


def test_a_task_without_a_loss_is_rejected():
    inputs = torch.rand(4, 1, 8, 8)
    context = context_of(Target(scorer(3)), inputs, Compare(far, "far"))
    for name in ALL:
        with pytest.raises(UsageError, match="an attack needs a loss to maximise, but oracle 'far' has none"):
            attack(name, inputs, 0.1, context)


def test_cw_says_what_is_missing():
    with pytest.raises(UsageError, match="'cw' needs the oracle's margin, got none"):
        attack("cw", torch.rand(2, 1, 8, 8), 0.0, Context(target=Target(scorer(3)), reference=torch.zeros(2).long()))


@pytest.mark.parametrize(("name", "magnitude"), [("pgd", 0.3), ("cw", 0.05)])
def test_a_campaign_keeps_the_inputs_of_an_attack(name, magnitude):
    inputs = torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    never = {"tolerance": 1e-12, "plateau": None, "uniform_share": 0.0}
    result = themis.run(
        Target(scorer(5)), inputs, ATTACK[name], magnitude=magnitude, policy="corners", max_tests=100, **never
    )
    assert len(result.faults) >= 99
    assert result.rounds[-1].passes == 5 + 4 + 2 + 40 + 100 * (1 + ATTACK[name].passes)
    assert all(fault.replay().is_same for fault in result.faults[:5])


def test_attacks_are_in_the_table():
    assert set(ALL) <= set(PERTURBATIONS)


# Without a gradient

ASKING = ["square", "square_label"]


def attacked(name, inputs, radius, context, seeds=None):
    theta = torch.as_tensor(radius, dtype=torch.float32).expand(len(inputs)).reshape(-1, 1)
    seeds = torch.arange(len(inputs)) if seeds is None else seeds
    return perturb(choose_perturbation(name), inputs, theta, seeds, context)


def as_scores(model):
    def predict(x):
        with torch.no_grad():
            return model(torch.from_numpy(np.asarray(x, np.float32))).numpy()

    return predict


@pytest.mark.parametrize(("name", "above"), [("square", 1.1), ("square_label", 1.5)])
def test_a_linear_model_breaks_above_its_radius_and_not_below(name, above):
    model, inputs = Linear(), near_the_middle()
    context = context_of(BlackBox(as_scores(model)), inputs)
    needed = to_the_edge(model, inputs, "max")
    assert bool((margin_at(attacked(f"{name}(queries=1000)", inputs, above * needed, context), context) < 0).all())
    assert bool((margin_at(attacked(f"{name}(queries=300)", inputs, 0.999 * needed, context), context) > 0).all())


@pytest.mark.parametrize("shape", [(40,), (2, 30), (1, 8, 8), (3, 6, 9), (2, 3, 6, 6)], ids=str)
@pytest.mark.parametrize("name", ASKING)
def test_the_result_is_in_the_box_and_the_bounds_and_every_query_is_in_the_bounds(name, shape):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(int(np.prod(shape)), 3))
    inputs, radius, tried = 255 * torch.rand(6, *shape), torch.linspace(0, 0.3, 6), []

    def spy(x):
        tried.append(x)
        return x / 255

    context = context_of(Target(model, bounds=(0, 255), preprocess=spy), inputs)
    found = attacked(name, inputs, radius, context)
    assert min(float(each.min()) for each in tried) >= 0
    assert max(float(each.max()) for each in tried) <= 255
    change = (found - inputs).flatten(1).abs().amax(1) / 255
    assert bool((change <= radius * (1 + 1e-5) + 1e-6).all())


@pytest.mark.parametrize("name", ASKING)
def test_a_test_is_the_same_in_any_batch(name):
    inputs = torch.rand(24, 1, 8, 8, generator=torch.Generator().manual_seed(2)).double()
    target = Target(scorer(5).double())
    whole = attacked(name, inputs, 0.05, context_of(target, inputs))
    for rows in ([0], [5, 3], list(range(20))):
        part = attacked(name, inputs[rows], 0.05, context_of(target, inputs[rows]), torch.tensor(rows))
        torch.testing.assert_close(part, whole[rows], atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", ASKING)
def test_only_questions_count_and_a_test_ends_at_its_first_fault(name):
    inputs = torch.rand(24, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    context = context_of(Target(scorer(5)), inputs)
    attacked(f"{name}(queries=30)", inputs, 1e-6, context)
    assert context.passes == 24 * 30
    context = context_of(Target(scorer(5)), inputs)
    attacked(f"{name}(queries=300)", inputs, 0.4, context)
    assert 24 <= context.passes < 24 * 100


@pytest.mark.parametrize("name", ASKING)
@pytest.mark.parametrize("target", ["network", "black box"])
def test_a_campaign_counts_what_was_asked_and_replays_its_faults(name, target):
    model, asked = scorer(5), []

    def counted(x):
        asked.append(len(x))
        return as_scores(model)(x)

    inputs = torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    tested = Target(model) if target == "network" else BlackBox(counted)
    settings = {"magnitude": 0.3, "plateau": None, "max_tests": 100, "tolerance": 1e-12, "uniform_share": 1.0}
    result = themis.run(tested, inputs, f"{name}(queries=50)", **settings)
    n_asked = sum(asked)
    again = themis.run(tested, inputs, f"{name}(queries=50)", **settings, batch_size=7)
    assert target == "network" or result.rounds[-1].passes == n_asked
    assert len(result.faults) > 50
    assert result.rounds[-1].passes == again.rounds[-1].passes < 100 * 51
    assert [fault.margin for fault in again.faults] == pytest.approx(
        [fault.margin for fault in result.faults], abs=1e-5
    )
    assert all(fault.replay().is_same for fault in result.faults[:5])


def test_a_forest_is_attacked():
    ensemble = pytest.importorskip("sklearn.ensemble")
    draw = np.random.default_rng(0)
    rows = draw.random((300, 6), dtype=np.float32)
    forest = ensemble.RandomForestClassifier(20, random_state=0).fit(rows, rows[:, 0] + rows[:, 1] > 1)
    inputs = torch.from_numpy(rows[:32])
    noise_context = context_of(BlackBox(forest), inputs)
    noise = perturb(PERTURBATIONS["gaussian"], inputs, torch.full((32, 1), 0.09), torch.arange(32), noise_context)
    for name in ASKING:
        context = context_of(BlackBox(forest), inputs)
        broken = margin_at(attacked(name, inputs, 0.15, context), context) < 0
        assert broken.float().mean() > (margin_at(noise, context) < 0).float().mean() + 0.1


def test_queries_are_part_of_the_name():
    assert choose_perturbation("square(queries=1000)").passes == 1000
    assert choose_perturbation("square(queries=1000)").theta_is_magnitude
    both = choose_perturbation("square(radius=0:0.2, queries=7)")
    assert (both.name, both.passes, both.theta[0].high) == ("square(queries=7, radius=0:0.2)", 7, 0.2)
    assert choose_perturbation(both.name).name == both.name
    for wrong in ("0", "1.5", "1:3"):
        with pytest.raises(UsageError, match="queries of 'square' must be a whole number of at least 1"):
            choose_perturbation(f"square(queries={wrong})")
    with pytest.raises(UsageError, match="theta 'queries' of 'pgd' must be one it has"):
        choose_perturbation("pgd(queries=10)")


def test_a_refused_attack_names_the_ones_that_need_no_gradient():
    with pytest.raises(UsageError, match="use square or square_label"):
        themis.run(BlackBox(as_scores(scorer(5))), torch.rand(8, 1, 8, 8), "pgd")
