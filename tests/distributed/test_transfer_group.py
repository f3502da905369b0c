"""Transfer groups between processes that share no world, and what their members notice."""

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from hpc_rlhf.sync.process_group import TransferError, TransferGroup

pytestmark = pytest.mark.distributed
TIMEOUT_S = 20.0
CHUNKS, CHUNK_BYTES = 50, 1 << 20


def serve_store() -> TCPStore:
    timeout = timedelta(seconds=TIMEOUT_S)
    return TCPStore("127.0.0.1", 0, None, True, timeout, wait_for_workers=False)


def join(port: int, rank: int, size: int, **options: Any) -> TransferGroup:
    return TransferGroup(
        **{
            "host": "127.0.0.1",
            "port": port,
            "name": "test",
            "rank": rank,
            "size": size,
            "device": torch.device("cpu"),
            "address": "127.0.0.1",
            "timeout_s": TIMEOUT_S,
            **options,
        }
    )


def run_members(
    size: int, member: Callable[[TransferGroup], Any], **options: Any
) -> dict[int, tuple[str, float]]:
    """Run ``member`` as each rank of a group; return what it said and after how long, by rank.

    Rank 0 has the store, as in a learner, so that the process that forks has no threads.
    """
    context = get_context("fork")
    results = context.SimpleQueue()
    port_receiver, port_sender = context.Pipe(duplex=False)

    def main(rank: int, port: int) -> None:
        torch.set_num_threads(1)
        if rank == 0:
            store = serve_store()
            port_sender.send(port := store.port)
        group = join(port, rank, size, **options)
        start = time.monotonic()
        try:
            said = str(member(group))
        except TransferError as error:
            group.close()  # as both sides do: whoever waits for this one is told
            said = f"TransferError: {error}"
        results.put((rank, said, time.monotonic() - start))

    processes = [context.Process(target=main, args=(0, 0))]
    processes[0].start()
    port = port_receiver.recv()
    processes += [context.Process(target=main, args=(rank, port)) for rank in range(1, size)]
    for process in processes[1:]:
        process.start()
    for process in processes:
        process.join(60)
        if process.exitcode is None:
            process.kill()
            raise AssertionError("a member hangs")
    found = {}
    while not results.empty():
        rank, said, seconds = results.get()
        found[rank] = (said, seconds)
    return found


def test_everybody_gets_what_rank_0_sends() -> None:
    def member(group: TransferGroup) -> float:
        tensor = torch.full((1000,), float(group.rank + 1))
        group.broadcast(tensor)
        return float(tensor.sum())

    assert {r: said for r, (said, _) in run_members(4, member).items()} == dict.fromkeys(
        range(4), "1000.0"
    )


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("dying", ["first", "last"])
def test_all_notice_at_once_when_one_dies(size: int, dying: str) -> None:
    """Rank 0 included; long before the time of an operation is up."""
    victim = 0 if dying == "first" else size - 1

    def member(group: TransferGroup) -> str:
        for number in range(CHUNKS):
            if group.rank == victim and number == CHUNKS // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            group.broadcast(torch.zeros(CHUNK_BYTES, dtype=torch.uint8))
        return "finished"

    found = run_members(size, member)
    assert found.keys() == set(range(size)) - {victim}
    for said, seconds in found.values():
        assert said.startswith("TransferError")
        assert seconds < TIMEOUT_S / 2


def test_one_that_hangs_is_noticed_in_time() -> None:
    def member(group: TransferGroup) -> str:
        if group.rank == 1:
            time.sleep(6)
            return "slept"
        for _ in range(CHUNKS):
            group.broadcast(torch.zeros(CHUNK_BYTES, dtype=torch.uint8))
        return "finished"

    found = run_members(2, member, timeout_s=2.0)
    said, seconds = found[0]
    assert said.startswith("TransferError")
    assert 1.5 < seconds < 5


def test_one_that_never_comes() -> None:
    store, start = serve_store(), time.monotonic()
    with pytest.raises(TransferError, match="transfer group test of 2 members did not form"):
        join(store.port, 0, 2, timeout_s=30.0, join_timeout_s=1.0)
    assert time.monotonic() - start < 10


def test_a_group_can_be_formed_again_under_another_name() -> None:
    def member(group: TransferGroup) -> float:
        tensor = torch.full((10,), float(group.rank + 1))
        group.broadcast(tensor)
        return float(tensor.sum())

    for name in ("one", "two"):
        found = run_members(3, member, name=name)
        assert [found[rank][0] for rank in range(3)] == ["10.0"] * 3
