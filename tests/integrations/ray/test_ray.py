"""Workers on Ray: the same faults for any number of them, whichever die, and nothing is left behind."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from interruptions import assert_same_end
from ray_case import OPTIONS, PICTURES, Crashing, Raising, campaign, fault_set, kill, processes, workers

import themis
from themis import ModelError, ThemisError, UsageError
from themis.runs.store.reader import Reader
from themis_integrations import RayExecutor

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:a worker has died:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
HELPERS = str(Path(__file__).parents[2] / "helpers")
MEMORY = 100 << 20
HUNG = 600
"""Seconds after which a command is taken to be stuck: on a busy machine, Ray takes minutes to start."""
CLUSTER, COMMAND = (f"{name} of the test {os.getpid()}" for name in ("cluster", "command"))
"""Marks in the environment of what is started here: only processes that have them are killed or looked for."""


@pytest.fixture(scope="module")
def cluster():
    """Four machines, which are processes of this one; the driver is on the first, which has no room for workers."""
    from ray.cluster_utils import Cluster

    variables = {"THEMIS_TEST": CLUSTER, "RAY_worker_niceness": "0"}  # so that other work does not starve workers
    os.environ |= variables
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": MEMORY})
    nodes.workers = [nodes.add_node(num_cpus=1, object_store_memory=MEMORY) for _ in range(3)]
    ray.init(address=nodes.address, log_to_driver=False)
    yield nodes
    ray.shutdown()
    nodes.shutdown()
    for name in variables:
        del os.environ[name]


@pytest.fixture(scope="module")
def local():
    torch.set_num_threads(1)
    return campaign()


@pytest.mark.parametrize("n_workers", [1, 2, 3])
def test_any_number_of_workers_finds_the_same(cluster, local, n_workers):
    assert len(local.faults) > 100
    assert_same_end(local, campaign(executor=RayExecutor(workers=n_workers)))
    _soon(lambda: not workers(CLUSTER))


def test_workers_and_machines_die_at_random(cluster, local):
    """Twenty campaigns, in each of which workers are killed, and in every fourth a machine as well."""
    expected, n_killed, n_nodes = fault_set(local), 0, 0
    for number in range(20):
        chance, has_ended = random.Random(number), threading.Event()
        counts = [0, 0]

        def kill_some(chance=chance, has_ended=has_ended, counts=counts, kills_machine=number % 4 == 3):
            while not has_ended.wait(chance.uniform(0.3, 1.5)):
                found = workers(CLUSTER)
                if found and counts[0] < 3:
                    kill(chance.choice(found))
                    counts[0] += 1
                elif found and kills_machine and not counts[1]:
                    cluster.remove_node(cluster.workers.pop(chance.randrange(len(cluster.workers))))
                    counts[1] += 1

        thread = threading.Thread(target=kill_some)
        thread.start()
        try:
            run = campaign(seconds=0.05, executor=RayExecutor(workers=3))
        finally:
            has_ended.set()
            thread.join()
        if counts[1]:
            cluster.workers.append(cluster.add_node(num_cpus=1, object_store_memory=MEMORY))
        assert fault_set(run) == expected, number
        assert run.summary()["passes"] == local.summary()["passes"]
        n_killed, n_nodes = n_killed + counts[0], n_nodes + counts[1]
    print(f"{n_killed} workers and {n_nodes} machines were killed in 20 campaigns")
    assert n_killed >= 20
    assert n_nodes >= 3


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (Crashing, "3 workers in a row died while they ran the tests .* so the model seems to crash its process"),
        (Raising, "too bright"),
    ],
)
def test_a_model_that_fails_in_its_worker_stops_the_campaign(cluster, net, message):
    with pytest.raises(ModelError, match=message):
        themis.run(net(), PICTURES, "gaussian", max_tests=600, executor=RayExecutor(workers=2), **OPTIONS)


def test_too_many_workers_are_refused(cluster):
    with pytest.raises(UsageError, match="9 workers with 1 CPU each need 9 CPUs, but the cluster has 3"):
        campaign(executor=RayExecutor(workers=9))
    with pytest.raises(UsageError, match="1 workers with 4 CPU each"):
        campaign(executor=RayExecutor(workers=1, cpus_per_worker=4))


def _command(*words, **rest):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([HELPERS, *sys.path]), "OMP_NUM_THREADS": "1"}
    environment["THEMIS_TEST"] = COMMAND
    environment.pop("RAY_ADDRESS", None)
    return subprocess.Popen(
        [sys.executable, "-m", "themis", *map(str, words)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **rest,
    )


RUN = ["run", "--model", "ray_case:slow_net", "--data", "ray_case:pictures", "--perturb", "gaussian"]
RUN += [f"--{name.replace('_', '-')}={'null' if value is None else value}" for name, value in OPTIONS.items()]
RUN += ["--max-tests=6000", "--no-report"]
RAY = ["--executor", "ray", "--workers", "2"]


def _has_checkpoint(path):
    try:
        with closing(Reader(path, is_brief=True)) as run:
            return run.checkpoint() is not None
    except ThemisError:  # it is being created
        return False


def _wait(condition):
    end = time.monotonic() + HUNG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


def _soon(condition):
    """Ask without a pause for at most 30 seconds of CPU time, which take longer on a busy machine."""
    end = time.process_time() + 30
    while not condition():
        assert time.process_time() < end


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_driver_leaves_no_process_and_resumes(stop, tmp_path):
    ray.shutdown()
    with _command(*RUN, *RAY, "--out", tmp_path / "run") as process:
        _wait(lambda: _has_checkpoint(tmp_path / "run"))
        os.killpg(process.pid, stop) if stop == signal.SIGINT else process.send_signal(stop)
        _, errors = process.communicate(timeout=HUNG)
    assert "Traceback" not in errors
    _soon(lambda: not processes("environ", COMMAND))
    with _command("resume", tmp_path / "run", *RAY, "--no-report") as process:
        _, errors = process.communicate(timeout=HUNG)
    assert process.returncode == 0, errors
    whole = campaign(max_tests=6000)
    resumed = themis.open_run(tmp_path / "run")
    assert fault_set(resumed) == fault_set(whole)
    assert resumed.summary()["passes"] == whole.summary()["passes"]
    texts = [file.read_text() for file in (tmp_path / "run").rglob("*") if file.suffix in (".json", ".yaml")]
    assert texts
    assert not any(word in text for text in texts for word in ("executor", "address"))


def test_an_address_that_does_not_answer_is_named():
    ray.shutdown()
    with pytest.raises(UsageError, match=r"running Ray cluster, but '127\.0\.0\.1:1' does not answer"):
        campaign(executor=RayExecutor(address="127.0.0.1:1"))
