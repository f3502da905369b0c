"""The coordinator's side of sampling: which replica samples what, and what happens when one dies.

One thread with an event loop of its own does the talking. Its state belongs to that loop; the
public methods may be called from any other thread.

A replica is *current* once it serves the weights of the policy version being sampled; only current
ones get work. A dead replica's samples go back to the head of the queue. When a new incarnation of
it (or the same one, reachable again) is healthy, :class:`Joined` asks for weights for it.
"""

import asyncio
import math
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from hpc_rlhf.cluster.rendezvous import Endpoint, read_endpoints
from hpc_rlhf.config import SamplerConfig, SamplingConfig
from hpc_rlhf.errors import ComponentError, WaitTimeout
from hpc_rlhf.rollout.client import SamplerClient, SamplerRefused, SamplerUnreachable
from hpc_rlhf.run_dir import Attempt
from hpc_rlhf.types import Completion, Prompt, Rollout, continuation_seed

T = TypeVar("T")

COMPONENT = "sampler"
"""Component name of the endpoints."""

_WATCH_S = 0.25  # how often the endpoint files are read
_START_WATCH_S = 0.1  # ... while replicas are missing
_HEALTH_PERIOD_S = 5.0  # of the health checks of replicas that have work
_HEALTH_TIMEOUT_S = 5.0
_HEALTH_FAILURES = 3  # in a row, of a replica that takes connections but does not answer
_TRIES = 5  # of one sample; more means that the sample is the cause
_CALL_TIMEOUT_S = 120.0  # of what the loop does for a caller
_TICK_S = 0.2  # how often a blocked caller looks for failures of the loop


@dataclass(frozen=True)
class SampleRequest:
    """One completion to sample; ``(step, prompt.uid, sample_index)`` names it.

    With a ``prefix``, an unfinished completion of the same name, sampling goes on behind its tokens,
    with noise of its own: that of ``seed`` began with the first token.
    """

    prompt: Prompt
    sample_index: int
    step: int
    seed: int
    prefix: Completion | None = None

    @property
    def key(self) -> tuple[int, str, int]:
        return (self.step, self.prompt.uid, self.sample_index)


@dataclass(frozen=True)
class RolloutStats:
    """Of one call of :meth:`SamplerPool.begin`."""

    seconds: float
    samples: int
    tokens: int  # sampled ones that are in the rollouts
    tokens_per_second: float
    reissued: int  # samples started again after their replica died or dropped them
    deaths: int  # of replicas
    by_replica: Mapping[int, int]  # replica -> samples

    def as_metrics(self) -> dict[str, float]:
        """The numbers under their names in the metrics."""
        return {
            "rollout/seconds": self.seconds,
            "rollout/samples": self.samples,
            "rollout/tokens": self.tokens,
            "rollout/tokens_per_second": self.tokens_per_second,
            "rollout/reissued": self.reissued,
            "rollout/deaths": self.deaths,
        }


@dataclass(frozen=True)
class Done:
    """All samples are there, in the order of the requests."""

    rollouts: tuple[Rollout, ...]
    stats: RolloutStats


@dataclass(frozen=True)
class Joined:
    """These replicas are healthy and need the current weights; the others go on sampling."""

    endpoints: tuple[Endpoint, ...]


@dataclass(frozen=True)
class Interrupted:
    """What :meth:`SamplerPool.interrupt` found; together they are all the requests."""

    finished: tuple[Rollout, ...]
    partial: tuple[Rollout, ...]  # finish_reason "abort", with the tokens sampled so far
    unstarted: tuple[SampleRequest, ...]


@dataclass
class _Replica:
    endpoint: Endpoint
    client: SamplerClient
    version: int | None = None  # of the weights it serves, as far as known here
    alive: bool = True
    in_flight: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)  # by request id
    last_probe: float = 0.0
    missed_probes: int = 0


