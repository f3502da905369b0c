"""Checkpoints at step boundaries: published whole, loaded onto any layout of the learner.

A checkpoint is written into a hidden neighbour, every file made durable, the manifest last, and
renamed into place. Only rank 0 looks at directories: ranks may disagree about what a shared
filesystem holds.
"""

import contextlib
import io
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from hpc_rlhf.checkpoint import manifest
from hpc_rlhf.checkpoint.state import capture_rng, read_state, restore_rank, write_state
from hpc_rlhf.errors import ComponentError
from hpc_rlhf.fs import fsync_directory, publish, system_error, write_failure
from hpc_rlhf.run_dir import RunDir

logger = logging.getLogger(__name__)

T = TypeVar("T")
STATE = "state.h5"
_HASHING_THREADS = 2  # of every rank; a node has several
_TEMPORARY = re.compile(r"\.step_\d+\.tmp-(\d+)-[0-9a-f]+")  # group 1 is the attempt


class Checkpointable(Protocol):
    """What the manager saves: the trainer, of which checkpoint/ needs to know no more than this."""

    def sharded_state_dict(self, *, is_loading: bool) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class CheckpointManager:
    """Saves and loads the checkpoints of one run. Every method is collective over the learner."""

    def __init__(
        self, run: RunDir, keep: int, *, attempt: int = 0, timeout_s: float = 1800.0
    ) -> None:
        """Args:
        keep: whole checkpoints kept, the newest ones; 0 keeps all.
        attempt: number of this attempt; unfinished saves of earlier ones are removed.
        timeout_s: of agreeing among the ranks, the slowest rank's writing included.
        """
        self._directory = run.checkpoints
        self._keep = keep
        self._attempt = attempt
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._rank = dist.get_rank()

    def path(self, step: int) -> Path:
        return self._directory / f"step_{step}"

    def save(self, step: int, trainer: Checkpointable, run_state: Mapping[str, Any]) -> Path:
        """Write the checkpoint of ``step`` and publish it; returns its directory.

        Args:
            run_state: plain JSON data (step, cursors, counters, frozen models), rank 0's counts.

        Raises:
            ComponentError: it could not be written, on every rank, naming the rank that failed,
                the path, the system's error and what to do. What was there before is untouched.
        """
        temporary = self._on_rank_0(f"save step {step}", lambda: self._make_temporary(step))
        try:
            _save_sharded(trainer.sharded_state_dict(is_loading=False), temporary, self._agreed)
            states = self._gather(capture_rng())
            with self._agreed(f"save step {step}: describe files"):
                mine = [manifest.describe(f) for f in temporary.glob(f"__{self._rank}_*.distcp")]
            files = [entry for entries in self._gather(mine) for entry in entries]

            def publish() -> None:
                write_state(temporary / STATE, states, run_state)
                self._publish(step, temporary, files)
                self._retire()

            self._on_rank_0(f"save step {step}: publish", publish)
        except BaseException:
            if self._rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        return self.path(step)

    def latest(self, *, verify: bool = False) -> int | None:
        """Step of the newest whole checkpoint, or None.

        Broken ones are warned about, naming the file, and skipped; they are never deleted.

        Args:
            verify: compare the digests of all files, each read by one of the ranks, not only
                their sizes.
        """
        steps = self._on_rank_0("look for checkpoints", lambda: manifest.steps(self._directory))
        for step in steps:
            reason = self._problem(step, verify=verify)
            if reason is None:
                return int(step)
            if self._rank == 0:
                logger.warning("checkpoint %s is broken and skipped: %s", self.path(step), reason)
        return None

    def load(self, step: int, trainer: Checkpointable, *, verify: bool = False) -> dict[str, Any]:
        """Load the checkpoint of ``step`` into ``trainer`` and this rank's random streams.

        The layout (TP, PP, DP) may differ from the one that saved; see
        :func:`hpc_rlhf.checkpoint.state.restore_rank` for what then becomes of the streams.

        Returns:
            The ``run_state`` given to :meth:`save`.

        Raises:
            ComponentError: it is not whole, or not of this model.
        """
        path = self.path(step)
        if reason := self._problem(step, verify=verify):
            raise ComponentError(f"checkpoint {path} is not whole: {reason}")
        states, run_state = self._on_rank_0(f"load step {step}", lambda: read_state(path / STATE))
        with self._agreed(f"load step {step}"):
            trainer.load_state_dict(
                dist_checkpointing.load(
                    trainer.sharded_state_dict(is_loading=True),
                    str(path),
                    FullyParallelLoadStrategyWrapper(
                        get_default_load_sharded_strategy(str(path)),
                        parallel_state.get_data_parallel_group(),
                    ),
                    strict=StrictHandling.RAISE_ALL,
                )
            )
        restore_rank(states, self._rank)
        return run_state

    # -- rank 0 only ------------------------------------------------------------------------------

    def _make_temporary(self, step: int) -> Path:
        self._directory.mkdir(parents=True, exist_ok=True)
        for path in self._directory.iterdir():
            unfinished = _TEMPORARY.fullmatch(path.name)
            if unfinished and int(unfinished[1]) < self._attempt:
                logger.info("removing %s, left by an earlier attempt", path)
                shutil.rmtree(path, ignore_errors=True)
        temporary = self._temporary(step)
        temporary.mkdir()
        return temporary

    def _temporary(self, step: int) -> Path:
        name = f".step_{step}.tmp-{self._attempt}-{secrets.token_hex(4)}"
        return self._directory / name

    def _publish(self, step: int, temporary: Path, files: list[manifest.FileEntry]) -> None:
        written = {entry.name for entry in files}
        for file in sorted(temporary.iterdir()):
            if file.name not in written:
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
                files.append(manifest.describe(file))
        manifest.publish_manifest(temporary, step, dist.get_world_size(), files)
        fsync_directory(temporary)
        target = self.path(step)
        if target.exists():
            aside = target.with_name(f".{target.name}.replaced-{secrets.token_hex(4)}")
            logger.warning("%s is there already (broken?) and is kept as %s", target, aside)
            target.rename(aside)
        temporary.rename(target)
        fsync_directory(self._directory)

    def _retire(self) -> None:
        """Delete whole checkpoints beyond the newest ``keep``; broken ones are left to a person."""
        if self._keep == 0:
            return
        whole = [s for s in manifest.steps(self._directory) if not manifest.problem(self.path(s))]
        for step in whole[self._keep :]:
            # Renamed first: a half-deleted directory must not look like a broken checkpoint.
            doomed = self._temporary(step)
            try:
                self.path(step).rename(doomed)
                shutil.rmtree(doomed)
            except OSError as error:  # the new checkpoint is safe, and NFS keeps opened files
                logger.warning("old checkpoint %s not deleted: %s", doomed, error)

    # -- all ranks --------------------------------------------------------------------------------

    def _problem(self, step: int, *, verify: bool) -> str | None:
        """:func:`manifest.problem` of a checkpoint, its files hashed by all ranks together."""
        path = self.path(step)
        reason = self._on_rank_0("look at a checkpoint", lambda: manifest.problem(path))
        if reason is not None or not verify:
            return reason
        files = self._on_rank_0("read a manifest", lambda: manifest.read_manifest(path).files)
        share = manifest.share(files, self._rank, dist.get_world_size())
        with ThreadPoolExecutor(_HASHING_THREADS) as pool:
            mine = list(pool.map(lambda entry: manifest.digest_problem(path, entry), share))
        found = [reason for reasons in self._gather(mine) for reason in reasons if reason]
        return min(found, default=None)

    # -- agreement --------------------------------------------------------------------------------

    def _gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self._group)
        return values

    @contextlib.contextmanager
    def _agreed(self, what: str) -> Iterator[None]:
        """Raise on every rank what the body raised on any, so that none waits for the others."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:  # noqa: BLE001 (raised below, on every rank)
            error = raised
        errors = self._gather(None if error is None else self._describe(error))
        failed = {rank: text for rank, text in enumerate(errors) if text is not None}
        if failed:
            rank, text = next(iter(failed.items()))
            raise ComponentError(f"checkpoint: {what}: learner rank {rank}: {text}") from error

    def _describe(self, error: Exception) -> str:
        if isinstance(error, ComponentError):
            return str(error)
        cause = system_error(error)
        if cause is not None:
            return write_failure(cause, self._directory)
        return f"{type(error).__name__}: {error}"

    def _on_rank_0(self, what: str, function: Any) -> Any:
        """Run ``function`` on rank 0 and return its value on every rank."""
        value = None
        with self._agreed(what):
            if self._rank == 0:
                value = function()
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]


class _ShardWriter(FileSystemWriter):
    """torch's writer, whose failures keep the system's error on their way to the other ranks."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause = system_error(error)
            if cause is None:
                raise
            # Pickling drops what an exception was caused by.
            raise OSError(cause.errno, cause.strerror, str(self.path)) from error


