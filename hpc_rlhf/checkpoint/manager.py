"""Checkpoints of save points: published whole, loaded onto any layout of the learner.

A checkpoint is written into a hidden neighbour, every file made durable, the manifest last, and
renamed into place. Only rank 0 looks at directories: ranks may disagree about what a shared
filesystem holds.
"""

import copy
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)
from megatron.core.dist_checkpointing.validation import StrictHandling

from hpc_rlhf.checkpoint import manifest
from hpc_rlhf.checkpoint.agreement import Agreement
from hpc_rlhf.checkpoint.save_point import SavePoint, outlived
from hpc_rlhf.checkpoint.shards import Staged, Stager, write_shards
from hpc_rlhf.checkpoint.state import (
    RngState,
    capture_rng,
    read_state,
    restore_rank,
    write_state,
)
from hpc_rlhf.cluster import device
from hpc_rlhf.errors import ComponentError, WaitTimeout
from hpc_rlhf.fs import fsync_directory
from hpc_rlhf.run_dir import RunDir

logger = logging.getLogger(__name__)

STATE = "state.h5"
_HASHING_THREADS = 2  # of every rank; a node has several
_TEMPORARY = re.compile(r"\.step_[\d+]+\.tmp-(\d+)-[0-9a-f]+")  # group 1 is the attempt


class Checkpointable(Protocol):
    """What the manager saves: the trainer, of which checkpoint/ needs to know no more than this."""

    def sharded_state_dict(self, *, is_loading: bool) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class SaveCost:
    """What a checkpoint cost."""

    bytes: int  # of all files
    blocked_seconds: float  # in which the learner did nothing else
    seconds: float  # until it was published

    def as_metrics(self) -> dict[str, float]:
        """``checkpoint/bytes``, ``checkpoint/blocked_seconds``, ``checkpoint/seconds``."""
        return {
            "checkpoint/bytes": self.bytes,
            "checkpoint/blocked_seconds": self.blocked_seconds,
            "checkpoint/seconds": self.seconds,
        }


