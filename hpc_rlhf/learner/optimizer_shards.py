"""The optimizer's state of one rank as parts of whole tensors, without asking any other rank.

Megatron's distributed optimizer (ZeRO-1) gives each data-parallel rank a range of the flattened
parameters. Its own format that loads onto any TP x PP x DP (``fully_reshardable``) gathers the whole
state on every rank first: twelve bytes a parameter through the network, while training waits. But a
range of a flattened tensor is a few boxes of that tensor, and boxes of any size are what
torch.distributed.checkpoint stores and puts together again. The files load as ``fully_reshardable``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset and size on each axis

_STATES = ("param", "exp_avg", "exp_avg_sq")


def boxes(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """The elements ``start`` to ``end`` of a flattened tensor as boxes of the tensor, in order.

    At most ``2 * len(shape) - 1`` of them: the rest of a row, whole rows, the beginning of a row.
    """
    if start >= end:
        return []
    if len(shape) == 1:
        return [((start,), (end - start,))]
    inner = prod(shape[1:])

    def within(row: int) -> list[Box]:
        first, last = max(start - row * inner, 0), min(end - row * inner, inner)
        return [((row, *at), (1, *size)) for at, size in boxes(shape[1:], first, last)]

    first, last = -(-start // inner), end // inner  # whole rows
    if first > last:
        return within(last)
    found = within(first - 1) if start < first * inner else []
    if first < last:
        found.append(((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    return found + (within(last) if last * inner < end else [])


def optimizer_shards(
    optimizer: DistributedOptimizer, model_state: dict[str, Any]
) -> dict[int, dict[str, list[ShardedTensor]]]:
    """This rank's master weights and moments, as views: by parameter and kind of state.

    Args:
        model_state: the model's sharded state dict, with its parameters themselves as data.

    Raises:
        ValueError: a parameter is not in ``model_state``.
    """
    model_shards, _ = extract_sharded_tensors_and_factories(model_state)
    by_parameter = {shard.data: shard for shard in nested_values(model_shards)}
    found: dict[int, dict[str, list[ShardedTensor]]] = {}
    for parameter, start, end in _held(optimizer):
        if parameter not in by_parameter:
            raise ValueError(f"a parameter of shape {parameter.shape} is not in the model's state")
        tensors = optimizer._get_main_param_and_optimizer_states(parameter)
        shards = list(_parts(by_parameter[parameter]))
        found[len(found)] = {
            name: [
                piece
                for shard in shards
                for piece in _pieces(
                    shard,
                    shard.data.storage_offset() - parameter.storage_offset(),
                    name,
                    tensors[name].detach().view(-1),
                    start,
                    end,
                )
            ]
            for name in _STATES
        }
    return found


def _held(optimizer: DistributedOptimizer) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Parameters of which this rank holds the optimizer's state, and the range that it holds."""
    for by_dtype in optimizer.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, ranges["param"].end


def _parts(shard: ShardedTensor | ShardedTensorFactory) -> Iterator[ShardedTensor]:
    """The tensors that a parameter is in the checkpoint (gate and up are one parameter)."""
    if isinstance(shard, ShardedTensor):
        yield shard
    else:
        yield from nested_values(shard.build())  # views


def _pieces(
    shard: ShardedTensor, begin: int, name: str, state: torch.Tensor, start: int, end: int
) -> Iterator[ShardedTensor]:
    """What ``state`` has of ``shard``, a view of its parameter.

    Args:
        begin: where the shard begins in the flattened parameter.
        state: the elements ``start`` to ``end`` of the flattened parameter.
    """
    view = shard.data
    assert view is not None
    assert view.is_contiguous()
    assert isinstance(shard.replica_id, tuple)
    position = max(start - begin, 0)
    for offset, size in boxes(view.shape, position, min(end - begin, view.numel())):
        at = begin + position - start
        position += prod(size)
        data = state[at : at + prod(size)]
        prepended = (1,) * shard.prepend_axis_num
        yield replace(
            shard,
            key=f"optimizer.state.{name}.{shard.key}",
            data=data.view(*prepended, *size),
            dtype=data.dtype,
            local_shape=(*prepended, *size),
            global_offset=tuple(
                whole + part
                for whole, part in zip(
                    shard.global_offset, (*(0 for _ in prepended), *offset), strict=True
                )
            ),
            axis_fragmentations=None,
            prepend_axis_num=0,
            # of tensor, pipeline and data parallelism; no other data-parallel rank holds this
            replica_id=(*shard.replica_id[:2], 0),
        )
