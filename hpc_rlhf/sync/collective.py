"""The learner's side of a weight transfer, over one process group per pipeline stage.

Each group is {that stage's leader} + all workers of all samplers: NCCL on GPUs, gloo on CPUs. The
stages send one after the other. Every rank's part of a step is bounded, and after each step the
ranks agree on how it went, so none of them waits for one that has given up.

What the samplers do is in :mod:`hpc_rlhf.sync.receiver`: they stage, and swap only what is whole.
Whatever dies here, old or new weights are served, never a mixture.
"""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.distributed import TCPStore

from hpc_rlhf.cluster import device
from hpc_rlhf.cluster.control import ControlGroup
from hpc_rlhf.cluster.rendezvous import Endpoint
from hpc_rlhf.config import SyncConfig
from hpc_rlhf.errors import ComponentError
from hpc_rlhf.models.megatron import PolicyModel, hf_metadata, hf_tensors
from hpc_rlhf.rollout.client import SamplerRefused, SamplerUnreachable
from hpc_rlhf.rollout.sampler import SamplerPool
from hpc_rlhf.sync.buckets import Bucket, pack, plan_buckets
from hpc_rlhf.sync.fleet import Fleet
from hpc_rlhf.sync.process_group import TransferError, TransferGroup
from hpc_rlhf.sync.wire import InitInfo

# What a try may fail with and be repeated: a sampler or a connection to one. Any other error is
# this program's, and is raised.
_RETRIED = (TransferError, SamplerUnreachable, SamplerRefused)


@dataclass(frozen=True)
class SyncStats:
    """Of one :meth:`CollectiveTransport.publish`; the same on every rank of the learner."""

    version: int
    seconds: dict[str, float]  # by part ("form", "plan", "send", "swap"), and "total"
    bytes: int  # sent to each worker
    replicas: int  # that serve this version now
    dropped: tuple[int, ...]  # replicas that were found dead
    tries: int


@dataclass(frozen=True)
class _Position:
    """This rank's place in the learner."""

    stage: int
    stages: int
    gathers: bool  # takes part in gathering its stage's tensors
    leads: bool  # is its stage's member of the transfer group

    @classmethod
    def here(cls) -> "_Position":
        from megatron.core import parallel_state

        first_copy = parallel_state.get_data_parallel_rank() == 0
        return cls(
            stage=parallel_state.get_pipeline_model_parallel_rank(),
            stages=parallel_state.get_pipeline_model_parallel_world_size(),
            gathers=first_copy,
            leads=first_copy and parallel_state.get_tensor_model_parallel_rank() == 0,
        )


