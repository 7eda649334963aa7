"""Attacks are as strong as those of foolbox and ART, on LeNet-5 and the embedded digits."""

import pytest
import torch
from torch import nn

from themis import Target
from themis.oracle import Wrong
from themis.perturb import Context, perturb
from themis.perturb.attack import APGD_FIRST_STEP, ATTACKS, PGD_STEP, PGD_STEPS
from themis.perturb.attack import APGD_STEPS as AUTO_STEPS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]  # the reference libraries emit warnings when imported

N, N_SEARCHED = 500, 100
ATTACK = {each.name: each for each in ATTACKS}


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The demo's model, and held-out digits that it answers correctly."""
    from themis_lab.cli.demo import make_data, make_model

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THEMIS_CACHE", str(tmp_path_factory.mktemp("cache")))
        target, data = Target(make_model().eval()), make_data()
    with torch.no_grad():
        at = (target.forward(data.inputs).argmax(1) == data.labels).nonzero().squeeze(1)[:N]
    assert len(at) == N
    return target, data.inputs[at].contiguous(), data.labels[at]


def ours(name, theta, digits, n=N):
    target, inputs, labels = digits
    context = Context(
        target.bounds,
        target,
        labels[:n],
        margin=lambda outputs: Wrong().compare(outputs, outputs, labels[:n]).margin,
    )
    return perturb(ATTACK[name], inputs[:n], torch.full((n, 1), theta), torch.arange(n), context)


def broken(found, digits):
    """Which digits are answered incorrectly; foolbox returns a black picture if it found none."""
    with torch.no_grad():
        answers = digits[0].forward(found).argmax(1)
    return (answers != digits[2][: len(found)]) & found.flatten(1).any(1)


def assert_as_strong(mine, theirs, digits, distance):
    """Success within one percentage point or better, and at most 5% more distortion on digits that both broke."""
    is_mine, is_theirs = broken(mine, digits), broken(theirs, digits)
    assert is_theirs.float().mean() > 0.1, "a comparison that means something"
    assert is_mine.float().mean() >= is_theirs.float().mean() - 0.01
    both = is_mine & is_theirs
    change = [(each - digits[1][: len(each)]).flatten(1)[both] for each in (mine, theirs)]
    lengths = [distance(each).mean() for each in change]
    assert lengths[0] <= 1.05 * lengths[1]


def largest(change):
    return change.abs().amax(1)


def euclidean(change):
    return change.norm(dim=1)


def foolbox_of(digits):
    foolbox = pytest.importorskip("foolbox", reason='needs pip install "themis-dl[attacks]"')
    torch.manual_seed(0)
    return foolbox.attacks, foolbox.PyTorchModel(digits[0].module, bounds=(0, 1), device="cpu")


@pytest.mark.parametrize("radius", [0.1, 0.15, 0.2])
def test_fgsm_equals_foolbox(digits, radius):
    attacks, model = foolbox_of(digits)
    theirs = attacks.LinfFastGradientAttack()(model, *digits[1:], epsilons=radius)[1]
    mine = ours("fgsm", radius, digits)
    assert_as_strong(mine, theirs, digits, largest)
    assert (mine - theirs).abs().gt(1e-5).float().mean() < 1e-3, "but for gradients of 0 in one of them"


@pytest.mark.parametrize("radius", [0.1, 0.15])
def test_pgd_is_as_strong_as_foolbox(digits, radius):
    attacks, model = foolbox_of(digits)
    attack = attacks.LinfProjectedGradientDescentAttack(rel_stepsize=PGD_STEP, steps=PGD_STEPS)
    assert_as_strong(ours("pgd", radius, digits), attack(model, *digits[1:], epsilons=radius)[1], digits, largest)


@pytest.mark.parametrize("radius", [1.5, 2.0])
def test_pgd_l2_is_as_strong_as_foolbox(digits, radius):
    attacks, model = foolbox_of(digits)
    attack = attacks.L2ProjectedGradientDescentAttack(rel_stepsize=PGD_STEP, steps=PGD_STEPS)
    assert_as_strong(ours("pgd_l2", radius, digits), attack(model, *digits[1:], epsilons=radius)[1], digits, euclidean)


def test_cw_is_as_close_as_foolbox_with_nine_times_its_steps(digits):
    attacks, model = foolbox_of(digits)
    attack = attacks.L2CarliniWagnerAttack(binary_search_steps=9, steps=100, stepsize=0.1)
    theirs = attack(model, *(each[:N_SEARCHED] for each in digits[1:]), epsilons=None)[0]
    assert_as_strong(ours("cw", 0.0, digits, N_SEARCHED), theirs, digits, euclidean)


@pytest.mark.parametrize("radius", [0.1, 0.15])
def test_apgd_is_as_strong_as_art(digits, radius):
    evasion = pytest.importorskip("art.attacks.evasion", reason='needs pip install "themis-dl[attacks]"')
    from art.estimators.classification import PyTorchClassifier

    target, inputs, labels = digits
    torch.manual_seed(0)
    classifier = PyTorchClassifier(
        target.module, nn.CrossEntropyLoss(), (1, 28, 28), 10, clip_values=(0, 1), device_type="cpu"
    )
    attack = evasion.AutoProjectedGradientDescent(
        classifier,
        eps=radius,
        eps_step=APGD_FIRST_STEP * radius,
        max_iter=AUTO_STEPS,
        nb_random_init=1,
        batch_size=N,
        verbose=False,
    )
    theirs = torch.from_numpy(attack.generate(inputs.numpy(), labels.numpy()))
    assert_as_strong(ours("apgd", radius, digits), theirs, digits, largest)
