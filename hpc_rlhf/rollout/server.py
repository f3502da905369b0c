"""One sampler replica: vLLM's OpenAI-compatible server in this process, guarded and published."""

import asyncio
import hashlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Literal

from hpc_rlhf.cluster import device
from hpc_rlhf.cluster.rendezvous import Endpoint, endpoint_path, publish_endpoint, read_endpoints
from hpc_rlhf.cluster.world import World
from hpc_rlhf.config import ModelConfig, SamplerConfig
from hpc_rlhf.errors import ComponentError, WaitTimeout
from hpc_rlhf.observe.startup import ENGINE, SERVER, StartUp, importing
from hpc_rlhf.rollout.auth import TOKEN_FILE_VARIABLE, read_token
from hpc_rlhf.rollout.client import MODEL_NAME, SamplerClient
from hpc_rlhf.rollout.sampler import COMPONENT
from hpc_rlhf.run_dir import Attempt
from hpc_rlhf.sync.vllm_plugin import BACKEND, WORKER_EXTENSION

Weights = Literal["synced", "model"]

_DRAIN_S = 25.0  # from SIGTERM to the stop, if nobody ends the server before
_CHILD_POLL_S = 0.2
_HEALTH_POLL_S = 0.1
_STOP_TIMEOUT_S = 3.0
_SOCKET_PATH_BYTES = 107  # of unix(7)


def serve(
    *,
    attempt: Attempt,
    token_file: Path,
    replica: int,
    world: World,
    address: str,
    model: ModelConfig,
    sampler: SamplerConfig,
    cache: Path,
    startup: StartUp | None = None,
    weights: Weights = "synced",
) -> None:
    """Serve until SIGUSR2, or a while after SIGTERM; then return.

    Args:
        token_file: holds the bearer token, mode 0600.
        address: of this node, as peers reach it.
        cache: where the engine keeps what it compiled for its next start; of this replica alone.
        startup: of this process; default: it began just now.
        weights: "synced": start with random ones, since nothing is sampled before the learner's
            first sync, which brings every tensor of the checkpoint (the receiver checks that). It
            spares reading the model from the filesystem once per replica. "model": load them.

    Raises:
        UserError: bad token file, or the engine cannot run this model here.
        ComponentError: the engine died.
        WaitTimeout: the server was not healthy within ``sampler.start_timeout_s``.
    """
    token = read_token(token_file)
    started = time.time()
    startup = startup or StartUp(started)
    sockets = _socket_directory(attempt, replica)
    _set_environment(address, token_file, sampler, cache, sockets)

    with importing():  # after the environment: vLLM reads it while it is imported
        import uvloop
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.entrypoints.launchers.launcher import setup_server
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        from hpc_rlhf.rollout.engine import serve_engine

    parser = make_arg_parser(FlexibleArgumentParser())
    arguments = parser.parse_args(_arguments(address, model, sampler, weights))
    validate_parsed_serve_args(arguments)
    startup.begin(ENGINE)

    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, _stop)
    stopping = threading.Event()

    class Loop(uvloop.Loop):
        """vLLM handles the signals; this decides when, and notes that it did.

        USR2 stops at once: whoever ends the attempt sends it. SIGTERM comes to every task of every
        component when Slurm preempts the job, and the learner is about to ask for the samples that
        are under way: they are served a while longer.
        """

        def add_signal_handler(
            self, number: int, callback: Callable[..., object], *args: object
        ) -> None:
            def stop() -> None:
                stopping.set()
                callback(*args)

            if number != signal.SIGTERM:
                super().add_signal_handler(number, stop)
                return
            super().add_signal_handler(signal.SIGUSR2, stop)
            super().add_signal_handler(signal.SIGTERM, lambda: self.call_later(_DRAIN_S, stop))

    # The loop is not closed: closing waits for vLLM's own tasks, which wait for ever on an engine
    # that has died. The process ends right after this function.
    loop = Loop()
    asyncio.set_event_loop(loop)
    incarnation = uuid.uuid4().hex
    try:
        url, sock = setup_server(arguments, reuse_port=False)
        arguments.port = sock.getsockname()[1]
        endpoint = Endpoint(
            component=COMPONENT,
            replica=replica,
            url=f"http://{address}:{arguments.port}",
            host=world.node,
            pid=os.getpid(),
            incarnation=incarnation,
            job_id=world.job_id,
            attempt=world.attempt,
            started=started,
        )
        first_token = loop.create_future()
        serving = loop.create_task(
            serve_engine(
                url,
                sock,
                arguments,
                first_token=first_token,
                on_engine=lambda: startup.begin(SERVER),
            )
        )
        publishing = _publish(
            attempt, endpoint, token, sampler.start_timeout_s, startup, first_token
        )
        loop.run_until_complete(_run(serving, publishing, stopping))
    except _Stopped:
        pass
    finally:
        _withdraw(attempt, replica, incarnation)
        shutil.rmtree(sockets, ignore_errors=True)


class _Stopped(SystemExit):
    """Asked to stop before vLLM handles signals.

    An exit, because an event loop lets only that and KeyboardInterrupt through: any other would end
    the task it happens to fall in, as an error of that task.
    """


def _stop(*_: object) -> None:
    raise _Stopped


