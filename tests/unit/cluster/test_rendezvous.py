import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_rlhf.cluster.rendezvous import (
    Endpoint,
    clone_store,
    endpoint_path,
    join_learner_world,
    publish_endpoint,
    read_endpoints,
    wait_for,
)
from hpc_rlhf.cluster.world import World
from hpc_rlhf.errors import WaitTimeout
from hpc_rlhf.run_dir import Attempt, RunDir


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return RunDir(tmp_path).new_attempt()


def test_endpoints(attempt: Attempt) -> None:
    first = Endpoint("sampler", 0, "http://10.0.0.1:99", "node1", 17, "abc", "12", 1, 1.5)
    eleventh = replace(first, replica=11, host="node2")
    for endpoint in (eleventh, replace(first, incarnation="old"), first):
        publish_endpoint(attempt, endpoint)
    publish_endpoint(attempt, replace(first, component="scorer"))
    assert read_endpoints(attempt, "sampler") == [first, eleventh]
    endpoint_path(attempt, "sampler", 0).unlink()
    assert read_endpoints(attempt, "sampler") == [eleventh]


def test_wait_for() -> None:
    began = time.monotonic()
    values = iter([None, False, 0])
    assert wait_for(lambda: next(values), what="zero", timeout_s=5, poll_s=0.01) == 0
    assert time.monotonic() - began < 1
    with pytest.raises(WaitTimeout, match=r"waited 0.2 s for the moon"):
        wait_for(lambda: None, what="the moon", timeout_s=0.2)
    assert time.monotonic() - began < 2


def test_learner_world_meets_in_one_store(attempt: Attempt) -> None:
    def join(rank: int) -> bytes:
        world = World("learner", rank, 3, rank, "here", "local-1", 1)
        if rank == 0:
            time.sleep(0.3)  # the others are there first
        store = join_learner_world(attempt, world, address="127.0.0.1", timeout_s=20)
        clone = clone_store(store, 20)
        clone.set(f"rank{rank}", f"hello from {rank}")
        store.wait([f"rank{peer}" for peer in range(3)])
        value = store.get(f"rank{(rank + 1) % 3}")
        store.add("left", 1)
        while rank == 0 and store.add("left", 0) < 3:  # the server goes last
            time.sleep(0.01)
        return value

    with ThreadPoolExecutor(3) as pool:
        values = list(pool.map(join, range(3)))
    assert values == [b"hello from 1", b"hello from 2", b"hello from 0"]


def test_learner_world_without_rank_0(attempt: Attempt) -> None:
    world = World("learner", 1, 2, 1, "here", "local-1", 1)
    with pytest.raises(WaitTimeout, match=r"waited 0.1 s for learner rank 0 to publish .*learner"):
        join_learner_world(attempt, world, address="127.0.0.1", timeout_s=0.1)
