"""No test of a campaign is run twice, whatever the policy and the size of a round."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from guided import Seen, labelled

import themis
from themis import Target
from themis.search import POLICIES, choose_policy
from themis.search.policy import Novelty, Space

pytestmark = pytest.mark.quick

N_SEEDS, ROUND_SIZE, MAX_TESTS = 20, 128, 640


def record_tests(policy):
    """The tests that were run, in batches, as the policy learns about them from now on."""
    batches, observe = [], policy.observe

    def record(tests, results):
        batches.append(tests)
        observe(tests, results)

    policy.observe = record
    return batches


def triples(batches):
    """Seed, noise seed and theta of every test."""
    return [
        (seed, noise, theta.tobytes())
        for tests in batches
        for seed, noise, theta in zip(tests.seed.tolist(), tests.noise_seed.tolist(), tests.theta, strict=True)
    ]


@pytest.mark.parametrize("perturbation", ["gaussian", "brightness", "gaussian + brightness"])
@pytest.mark.parametrize("name", [name for name in POLICIES if name != "boundary"])
def test_all_tests_of_a_campaign_are_different_in_rounds_larger_than_the_number_of_seeds(name, perturbation):
    net, policy, options = Seen(), choose_policy(name), {}
    if name == "fuzz":
        options["criterion"] = "nc"
    elif name == "deepxplore":
        rival = Seen()
        with torch.no_grad():
            rival.conv.weight += 0.3
        options["rivals"] = [Target(rival)]
    batches = record_tests(policy)
    inputs, labels = labelled(net)
    run = themis.run(
        Target(net), (inputs[:N_SEEDS], labels[:N_SEEDS]), perturbation, policy=policy, round_size=ROUND_SIZE,
        max_tests=MAX_TESTS, coverage=None, plateau=None, **options,
    )  # fmt: skip
    tests = triples(batches)
    assert len(tests) == run.rounds[-1].tests == MAX_TESTS
    assert len(set(tests)) == len(tests)
    if policy.needs_gradient:  # every step of an ascent follows from the step before it
        steps = [batch.seed[batch.kind == "ascent"] for batch in batches]
        assert all(len(np.unique(seeds)) == len(seeds) for seeds in steps)
        assert sum(map(len, steps)) > N_SEEDS


def test_the_same_noise_at_the_same_theta_is_the_same_test_and_gets_other_noise():
    perturbation = themis.Perturbation("p", (themis.Theta("a", 0, 1),), lambda inputs, *rest: inputs, is_random=True)
    space = Space.of(perturbation, np.arange(5), np.arange(5), np.ones(5, np.float32), 0)
    tests = space.tests(np.arange(5), np.arange(5), np.full((5, 1), 0.5, np.float32), "ascent")
    novelty = Novelty(space)
    assert novelty.ensure(tests) is tests
    other_noise = space.tests(np.arange(5, 10), np.arange(5), tests.theta, "ascent")
    assert novelty.ensure(other_noise) is other_noise
    again = novelty.ensure(replace(tests, number=np.arange(10, 15)))
    assert (again.seed == tests.seed).all()
    assert (again.theta == tests.theta).all()
    assert len({*triples([tests]), *triples([other_noise]), *triples([again])}) == 15
