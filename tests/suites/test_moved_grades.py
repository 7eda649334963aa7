"""Grades of a suite whose perturbations move the labels."""

import numpy as np
from pixel_nets import PixelNet, RecallingNet, scenes

import themis
from themis.data.seeds import read_seeds
from themis.measure.calculator import Calculator
from themis.measure.sweep import sweep
from themis.oracle import choose_oracle
from themis.perturb import choose_perturbation
from themis.suites.definition import Level, SuiteMember
from themis.suites.grades import grade_member


def test_a_perfect_segmentation_has_no_error_under_geometry():
    pictures, labels = scenes()
    member = SuiteMember("rotate", choose_perturbation("rotate"), levels=(Level(0.5), Level(1.0)))
    grades = {}
    for net in (PixelNet(), RecallingNet(pictures)):
        target = themis.Target(net, oracle="segmentation:0.01")
        with target.opened():
            calculator = Calculator.trace(
                target, read_seeds((pictures, labels)), member.perturbation, choose_oracle(target.oracle)
            )
            sweep(calculator)
            grades[type(net)] = grade_member(calculator, member, np.arange(len(pictures)), 0)
    assert not any(level.errors for level in grades[PixelNet])
    assert [level.score for level in grades[PixelNet]] == [1, 1]
    assert any(level.wrong.any() for level in grades[RecallingNet])
