"""Live sampler servers for the tests: the product's own `serve`, each in a process of its own."""

import ctypes
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hpc_rlhf.cluster.rendezvous import Endpoint, read_endpoints, wait_for
from hpc_rlhf.run_dir import Attempt, RunDir

START_TIMEOUT_S = 240.0  # 20 s on two idle cores
MAX_SEQUENCE_TOKENS = 512
KV_CACHE_BYTES = 64 << 20
PR_SET_PDEATHSIG = 1


@dataclass
class Server:
    """One replica's process."""

    run: str
    attempt: int
    replica: int
    model: str
    tensor_parallel: int = 1
    process: "subprocess.Popen[bytes] | None" = field(default=None, init=False)

    @property
    def log(self) -> Path:
        return self._attempt.log("sampler", self.replica)

    @property
    def _attempt(self) -> Attempt:
        return RunDir(Path(self.run)).attempt(self.attempt)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> "Server":
        options = {k: v for k, v in asdict(self).items() if k != "process"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.engine.servers", json.dumps(options)],
                stdout=log,
                stderr=log,
                cwd=Path(__file__).parents[2],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        return self

    def endpoint(self) -> Endpoint:
        """Wait until this very process has published itself."""
        pid = self.pid

        def published() -> Endpoint | None:
            assert self.process is not None
            if self.process.poll() is not None:
                tail = self.log.read_text()[-3000:]
                raise AssertionError(
                    f"sampler {self.replica} ended: {self.process.returncode}\n{tail}"
                )
            found = [e for e in read_endpoints(self._attempt, "sampler") if e.pid == pid]
            return found[0] if found else None

        return wait_for(published, what=f"test server {self.replica}", timeout_s=START_TIMEOUT_S)

    def kill(self) -> None:
        """SIGKILL, as a node's failure would look."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def wait(self, timeout_s: float) -> int:
        """Exit code of the process, which ends by itself."""
        assert self.process is not None
        return self.process.wait(timeout_s)


def new_run(directory: Path) -> tuple[RunDir, Attempt]:
    run = RunDir(directory)
    run.path.mkdir(parents=True)
    run.ensure_token()
    return run, run.new_attempt()


def _main(options: dict[str, object]) -> None:
    from hpc_rlhf.cluster.world import World
    from hpc_rlhf.config import ModelConfig, SamplerConfig
    from hpc_rlhf.rollout.server import serve

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # of the thread that started it
    server = Server(**options)  # type: ignore[arg-type]
    run = RunDir(Path(server.run))
    serve(
        attempt=run.attempt(server.attempt),
        token_file=run.token_file,
        replica=server.replica,
        world=World("sampler", 0, 1, 0, "localhost", "local-tests", server.attempt),
        address="127.0.0.1",
        cache=run.engine_cache(server.replica),
        model=ModelConfig(path=server.model, max_sequence_tokens=MAX_SEQUENCE_TOKENS),
        sampler=SamplerConfig(
            tensor_parallel=server.tensor_parallel,
            kv_cache_bytes=KV_CACHE_BYTES,
            start_timeout_s=START_TIMEOUT_S,
            max_concurrency=64,
        ),
    )


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # as the component's program ends: nothing is waited for
