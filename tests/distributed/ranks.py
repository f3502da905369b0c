"""Runs a function on several ranks: forked processes in a gloo world of their own.

Forked, because importing torch and megatron-core takes seconds: the parent imports them once, and
whatever it has computed (a reference, a fixture) is simply there in every rank.
"""

import ctypes
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, TypeVar

import torch

from hpc_rlhf.cluster import device
from hpc_rlhf.models import megatron  # noqa: F401 - imported here, once, before the forks

PR_SET_PDEATHSIG = 1
T = TypeVar("T")


class RankError(AssertionError):
    """A rank raised, died or did not finish in time; the message has its rank and traceback."""


def run_ranks(
    function: Callable[..., T], world_size: int, *args: Any, timeout_s: float = 120.0
) -> list[T]:
    """Call ``function(*args)`` on each of ``world_size`` ranks; return their results in rank order.

    In each rank torch.distributed is initialised with gloo and the device module is prepared, with
    one CPU thread. Results are pickled; ``function`` and ``args`` are not, so closures are fine.
    When the first rank fails the others are killed; on return no process is left.

    Raises:
        RankError: from the first rank that failed.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        store = Path(directory) / "store"
        ranks: list[tuple[int, Connection]] = []
        try:
            for rank in range(
                world_size
            ):  # each is in the list at once, to be ended whatever comes
                ranks.append(_start(function, rank, world_size, store, args, timeout_s))  # noqa: PERF401
            results = _collect(ranks, timeout_s)
        except BaseException:
            for pid, _ in ranks:
                os.kill(pid, signal.SIGKILL)
            raise
        finally:
            for pid, connection in ranks:
                connection.close()
                os.waitpid(pid, 0)
        return results


def _start(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    store: Path,
    args: tuple[Any, ...],
    timeout_s: float,
) -> tuple[int, Connection]:
    receiver, sender = Pipe(duplex=False)
    parent = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # else both processes write what is buffered now
    pid = os.fork()
    if pid:
        sender.close()
        return pid, receiver
    try:  # the child leaves through os._exit only: nothing of pytest may run in it
        receiver.close()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            result = _rank_main(function, rank, world_size, store, args, timeout_s)
            sender.send_bytes(pickle.dumps(("result", time.monotonic(), result)))
    except BaseException:  # noqa: BLE001 - sent to the parent
        sender.send_bytes(pickle.dumps(("error", time.monotonic(), traceback.format_exc())))
    finally:
        sender.close()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    store: Path,
    args: tuple[Any, ...],
    timeout_s: float,
) -> Any:
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.FileStore(str(store), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    device.prepare_process(local_rank=rank, threads=1)
    result = function(*args)
    # A rank that leaves early breaks the connections of one that is still in a collective.
    torch.distributed.barrier()
    return result


def _collect(ranks: list[tuple[int, Connection]], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    waiting: dict[Any, int] = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    results: dict[int, Any] = {}
    while waiting:
        ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))
        if not ready:
            raise RankError(f"ranks {sorted(waiting.values())} did not finish in {timeout_s:.0f} s")
        failures: list[tuple[float, int, str]] = []
        for connection in ready:
            rank = waiting.pop(connection)
            try:
                kind, when, value = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                # Nothing but a kill or a crash: before the broken connections it caused.
                kind, when, value = "error", 0.0, "the process died"
            if kind == "error":
                failures.append((when, rank, value))
            results[rank] = value
        if failures:
            _, rank, text = min(failures)
            raise RankError(f"rank {rank} of {len(ranks)}:\n{text}")
    return [results[rank] for rank in range(len(ranks))]
