"""One set of live servers for all tests here; starting them is what takes the time."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from hpc_rlhf.data.tiny import make_tiny_model
from hpc_rlhf.run_dir import Attempt
from tests.engine.learners import Learner, run_learner
from tests.engine.servers import Server, new_run
from tests.tiny_models import SIZES, TINY_MODELS

T = TypeVar("T")


@dataclass
class Fleet:
    """The replicas of one attempt, all of one model."""

    attempt: Attempt
    token: str
    model: Path
    servers: list[Server]
    # One thread to the end: servers die with the thread that started them.
    starter: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def learn(self, scenario: Callable[[Learner], T], **options: Any) -> T:
        """Run a learner's part of a test against all replicas; see :func:`run_learner`."""
        return run_learner(
            scenario,
            attempt=self.attempt,
            token=self.token,
            model=self.model,
            replicas=len(self.servers),
            **options,
        )

    def restart_when_dead(self, replica: int, tensor_parallel: int) -> "Future[Server]":
        """Start a new incarnation as soon as the present one has died, as the supervisor does."""
        old = self.servers[replica]

        def restart() -> Server:
            assert old.process is not None
            old.process.wait()
            new = Server(old.run, old.attempt, replica, old.model, tensor_parallel)
            self.servers[replica] = new
            return new.start()

        return self.starter.submit(restart)


def _start(directory: Path, model: Path, tensor_parallel: list[int]) -> Fleet:
    run, attempt = new_run(directory)
    servers = [
        Server(str(run.path), attempt.number, replica, str(model), size).start()
        for replica, size in enumerate(tensor_parallel)
    ]
    return Fleet(attempt, run.ensure_token(), model, servers)


def _end(fleet: Fleet) -> None:
    for server in fleet.servers:
        if server.process is not None and server.process.poll() is None:
            server.kill()
    fleet.starter.shutdown()


def _model(directory: Path, name: str) -> Path:
    model = TINY_MODELS[name]
    # vLLM's Qwen2 takes head_dim to be hidden / heads
    sizes = SIZES | {"hidden": 128, "heads": 4, "head_dim": 32}
    return make_tiny_model(directory, family=model.family, **sizes, **model.options)


@pytest.fixture(scope="session")
def tied_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One server of a model with tied embeddings and biases, serving version 0 of it."""
    directory = tmp_path_factory.mktemp("tied")
    fleet = _start(directory / "run", _model(directory / "model", "qwen2-tied"), [1])
    for server in fleet.servers:
        server.endpoint()

    def publish(learner: Learner) -> None:
        learner.transport.publish(learner.model, 0)

    fleet.learn(publish)
    yield fleet
    _end(fleet)


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two servers of an untied model: replica 0 with one worker, replica 1 with two (TP=2)."""
    directory = tmp_path_factory.mktemp("fleet")
    fleet = _start(directory / "run", _model(directory / "model", "llama3-rope"), [1, 2])
    for server in fleet.servers:
        server.endpoint()
    yield fleet
    _end(fleet)