class CheckpointManager:
    """Saves and loads the checkpoints of one run. Every method is collective over the learner."""

    def __init__(
        self,
        run: RunDir,
        keep: int,
        *,
        keep_every_steps: int = 0,
        attempt: int = 0,
        timeout_s: float = 1800.0,
    ) -> None:
        """Args:
        keep: whole checkpoints kept, the newest ones; 0 keeps all.
        keep_every_steps: whole checkpoints of steps that are multiples of it are kept, too.
        attempt: number of this attempt; unfinished saves of earlier ones are removed.
        timeout_s: of agreeing among the ranks, the slowest rank's writing included.
        """
        self._directory = run.checkpoints
        self._keep = keep
        self._keep_every_steps = keep_every_steps
        self._attempt = attempt
        self._timeout_s = timeout_s
        self._rank = dist.get_rank()
        self._agreement = Agreement(self._directory, timeout_s)
        self._writers = Agreement(self._directory, timeout_s)  # a group is one thread's
        self._stager = Stager()
        self._writing: _Writing | None = None
        self._cost: SaveCost | None = None

    def path(self, point: SavePoint) -> Path:
        return self._directory / point.name

    def save(
        self,
        point: SavePoint,
        trainer: Checkpointable,
        run_state: Mapping[str, Any],
        *,
        wait: bool = True,
    ) -> Path:
        """Write the checkpoint of ``point`` and publish it; returns its directory.

        What is to be saved is copied to host memory, and written by a thread of its own. At most one
        save is under way: this one waits for the one before, and raises what became of it.

        Args:
            run_state: plain JSON data (step, cursors, counters, frozen models), rank 0's counts.
            wait: until it is published; else return when the copy is made. Then :meth:`wait`, or
                the next call of another method, raises what went wrong with it.

        Raises:
            ComponentError: it could not be written, on every rank, naming the rank that failed,
                the path, the system's error and what to do. What was there before is untouched.
        """
        began = time.monotonic()
        self.wait()
        staged = self._stager.stage(trainer.sharded_state_dict(is_loading=False))
        rng, state = capture_rng(), copy.deepcopy(dict(run_state))
        blocked = None if wait else time.monotonic() - began

        def write() -> None:
            size = self._write(point, staged, rng, state)
            seconds = time.monotonic() - began
            self._cost = SaveCost(size, seconds if blocked is None else blocked, seconds)

        self._writing = _Writing(point, write)
        self._writing.start()
        if wait:
            self.wait()
        return self.path(point)

    @property
    def failed(self) -> bool:
        """Whether this rank knows already that the save under way has failed: on all ranks, as
        :meth:`wait` will say. Not collective."""
        writing = self._writing
        return writing is not None and not writing.is_alive() and writing.error is not None

    def take_cost(self) -> SaveCost | None:
        """Of the newest save, once, when it is published. Not collective."""
        cost, self._cost = self._cost, None
        return cost

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until no save is under way.

        Args:
            timeout_s: at most this long (default: the manager's).

        Raises:
            ComponentError: the save failed, on every rank.
            WaitTimeout: it is still being written; a later call may wait on.
        """
        writing, bound = self._writing, self._timeout_s if timeout_s is None else timeout_s
        if writing is None:
            return
        writing.join(bound)
        if writing.is_alive():
            raise WaitTimeout(
                f"checkpoint {self.path(writing.point)} is still being written after {bound:.0f} s"
            )
        self._writing = None
        if writing.error is not None:
            raise writing.error

    def close(self, timeout_s: float = 10.0) -> None:
        """Give a save under way ``timeout_s`` to end; what goes wrong with it is logged.

        For the end of a process that may have failed already: who needs the save calls
        :meth:`wait` first. Not collective.
        """
        try:
            self.wait(timeout_s)
        except Exception:
            logger.exception("the last save did not end well")

    def latest(
        self,
        *,
        verify: bool = False,
        reject: Callable[[SavePoint], str | None] | None = None,
        tell: Callable[[str], None] = logger.warning,
    ) -> SavePoint | None:
        """Save point of the newest whole checkpoint, or None.

        Broken ones are skipped; they are never deleted.

        Args:
            verify: compare the digests of all files, each read by one of the ranks, not only
                their sizes.
            reject: further reasons to skip one; asked on rank 0.
            tell: called on rank 0 for each that is skipped, with the file and the reason.
        """
        self.wait()
        points: list[SavePoint] = self._agreement.on_rank_0(
            "look for checkpoints", lambda: manifest.save_points(self._directory)
        )
        for point in points:
            reason = self._problem(point, verify=verify)
            if reason is None and reject is not None:
                reason = self._agreement.on_rank_0("look at a checkpoint", partial(reject, point))
            if reason is None:
                return point
            if self._rank == 0:
                tell(f"checkpoint {self.path(point)} is broken and skipped: {reason}")
        return None

    def load(
        self, point: SavePoint, trainer: Checkpointable, *, verify: bool = False
    ) -> dict[str, Any]:
        """Load the checkpoint of ``point`` into ``trainer`` and this rank's random streams.

        The layout (TP, PP, DP) may differ from the one that saved; see
        :func:`hpc_rlhf.checkpoint.state.restore_rank` for what then becomes of the streams.

        Returns:
            The ``run_state`` given to :meth:`save`.

        Raises:
            ComponentError: it is not whole, or not of this model.
        """
        self.wait()
        path = self.path(point)
        if reason := self._problem(point, verify=verify):
            raise ComponentError(f"checkpoint {path} is not whole: {reason}")
        states, run_state = self._agreement.on_rank_0(
            f"load {point.name}", lambda: read_state(path / STATE)
        )
        with self._agreement.on(f"load {point.name}"):
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

    # -- the writing thread -----------------------------------------------------------------------

    def _write(
        self, point: SavePoint, staged: Staged, rng: RngState, run_state: Mapping[str, Any]
    ) -> int:
        """Write and publish; collective over the writing threads of all ranks.

        Returns:
            Bytes of all files.
        """
        ranks, what = self._writers, f"save {point.name}"
        temporary = ranks.on_rank_0(what, lambda: self._make_temporary(point))
        try:
            mine = write_shards(staged, temporary, ranks, what)
            written = ranks.gather((mine, rng))
            files = [entry for entries, _ in written for entry in entries]
            states = [state for _, state in written]

            def publish() -> int:
                write_state(temporary / STATE, states, run_state)
                size = self._publish(point, temporary, files)
                self._retire()
                return size

            return ranks.on_rank_0(f"{what}: publish", publish)
        except BaseException:
            if self._rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    # -- rank 0 only ------------------------------------------------------------------------------

    def _make_temporary(self, point: SavePoint) -> Path:
        self._directory.mkdir(parents=True, exist_ok=True)
        for path in self._directory.iterdir():
            unfinished = _TEMPORARY.fullmatch(path.name)
            if unfinished and int(unfinished[1]) < self._attempt:
                logger.info("removing %s, left by an earlier attempt", path)
                shutil.rmtree(path, ignore_errors=True)
        temporary = self._temporary(point)
        temporary.mkdir()
        return temporary

    def _temporary(self, point: SavePoint) -> Path:
        name = f".{point.name}.tmp-{self._attempt}-{secrets.token_hex(4)}"
        return self._directory / name

    def _publish(self, point: SavePoint, temporary: Path, files: list[manifest.FileEntry]) -> int:
        """Make ``temporary`` the checkpoint of ``point``; returns its bytes."""
        written = {entry.name for entry in files}
        for file in sorted(temporary.iterdir()):
            if file.name not in written:
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
                files.append(manifest.describe(file))
        manifest.publish_manifest(temporary, point, dist.get_world_size(), files)
        fsync_directory(temporary)
        target = self.path(point)
        if target.exists():
            aside = target.with_name(f".{target.name}.replaced-{secrets.token_hex(4)}")
            logger.warning("%s is there already (broken?) and is kept as %s", target, aside)
            target.rename(aside)
        temporary.rename(target)
        fsync_directory(self._directory)
        return sum(entry.size for entry in files)

    def _retire(self) -> None:
        """Delete whole checkpoints that need not be kept; broken ones are left to a person."""
        points = manifest.save_points(self._directory)
        whole = [point for point in points if not manifest.problem(self.path(point))]
        for point in outlived(whole, self._keep, self._keep_every_steps):
            # Renamed first: a half-deleted directory must not look like a broken checkpoint.
            doomed = self._temporary(point)
            try:
                self.path(point).rename(doomed)
                shutil.rmtree(doomed)
            except OSError as error:  # the new checkpoint is safe, and NFS keeps opened files
                logger.warning("old checkpoint %s not deleted: %s", doomed, error)

    # -- all ranks --------------------------------------------------------------------------------

    def _problem(self, point: SavePoint, *, verify: bool) -> str | None:
        """:func:`manifest.problem` of a checkpoint, its files hashed by all ranks together."""
        path = self.path(point)
        reason = self._agreement.on_rank_0("look at a checkpoint", lambda: manifest.problem(path))
        if reason is not None or not verify:
            return reason
        files = self._agreement.on_rank_0(
            "read a manifest", lambda: manifest.read_manifest(path).files
        )
        share = manifest.share(files, self._rank, dist.get_world_size())
        with ThreadPoolExecutor(_HASHING_THREADS) as pool:
            mine = list(pool.map(lambda entry: manifest.digest_problem(path, entry), share))
        found = [reason for reasons in self._agreement.gather(mine) for reason in reasons if reason]
        return min(found, default=None)


class _Writing(threading.Thread):
    """The save under way. A daemon: a process that has failed does not wait for a dead disk."""

    def __init__(self, point: SavePoint, write: Callable[[], None]) -> None:
        super().__init__(name=f"checkpoint-{point}", daemon=True)
        self.point = point
        self.error: Exception | None = None
        self._write = write

    def run(self) -> None:
        try:
            device.enter_thread()
            self._write()
        except Exception as error:  # noqa: BLE001 - raised by CheckpointManager.wait
            self.error = error