class _TorchDistSave(SaveShardedStrategy):
    """Megatron's torch_dist format, written by this process's threads and fsynced.

    Megatron's own strategy writes through forked processes and a spawned queue server even when
    synchronous: seconds of start-up, and processes that outlive a killed rank. What it does before
    writing (two functions, one of them private) is what makes the format, and is used as it is.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str) -> None:
        """Collective. Raises on the ranks that failed only; the others return as well."""
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        try:
            save_state_dict(
                mcore_to_pyt_state_dict(by_key, False),
                storage_writer=_ShardWriter(checkpoint_dir, sync_files=True),
                planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            )
        except CheckpointException as error:  # not an Exception; raised on all ranks
            mine = error.failures.get(dist.get_rank())
            if mine is not None:
                raise mine[0] from None


def _write_common(common: dict[str, Any], directory: Path) -> None:
    """What ``TorchCommonSaveStrategy`` writes; given a path, torch hides why it cannot write."""
    content = io.BytesIO()
    torch.save(common, content)
    publish(directory / COMMON_STATE_FNAME, lambda file: file.write(content.getbuffer()))


def _save_sharded(state: dict[str, Any], directory: Path, agreed: Any) -> None:
    """``dist_checkpointing.save``, in whose parts a failure of one rank is agreed on by all."""
    strategy = FullyParallelSaveStrategyWrapper(
        _TorchDistSave(), parallel_state.get_data_parallel_group()
    )
    sharded, common = save_preprocess(state)
    with agreed("write common.pt"):
        if dist.get_rank() == 0:
            _write_common(common, directory)
    with agreed("write shards"):
        strategy.save(sharded, str(directory))
    with agreed("write metadata.json"):
        if dist.get_rank() == 0:
            save_config(CheckpointingConfig(strategy.backend, strategy.version), str(directory))
