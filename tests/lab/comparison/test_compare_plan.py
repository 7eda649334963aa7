"""The plan, its grids and its seeds, which are decided before any technique runs."""

import json
import math

import numpy as np
import pytest
import torch

from themis.criteria import choose_criterion
from themis.data.seeds import from_arrays
from themis.errors import DataError, StoreError, UsageError
from themis.experiments import ExperimentFolder, ExperimentPlan
from themis.perturb import choose_perturbation
from themis.text import split_list
from themis_lab.comparison.cells import PART_SHARES, split_seeds
from themis_lab.comparison.plan import (
    FREE_IN_COMPARISON,
    CampaignCell,
    ComparisonPlan,
    fix_grid,
    largest_magnitude,
    list_grids,
    usual_magnitude,
)
from themis_lab.comparison.summary import baseline_indices
from themis_lab.criteria import PAPER
from themis_lab.executors import JsonResults
from themis_lab.techniques import BASELINES, choose_technique


def test_random_and_corners_are_always_included_and_nothing_is_included_twice():
    names = [each.name for each in ComparisonPlan(techniques="nc,scheduled,nc,random").chosen()]
    assert names == ["random", "corners", "nc", "scheduled"]


def test_criteria_may_have_options():
    assert split_list("nc(threshold=0.2, neurons=element), scheduled,,") == [
        "nc(threshold=0.2, neurons=element)",
        "scheduled",
    ]
    chosen = ComparisonPlan(techniques="nc(threshold=0.2),nc").chosen()[2:]
    assert [(each.name, each.criterion) for each in chosen] == [
        ("nc(threshold=0.2)", "nc(threshold=0.2)"),
        ("nc", "nc(threshold=0.5)"),  # as the paper sets it
    ]


def test_a_technique_under_several_names_is_one():
    given = "kmnc,KMNC,kmnc( k = 1000 ),lsc,LSA,Scheduled,scheduled,NC(threshold=0.5),kmnc(k=100),random"
    names = [each.name for each in ComparisonPlan(techniques=given).chosen()]
    assert names == ["random", "corners", "kmnc", "lsa", "scheduled", "nc", "kmnc(k=100)"]
    layered = ComparisonPlan(techniques="nc(layers=[Conv1, fc])").chosen()[-1]
    assert choose_technique(layered.name) == layered
    assert "Conv1" in layered.name


def test_the_baselines_have_the_settings_of_the_paper():
    assert {str(choose_criterion(each)) for each in PAPER.values()} == set(BASELINES)
    plan = ComparisonPlan(techniques="kmnc(k=100),nc(threshold=0.2),lsa,idc,nc,kmnc")
    assert baseline_indices([technique.name for technique in plan.chosen()]) == [6, 7, 5, 4]
    plan = ComparisonPlan(techniques="kmnc(k=100),lsa,idc,nc")
    assert baseline_indices([technique.name for technique in plan.chosen()]) == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"techniques": "schedulde"}, "did you mean 'scheduled'"),
        ({"techniques": "fuzz"}, "policies or criteria, got 'fuzz'"),
        ({"techniques": "nc(limit=3)"}, "unknown option 'limit'"),
        ({"techniques": "npc"}, "that can guide a campaign, got 'npc'"),
        ({"campaigns": 0}, "campaigns must be a whole number of at least 1, got 0"),
        ({"random_seed": -1}, "at least 0"),
        ({"uniform_share": 1.5}, "uniform_share"),
        ({"campagins": 3}, "did you mean 'campaigns'"),
        ({"magnitudes": "0.1,-3"}, "positive numbers, grid or paper, got '-3'"),
        ({"magnitudes": ","}, "at least one"),
        ({"magnitudes": "99"}, "must lie in 0..10"),
    ],
)
def test_wrong_options_are_refused_in_words(options, text):
    def use():
        plan = ComparisonPlan.of(**options)
        plan.chosen()
        list_grids(plan, choose_perturbation("gaussian"))

    with pytest.raises(UsageError) as error:
        use()
    assert text in str(error.value)


def test_several_grids_at_once_share_their_cells():
    plan = ComparisonPlan.of(magnitudes=["paper", 0.3, 0.05], techniques=[], campaigns=2)
    grids = list_grids(plan, choose_perturbation("gaussian"))
    assert [(each.name, each.magnitudes) for each in grids] == [
        ("paper", (0.01, 0.02, 0.03, 0.04, 0.05)),
        ("given", (0.05, 0.3)),
    ]
    cells = plan.cells(grids)
    assert len(cells) == len(set(cells)) == 2 * 6 * 2
    assert len({each.file for each in cells}) == len(cells)


def test_the_paper_has_magnitudes_of_its_own_perturbations_only():
    plan = ComparisonPlan(magnitudes="paper")
    grids = {name: list_grids(plan, choose_perturbation(name))[0] for name in ("fgsm", "pgd", "cw")}
    assert grids["fgsm"].magnitudes == grids["pgd"].magnitudes == (0.1, 0.2, 0.3, 0.4, 0.5)
    assert grids["cw"].magnitudes == (10, 20, 30, 40, 50)
    with pytest.raises(UsageError, match="none for 'rotate'"):
        list_grids(plan, choose_perturbation("rotate"))