async def _run(
    serving: "asyncio.Task[None]",
    publishing: Coroutine[object, object, None],
    stopping: threading.Event,
) -> None:
    """Wait for the server's end, and raise if it was not asked for."""
    watching = asyncio.create_task(_watch_engine(serving, stopping))
    waiting: set[asyncio.Task[None]] = {serving, watching, asyncio.create_task(publishing)}
    while not (serving.done() or watching.done()):
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    for task in (serving, watching):
        if task.done():
            task.result()
    if not stopping.is_set():
        raise ComponentError("the server ended by itself; its log says why")


async def _publish(
    attempt: Attempt,
    endpoint: Endpoint,
    token: str,
    start_timeout_s: float,
    startup: StartUp,
    first_token: "asyncio.Future[float]",
) -> None:
    """Publish the endpoint as soon as the server is healthy, and again with its first token."""
    deadline = time.monotonic() + start_timeout_s
    async with SamplerClient(endpoint, token) as client:
        while not await client.healthy():
            if time.monotonic() > deadline:
                raise WaitTimeout(
                    f"waited {start_timeout_s:g} s for sampler {endpoint.replica} to be healthy"
                )
            await asyncio.sleep(_HEALTH_POLL_S)
    startup.end()
    endpoint = replace(endpoint, startup=startup.seconds())
    await asyncio.to_thread(publish_endpoint, attempt, endpoint)
    endpoint = replace(endpoint, first_token=await first_token)
    await asyncio.to_thread(publish_endpoint, attempt, endpoint)


async def _watch_engine(serving: "asyncio.Task[None]", stopping: threading.Event) -> None:
    """Raise when an engine process has died: the server would stay, and may hang for ever.

    Returns when the server has ended, or had its time to end after it was asked to.
    """
    seen: dict[int, multiprocessing.process.BaseProcess] = {}
    while not (serving.done() or stopping.is_set()):
        living = {child.pid: child for child in multiprocessing.active_children() if child.pid}
        for pid in seen.keys() - living.keys():
            raise ComponentError(
                f"engine process {seen[pid].name} (pid {pid}) died: exit code {seen[pid].exitcode}"
            )
        seen |= living
        await asyncio.sleep(_CHILD_POLL_S)
    # vLLM's server waits for requests that its engine, already ended, will never answer.
    await asyncio.wait([serving], timeout=_STOP_TIMEOUT_S)


def _withdraw(attempt: Attempt, replica: int, incarnation: str) -> None:
    """Remove the endpoint, unless a new incarnation has already published its own."""
    for endpoint in read_endpoints(attempt, COMPONENT):
        if endpoint.replica == replica and endpoint.incarnation == incarnation:
            endpoint_path(attempt, COMPONENT, replica).unlink(missing_ok=True)


def _socket_directory(attempt: Attempt, replica: int) -> Path:
    """A directory on this node for the sockets of the engine's processes, new and empty.

    vLLM puts them into the temporary directory itself and leaves them there when it is killed. This
    one has a name of its own by run and replica, so that the next start on the node clears it.
    """
    run = hashlib.sha256(str(attempt.path.parent.parent).encode()).hexdigest()[:12]
    directory = Path(tempfile.gettempdir()) / f"hpc-rlhf-{run}-{replica}"
    if len(str(directory / str(uuid.uuid4()))) > _SOCKET_PATH_BYTES:
        directory = Path("/tmp", directory.name)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700)
    return directory


def _set_environment(
    address: str, token_file: Path, sampler: SamplerConfig, cache: Path, sockets: Path
) -> None:
    os.environ |= {
        TOKEN_FILE_VARIABLE: str(token_file.absolute()),
        "VLLM_HOST_IP": address,  # else it asks the network
        "VLLM_SERVER_DEV_MODE": "1",  # the RL control routes
        "VLLM_RPC_BASE_PATH": str(sockets),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    defaults = {
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        **device.engine_environment(sampler.tensor_parallel),
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)  # a site's own choice of caches or threads stands


def _arguments(
    address: str, model: ModelConfig, sampler: SamplerConfig, weights: Weights
) -> list[str]:
    """Command line of vLLM's server, as this process would have been given it."""
    dtype = str(device.resolve_dtype(model.dtype)).removeprefix("torch.")
    return [
        *("--model", str(model.path)),
        *("--served-model-name", MODEL_NAME),
        *("--host", address),
        *("--port", "0"),
        *("--dtype", dtype),
        *("--max-model-len", str(model.max_sequence_tokens)),
        *("--max-num-seqs", str(sampler.max_concurrency)),
        *("--tensor-parallel-size", str(sampler.tensor_parallel)),
        *("--load-format", "dummy" if weights == "synced" else "auto"),
        # Nothing of generation_config.json: the run's own sampling settings are all there is.
        *("--generation-config", "vllm"),
        # Of the distribution sampled from, after temperature, top-p and top-k.
        *("--logprobs-mode", "processed_logprobs"),
        "--enable-scale-out",  # /inference/v1/generate
        *("--weight-transfer-config", f'{{"backend": "{BACKEND}"}}'),
        *("--worker-extension-cls", WORKER_EXTENSION),
        *("--middleware", "hpc_rlhf.rollout.auth.BearerAuth"),
        "--disable-uvicorn-access-log",
        *device.engine_arguments(sampler, model.max_sequence_tokens),
    ]
