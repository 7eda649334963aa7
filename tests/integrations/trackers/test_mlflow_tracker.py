"""MLflow: what real campaigns log to a database file, read with its own client."""

import pytest
import torch

import themis
from themis import Callback, Target
from themis_integrations.trackers import MLflow

pytestmark = pytest.mark.xdist_group("mlflow_tracker")

mlflow = pytest.importorskip("mlflow")
pytest.importorskip("sqlalchemy")

OPTIONS = {"magnitude": 0.5, "policy": "random", "random_seed": 3, "max_tests": 1280}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """One database for all tests: creating its tables takes seconds."""
    return tmp_path_factory.mktemp("mlflow tracked")


def shown_in(place, experiment):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{place.resolve() / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return client, run


def test_parameters_metrics_and_files_are_logged_and_a_resumed_campaign_continues(trained, tmp_path, place):
    target, held_out = trained
    data, out = held_out[range(0, 1000, 5)], tmp_path / "run"
    how = {"run": out, "experiment": "digits", "n_pictures": 3}
    first = themis.run(target, data, "gaussian", out=out, callbacks=[MLflow(place, **how)], **OPTIONS)
    client, shown = shown_in(place, "digits")
    assert mlflow.active_run() is None
    assert (shown.info.status, shown.info.run_name) == ("FINISHED", "run")
    assert (shown.data.params["policy"], shown.data.params["perturbation"]) == ("random", "gaussian")
    history = client.get_metric_history(shown.info.run_id, "distinct_faults")
    assert [(each.step, each.value) for each in history] == [
        (each.tests, each.distinct_faults) for each in first.rounds
    ]
    assert shown.data.metrics["result/residual_risk"] == pytest.approx(first.residual_risk.value)
    assert first.stop in shown.data.tags["mlflow.note.content"]
    assert {each.path for each in client.list_artifacts(shown.info.run_id)} == {"summary.json", "faults"}
    assert len(client.list_artifacts(shown.info.run_id, "faults")) == 3 + 1

    themis.resume(out, target, data, max_tests=2560, callbacks=[MLflow(place, **how)])
    client, again = shown_in(place, "digits")
    assert again.info.run_id == shown.info.run_id
    steps = [each.step for each in client.get_metric_history(again.info.run_id, "coverage")]
    assert steps == sorted(set(steps))
    assert steps[-1] == again.data.metrics["result/tests"] == 2560
    assert again.info.status == "FINISHED"


def test_a_failed_campaign_is_shown_as_failed(place):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))

    class Break(Callback):
        def on_round(self, round):
            net[2].weight.data = net[2].weight.data[:, :3]

    options = {
        **OPTIONS,
        "max_tests": 5120,
        "coverage": None,
        "callbacks": [MLflow(place, experiment="broken"), Break()],
    }
    with pytest.raises(themis.ModelError):
        themis.run(Target(net), torch.rand(50, 8), "gaussian", **options)
    _, shown = shown_in(place, "broken")
    assert shown.info.status == "FAILED"
    assert "The campaign failed" in shown.data.tags["mlflow.note.content"]