class CollectiveTransport:
    """Publishes the policy's weights to the samplers. One per learner rank.

    The coordinator (learner rank 0) has the pool and talks to the servers; the others follow.
    """

    def __init__(
        self,
        config: SyncConfig,
        control: ControlGroup,
        store: TCPStore,
        address: str,
        pool: SamplerPool | None,
    ) -> None:
        """
        Args:
            store: this rank's client of the learner's store, which the samplers connect to as well.
            address: of this rank's node.
            pool: the samplers, on the coordinator; None elsewhere.
        """
        if control.is_coordinator != (pool is not None):
            raise ValueError("the coordinator, and no other rank, has the pool of samplers")
        self._config, self._control, self._pool = config, control, pool
        self._store, self._address = store, address
        self._position = _Position.here()
        self._plan: list[tuple[Bucket, ...]] = []  # by stage
        self._members: tuple[str, ...] = ()  # incarnations in the groups
        self._group: TransferGroup | None = None  # this rank's, where it leads a stage
        self._seconds: dict[str, float] = {}

    def publish(
        self, model: PolicyModel, version: int, endpoints: Sequence[Endpoint] | None = None
    ) -> SyncStats:
        """Bring ``model``'s weights to the samplers as ``version``. COLLECTIVE over the learner.

        On return every living replica of ``endpoints`` serves exactly this version, and the pool
        knows it. One that dies meanwhile is left out, be it the last one: a replica that is started
        again gets them before it gets work (:class:`~hpc_rlhf.rollout.sampler.Joined`), and how long
        to wait for one is the pool's to say.

        Args:
            endpoints: the coordinator's choice; default: all that do not serve ``version``.
                Ignored on the other ranks.

        Raises:
            ComponentError: on every rank: ``config.attempts`` tries failed.
        """
        self._seconds = {}
        with self._timed("total"):
            if not self._plan:
                self._plan = self._plan_stages(model)
            targets = self._choose(version, endpoints)
            dropped: list[Endpoint] = []
            tries = 0
            while targets:
                tries += 1
                failure = self._try(model, version, targets)
                if not failure:
                    break
                self._leave()
                if tries == self._config.attempts:
                    raise ComponentError(
                        f"publishing version {version} to {len(targets)} samplers failed "
                        f"{tries} times, the last time: {failure}"
                    )
                dead = self._find_dead(targets)
                dropped += dead
                targets = [endpoint for endpoint in targets if endpoint not in dead]
            if self._pool is not None:
                self._pool.mark_current(targets, version)
        return self._control.broadcast(
            SyncStats(
                version=version,
                seconds=self._seconds,
                bytes=sum(bucket.nbytes for stage in self._plan for bucket in stage),
                replicas=len(targets),
                dropped=tuple(endpoint.replica for endpoint in dropped),
                tries=tries,
            )
        )

    def close(self) -> None:
        """Leave the transfer groups."""
        self._leave()

    # ---- what the ranks tell each other

    def _plan_stages(self, model: PolicyModel) -> list[tuple[Bucket, ...]]:
        own = None
        if self._position.leads:
            tensors = [(meta.name, meta.dtype, meta.shape) for meta in hf_metadata(model)]
            own = (self._position.stage, plan_buckets(tensors, self._config.bucket_bytes))
        plans = dict(plan for plan in self._control.gather(own) if plan is not None)
        return [plans[stage] for stage in range(self._position.stages)]

    def _choose(self, version: int, endpoints: Sequence[Endpoint] | None) -> list[Endpoint]:
        if self._pool is not None and endpoints is None:
            endpoints = self._pool.stale(version)
        return self._control.broadcast(list(endpoints or ()))

    def _find_dead(self, targets: Sequence[Endpoint]) -> list[Endpoint]:
        return self._control.broadcast(self._pool.drop_dead(targets) if self._pool else [])

    def _agree(self, part: Callable[[], None]) -> str:
        """Run this rank's part of a step; return what failed on any rank, or ""."""
        failure = ""
        try:
            part()
        except _RETRIED as error:
            failure = str(error)
        return "; ".join(text for text in self._control.gather(failure) if text)

    # ---- one try

    def _try(self, model: PolicyModel, version: int, targets: Sequence[Endpoint]) -> str:
        """Publish to all of ``targets``; return what failed, or ""."""
        fleet = Fleet(self._pool, targets, self._config.timeout_s) if self._pool else None
        members = tuple(endpoint.incarnation for endpoint in targets)
        if members != self._members:
            with self._timed("form"):
                if failure := self._form(fleet, members):
                    return failure
        update = self._control.broadcast(uuid.uuid4().hex)
        with self._timed("plan"):
            if failure := self._agree(
                lambda: fleet.announce(update, self._plan) if fleet else None
            ):
                return failure
        with self._timed("send"):
            for stage in range(self._position.stages):
                if failure := self._transfer(fleet, model, update, stage):
                    return failure
        with self._timed("swap"):
            return self._agree(lambda: fleet.swap(update, version) if fleet else None)

    def _form(self, fleet: Fleet | None, members: tuple[str, ...]) -> str:
        """Form a new transfer group for every stage."""
        self._leave()
        counts: list[int] = []
        if failure := self._agree(lambda: counts.extend(fleet.worker_counts()) if fleet else None):
            return failure
        counts = self._control.broadcast(counts)
        size = 1 + sum(counts)
        name = self._control.broadcast(uuid.uuid4().hex)
        groups = [f"transfer/{name}/{stage}" for stage in range(self._position.stages)]
        infos = [
            InitInfo(
                host=self._store.host,
                port=self._store.port,
                groups=groups,
                rank=1 + sum(counts[:replica]),
                size=size,
                timeout_s=self._config.timeout_s,
                chunk_bytes=self._config.bucket_bytes,
            )
            for replica in range(len(counts))
        ]

        def join() -> None:
            joining = fleet.join(infos) if fleet else None
            try:
                if self._position.leads:
                    self._group = TransferGroup(
                        host=self._store.host,
                        port=self._store.port,
                        name=groups[self._position.stage],
                        rank=0,
                        size=size,
                        device=device.device(),
                        address=self._address,
                        timeout_s=self._config.timeout_s,
                        # The workers join the stages' groups one after the other.
                        join_timeout_s=self._config.timeout_s * (1 + self._position.stage),
                    )
            finally:
                if joining is not None:
                    joining.result(None)
            if fleet is not None:
                fleet.check_joined()

        failure = self._agree(join)
        if not failure:
            self._members = members
        return failure

    def _transfer(self, fleet: Fleet | None, model: PolicyModel, update: str, stage: int) -> str:
        """Send one stage's tensors."""
        receiving = fleet.receive(update, stage) if fleet else None
        failure = self._agree(lambda: self._send(model, stage))

        def arrive() -> None:
            if fleet is not None and receiving is not None:
                receiving.result(self._config.timeout_s)
                fleet.check_received(update, stage + 1)

        return "; ".join(text for text in (failure, self._agree(arrive)) if text)

    def _send(self, model: PolicyModel, stage: int) -> None:
        """Gather this rank's stage, and broadcast it from its leader."""
        if stage != self._position.stage or not self._position.gathers:
            return
        tensors = hf_tensors(model)
        failure: TransferError | None = None
        for bucket in self._plan[stage]:
            contents = []
            for slot in bucket.slots:
                name, tensor = next(tensors)
                assert name == slot.name, "hf_tensors and hf_metadata differ in order"
                contents.append(tensor)
            if self._group is not None and failure is None:
                try:
                    self._broadcast(self._group, bucket, contents)
                except TransferError as error:
                    failure = error  # go on to the end: the others of the gathering group do
                    self._leave()  # and let the workers know
        assert next(tensors, None) is None, "hf_tensors has more tensors than hf_metadata"
        if failure is not None:
            raise failure

    def _broadcast(
        self, group: TransferGroup, bucket: Bucket, tensors: Sequence[torch.Tensor]
    ) -> None:
        buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=group.device)
        pack(bucket, tensors, buffer)
        for chunk in buffer.split(self._config.bucket_bytes):
            group.broadcast(chunk)

    def _leave(self) -> None:
        self._members = ()
        if self._group is not None:
            self._group.close()
            self._group = None

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[part] = self._seconds.get(part, 0.0) + time.monotonic() - start
