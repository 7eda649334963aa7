"""`themis.retrain`: its inputs, results and refusals."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import themis
from themis import BlackBox, DataError, ModelError, Perturbation, Target, Theta, UsageError
from themis.data.groups import seed_hashes
from themis.experiments import ExperimentFolder, Listener
from themis.judge.estimate import Estimate
from themis.retraining import tune as tuning
from themis.retraining.api import retrain
from themis.retraining.changes import Shift
from themis.retraining.examine import read_reading, write_reading
from themis.retraining.result import change_words, markdown, verdict
from themis.runs.parts import read_parts
from themis.target.ledger import read_ledger, read_metadata
from themis.target.loaders.weights import load_weights

pytestmark = [pytest.mark.xdist_group("retrain"), pytest.mark.usefixtures("few_held_out_tests")]

QUICK = {"random_seeds": 2, "epochs": 3, "draws": 3, "passes": 300, "batch_size": 32}


def blobs(n=300, shift=0.0):
    """Two kinds of pictures, brighter on the left or on the right."""
    rng = torch.Generator().manual_seed(7)
    inputs = 0.4 + 0.2 * torch.rand(n, 1, 6, 6, generator=rng)
    labels = torch.randint(0, 2, (n,), generator=rng)
    inputs[labels == 0, :, :, :3] += 0.15
    inputs[labels == 1, :, :, 3:] += 0.15
    return inputs + shift, labels


def small_net():
    """It has learnt from few of them."""
    inputs, labels = blobs(40, 0.01)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 2))
    optimiser = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(40):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimiser.step()
    return net.eval()


def searched(net, data, **options):
    how = {"magnitude": 0.5, "max_tests": 400, "split": (0.4, 0.3, 0.3), "tolerance": 1e-9, "plateau": None}
    return themis.run(Target(net), data, "gaussian", **{**how, **options})


@pytest.fixture(scope="module")
def small():
    """A small model, its data, and a split run in memory."""
    net, data = small_net(), blobs()
    return net, data, searched(net, data)


@pytest.fixture(scope="module")
def done(small, tmp_path_factory):
    """The same retrained, in a folder."""
    _, data, run = small
    out = tmp_path_factory.mktemp("done") / "out"
    return retrain(run, data=data, out=out, also=["gaussian:0.3"], **QUICK), out


def test_the_folder_has_all_results(small, done):
    _, data, run = small
    result, out = done
    assert {each.name for each in out.iterdir()} >= {"weights.safetensors", "retrain.json", "table.md"}
    kept = json.loads((out / "retrain.json").read_text())
    assert kept["outcomes"][0]["change"]["disturbed"]["after"] == result.outcomes[0].change.disturbed.after
    assert [each["name"] for each in kept["outcomes"]] == ["gaussian:0.5", "gaussian:0.3"]
    assert kept["recipe"]["epochs"] == 3
    assert len({model["share"] for model in kept["models"]}) == 1  # chosen together
    frontier, point = kept["frontier"], kept["point"]
    assert point["share"] == kept["models"][0]["share"]
    assert frontier[0]["lost"] == 0
    assert kept["seeds"] == result.seeds
    assert sum(result.seeds.values()) == 300
    loaded = small_net()
    load_weights(loaded, result.weights)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), result.target.module.parameters(), strict=True))
    assert read_metadata(result.weights)["random_seed"] == str(result.model.random_seed)
    parts = read_parts(run, data)
    seen = read_ledger(result.weights)
    assert seen.knows(parts.search).all()
    assert seen.knows(parts.train).all()
    assert not seen.knows(parts.judge).any()


def test_whole_groups_are_held_out_of_training_and_kept_for_judging(tmp_path, monkeypatch):
    net, data = small_net(), blobs()
    splits, hold_out = [], tuning.hold_out
    monkeypatch.setattr(tuning, "hold_out", lambda *given: splits.append((given[0], hold_out(*given))) or splits[-1][1])
    (tmp_path / "sites.txt").write_text("".join(f"site {k // 10}\n" for k in range(300)))
    other = blobs(80, 0.02)
    quick = {**QUICK, "random_seeds": 1, "epochs": 1}
    for split_by, options in ((10, {}), (tmp_path / "sites.txt", {}), (10, {"train": other}), (10, {"judge": other})):
        split = {"split": None} if "judge" in options else {}
        run = searched(net, data, split_by=split_by, **split)
        result = retrain(run, data=data, **quick, **options)
        material, kept = splits.pop()
        held, trained = (set(material.pool.seed_id[rows].numpy() // 10) for rows in (kept.held_pool, kept.pool))
        assert held
        assert trained
        assert not held & trained
        clean = [set(material.clean.seed_id[rows].numpy() // 10) for rows in (kept.held_clean, kept.clean)]
        assert not set.intersection(*clean)
        if not options:
            judged = set(read_parts(run, data).judge.seed_id.numpy() // 10)
            assert not judged & set.union(held, trained, *clean)
        assert sum(result.seeds.values()) > 0
    (tmp_path / "sites.txt").write_text("".join(f"site {(k >= 100) + (k >= 200)}\n" for k in range(300)))
    for split_seed in range(6):  # the first site is searched in some
        run = searched(net, data, split_by=tmp_path / "sites.txt", split_seed=split_seed)
        with pytest.raises(DataError, match="must be in at least 2 groups"):
            retrain(run, data=data, **quick)
    with pytest.raises(DataError, match="must be in at least 2 groups"):
        retrain(searched(net, data, split_by=300, split=None), judge=other, **quick)


def test_the_table_has_every_measurement(done):
    result, out = done
    text = markdown(result)
    assert text + "\n" == (out / "table.md").read_text()
    assert result._repr_markdown_() == text
    assert repr(result) == f"<Retrained: {' '.join(result.verdict)}>"
    for words in ("clean score", "disturbed score", "old faults now correct", "distinct faults found", "failing seeds"):
        assert text.count(f"| {words}") == 2 or words in text
    assert "### gaussian:0.3" in text
    assert "### The frontier, on seeds held out of training" in text
    assert "of the way from the old weights to the trained ones" in text
    assert "judge seeds, which no model was trained on" in text
    assert f"random seed {result.model.random_seed}, epoch" in text


def test_the_returned_model_is_the_best_on_the_seeds_held_out(done):
    result, _ = done
    scores = [each.held_out for each in result.models]
    assert result.model.held_out == max(scores)
    assert result.target is result.model.target


def test_the_same_call_resumes_to_the_same_result(small, done, tmp_path):
    _, data, run = small
    result, _ = done

    class Stop(Listener):
        left = 3

        def on_cell_end(self, end):
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt

    how = {"data": data, "out": tmp_path / "out", "also": ["gaussian:0.3"], **QUICK}
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            retrain(run, listener=Stop(), **how)
    steps = []

    class Note(Listener):
        def on_cells(self, n_done, n_cells, noun):
            steps.append((n_done, n_cells))

    again = retrain(run, listener=Note(), **how)
    assert steps[0] == (2, 2)  # the original model was examined before
    for one, other in zip(again.outcomes, result.outcomes, strict=True):
        for a, b in zip(one.after, other.after, strict=True):
            assert np.array_equal(a.disturbed, b.disturbed)
    assert (tmp_path / "out/weights.safetensors").read_bytes() == result.weights.read_bytes()


def test_a_value_that_the_task_chooses_is_the_same_plan_as_none(small, tmp_path):
    _, data, run = small
    how = {"data": data, "out": tmp_path, **QUICK, "random_seeds": 1, "epochs": 1}
    weights = retrain(run, **how).weights.read_bytes()
    path = tmp_path / "plan.json"
    stored = json.loads(path.read_text())
    assert stored["recipe"]["steer"] is stored["recipe"]["learning_rate"] is None
    stored["recipe"] |= {"steer": 0.5, "learning_rate": 3e-4}
    stored["plan"] |= {"rounds": 2, "strengths": True}  # options of earlier versions
    path.write_text(json.dumps(stored))
    assert retrain(run, **how).weights.read_bytes() == weights
    assert retrain(run, **how, steer=0.5).weights.read_bytes() == weights
    with pytest.raises(UsageError, match=r"another retraining \(steer 0.5 then, 0.3 now\): pass the same options"):
        retrain(run, **how, steer=0.3)
    stored["recipe"]["steer"] = 0.3
    path.write_text(json.dumps(stored))
    with pytest.raises(UsageError, match=r"another retraining \(steer 0.3 then, 0.5 now\)"):
        retrain(run, **how)
    with pytest.raises(UsageError, match=r"patience 5 then, None now"):
        retrain(run, **how, steer=0.3, patience=None)


def test_another_retraining_in_the_same_folder_is_refused(small, done, tmp_path):
    _, data, run = small
    _, out = done
    before = (out / "retrain.json").read_bytes()
    with pytest.raises(UsageError, match=r"another retraining .*epochs 3 then, 4 now.*another folder"):
        retrain(run, data=data, out=out, also=["gaussian:0.3"], **{**QUICK, "epochs": 4})
    assert (out / "retrain.json").read_bytes() == before
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(UsageError, match="contains other files"):
        retrain(run, data=data, out=tmp_path, **QUICK)


def test_readings_are_loaded_as_they_were_stored(done, tmp_path):
    result, _ = done
    folder = ExperimentFolder(tmp_path / "kept", "retraining")
    reading = result.outcomes[0].after[0]
    write_reading(folder, "one.safetensors", reading)
    back = read_reading(folder, "one.safetensors")
    assert back.as_dict() == reading.as_dict()
    assert np.array_equal(back.held, reading.held)
    assert torch.equal(back.old_inputs, reading.old_inputs)
    assert read_reading(folder, "two.safetensors") is None
    earlier = {name.replace("old_", "old."): value for name, value in vars(reading).items()}
    write_reading(folder, "earlier.safetensors", SimpleNamespace(**earlier, strength=reading.clean))
    back = read_reading(folder, "earlier.safetensors")
    assert back.as_dict() == reading.as_dict()
    assert torch.equal(back.old_inputs, reading.old_inputs)
    folder.close()


def test_a_clean_score_that_falls_comes_first(done):
    result, _ = done
    outcome = result.outcomes[0]
    worse = replace(outcome, after=tuple(replace(each, clean=0 * each.clean) for each in outcome.after))
    said, has_failed = verdict((worse,), 0.005)
    assert has_failed
    assert said[0].startswith("THE CLEAN SCORE FELL by ")
    rounded = replace(outcome.before, disturbed=outcome.before.disturbed + 1e-9)
    for after in (outcome.before, rounded):
        said, has_failed = verdict((replace(outcome, after=(after,)),), 0.0)
        assert not has_failed
        assert "the disturbed score is unchanged" in said[0]


def test_a_difference_is_shown_with_its_interval():
    shift = Shift(0.9714, 0.9706, 0.9706, 0.9706, None, None, Estimate(-0.0008, -0.002, 0.0004))
    assert change_words(shift) == "by 0.08 points, from 97.14% to 97.06% (95%: -0.20 to +0.04 points)"


def test_a_retrained_model_is_searched_and_retrained_again(small, done):
    """Its campaign searches seeds that it was trained on, and its ledger keeps all of them."""
    _, data, _ = small
    result, _ = done
    with pytest.warns(RuntimeWarning, match="the weights were retrained on"):
        run = searched(result.target.module, data)
    again = retrain(run, data=data, **QUICK)
    assert again.outcomes[0].before.clean.mean() == result.outcomes[0].after[result.chosen].clean.mean()
    assert np.isin(result.ledger.hashes, again.ledger.hashes).all()


def test_a_retraining_goes_on_wherever_its_run_is_but_not_on_another_run(small, tmp_path):
    net, data, _ = small
    first, second = tmp_path / "first", tmp_path / "second"
    searched(net, data, out=first)
    how = {"target": Target(net), "data": data, "out": tmp_path / "out", **QUICK}
    before = retrain(first, **how)
    first.rename(second)
    assert retrain(second, **how).gain == before.gain
    searched(net, data, out=first, random_seed=1)
    with pytest.raises(UsageError, match="campaign_seed 0 then, 1 now"):
        retrain(first, **how)


def test_other_data_may_judge_a_run_that_was_not_split(small):
    net, data, _ = small
    run = searched(net, data, split=None)
    with pytest.raises(UsageError, match="--split"):
        retrain(run, **QUICK)
    with pytest.raises(DataError, match="not trained on, but 300 of 300 were"):
        retrain(run, judge=(data[0].flip(0), data[1].flip(0)), **QUICK)
    with pytest.raises(DataError, match=r"inputs like the run's, \[1, 6, 6\], got \[1, 5, 5\]"):
        retrain(run, judge=(data[0][:, :, :5, :5], data[1]), **QUICK)
    others = blobs(120, 0.003)
    result = retrain(run, judge=others, **QUICK)
    assert result.seeds == {"search": 300, "train": 300, "judge": 120}
    assert not np.isin(seed_hashes(themis.data.seeds.read_seeds(others)), result.ledger.hashes).any()


def test_data_and_models_that_cannot_be_trained_on_are_refused(small):
    net, data, run = small
    with pytest.raises(UsageError, match="data must be passed, because a run in memory"):
        retrain(run, **QUICK)
    with pytest.raises(UsageError, match="judge must be left out"):
        retrain(run, data=data, judge=data, **QUICK)
    judge = read_parts(run, data).judge
    with pytest.raises(DataError, match="train must share no seed with the judge seeds"):
        retrain(run, data=data, train=(judge.inputs[:5], judge.labels[:5]), **QUICK)
    box = BlackBox(lambda inputs: net(torch.as_tensor(inputs)).detach().numpy(), oracle="wrong")
    boxed = themis.run(box, data, "gaussian", magnitude=0.5, max_tests=200, split=(0.4, 0.3, 0.3))
    with pytest.raises((UsageError, ModelError), match="not a TorchScript or exported program, got a BlackBox"):
        retrain(boxed, data=data, **QUICK)


def test_a_retrained_model_may_not_be_judged_by_seeds_it_was_trained_on(small, done):
    _, data, _ = small
    result, _ = done
    with pytest.warns(RuntimeWarning, match=r"the weights were retrained on [\d,]+ of [\d,]+ seeds"):
        again = searched(result.target.module, data, split_seed=5)  # other parts of the same data
    with pytest.raises(DataError, match=r"judge .*not trained on"):
        retrain(again, data=data, **QUICK)


def test_options_are_checked_before_anything_runs(small):
    _, data, run = small
    for options, why in (
        ({"epoch": 3}, "unknown option 'epoch'"),
        ({"random_seeds": 0}, "random_seeds must be a whole number of at least 1, got 0"),
        ({"tolerance": 2}, "tolerance must lie in"),
        ({"passes": 10}, "passes must leave room for tests after one pass for each of"),
        ({"also": "gausian"}, "gaussian"),
    ):
        with pytest.raises(UsageError, match=why):
            retrain(run, data=data, **options)
    with pytest.raises(UsageError, match="run must be a finished Run or the folder of one"):
        retrain(3)


def test_custom_perturbations_are_examined_too(small):
    _, data, run = small

    def darken(inputs, theta, rng, context):
        """Less light."""
        return inputs * (1 - theta.view(-1, 1, 1, 1))

    own = Perturbation("darken", (Theta("by", 0, 0.5),), darken, is_random=False)
    result = retrain(run, data=data, also=[own, "gaussian:0.2"], **{**QUICK, "random_seeds": 1, "epochs": 1})
    assert [each.name for each in result.outcomes] == ["gaussian:0.5", "gaussian:0.2", "darken"]
    assert result.weights is None
    assert result.summary()["outcomes"][2]["before"]["perturbation"] == "darken"
