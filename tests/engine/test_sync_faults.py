"""What dies in the middle of something, and what is served and sampled afterwards.

The tests here kill servers of the shared fleet and start them again; they run in this order.
"""

import asyncio
import os
import signal
import time

import psutil
import pytest

from hpc_rlhf.cluster.rendezvous import read_endpoints
from hpc_rlhf.config import ParallelConfig, SamplerConfig, SamplingConfig
from hpc_rlhf.errors import ComponentError, WaitTimeout
from hpc_rlhf.rollout.client import SamplerClient
from hpc_rlhf.rollout.sampler import Done, Interrupted, Joined, SamplerPool
from hpc_rlhf.sync.collective import SyncStats
from tests.distributed.ranks import RankError
from tests.engine.conftest import Fleet
from tests.engine.learners import (
    EOS,
    Learner,
    at_tensor,
    die,
    kill,
    prompts,
    requests,
    train_a_bit,
)
from tests.engine.servers import KV_CACHE_BYTES, MAX_SEQUENCE_TOKENS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(480)]  # starting servers on busy cores
LONG = SamplingConfig(temperature=1.0, max_new_tokens=400)


def greedy(fleet: Fleet, replica: int) -> tuple[list[int], int | None]:
    """Greedy tokens of a server as it is, and the version it says it serves."""

    async def ask() -> tuple[list[int], int | None]:
        async with SamplerClient(fleet.servers[replica].endpoint(), fleet.token) as client:
            completion = await client.generate(
                prompts(1)[0].token_ids,
                SamplingConfig(temperature=0.0),
                seed=0,
                request_id="greedy",
                max_tokens=24,
                stop_token_ids=[EOS],
                timeout_s=30,
            )
            return completion.token_ids.tolist(), await client.version()

    return asyncio.run(ask())


def publish(fleet: Fleet, version: int, how: int) -> SyncStats:
    def scenario(learner: Learner) -> SyncStats:
        train_a_bit(learner.model, how)
        return learner.transport.publish(learner.model, version)

    return fleet.learn(
        scenario,
    )


@pytest.mark.parametrize("stage", [0, 1])
def test_a_learner_that_dies_in_an_update_leaves_the_old_weights(fleet: Fleet, stage: int) -> None:
    """At both tensor-parallel sizes; and the next learner finds servers that take its weights."""
    publish(fleet, version=60, how=0)
    before = [greedy(fleet, replica) for replica in range(2)]
    assert [version for _, version in before] == [60, 60]

    def scenario(learner: Learner) -> None:
        train_a_bit(learner.model, how=3)
        if learner.transport._position.stage == stage:
            at_tensor(7, die)
        learner.transport.publish(learner.model, 61)

    with pytest.raises(RankError, match="died"):
        fleet.learn(
            scenario,
            parallel=ParallelConfig(pipeline=2),
        )
    assert [greedy(fleet, replica) for replica in range(2)] == before

    stats = publish(fleet, version=62, how=3)
    assert (stats.replicas, stats.tries) == (2, 1)
    after = [greedy(fleet, replica) for replica in range(2)]
    assert [version for _, version in after] == [62, 62]
    assert after[0][0] == after[1][0] != before[0][0]


def test_replicas_that_do_not_come_are_named(fleet: Fleet) -> None:
    config = SamplerConfig(kv_cache_bytes=KV_CACHE_BYTES, start_timeout_s=3.0)
    pool = SamplerPool(fleet.attempt, fleet.token, config, LONG, 4, [EOS], MAX_SEQUENCE_TOKENS)
    try:
        with pytest.raises(WaitTimeout, match="sampler replicas 2, 3 of 4 to be healthy"):
            pool.wait_until_ready()
    finally:
        pool.close()


def test_tensors_of_another_model_are_refused_before_any_is_sent(fleet: Fleet) -> None:
    publish(fleet, version=63, how=0)
    before = [greedy(fleet, replica) for replica in range(2)]

    def scenario(learner: Learner) -> str:
        plan = learner.transport._plan_stages(learner.model)
        learner.transport._plan = [stage[1:] for stage in plan]  # some are missing
        with pytest.raises(ComponentError) as caught:
            learner.transport.publish(learner.model, 64)
        return str(caught.value)

    message = fleet.learn(
        scenario,
    )
    assert "failed 3 times" in message
    assert "are not announced" in message
    assert [greedy(fleet, replica) for replica in range(2)] == before