def test_files_of_cells_differ_even_if_their_plain_names_are_equal():
    files = [CampaignCell(name, 0.1, 0).file for name in ("nc", "nc(a=1)", "nc[a=1]", "nc_a_1_")]
    assert len(set(files)) == 4
    assert all(set(each) <= set("abcdefghijklmnopqrstuvwxyz0123456789_.-/") for each in files)


def test_the_grid_runs_from_10_to_90_percent():
    asked = []

    def rate(magnitude):
        asked.append(magnitude)
        return 1 - np.exp(-((magnitude / 0.37) ** 2))

    grid = fix_grid(rate, start=0.1, most=10)
    assert len(grid.magnitudes) == 10
    assert grid.note == ""
    assert list(grid.magnitudes) == sorted(grid.magnitudes)
    found = 1 - np.exp(-((np.array(grid.magnitudes) / 0.37) ** 2))
    assert np.abs(found - np.linspace(0.1, 0.9, 10)).max() <= 0.01
    assert len(asked) == len(set(asked)) < 60


def test_a_grid_that_cannot_reach_90_percent_says_so():
    guessing = fix_grid(lambda magnitude: 0.9 * np.tanh(magnitude), start=0.25, highest=0.81)
    assert len(guessing.magnitudes) == 10
    assert guessing.magnitudes[-1] == pytest.approx(np.arctanh(0.9), rel=0.05)
    limited = fix_grid(lambda magnitude: 0.6 * magnitude, start=0.25, most=1.0)
    assert limited.magnitudes[-1] == 1.0
    assert limited.note == "10 magnitudes of 10, error rates 10% to 60%: none near 90%"
    saturated = fix_grid(lambda magnitude: 0.7 * np.tanh(magnitude), start=0.25)
    assert "to 70%: none near 90%" in saturated.note
    assert saturated.magnitudes[-1] < 100


def test_a_grid_that_begins_above_10_percent_says_so():
    grid = fix_grid(lambda magnitude: min(1.0, 0.3 + magnitude), start=0.2)
    assert grid.note == "10 magnitudes of 10, error rates 30% to 90%: none near 10%"


def test_of_magnitudes_with_equal_error_rates_the_one_at_the_turn_is_chosen():
    def rate(magnitude):
        return float(np.interp(magnitude, [0.2, 1.0], [0.3, 0.7]))

    grid = fix_grid(rate, start=0.5)
    assert grid.magnitudes[0] >= 0.1  # not the last halving, 0.5 / 2**30
    assert grid.magnitudes[-1] <= 1.0  # nor the last doubling
    assert [rate(each) for each in grid.magnitudes] == pytest.approx(np.linspace(0.3, 0.7, 10), abs=0.01)


def test_a_step_without_a_near_error_rate_is_omitted():
    def rate(magnitude):
        return 0.01 if magnitude < 0.1 else min(1.0, 0.3 + 0.5 * (magnitude - 0.1))

    grid = fix_grid(rate, start=0.5)
    found = [rate(each) for each in grid.magnitudes]
    aims = np.linspace(0.1, 0.9, 10)
    assert min(found) == pytest.approx(0.3, abs=0.05)
    assert all(min(abs(aims - each)) <= 0.045 for each in found)
    assert grid.note == "8 magnitudes of 10, error rates 30% to 90%: none near 10%"


def test_a_grid_of_few_steps_has_few_magnitudes():
    grid = fix_grid(lambda magnitude: [0.08, 0.4, 0.92][int(np.searchsorted([0.3, 0.6], magnitude))], start=1.0)
    assert grid.note == "3 magnitudes of 10, error rates 8% to 92%"
    assert len(grid.magnitudes) == 3
    one = fix_grid(lambda magnitude: [0.05, 0.4, 0.95][int(np.searchsorted([0.3, 0.6], magnitude))], start=1.0)
    assert one.note == "1 magnitude of 10, error rates 40%: none near 10% or 90%"


def test_a_grid_needs_an_error_rate_that_changes():
    with pytest.raises(DataError, match=r"must change with the magnitude, .* it stays at 50.0%"):
        fix_grid(lambda magnitude: 0.5, start=1.0)
    with pytest.raises(DataError, match=r"it reaches only 3.0%, the grid needs 10%"):
        fix_grid(lambda magnitude: min(0.03, magnitude), start=1.0)
    with pytest.raises(DataError, match=r"it is at least 95.0%, the grid needs at most 90%"):
        fix_grid(lambda magnitude: 0.95, start=1.0)
    with pytest.raises(DataError, match="jumps from below 10% to above 90%"):
        fix_grid(lambda magnitude: float(magnitude > 0.3), start=1.0)