@dataclass
class _Collection:
    """One batch of requests under way."""

    requests: tuple[SampleRequest, ...]
    version: int
    started: float
    pending: deque[int]  # indexes into requests
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    partial: dict[int, Rollout] = field(default_factory=dict)
    tries: Counter[int] = field(default_factory=Counter)
    by_replica: Counter[int] = field(default_factory=Counter)
    reissued: int = 0
    deaths: int = 0
    interrupted: bool = False
    last_progress: float = field(default_factory=time.monotonic)

    def missing(self) -> list[int]:
        return [i for i in range(len(self.requests)) if i not in self.rollouts]


class SamplerPool:
    """The sampler replicas of an attempt, seen from learner rank 0."""

    def __init__(
        self,
        attempt: Attempt,
        token: str,
        sampler: SamplerConfig,
        sampling: SamplingConfig,
        replicas: int,
        eos_token_ids: Sequence[int],
        max_sequence_tokens: int,
    ) -> None:
        """Start the pool's thread; :meth:`wait_until_ready` waits for the servers.

        Args:
            replicas: how many the attempt has.
            eos_token_ids: end a completion, as do ``sampling.stop_token_ids``.
            max_sequence_tokens: prompt and completion; what a server holds at most.
        """
        self._attempt, self._token = attempt, token
        self._config, self._sampling = sampler, sampling
        self._replica_count = replicas
        self._stop_ids = sorted({*eos_token_ids, *sampling.stop_token_ids})
        self._max_sequence_tokens = max_sequence_tokens
        self._replicas: dict[int, _Replica] = {}  # by replica number: the newest incarnation
        self._collection: _Collection | None = None
        self._events: queue.SimpleQueue[Done | Interrupted] = queue.SimpleQueue()
        self._retired: list[SamplerClient] = []  # of former incarnations
        self._joined: set[str] = set()  # incarnations to announce
        self._failure: BaseException | None = None
        self._none_alive_since: float | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._admitting: set[str] = set()  # incarnations whose first health check is under way
        self._published: list[Endpoint] = []  # as last read
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="sampler-pool", daemon=True
        )
        self._thread.start()
        self._watcher = self.submit(self._watch())

    # ---- public: called from other threads

    def wait_until_ready(self) -> None:
        """Wait for all replicas to be published and healthy.

        Raises:
            WaitTimeout: some were not within ``start_timeout_s``; names them.
        """
        deadline = time.monotonic() + self._config.start_timeout_s
        while missing := self.call(self._missing_replicas()):
            self._check()
            if time.monotonic() > deadline:
                raise WaitTimeout(
                    f"waited {self._config.start_timeout_s:g} s for sampler replicas "
                    f"{', '.join(map(str, missing))} of {self._replica_count} to be healthy; "
                    f"see their logs in {self._attempt.path / 'logs'}"
                )
            time.sleep(_START_WATCH_S)

    def published(self) -> list[Endpoint]:
        """The replicas as they last published themselves, sorted."""
        return self._published

    def begin(self, requests: Sequence[SampleRequest], version: int) -> None:
        """Start sampling ``requests`` from the replicas that serve ``version``; returns at once.

        Raises:
            ValueError: a request comes twice, or its prompt leaves no room for a token.
            ComponentError: an earlier batch is not done.
        """
        self._check()
        keys = Counter(request.key for request in requests)
        twice = [key for key, count in keys.items() if count > 1]
        if twice:
            raise ValueError(f"requested twice: (step, prompt, sample) {twice[0]}")
        for request in requests:
            if len(request.prompt.token_ids) >= self._max_sequence_tokens:
                raise ValueError(
                    f"prompt {request.prompt.uid} of {len(request.prompt.token_ids)} tokens leaves "
                    f"no room in {self._max_sequence_tokens}"
                )
        self.call(self._begin(tuple(requests), version))

    def wait_event(self, timeout_s: float | None = None) -> Done | Joined | None:
        """Wait for the batch to be done, or for replicas that need weights.

        Args:
            timeout_s: return None after this long; default: wait for an event, or for a failure.

        Raises:
            WaitTimeout: no replica was alive for ``start_timeout_s``, or no sample ended for
                ``request_timeout_s``; names what is missing.
            ComponentError: the servers refuse a request, or the pool failed.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._check()
            try:
                event = self._events.get(timeout=_TICK_S)
            except queue.Empty:
                joined = self.call(self._take_joined())
                if joined:
                    return Joined(joined)
                self.call(self._check_progress())
                if time.monotonic() >= deadline:
                    return None
                continue
            assert isinstance(event, Done)
            return event

    def interrupt(self, timeout_s: float) -> Interrupted:
        """End the batch under way: abort what is in flight and return what there is.

        A completion that was cut short keeps its tokens, log-probs, versions and seed. Of a replica
        that does not answer in time nothing is kept: its samples count as not started.

        Raises:
            WaitTimeout: they were not all there a second later either.
        """
        self._check()
        self.call(self._interrupt(timeout_s))
        deadline = time.monotonic() + timeout_s + 1.0
        while True:
            self._check()
            try:
                event = self._events.get(timeout=_TICK_S)
            except queue.Empty:
                if time.monotonic() > deadline:
                    raise WaitTimeout(
                        f"waited {timeout_s:g} s for the samplers to abort their requests"
                    ) from None
                # again: one that was on its way was not there to abort
                self.call(self._abort_in_flight(max(0.1, deadline - 1.0 - time.monotonic())))
                continue
            if isinstance(event, Done):  # it was done just before
                return Interrupted(event.rollouts, (), ())
            return event

    def stale(self, version: int) -> list[Endpoint]:
        """Healthy replicas that do not serve ``version``."""
        return self.call(self._stale(version))

    def mark_current(self, endpoints: Sequence[Endpoint], version: int) -> None:
        """Note that these serve ``version`` now."""
        self.call(self._mark_current([e.incarnation for e in endpoints], version))

    def drop_dead(self, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
        """Check the health of these replicas; return those that are gone, and forget their weights."""
        return self.call(self._drop_dead(list(endpoints)))

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = _CALL_TIMEOUT_S) -> T:
        """Run ``coroutine`` on the pool's loop and return its result.

        Raises:
            WaitTimeout: it took longer than ``timeout_s``.
        """
        future = self.submit(coroutine)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise WaitTimeout(
                f"waited {timeout_s:g} s for the sampler pool: {coroutine!r}"
            ) from None

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start ``coroutine`` on the pool's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def on_each(
        self, endpoints: Sequence[Endpoint], what: Callable[[SamplerClient], Coroutine[Any, Any, T]]
    ) -> "list[Future[T]]":
        """Start ``what(client)`` for each of these replicas at once."""
        return [self.submit(self._on(endpoint, what)) for endpoint in endpoints]

    def close(self) -> None:
        """End the thread; requests in flight are cancelled, their servers drop them."""
        if not self._thread.is_alive():
            return
        self.call(self._close(), timeout_s=10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10.0)
        self._loop.close()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._watcher.done():
            self._watcher.result()  # raises what ended it
            raise ComponentError("the sampler pool is closed")

    # ---- on the loop: discovery and health

    async def _watch(self) -> None:
        """Keep the table of replicas true: new incarnations, dead ones, ones that came back."""
        while True:
            self._published = await asyncio.to_thread(read_endpoints, self._attempt, COMPONENT)
            for endpoint in self._published:
                known = self._replicas.get(endpoint.replica)
                if known is None or known.endpoint.incarnation != endpoint.incarnation:
                    self._spawn(self._admit(endpoint))
            now = time.monotonic()
            for replica in list(self._replicas.values()):
                # Idle ones are not asked: a server that receives weights may be slow to answer.
                due = now - replica.last_probe > _HEALTH_PERIOD_S
                if due and (replica.in_flight or not replica.alive):
                    replica.last_probe = now
                    self._spawn(self._probe(replica))
            alive = any(replica.alive for replica in self._replicas.values())
            self._none_alive_since = None if alive else self._none_alive_since or now
            missing = len(self._replicas) < self._replica_count
            await asyncio.sleep(_START_WATCH_S if missing else _WATCH_S)

    async def _admit(self, endpoint: Endpoint) -> None:
        if endpoint.incarnation in self._admitting:
            return
        self._admitting.add(endpoint.incarnation)
        client = SamplerClient(endpoint, self._token)
        healthy = await client.healthy(_HEALTH_TIMEOUT_S)
        self._admitting.discard(endpoint.incarnation)
        if not healthy:  # the file of a dead one: looked at again
            await client.close()
            return
        old = self._replicas.get(endpoint.replica)
        if old is not None:
            self._bury(old)
            self._retired.append(old.client)  # somebody may be in the middle of a call
        self._replicas[endpoint.replica] = _Replica(endpoint, client)
        self._joined.add(endpoint.incarnation)

    async def _probe(self, replica: _Replica) -> None:
        if await replica.client.healthy(_HEALTH_TIMEOUT_S):
            replica.missed_probes = 0
            if not replica.alive and self._is_listed(replica):
                replica.alive = True
                self._joined.add(replica.endpoint.incarnation)
        else:
            replica.missed_probes += 1
            if replica.missed_probes >= _HEALTH_FAILURES:
                self._bury(replica)

    def _is_listed(self, replica: _Replica) -> bool:
        return self._replicas.get(replica.endpoint.replica) is replica

    def _bury(self, replica: _Replica) -> None:
        """Give a dead replica's work back."""
        if not replica.alive:
            return
        replica.alive, replica.version = False, None
        self._joined.discard(replica.endpoint.incarnation)
        if self._collection is not None:
            self._collection.deaths += 1
        for task in replica.in_flight.values():
            if task is not asyncio.current_task():
                task.cancel()

    async def _on(
        self, endpoint: Endpoint, what: Callable[[SamplerClient], Coroutine[Any, Any, T]]
    ) -> T:
        replica = self._replicas.get(endpoint.replica)
        if replica is None or replica.endpoint.incarnation != endpoint.incarnation:
            raise SamplerUnreachable(f"sampler {endpoint.replica} was replaced by a new one")
        return await what(replica.client)

    async def _drop_dead(self, endpoints: list[Endpoint]) -> list[Endpoint]:
        listed = {r.endpoint.incarnation: r for r in self._replicas.values()}
        dead = [endpoint for endpoint in endpoints if endpoint.incarnation not in listed]
        checked = [listed[e.incarnation] for e in endpoints if e.incarnation in listed]
        healthy = await asyncio.gather(*(r.client.healthy(_HEALTH_TIMEOUT_S) for r in checked))
        for replica, ok in zip(checked, healthy, strict=True):
            if not ok:
                self._bury(replica)
                dead.append(replica.endpoint)
        return dead

    async def _missing_replicas(self) -> list[int]:
        alive = {number for number, replica in self._replicas.items() if replica.alive}
        return sorted(set(range(self._replica_count)) - alive)

    async def _stale(self, version: int) -> list[Endpoint]:
        found = [r.endpoint for r in self._replicas.values() if r.alive and r.version != version]
        return sorted(found, key=lambda endpoint: endpoint.replica)

    async def _mark_current(self, incarnations: list[str], version: int) -> None:
        for replica in self._replicas.values():
            if replica.alive and replica.endpoint.incarnation in incarnations:
                replica.version = version
                self._joined.discard(replica.endpoint.incarnation)
        self._dispatch()

    async def _take_joined(self) -> tuple[Endpoint, ...]:
        """Replicas to announce; each is announced once, and again if it dies and comes back."""
        found = [
            replica.endpoint
            for replica in self._replicas.values()
            if replica.endpoint.incarnation in self._joined and replica.alive
        ]
        self._joined.clear()
        return tuple(sorted(found, key=lambda endpoint: endpoint.replica))

    # ---- on the loop: work

    async def _begin(self, requests: tuple[SampleRequest, ...], version: int) -> None:
        if self._collection is not None:
            raise ComponentError("sampling began before the former batch was done")
        assert self._events.empty(), "the former batch's result was not taken"
        self._collection = _Collection(
            requests=requests,
            version=version,
            started=time.monotonic(),
            pending=deque(range(len(requests))),
        )
        self._joined |= {
            replica.endpoint.incarnation
            for replica in self._replicas.values()
            if replica.alive and replica.version != version
        }
        self._dispatch()
        self._finish_if_done()

    def _dispatch(self) -> None:
        """Give pending samples to the least loaded current replicas."""
        batch = self._collection
        if batch is None or batch.interrupted:
            return
        while batch.pending:
            free = [
                replica
                for replica in self._replicas.values()
                if replica.alive
                and replica.version == batch.version
                and len(replica.in_flight) < self._config.max_concurrency
            ]
            if not free:
                return
            replica = min(free, key=lambda r: (len(r.in_flight), r.endpoint.replica))
            index = batch.pending.popleft()
            batch.tries[index] += 1
            request_id = f"{batch.requests[index].step}-{index}-{batch.tries[index]}"
            work = self._sample(batch, index, replica, request_id)
            replica.in_flight[request_id] = self._spawn(work)

    async def _sample(
        self, batch: _Collection, index: int, replica: _Replica, request_id: str
    ) -> None:
        completion: Completion | None = None
        try:
            completion = await self._generate(batch, index, replica, request_id)
        except asyncio.CancelledError:  # by _bury, or by _close
            pass
        finally:
            replica.in_flight.pop(request_id, None)
        if batch is self._collection:
            self._settle(batch, index, replica, completion)

    async def _generate(
        self, batch: _Collection, index: int, replica: _Replica, request_id: str
    ) -> Completion | None:
        """Return the completion, or None if the replica did not deliver it."""
        request = batch.requests[index]
        room = self._max_sequence_tokens - len(request.prompt.token_ids)
        prompt, seed, done = request.prompt.token_ids, request.seed, 0
        if request.prefix is not None:
            done = len(request.prefix.token_ids)
            prompt = np.concatenate([prompt, request.prefix.token_ids])
            seed = continuation_seed(request.seed, done)
        try:
            completion = await replica.client.generate(
                prompt,
                self._sampling,
                seed=seed,
                request_id=request_id,
                max_tokens=min(self._sampling.max_new_tokens, room) - done,
                stop_token_ids=self._stop_ids,
                timeout_s=self._config.request_timeout_s,
            )
            return completion if request.prefix is None else join(request.prefix, completion)
        except (SamplerUnreachable, SamplerRefused) as error:
            if isinstance(error, SamplerRefused) and error.status < 500:
                raise  # the request is wrong: so it would be anywhere else
            if not await replica.client.healthy(_HEALTH_TIMEOUT_S):
                self._bury(replica)
            elif batch.tries[index] >= _TRIES:
                raise
            return None

    def _settle(
        self, batch: _Collection, index: int, replica: _Replica, completion: Completion | None
    ) -> None:
        """Note what became of a sample: a rollout, a part of one, or work to be done again."""
        request = batch.requests[index]
        if completion is not None and (completion.finish_reason != "abort" or batch.interrupted):
            rollout = Rollout(
                prompt=request.prompt,
                sample_index=request.sample_index,
                completion=completion,
                step=request.step,
            )
            if completion.finish_reason == "abort":
                batch.partial[index] = rollout
            else:
                batch.rollouts[index] = rollout
                batch.by_replica[replica.endpoint.replica] += 1
                batch.last_progress = time.monotonic()
        elif not batch.interrupted and batch.tries[index] >= _TRIES:
            self._failure = ComponentError(
                f"sample {request.key} was given to samplers {_TRIES} times and came back from none"
            )
        else:
            batch.pending.appendleft(index)
            batch.reissued += not batch.interrupted
        self._dispatch()
        self._finish_if_done()

    def _finish_if_done(self) -> None:
        batch = self._collection
        if batch is None:
            return
        if batch.interrupted:
            if any(replica.in_flight for replica in self._replicas.values()):
                return
            self._events.put(_interrupted(batch))
        elif len(batch.rollouts) == len(batch.requests):
            rollouts = tuple(batch.rollouts[i] for i in range(len(batch.requests)))
            self._events.put(Done(rollouts, _stats(batch, rollouts)))
        else:
            return
        self._collection = None

    async def _interrupt(self, timeout_s: float) -> None:
        batch = self._collection
        if batch is None:
            if self._events.empty():
                raise ComponentError("no batch to interrupt")
            return
        batch.interrupted = True
        await self._abort_in_flight(timeout_s)
        self._finish_if_done()

    async def _abort_in_flight(self, timeout_s: float) -> None:
        """Ask the replicas to end what they work on; one that does not answer is taken for dead."""
        busy = [replica for replica in self._replicas.values() if replica.in_flight]
        aborts = [replica.client.abort(list(replica.in_flight), timeout_s) for replica in busy]
        results = await asyncio.gather(*aborts, return_exceptions=True)
        for replica, result in zip(busy, results, strict=True):
            if isinstance(result, SamplerUnreachable | SamplerRefused):
                self._bury(replica)
            elif isinstance(result, BaseException):
                raise result

    async def _check_progress(self) -> None:
        batch, now = self._collection, time.monotonic()
        if batch is None:
            if self._events.empty():
                raise ComponentError("no batch is being sampled: nothing to wait for")
            return  # it was done just now
        since = self._none_alive_since
        if since is not None and now - since > self._config.start_timeout_s:
            raise WaitTimeout(
                f"no sampler replica was alive for {self._config.start_timeout_s:g} s; "
                f"{_pending_text(batch)}"
            )
        limit = self._config.request_timeout_s + self._config.start_timeout_s
        if now - batch.last_progress > limit:
            raise WaitTimeout(f"no sample ended within {limit:g} s; {_pending_text(batch)}")

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Start a task whose failure fails the pool."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)  # the loop itself keeps no reference
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()

    async def _close(self) -> None:
        self._collection = None
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in [*self._retired, *(replica.client for replica in self._replicas.values())]:
            await client.close()