def test_an_interrupted_batch_gives_back_everything(fleet: Fleet) -> None:
    """Finished samples, parts of those in flight, and the requests that were never started."""
    batch = requests(10, 65, samples=4)

    def scenario(learner: Learner) -> tuple[Interrupted, Done]:
        pool = learner.pool
        assert pool is not None
        learner.transport.publish(learner.model, 65)
        pool.begin(batch, 65)
        assert pool.wait_event(timeout_s=0.5) is None, "done too soon to be interrupted"
        interrupted = pool.interrupt(timeout_s=30)
        pool.begin(batch, 65)  # the pool is as good as new
        done = pool.wait_event()
        assert isinstance(done, Done)
        return interrupted, done

    interrupted, done = fleet.learn(
        scenario,
        sampling=LONG,
        sampler=SamplerConfig(kv_cache_bytes=KV_CACHE_BYTES, max_concurrency=8),
    )
    parts = [*interrupted.finished, *interrupted.partial]
    keys = [(r.step, r.prompt.uid, r.sample_index) for r in parts]
    keys += [request.key for request in interrupted.unstarted]
    assert sorted(keys) == sorted(request.key for request in batch)
    assert interrupted.partial
    assert interrupted.unstarted
    whole = {(r.prompt.uid, r.sample_index): r.completion for r in done.rollouts}
    for part in interrupted.partial:
        cut, completion = part.completion, whole[part.prompt.uid, part.sample_index]
        assert cut.finish_reason == "abort"
        assert cut.seed == completion.seed
        assert cut.token_ids.tolist() == completion.token_ids[: len(cut.token_ids)].tolist()
        assert [span.version for span in cut.versions] in ([65], [])


def test_an_interruption_does_not_wait_for_a_sampler_that_hangs(fleet: Fleet) -> None:
    """The other one's samples are there within the time that a preemption leaves."""
    frozen = fleet.servers[1].pid
    batch = requests(10, 67, samples=4)

    def scenario(learner: Learner) -> tuple[Interrupted, float]:
        pool = learner.pool
        assert pool is not None
        learner.transport.publish(learner.model, 67)
        pool.begin(batch, 67)
        assert pool.wait_event(timeout_s=0.5) is None, "done too soon to be interrupted"
        os.kill(frozen, signal.SIGSTOP)
        try:
            began = time.monotonic()
            interrupted = pool.interrupt(timeout_s=8)
            return interrupted, time.monotonic() - began
        finally:
            os.kill(frozen, signal.SIGCONT)

    interrupted, seconds = fleet.learn(scenario, sampling=LONG)
    assert seconds < 14
    assert interrupted.partial
    assert interrupted.unstarted
    parts = [*interrupted.finished, *interrupted.partial, *interrupted.unstarted]
    assert sorted(part.key for part in parts) == sorted(request.key for request in batch)


