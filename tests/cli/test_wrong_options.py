"""Wrong commands, flags, values and configuration files: each is reported in one line with its exit code."""

import pytest
from wrong_use import PICTURE, enter, refused, run, write

WRONG = {
    # commands
    "unknown command": (["rnu"], 2, "unknown command 'rnu': did you mean 'run'?"),
    "unlike any command": (["xyzzyx"], 2, "unknown command 'xyzzyx': known: "),
    "option before the command": (["--quiet", "run"], 2, "unknown command '--quiet'"),
    "completion for no shell": (["completion"], 2, "SHELL must be given"),
    "completion for an unknown shell": (["completion", "bsh"], 2, "did you mean 'bash'?"),
    "demo with an unknown perturbation": (["demo", "--perturb", "fgms"], 2, "did you mean 'fgsm'?"),
    # flags
    "unknown flag": (run("--max-test 5"), 2, "unknown option --max-test: did you mean --max-tests?"),
    "underscores": (run("--max_tests 5"), 2, "did you mean --max-tests?"),
    "part of a flag": (run("--passes 5"), 2, "unknown option --passes: did you mean --max-passes?"),
    "unlike any flag": (run("--frobnicate"), 2, "unknown option --frobnicate: see themis run --help"),
    "flag of one dash": (run("-max-tests=5"), 2, "did you mean --max-tests?"),
    "no value": (run("--max-tests"), 2, "--max-tests must be followed by a value"),
    "a flag for a value": (run("--max-tests --quiet"), 2, "--max-tests must be followed by a value"),
    "a value for a flag": (run("--quiet=5"), 2, "ignored explicit argument '5'"),
    "one word too many": (run("--layers fc1 fc2"), 2, "unexpected argument 'fc2'"),
    "no model": (["run"], 2, "--model must be given: module:factory"),
    "no data": (["run", "--model", "mine:net"], 2, "--data must be given: READER"),
    "no perturbation": (["run", "--model", "mine:net", "--data", "mine:data"], 2, "--perturb must be given"),
    "an empty model": (["run", "--model", ""], 2, "--model must be given"),
    # values of the wrong type
    "text for a count": (run("--max-tests many"), 2, "max_tests must be a whole number or null, got 'many'"),
    "half a test": (run("--max-tests 1.5"), 2, "max_tests must be a whole number or null, got '1.5'"),
    "infinitely many": (run("--max-tests inf"), 2, "max_tests must be a whole number or null, got 'inf'"),
    "no random seed": (run("--random-seed null"), 2, "random_seed must be a whole number, got 'null'"),
    "text for a number": (run("--magnitude big"), 2, "magnitude must be a number or null, got 'big'"),
    "not a number": (run("--tolerance nan"), 2, "tolerance must be a number, got 'nan'"),
    "one bound": (run("--bounds 255"), 2, "bounds must be two numbers such as 0,255, got '255'"),
    "three bounds": (run("--bounds 0,1,2"), 2, "bounds must be two numbers such as 0,255, got '0,1,2'"),
    "a mean in words": (run("--mean grey --std 1"), 2, "mean must be numbers such as 0.4,0.5,0.4 or null, got 'grey'"),
    "an empty layer": (run("--layers fc1,,fc2"), 2, "layers must be names such as conv1,fc* or null"),
    # values out of range
    "coverage over one": (run("--coverage 2"), 2, "coverage must lie in (0, 1], or be None for no goal, got 2.0"),
    "no coverage": (run("--coverage 0"), 2, "coverage must lie in (0, 1], or be None for no goal, got 0.0"),
    "negative tolerance": (run("--tolerance -1"), 2, "tolerance must be a positive number, got -1.0"),
    "alpha of one": (run("--alpha 1"), 2, "alpha must lie in [0.5, 1)"),
    "odd draws": (run("--draws 4001"), 2, "draws must be at least 100 and a multiple of the 4 chains"),
    "no sample": (run("--sample 0"), 2, "sample must be at least 1, got 0"),
    "share over one": (run("--uniform-share 1.5"), 2, "uniform_share must lie in [0, 1], got 1.5"),
    "no tests": (run("--max-tests 0"), 2, "max_tests must be positive"),
    "negative time": (run("--max-seconds -5"), 2, "max_seconds must be positive"),
    "negative memory": (run("--clean-memory-gib -1"), 2, "clean_memory_gib must be 0 or more"),
    "negative random seed": (run("--random-seed -1"), 2, "random_seed must lie in 0..2**63 - 1, got -1"),
    "no magnitude": (run("--magnitude 0"), 2, "magnitude must be a positive number, got 0"),
    "too few passes": (run("--max-passes 10"), 2, "max_passes must leave room for a test after the"),
    "bounds upside down": (run("--bounds 1,0"), 2, "bounds must be finite and ascending"),
    "no spread": (run("--mean 0.5 --std 0"), 2, "std must be positive"),
    "mean alone": (run("--mean 0.5"), 2, "--mean and --std must be given together"),
    "means of other channels": (run("--mean 1,2,3 --std 1,2,3"), 3, "one per channel, got 3 for inputs with 1 channel"),
    # names
    "perturbation": (run("--perturb gausian"), 2, "did you mean 'gaussian'?"),
    "one of two perturbations": (run("--perturb rain+fogg"), 2, "did you mean 'fog'?"),
    "theta that the perturbation does not have": (run("--perturb rain(angel=1:2)"), 2, "did you mean 'angle'?"),
    "theta that is no range": (run("--perturb rain(angle=wide)"), 2, "must be NAME=LOW:HIGH"),
    "theta outside of what it means": (run("--perturb rain(density=0:3)"), 2, "'density' must lie in 0..1, got 3"),
    "magnitude that takes theta too far": (run("--perturb jpeg --magnitude 9"), 2, "'quality' must lie in 1..100"),
    "bracket that is not closed": (run("--perturb rain(angle=1:2"), 2, "must be names joined by +"),
    "perturbation of no module": (run("--perturb nowhere:BAND"), 2, "No module named 'nowhere'"),
    "perturbation that is something else": (run("--perturb mine:net"), 2, "must be a themis.Perturbation, got Net"),
    "picture perturbation on a table": (run("--data mine:rows --perturb rain"), 2, "'rain' needs pictures"),
    "table perturbation on pictures": (run("--perturb edit"), 2, "'edit' needs rows of a table"),
    "colours of grey pictures": (run("--perturb hue"), 2, "needs pictures with 3 channels, got 1"),
    "similarity of tiny pictures": (run("--min-ssim 0.9"), 2, "min_ssim needs pictures"),
    "information of small pictures": (run("--min-vif 0.1"), 2, "min_vif needs pictures"),
    "similarity over one": (run("--min-ssim 1.5"), 2, "min_ssim must lie in (0, 1)"),
    "policy": (run("--policy schedule"), 2, "did you mean 'scheduled'?"),
    "judge": (run("--judge exakt"), 2, "did you mean 'exact'?"),
    "preset": (run("--preset papper"), 2, "preset must be 'paper'"),
    "scale": (run("--scale relativ"), 2, "scale must be 'absolute' or 'relative'"),
    "neurons": (run("--neurons pixel"), 2, "neurons must be 'element' or 'channel', got 'pixel'"),
    "oracle": (run("--oracle wronng"), 2, "did you mean 'wrong'?"),
    "layers": (run("--layers conv9"), 2, "'conv9' matches none"),
    "device": (run("--device cuda:77"), 2, "--device must be usable here, but 'cuda:77' is not"),
    "device by a wrong name": (run("--device gpu"), 2, "--device must be usable here, but 'gpu' is not"),
    "no GPU": (run("--device cuda:77"), 2, "leave it out, or pass --device cpu; themis doctor lists the devices"),
    "theta from high to low": (run("--perturb gaussian(sigma=1:0)"), 2, "LOW not above HIGH, got 'sigma=1:0'"),
    "folder": (run("--folder nowhere"), 2, "--folder must be an existing folder, got nowhere"),
    # configuration files
    "config missing": (run("--config no.yaml"), 2, "with valid YAML, but no.yaml is not: No such file or directory"),
    "config is a folder": (run("--config ."), 2, "valid YAML, but . is not: it is a folder"),
    "config not YAML": (run("--config c.yaml"), 2, "c.yaml is not: line 2", write("c.yaml", "a: 1\nb: c: d\n")),
    "config is a picture": (run("--config c.yaml"), 2, "c.yaml is not", write("c.yaml", PICTURE)),
    "config is a list": (run("--config c.yaml"), 2, "must hold names and values", write("c.yaml", "- max_tests\n")),
    "config is a word": (run("--config c.yaml"), 2, "must hold names and values", write("c.yaml", "max_tests")),
    "unknown key": (
        run("--config c.yaml"),
        2,
        "unknown option 'max_test' in c.yaml: did you mean max_tests?",
        write("c.yaml", "max_test: 5"),
    ),
    "config in a config": (run("--config c.yaml"), 2, "unknown option 'config'", write("c.yaml", "config: d.yaml")),
    "wrong type in a file": (
        run("--config c.yaml"),
        2,
        "in c.yaml: draws must be a whole number, got 'many'",
        write("c.yaml", "draws: many"),
    ),
    "yes for a number": (run("--config c.yaml"), 2, "alpha must be a number or null", write("c.yaml", "alpha: yes")),
    "null in a file": (run("--config c.yaml"), 2, "draws must be a whole number", write("c.yaml", "draws: null")),
    "a mapping": (run("--config c.yaml"), 2, "judge must be text, got {'a': 1}", write("c.yaml", "judge: {a: 1}")),
    "text for yes": (run("--config c.yaml"), 2, "json must be true or false, got 1", write("c.yaml", "json: 1")),
    "out of range in a file": (run("--config c.yaml"), 2, "alpha must lie in [0.5, 1)", write("c.yaml", "alpha: 2")),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_option_is_reported_in_one_line_with_its_exit_code(tmp_path, monkeypatch, capsys, name):
    enter(tmp_path, monkeypatch)
    words, code, message, *setup = WRONG[name]
    assert message in refused(words, code, setup, capsys)


def test_the_table_of_wrong_options_is_long():
    assert len(WRONG) >= 60