def test_the_largest_magnitude_is_the_largest_valid_one():
    for name in ("gaussian", "fgsm", "brightness", "rotate", "jpeg", "gaussian_blur"):
        perturbation = choose_perturbation(name)
        most = largest_magnitude(perturbation)
        perturbation.at(usual_magnitude(perturbation))
        if np.isfinite(most):
            perturbation.at(most)
            with pytest.raises(UsageError):
                perturbation.at(most * 1.01)


def test_parts_share_no_seed_and_depend_on_the_seed_only():
    seeds = from_arrays(torch.rand(1000, 4))
    parts = split_seeds(seeds, 10_000, 10_000, 10_000)
    ids = [set(each.seed_id.tolist()) for each in (parts.search, parts.judge, parts.grid)]
    assert sum(map(len, ids)) == len(set.union(*ids)) == 1000
    for found, share in zip(ids, PART_SHARES.values(), strict=True):
        assert abs(len(found) / 1000 - share) < 0.05
    few = split_seeds(seeds[torch.arange(0, 1000, 2)], 50, 40, 30)
    small = [set(each.seed_id.tolist()) for each in (few.search, few.judge, few.grid)]
    assert [len(each) for each in small] == [50, 40, 30]
    assert all(a <= b for a, b in zip(small, ids, strict=True))


def test_too_little_data_is_refused():
    with pytest.raises(DataError, match="too few"):
        split_seeds(from_arrays(torch.rand(2, 4)), 10, 10, 10)


def planned(other=None, **options):
    record = {"plan": ComparisonPlan(**options).as_dict(), "perturbation": "gaussian", "model_sha256": "0" * 64}
    return ExperimentPlan({**record, **(other or {})}, FREE_IN_COMPARISON)


def test_a_folder_accepts_the_same_plan_and_refuses_another(tmp_path):
    for _ in range(2):
        folder = ExperimentFolder(tmp_path / "out", "comparison")
        folder.begin(planned(), {"torch": "1"})
        folder.close()
        folder = ExperimentFolder(tmp_path / "unlimited", "comparison")
        folder.begin(planned({"theta": [{"name": "count", "limits": [0, math.inf]}]}), {"torch": "1"})
        folder.close()
    folder = ExperimentFolder(tmp_path / "out", "comparison")
    with pytest.raises(UsageError, match=r"max_passes 5000 then, 300 now.*another folder"):
        folder.begin(planned(max_passes=300), {"torch": "1"})
    more = planned(techniques="nc", campaigns=9, magnitudes="0.1", resamples=7)
    folder.begin(more, {"torch": "1"})
    assert folder.read("plan.json")["plan"]["campaigns"] == 9
    with pytest.raises(UsageError, match="model_sha256"):
        folder.begin(planned({"model_sha256": "1" * 64}), {"torch": "1"})
    with pytest.warns(RuntimeWarning, match="torch 1 then, 2 now"):
        folder.begin(planned(), {"torch": "2"})
    folder.close()


def test_a_folder_has_one_writer_and_no_other_files(tmp_path):
    folder = ExperimentFolder(tmp_path / "out", "comparison")
    with pytest.raises(StoreError, match="one writer"):
        ExperimentFolder(tmp_path / "out", "comparison")
    folder.close()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("do not lose me")
    with pytest.raises(UsageError, match="contains other files"):
        ExperimentFolder(tmp_path / "mine", "comparison")
    with pytest.raises(UsageError, match="is a file"):
        ExperimentFolder(tmp_path / "mine" / "thesis.txt", "comparison")


def test_a_new_folder_in_which_nothing_was_stored_is_removed(tmp_path):
    ExperimentFolder(tmp_path / "out", "comparison").close()
    assert not (tmp_path / "out").exists()
    (tmp_path / "mine").mkdir()
    ExperimentFolder(tmp_path / "mine", "comparison").close()
    assert (tmp_path / "mine").exists()


def test_failed_cells_run_again_and_damaged_files_are_named(tmp_path):
    folder, cells = ExperimentFolder(tmp_path / "out", "comparison"), [CampaignCell("nc", 0.1, k) for k in range(3)]
    results = JsonResults(folder)
    results.save(cells[0], {"tests": 5})
    results.save(cells[1], {"error": "it broke"})
    assert [results.load(cell) for cell in cells] == [{"tests": 5}, None, None]
    path = tmp_path / "out" / "cells" / cells[2].file
    path.write_text('{"tests": ')
    with pytest.raises(StoreError, match="remove it"):
        results.load(cells[2])
    path = tmp_path / "out" / "cells" / cells[0].file
    stored = json.loads(path.read_text())
    for changed in ({**stored, "tests": 6}, {"tests": stored["tests"]}):  # another result, and one without a checksum
        path.write_text(json.dumps(changed))
        with pytest.raises(StoreError, match="it was changed or is that of another cell; remove it to create it again"):
            results.load(cells[0])
    folder.close()
