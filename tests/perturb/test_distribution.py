"""How often theta occurs: distributions in specifications and in Python, and what is refused."""

import numpy as np
import pytest
from scipy import stats

from themis import DataError, Theta, UsageError
from themis.perturb.distribution import read_distribution
from themis.perturb.names import choose_perturbation

SHARES = np.linspace(0.005, 0.995, 199)


@pytest.mark.parametrize(
    ("text", "low", "high", "scipy"),
    [
        ("beta(1,8)", 0.5, 2.5, stats.beta(1, 8, 0.5, 2)),
        ("normal(1,2)", -1, 2, stats.truncnorm(-1, 0.5, 1, 2)),
        ("lognormal(-1,0.5)", 0, 50, stats.lognorm(0.5, scale=np.exp(-1))),
        ("triangular(0,1,4)", 0, 4, stats.triang(0.25, 0, 4)),
        ("histogram(0,1,3,30,10)", 0, 3, stats.rv_histogram(([30, 10], [0, 1, 3]), density=False)),
    ],
)
def test_values_occur_as_often_as_the_distribution_says(text, low, high, scipy):
    distribution = read_distribution(text)
    np.testing.assert_allclose(distribution.value_at(SHARES, low, high), scipy.ppf(SHARES), rtol=1e-6)
    values = scipy.ppf(SHARES)
    np.testing.assert_allclose(distribution.density(values, low, high), scipy.pdf(values) * (high - low), rtol=1e-6)
    assert read_distribution(str(distribution)) == distribution


def test_values_outside_of_the_range_do_not_occur():
    values = read_distribution("normal(0,10)").value_at(np.linspace(0, 1, 101), -3, 4)
    assert values.min() == -3
    assert values.max() == 4
    assert (np.diff(values) > 0).all()


def test_a_histogram_is_read_from_a_file(tmp_path):
    path = tmp_path / "rain.csv"
    path.write_text("low,high,count\n0.5,1,10\n0,0.5,90\n")
    distribution = read_distribution(f"histogram({path})")
    assert distribution.numbers == (0, 0.5, 1, 90, 10)
    assert str(distribution) == "histogram(0,0.5,1,90,10)"


def test_a_specification_names_distributions_beside_ranges():
    chosen = choose_perturbation("fog(density=0:0.5~beta(1,8), scale=0.5) + rain(angle~normal(0,5))")
    assert chosen.name == "fog(density=0:0.5~beta(1,8), scale=0.5) + rain(angle~normal(0,5))"
    known = {theta.name: theta for theta in chosen.theta}
    assert str(known["fog_density"].distribution) == "beta(1,8)"
    assert known["fog_density"].high == 0.5
    assert str(known["angle"].distribution) == "normal(0,5)"
    assert known["patchiness"].distribution is None
    assert choose_perturbation(chosen.name).theta == chosen.theta
    assert Theta("density", 0, 1, distribution="beta(1,8)").as_dict()["distribution"] == "beta(1,8)"


@pytest.mark.parametrize(
    ("distribution", "reason"),
    [
        ("beta(1)", "must have .*two numbers above 0"),
        ("beta(0,1)", "must have .*two numbers above 0"),
        ("normal(0,-1)", "must have .*SD above 0"),
        ("normal(nan,1)", "must have .*SD above 0"),
        ("lognormal(1e9,1)", "must have .*SD above 0"),
        ("triangular(0,2,1)", "must have .*three ascending numbers"),
        ("histogram(0,1,0)", "must have .*counts are not all 0"),
        ("histogram(0,2,1,5,5)", "must have .*counts are not all 0"),
        ("histogram()", "must have .*counts are not all 0"),
        ("gamma(1,2)", "must be one of beta"),
        ("", "must be one of beta"),
        ("normal(50,1)", "at least 1% of its values in the range 0..1"),
    ],
)
def test_what_is_no_distribution_is_refused(distribution, reason):
    with pytest.raises(UsageError, match=reason):
        Theta("density", 0, 1, distribution=distribution)


@pytest.mark.parametrize("content", ["0,1\n", "0,1,x\n", "0,1,5\n2,3,5\n", "", "\x00"])
def test_a_file_that_is_no_histogram_is_refused(tmp_path, content):
    path = tmp_path / "rain.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=r"a histogram must"):
        read_distribution(f"histogram({path})")
    with pytest.raises(DataError, match="not a regular file"):
        read_distribution("histogram(/dev/zero)")


def test_a_histogram_that_is_missing_is_refused_in_words(tmp_path):
    with pytest.raises(DataError) as refusal:
        read_distribution(f"histogram({tmp_path / 'nope.csv'})")
    path = str(tmp_path / "nope.csv")
    rule = "a histogram must be a file with lines low,high,count"
    assert str(refusal.value) == f"{rule}, got {path!r}: No such file or directory; correct it"


def test_a_theta_is_held_or_distributed():
    with pytest.raises(UsageError, match="must be held fixed or distributed"):
        choose_perturbation("fog(density=0.2~beta(1,8))")
    with pytest.raises(UsageError, match="did you mean 'density'"):
        choose_perturbation("fog(densty~beta(1,8))")
