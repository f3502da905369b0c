"""The coordinator's calls to a set of samplers during a weight transfer, to all of them at once."""

import math
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict
from typing import Any, Generic, TypeVar

from hpc_rlhf.cluster.rendezvous import Endpoint
from hpc_rlhf.rollout.client import SamplerClient
from hpc_rlhf.rollout.sampler import SamplerPool
from hpc_rlhf.sync.buckets import Bucket
from hpc_rlhf.sync.process_group import TransferError
from hpc_rlhf.sync.wire import InitInfo, TransferStatus, UpdateInfo

T = TypeVar("T")

# Beyond the bound of what a worker does within a call: for the call's own way there and back.
_MARGIN_S = 10.0


class Fleet:
    """Some replicas of a pool, that receive one version together.

    Every method talks to all of them and raises ComponentError if one does not do its part;
    the others have done theirs by then.
    """

    def __init__(self, pool: SamplerPool, endpoints: Sequence[Endpoint], timeout_s: float) -> None:
        """
        Args:
            timeout_s: of one operation of the transfer groups.
        """
        self._pool, self._endpoints, self._timeout_s = pool, tuple(endpoints), timeout_s

    def worker_counts(self) -> list[int]:
        """Number of engine workers of each replica."""
        return self._each(lambda client: client.worker_count())

    def join(self, infos: Sequence[InitInfo]) -> "Pending[None]":
        """Start to join the transfer groups, which blocks until the learner's side does."""
        info = dict(zip((e.incarnation for e in self._endpoints), infos, strict=True))
        timeout_s = self._timeout_s * len(infos[0].groups) + _MARGIN_S
        return self._start(
            lambda client: client.init_transfer(
                asdict(info[client.endpoint.incarnation]), timeout_s
            )
        )

    def check_joined(self) -> None:
        """Raise what kept a worker from joining."""
        self._check(lambda status: True, "joined the transfer groups")

    def announce(self, update: str, plan: Sequence[Sequence[Bucket]]) -> None:
        """Begin an update: let every worker check what it will get, before anything is sent."""
        info = UpdateInfo(update, plan=[[bucket.to_json() for bucket in stage] for stage in plan])

        async def begin(client: SamplerClient) -> None:
            if any(status.open for status in await _statuses(client)):
                await client.finish_update(self._timeout_s)  # of a learner that died: dropped
            await client.start_update()
            await client.update(asdict(info))

        self._each(begin)
        self._check(lambda status: status.update == update, f"planned update {update}")

    def receive(self, update: str, stage: int) -> "Pending[None]":
        """Start to receive a stage, which lasts as long as the learner sends it."""
        # Without an end of its own: each broadcast has one, and Pending.result has another.
        info = asdict(UpdateInfo(update, receive=stage))
        return self._start(lambda client: client.update(info, timeout_s=math.inf))

    def check_received(self, update: str, stages: int) -> None:
        """Raise what kept a worker from receiving the first ``stages`` stages."""
        self._check(
            lambda status: status.update == update and status.stages == stages,
            f"received {stages} stages of update {update}",
        )

    def swap(self, update: str, version: int) -> None:
        """Put the staged weights in service as ``version``, with generation paused meanwhile."""

        async def swap(client: SamplerClient) -> None:
            await client.pause()
            await client.finish_update(self._timeout_s)
            statuses = await _statuses(client)
            if not all(status.applied == update for status in statuses):
                raise TransferError(f"sampler {client.endpoint.replica} did not apply: {statuses}")
            await client.set_version(version)
            served = await client.version()
            if served != version:
                raise TransferError(
                    f"sampler {client.endpoint.replica} says version {served}, not {version}"
                )
            await client.resume()

        self._each(swap)

    def _check(self, good: Callable[[TransferStatus], bool], what: str) -> None:
        for endpoint, statuses in zip(self._endpoints, self._each(_statuses), strict=True):
            for worker, status in enumerate(statuses):
                if status.failure is not None or not good(status):
                    raise TransferError(
                        f"sampler {endpoint.replica} worker {worker} has not {what}: "
                        f"{status.failure or status}"
                    )

    def _start(self, what: "Callable[[SamplerClient], Coroutine[Any, Any, T]]") -> "Pending[T]":
        return Pending(self._pool.on_each(self._endpoints, what))

    def _each(self, what: "Callable[[SamplerClient], Coroutine[Any, Any, T]]") -> list[T]:
        return self._start(what).result(None)


class Pending(Generic[T]):
    """Calls under way, one per replica."""

    def __init__(self, futures: "Sequence[Future[T]]") -> None:
        self._futures = list(futures)

    def result(self, timeout_s: float | None) -> list[T]:
        """Wait for all of them; raise the first failure once all have ended.

        Args:
            timeout_s: None: every call has a bound of its own.

        Raises:
            TransferError: some did not end in time; they are cancelled.
        """
        _, late = wait(self._futures, timeout_s)
        for future in late:
            future.cancel()
        if late:
            raise TransferError(f"{len(late)} samplers did not answer within {timeout_s:g} s")
        return [future.result() for future in self._futures]


async def _statuses(client: SamplerClient) -> list[TransferStatus]:
    return [TransferStatus(**status) for status in await client.transfer_status()]