def test_a_sampler_that_stops_answering(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections and says nothing; once it answers again it gets weights before work."""
    # Long enough that a replica which only shares its cores with others does not look dead.
    for name, seconds in {"PERIOD": 0.3, "TIMEOUT": 3.0}.items():
        monkeypatch.setattr(f"hpc_rlhf.rollout.sampler._HEALTH_{name}_S", seconds)
    frozen = fleet.servers[1].pid
    batch = requests(10, 66, samples=4)

    def scenario(learner: Learner) -> tuple[Done, Joined]:
        pool = learner.pool
        assert pool is not None
        learner.transport.publish(learner.model, 66)
        pool.begin(batch, 66)
        assert pool.wait_event(timeout_s=0.5) is None, "done too soon to be interrupted"
        os.kill(frozen, signal.SIGSTOP)
        try:
            done = pool.wait_event()
        finally:
            os.kill(frozen, signal.SIGCONT)
        assert isinstance(done, Done)
        pool.begin(batch, 66)
        while not isinstance(joined := pool.wait_event(), Joined):
            pool.begin(batch, 66)
        learner.transport.publish(learner.model, 66)
        return done, joined

    done, joined = fleet.learn(
        scenario,
        sampling=LONG,
    )
    assert done.stats.reissued > 0
    assert done.stats.deaths == 1
    assert len(done.rollouts) == len(batch)
    assert [endpoint.pid for endpoint in joined.endpoints] == [frozen]


def test_samples_of_a_sampler_that_dies_are_sampled_again(fleet: Fleet) -> None:
    """Replica 1 is killed while it samples, and gets weights before work when it is back."""
    victim = fleet.servers[1].pid
    engines = psutil.Process(victim).children(recursive=True)
    restarted = fleet.restart_when_dead(1, tensor_parallel=1)  # a smaller one starts sooner
    batch = requests(10, 70, samples=4)

    def scenario(learner: Learner) -> tuple[list[Done], list[Joined], list[SyncStats]]:
        pool = learner.pool
        assert pool is not None
        learner.transport.publish(learner.model, 70)
        pool.begin(batch, 70)
        assert pool.wait_event(timeout_s=0.5) is None, "done too soon to be interrupted"
        kill(victim)
        done: list[Done] = []
        joined: list[Joined] = []
        synced: list[SyncStats] = []
        # the first batch may have samples of the replica from before its death
        while not (joined and len(done) > 1 and done[-1].stats.by_replica.get(1)):
            match pool.wait_event():
                case Joined() as event:
                    joined.append(event)
                    synced.append(learner.transport.publish(learner.model, 70))
                case Done() as event:
                    done.append(event)
                    pool.begin(batch, 70)
        return done, joined, synced

    done, joined, synced = fleet.learn(
        scenario,
        sampling=LONG,
        timeout_s=300,
    )
    first, last = done[0], done[-1]
    assert first.stats.reissued > 0
    assert first.stats.deaths == 1
    # Sampling goes by seed: what was sampled again, elsewhere, is what would have been.
    for interrupted, undisturbed in zip(first.rollouts, last.rollouts, strict=True):
        assert (
            interrupted.completion.token_ids.tolist() == undisturbed.completion.token_ids.tolist()
        )
    assert [(r.step, r.prompt.uid, r.sample_index) for r in first.rollouts] == [
        request.key for request in batch
    ]
    assert last.stats.reissued == last.stats.deaths == 0

    endpoint = restarted.result().endpoint()
    assert [event.endpoints for event in joined] == [(endpoint,)]
    assert [(stats.replicas, stats.dropped) for stats in synced] == [(1, ())]
    _, alive = psutil.wait_procs(engines, timeout=10)
    assert alive == []  # the killed server's engine and workers went with it


def test_a_sampler_that_dies_in_an_update_is_left_out(fleet: Fleet) -> None:
    """The others get the weights all the same, and it is noticed when the last one is gone."""
    first, second = (server.pid for server in fleet.servers)

    def scenario(learner: Learner) -> tuple[SyncStats, str, SyncStats]:
        pool = learner.pool
        assert pool is not None
        train_a_bit(learner.model, how=2)
        at_tensor(9, lambda: kill(second))
        stats = learner.transport.publish(learner.model, 80)

        pool.begin(requests(4, 80), 80)
        os.kill(first, signal.SIGUSR2)
        with pytest.raises(WaitTimeout) as waited:
            pool.wait_event()
        return stats, str(waited.value), learner.transport.publish(learner.model, 81)

    start = time.monotonic()
    stats, waited, nobody = fleet.learn(
        scenario,
        sampling=LONG,
        sampler=SamplerConfig(kv_cache_bytes=KV_CACHE_BYTES, start_timeout_s=3.0),
    )
    assert (stats.dropped, stats.replicas, stats.tries) == ((1,), 1, 2)
    assert "no sampler replica was alive for 3 s" in waited
    assert "4 of 4 samples are missing: p0[0], p1[0], p2[0], p3[0]" in waited
    assert (nobody.dropped, nobody.replicas, nobody.tries) == ((), 0, 0)
    assert time.monotonic() - start < 60
    # A server that is asked to stop stops, with success, and takes its address down.
    assert fleet.servers[0].wait(timeout_s=20) == 0
    assert [e.replica for e in read_endpoints(fleet.attempt, "sampler")] == [1]
