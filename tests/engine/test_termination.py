"""How a server ends. The last of the live-server tests: it ends the server the others use."""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hpc_rlhf.cluster.rendezvous import read_endpoints
from hpc_rlhf.config import SamplingConfig
from hpc_rlhf.rollout.client import SamplerClient
from hpc_rlhf.types import Completion
from tests.engine.conftest import Fleet
from tests.engine.learners import EOS, prompts
from tests.engine.servers import Server, new_run
from tests.launch_driver import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(480)]  # starting servers on busy cores


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary directory of processes that are started; a short path, for sockets."""
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setenv("TMPDIR", directory)
        yield Path(directory)


@pytest.mark.parametrize("after_s", [0.0, 0.3])
def test_a_server_that_is_stopped_while_it_starts(
    tied_fleet: Fleet, tmp_path: Path, temporary: Path, after_s: float
) -> None:
    """A moment after it began to handle the signal, when no event loop does so yet."""
    run, attempt = new_run(tmp_path / "run")
    server = Server(str(run.path), attempt.number, 0, str(tied_fleet.model)).start()
    wait_until(lambda: handles(server.pid, signal.SIGTERM), "a handler of SIGTERM", 240)
    time.sleep(after_s)
    os.kill(server.pid, signal.SIGTERM)
    code = server.wait(timeout_s=20)
    assert code == 0, server.log.read_text()
    assert list(read_endpoints(attempt, "sampler")) == []
    assert [path for path in temporary.rglob("*") if path.is_socket()] == []


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether process ``pid`` has a handler of a signal: the mask of proc(5), bit number - 1."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def test_a_preempted_server_hands_over_what_it_sampled(tied_fleet: Fleet, tmp_path: Path) -> None:
    """SIGTERM to every process, as Slurm preempts: requests in flight can still be aborted."""
    server = tied_fleet.servers[0]

    async def sample_and_abort() -> Completion:
        async with SamplerClient(server.endpoint(), tied_fleet.token) as client:
            generating = asyncio.create_task(
                client.generate(
                    prompts(1)[0].token_ids,
                    SamplingConfig(temperature=1.0),
                    seed=1,
                    request_id="preempted",
                    max_tokens=400,
                    stop_token_ids=(EOS,),
                    timeout_s=60,
                )
            )
            await asyncio.sleep(0.3)
            for process in [psutil.Process(server.pid), *psutil.Process(server.pid).children()]:
                process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            assert not generating.done(), "done too soon to be cut short"
            await client.abort(["preempted"])
            return await generating

    completion = asyncio.run(sample_and_abort())
    assert completion.finish_reason == "abort"
    assert 0 < len(completion.token_ids) < 400
    assert len(completion.logprobs) == len(completion.token_ids)


def test_a_server_ends_when_its_engine_has_died(tied_fleet: Fleet) -> None:
    server = tied_fleet.servers[0]
    engines = psutil.Process(server.pid).children(recursive=True)
    core = next(process for process in engines if "EngineCore" in " ".join(process.cmdline()))
    start = time.monotonic()
    core.kill()
    assert server.wait(timeout_s=20) != 0
    assert time.monotonic() - start < 10
    assert "engine process EngineCore" in server.log.read_text()
    assert list(read_endpoints(tied_fleet.attempt, "sampler")) == []
    _, alive = psutil.wait_procs(engines, timeout=10)
    assert alive == []
