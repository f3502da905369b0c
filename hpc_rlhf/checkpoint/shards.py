"""Megatron's torch_dist format in two steps: staged in host memory, then written by any thread.

Megatron's own strategy writes through forked processes and a spawned queue server: seconds of
start-up, processes that outlive a killed rank, and a fork of a process that runs threads. What it
does before writing (some functions of it private) is what makes the format, and is used as it is.
"""

import copy
import hashlib
import io
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.exchange_utils import (
    ShardDistribution,
    determine_main_replica_uniform_distribution,
)
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    distribute_main_replicas_with_precomputed_distribution,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from hpc_rlhf.checkpoint.agreement import Agreement
from hpc_rlhf.checkpoint.manifest import FileEntry
from hpc_rlhf.cluster import device
from hpc_rlhf.fs import publish, system_error

FORMAT = CheckpointingConfig("torch_dist", 1)


@dataclass(frozen=True, slots=True)
class Staged:
    """What this rank writes, in host memory and shared with nobody."""

    shards: dict[str, list[ShardedBase]]  # by key
    common: bytes  # common.pt; rank 0's is written
    wait: Callable[[], None]  # until the copies are made


class Stager:
    """Copies what is to be saved, into host memory that the next save uses again.

    The first time it also asks all ranks who writes what and whether together it is everything.
    From then on the state must keep its structure, and nobody is asked: the ranks that train are
    held up by the copy alone.
    """

    def __init__(self) -> None:
        self._distribution: ShardDistribution | None = None
        self._structure: list[tuple[Any, ...]] | None = None
        self._buffers: list[torch.Tensor] = []

    def stage(self, state: dict[str, Any]) -> Staged:
        """Split the saving of ``state`` (a sharded state dict) among the ranks and copy this
        rank's part. The first call is collective. Nobody may be reading the copy of the call before.

        Raises:
            ValueError: the state has another structure than the first time.
        """
        first = self._structure is None
        sharded, common = save_preprocess(state, validate_access_integrity=first)
        group = parallel_state.get_data_parallel_group()
        if first:
            self._distribution = determine_main_replica_uniform_distribution(sharded, group)
        distribute_main_replicas_with_precomputed_distribution(sharded, group, self._distribution)
        mine, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)

        shards = [shard for same_key in mine.values() for shard in same_key]
        tensors = [shard for shard in shards if isinstance(shard, ShardedTensor)]
        structure = [(s.key, s.global_offset, s.data.shape, s.data.dtype) for s in tensors]
        sources = [shard.data.detach() for shard in tensors]
        if first:
            self._structure, self._buffers = structure, device.host_buffers(sources)
        elif structure != self._structure:
            raise ValueError("the state to save has another structure than the one saved before")
        wait = device.copy_to_host(sources, self._buffers)
        for shard, buffer in zip(tensors, self._buffers, strict=True):
            shard.data = buffer
        for shard in shards:
            if not isinstance(shard, ShardedTensor):
                shard.data = copy.deepcopy(shard.data)
        content = io.BytesIO()
        torch.save(common, content)
        return Staged(mine, content.getvalue(), wait)


def write_shards(
    staged: Staged, directory: Path, agreement: Agreement, what: str
) -> list[FileEntry]:
    """Write ``staged`` into ``directory``, fsynced. Collective over ``agreement``, in a thread of
    its own.

    Args:
        what: is being done, for messages.

    Returns:
        This rank's large files, of which the digests are known without reading them.

    Raises:
        ComponentError: a rank could not, on every rank.
    """
    # The sha256 guards the bytes better, and torch never checks this one. Of this thread only.
    torch.serialization.set_crc32_options(False)
    writer = _ShardWriter(directory)
    with agreement.on(f"{what}: write common.pt"):
        if agreement.rank == 0:
            _write_common(staged.common, directory)
    with agreement.on(f"{what}: write shards"):
        staged.wait()
        try:
            save_state_dict(
                mcore_to_pyt_state_dict(staged.shards, False),
                storage_writer=writer,
                planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
                process_group=agreement.group,
            )
        except CheckpointException as error:  # not an Exception; raised on all ranks
            mine = error.failures.get(dist.get_rank())
            if mine is not None:
                raise mine[0] from None
    with agreement.on(f"{what}: write metadata.json"):
        if agreement.rank == 0:
            save_config(FORMAT, str(directory))
    return writer.files.entries


class _ShardWriter(FileSystemWriter):
    """torch's writer, whose failures keep the system's error on their way to the other ranks."""

    def __init__(self, directory: Path) -> None:
        # what it would copy ahead is in host memory already
        super().__init__(str(directory), sync_files=True, per_thread_copy_ahead=0)
        self.fs = self.files = _HashingFiles()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause = system_error(error)
            if cause is None:
                raise
            # Pickling drops what an exception was caused by.
            raise OSError(cause.errno, cause.strerror, str(self.path)) from error


class _HashingFiles(FileSystem):
    """Writes files and knows what is in them."""

    def __init__(self) -> None:
        self._entries: dict[str, FileEntry] = {}

    @property
    def entries(self) -> list[FileEntry]:
        """The files written."""
        return list(self._entries.values())

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        path = Path(path)
        with path.open(mode) as file, ThreadPoolExecutor(2) as helpers:
            stream = _HashingStream(file, helpers)
            yield stream
            stream.wait()
        self._entries[path.name] = FileEntry(path.name, stream.size, stream.sha256)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        entry = self._entries.pop(Path(path).name)
        self._entries[Path(new_path).name] = FileEntry(
            Path(new_path).name, entry.size, entry.sha256
        )


class _HashingStream(io.BufferedIOBase):
    """A file that is written from beginning to end; meanwhile other threads hash it, and have the
    disk begin with what is written."""

    _SMALL = 1 << 20  # bytes; less is hashed sooner than handed over

    def __init__(self, file: Any, helpers: ThreadPoolExecutor) -> None:
        self._file = file
        self._helpers = helpers
        self._digest = hashlib.sha256()
        self._syncing: Future[None] | None = None
        self.size = 0

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if view.nbytes < self._SMALL:
            self._digest.update(view)
            self._file.write(view)
        else:
            # a buffered file takes all of it or raises; either way the caller's memory is left alone
            # only when both are done with it
            hashed = self._helpers.submit(self._digest.update, view)
            try:
                self._file.write(view)
            finally:
                hashed.result()
            if self._syncing is None or self._syncing.done():
                self.wait()
                self._syncing = self._helpers.submit(os.fdatasync, self.fileno())
        self.size += view.nbytes
        return view.nbytes

    def wait(self) -> None:
        """Wait for the disk, whose errors are told once, to whoever asked first.

        Raises:
            OSError: what was written could not be kept.
        """
        if self._syncing is not None:
            self._syncing.result()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def fileno(self) -> int:
        return int(self._file.fileno())

    def flush(self) -> None:
        self._file.flush()


def _write_common(content: bytes, directory: Path) -> None:
    """What ``TorchCommonSaveStrategy`` writes; given a path, torch hides why it cannot write."""
    publish(directory / COMMON_STATE_FNAME, lambda file: file.write(content))
