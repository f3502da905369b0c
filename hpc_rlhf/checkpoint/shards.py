"""Megatron's torch_dist format in two steps: staged in host memory, then written by any thread.

Megatron's own strategy writes through forked processes and a spawned queue server: seconds of
start-up, processes that outlive a killed rank, and a fork of a process that runs threads. What it
does before writing (some functions of it private) is what makes the format, and is used as it is.
"""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    determine_main_replica_uniform_distribution,
    distribute_main_replicas_with_precomputed_distribution,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from hpc_rlhf.checkpoint.agreement import Agreement
from hpc_rlhf.fs import publish, system_error

FORMAT = CheckpointingConfig("torch_dist", 1)


@dataclass(frozen=True, slots=True)
class Staged:
    """What this rank writes, in host memory and shared with nobody."""

    tensors: dict[str, Any]  # what torch.distributed.checkpoint saves
    common: bytes  # common.pt; rank 0's is written


class Stager:
    """Copies what is to be saved, into buffers that are used again by the next save.

    Memory written to for the first time costs several times the copy itself.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}

    def stage(self, state: dict[str, Any]) -> Staged:
        """Split the saving of ``state`` (a sharded state dict) among the ranks and copy this
        rank's part. Collective; the buffers must not be in use by an earlier save any more."""
        sharded, common = save_preprocess(state)
        group = parallel_state.get_data_parallel_group()
        distribution = determine_main_replica_uniform_distribution(sharded, group)
        distribute_main_replicas_with_precomputed_distribution(sharded, group, distribution)
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
        for key, shards in by_key.items():
            for index, shard in enumerate(shards):
                if isinstance(shard, ShardedTensor):
                    shard.data = self._copy((key, index), shard.data)
        content = io.BytesIO()
        torch.save(common, content)
        return Staged(mcore_to_pyt_state_dict(by_key, False), content.getvalue())

    def _copy(self, name: tuple[str, int], tensor: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = self._buffers[name] = torch.empty_like(
                tensor, device="cpu", requires_grad=False
            )
        return buffer.copy_(tensor.detach())


def write_shards(staged: Staged, directory: Path, agreement: Agreement) -> None:
    """Write ``staged`` into ``directory``, fsynced. Collective over ``agreement``, in any thread.

    Raises:
        ComponentError: a rank could not, on every rank.
    """
    with agreement.on("write common.pt"):
        if agreement.rank == 0:
            _write_common(staged.common, directory)
    with agreement.on("write shards"):
        try:
            save_state_dict(
                staged.tensors,
                storage_writer=_ShardWriter(str(directory), sync_files=True),
                planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
                process_group=agreement.group,
            )
        except CheckpointException as error:  # not an Exception; raised on all ranks
            mine = error.failures.get(dist.get_rank())
            if mine is not None:
                raise mine[0] from None
    with agreement.on("write metadata.json"):
        if agreement.rank == 0:
            save_config(FORMAT, str(directory))


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


def _write_common(content: bytes, directory: Path) -> None:
    """What ``TorchCommonSaveStrategy`` writes; given a path, torch hides why it cannot write."""
    publish(directory / COMMON_STATE_FNAME, lambda file: file.write(content))