def join(prefix: Completion, rest: Completion) -> Completion:
    """The whole completion of an unfinished one and its continuation."""
    offset = len(prefix.token_ids)
    moved = (replace(s, start=s.start + offset, end=s.end + offset) for s in rest.versions)
    return replace(
        rest,
        token_ids=np.concatenate([prefix.token_ids, rest.token_ids]),
        logprobs=np.concatenate([prefix.logprobs, rest.logprobs]),
        versions=(*prefix.versions, *moved),
        seed=prefix.seed,
    )


def _stats(batch: _Collection, rollouts: Sequence[Rollout]) -> RolloutStats:
    seconds = time.monotonic() - batch.started
    tokens = sum(len(rollout.completion.token_ids) for rollout in rollouts)
    return RolloutStats(
        seconds=seconds,
        samples=len(rollouts),
        tokens=tokens,
        tokens_per_second=tokens / seconds,
        reissued=batch.reissued,
        deaths=batch.deaths,
        by_replica=dict(batch.by_replica),
    )


def _interrupted(batch: _Collection) -> Interrupted:
    missing = [i for i in batch.missing() if i not in batch.partial]
    return Interrupted(
        finished=tuple(batch.rollouts[i] for i in sorted(batch.rollouts)),
        partial=tuple(batch.partial[i] for i in sorted(batch.partial)),
        unstarted=tuple(batch.requests[i] for i in missing),
    )


def _pending_text(batch: _Collection) -> str:
    missing = [batch.requests[i] for i in batch.missing()]
    names = ", ".join(f"{r.prompt.uid}[{r.sample_index}]" for r in missing[:5])
    return f"{len(missing)} of {len(batch.requests)} samples are missing: {names}" + (
        ", ..." if len(missing) > 5 else ""
    )
