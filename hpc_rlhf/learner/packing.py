"""Sequences -> packed micro-batches, balanced over data-parallel ranks. Pure and deterministic.

What is packed is an *item*: one sequence, or several that a loss compares and that therefore share a
micro-batch, whatever the layout. They see each other in the loss only. The model reads ``tokens`` and position ``t`` predicts ``targets[t]``; whatever belongs to a
completion token (loss mask, advantage, log-prob) sits on the position that predicts it. Nothing
here depends on the loss: a loss weighs its tokens by numbers of the whole mini-batch before
packing, so that the packing never changes what is learned.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpc_rlhf.errors import UserError

PADDING = -1  # MicroBatch.sequence_index of the padding segment
WEIGHT = "weight"  # field of an item: what its positions' losses count in the mini-batch's sum


@dataclass(frozen=True, slots=True, kw_only=True)
class PackItem:
    """One sequence as the model reads it: T input positions, each with a target.

    Or several sequences end to end, of ``segments`` positions each: see :func:`joined_item`.

    Example:
        >>> item = completion_item(np.array([5, 6]), np.array([7, 8]))
        >>> item.tokens.tolist(), item.targets.tolist(), item.loss_mask.tolist()
        ([5, 6, 7], [6, 7, 8], [False, True, True])
    """

    tokens: NDArray[np.int64]  # [T]
    targets: NDArray[np.int64]  # [T]
    loss_mask: NDArray[np.bool_]  # [T], positions whose target is learned from or scored
    fields: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)  # each [T]
    segments: tuple[int, ...] = ()  # lengths of its sequences, their sum is T; (): one of T


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Sequences laid end to end ("thd" without padding between them), S segments in T tokens.

    A last segment of padding (``sequence_index`` -1, mask False) rounds T up; it attends to itself
    only.
    """

    tokens: Tensor  # int64 [T]
    position_ids: Tensor  # int64 [T], from 0 in every segment
    targets: Tensor  # int64 [T]
    loss_mask: Tensor  # bool [T]
    learned: Tensor  # int64 [M], the positions where loss_mask is True
    cu_seqlens: Tensor  # int32 [S + 1], segment s is tokens[cu_seqlens[s]:cu_seqlens[s + 1]]
    sequence_index: Tensor  # int64 [S], item that a segment is of (several in a row), or PADDING
    fields: Mapping[str, Tensor]  # each float32 [T], 0 on padding

    @property
    def num_padding(self) -> int:
        """Tokens of the padding segment."""
        if len(self.sequence_index) == 0 or int(self.sequence_index[-1]) != PADDING:
            return 0
        return int(self.cu_seqlens[-1] - self.cu_seqlens[-2])

    @property
    def num_sequences(self) -> int:
        """Segments that are not padding."""
        return len(self.sequence_index) - (self.num_padding > 0)

    @property
    def last_positions(self) -> Tensor:
        """Last position of every sequence, int64 [num_sequences], on the CPU."""
        return self.cu_seqlens[1 : self.num_sequences + 1].long() - 1

    def sequence_sums(self, values: Tensor) -> Tensor:
        """Sum of per-position ``values`` [T] over each sequence, float64 [num_sequences].

        In float64, so that it does not depend on where a sequence lies.
        """
        lengths = self.cu_seqlens.diff().to(values.device)
        sums = torch.segment_reduce(values.double(), "sum", lengths=lengths, axis=0)
        return sums[: self.num_sequences]

    def to(self, device: torch.device) -> "MicroBatch":
        """Copy to ``device`` what is per token; what is per segment stays on the CPU.

        Attention reads segment bounds on the CPU, where that waits for no GPU.
        """
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("tokens", "position_ids", "targets", "loss_mask", "learned")
        }
        fields = {name: value.to(device, non_blocking=True) for name, value in self.fields.items()}
        return replace(self, **moved, fields=fields)

    def unpack(self, values: NDArray[Any]) -> list[tuple[int, NDArray[Any]]]:
        """Split per-position ``values`` [T] into (item index, values where the mask is set)."""
        masks = self.segments_of(self.loss_mask.cpu().numpy())
        segments = self.segments_of(values)
        return [(i, part[mask]) for (i, part), (_, mask) in zip(segments, masks, strict=True)]

    def segments_of(self, values: NDArray[Any]) -> list[tuple[int, NDArray[Any]]]:
        """Split per-position ``values`` [T] into (item index, values), one entry a sequence."""
        bounds = self.cu_seqlens.tolist()
        return [
            (index, values[start:end])
            for index, start, end in zip(
                self.sequence_index.tolist(), bounds, bounds[1:], strict=False
            )
            if index != PADDING
        ]


def completion_item(
    prompt: NDArray[np.integer],
    completion: NDArray[np.integer],
    *,
    learned: NDArray[np.bool_] | None = None,
    **completion_fields: NDArray[np.float32],
) -> PackItem:
    """Item of a prompt [P] and its completion [C]; ``completion_fields`` are [C] each.

    The last token is predicted but never read, so the item has P + C - 1 positions.

    Args:
        learned: bool [C], the tokens to learn from; default: all of the completion.

    Raises:
        ValueError: the prompt is empty (no position predicts the first completion token).
    """
    if len(prompt) == 0:
        raise ValueError("an empty prompt has no position that predicts the first completion token")
    ids = np.concatenate([prompt, completion]).astype(np.int64)
    start = len(prompt) - 1
    mask = np.zeros(len(ids) - 1, np.bool_)
    mask[start:] = True if learned is None else learned
    fields = {name: np.zeros(len(mask), np.float32) for name in completion_fields}
    for name, values in completion_fields.items():
        fields[name][start:] = values
    return PackItem(tokens=ids[:-1], targets=ids[1:], loss_mask=mask, fields=fields)


def masked_item(
    token_ids: NDArray[np.integer], loss_mask: NDArray[np.bool_], **fields: NDArray[np.float32]
) -> PackItem:
    """Item of ``token_ids`` [L] where ``loss_mask`` [L] marks the tokens to learn to predict.

    ``fields`` are [L - 1], on the predicting positions. The first token is predicted by nothing.
    """
    ids = np.asarray(token_ids).astype(np.int64)
    mask = np.asarray(loss_mask).astype(np.bool_)
    if len(ids) != len(mask) or len(ids) < 2:
        raise ValueError(f"{len(ids)} tokens with a loss mask of {len(mask)}: need equal, >= 2")
    return PackItem(tokens=ids[:-1], targets=ids[1:], loss_mask=mask[1:], fields=fields)


def scored_item(token_ids: NDArray[np.integer], **fields: NDArray[np.float32]) -> PackItem:
    """Item of ``token_ids`` [L] that is scored as a whole: its last token is read and marked.

    ``fields`` are [L]. The targets mean nothing.
    """
    ids = np.asarray(token_ids).astype(np.int64)
    mask = np.zeros(len(ids), np.bool_)
    mask[-1:] = True
    return PackItem(tokens=ids, targets=np.append(ids[1:], 0), loss_mask=mask, fields=fields)


def joined_item(parts: Sequence[PackItem], **fields: float) -> PackItem:
    """One item of several sequences, which go into one micro-batch together.

    Args:
        parts: with the same fields.
        fields: numbers of the whole item, on its last position; 0 on the others.
    """
    segments = tuple(n for part in parts for n in (part.segments or (len(part.tokens),)))
    last = np.zeros(sum(segments), np.float32)
    last[-1] = 1.0
    return PackItem(
        tokens=np.concatenate([part.tokens for part in parts]),
        targets=np.concatenate([part.targets for part in parts]),
        loss_mask=np.concatenate([part.loss_mask for part in parts]),
        fields={
            **{n: np.concatenate([p.fields[n] for p in parts]) for n in parts[0].fields},
            **{name: last * np.float32(value) for name, value in fields.items()},
        },
        segments=segments,
    )


def pack(
    items: Sequence[PackItem],
    *,
    max_tokens: int,
    pad_multiple: int = 1,
    dp_size: int = 1,
    pad_token_id: int = 0,
) -> list[list[MicroBatch]]:
    """Pack ``items`` into micro-batches, one list of equal length per data-parallel rank.

    Longest-processing-time-first balances tokens over the ranks, first-fit-decreasing fills the
    micro-batches of a rank. Ranks with fewer micro-batches get empty ones: ``pad_multiple`` tokens
    of padding whose loss and gradient are zero.

    Args:
        items: all of the mini-batch, the same on every rank, with the same field names.
        max_tokens: of one micro-batch, padding included.
        pad_multiple: every micro-batch's length is a multiple of it (the tensor-parallel size
            under sequence parallelism).
        pad_token_id: any valid token id; its logits are never used.

    Raises:
        UserError: a sequence is longer than ``max_tokens``.
    """
    plan = assign([len(i.tokens) for i in items], max_tokens, pad_multiple, dp_size)
    return [
        build(items, bins, pad_multiple=pad_multiple, pad_token_id=pad_token_id) for bins in plan
    ]


def build(
    items: Sequence[PackItem],
    bins: Sequence[Sequence[int]],
    *,
    pad_multiple: int = 1,
    pad_token_id: int = 0,
) -> list[MicroBatch]:
    """Lay out the micro-batches of one rank, ``bins`` being its part of :func:`assign`'s plan."""
    names = sorted({name for item in items for name in item.fields})
    return [_micro_batch(items, indices, names, pad_multiple, pad_token_id) for indices in bins]


def assign(
    lengths: Sequence[int], max_tokens: int, pad_multiple: int, dp_size: int
) -> list[list[list[int]]]:
    """Plan of :func:`pack`: sequence indices by data-parallel rank and micro-batch.

    Raises:
        UserError: as :func:`pack`.
    """
    capacity = max_tokens // pad_multiple * pad_multiple
    for index, length in enumerate(lengths):
        if length > capacity:
            raise UserError(
                f"learner.micro_batch_tokens={max_tokens} holds no sequence (or pair of them) longer "
                f"than {capacity} tokens (multiples of {pad_multiple}), but sequence {index} has "
                f"{length}: raise learner.micro_batch_tokens or lower model.max_sequence_tokens"
            )
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))

    loads = [(0, rank) for rank in range(dp_size)]
    ranks: list[list[int]] = [[] for _ in range(dp_size)]
    for index in longest_first:
        load, rank = heapq.heappop(loads)
        ranks[rank].append(index)
        heapq.heappush(loads, (load + lengths[index], rank))

    plan = [_first_fit([(i, lengths[i]) for i in indices], capacity) for indices in ranks]
    count = max(1, *(len(bins) for bins in plan))  # the pipeline schedule needs equal counts
    return [[sorted(b) for b in bins] + [[]] * (count - len(bins)) for bins in plan]


def padded_tokens(
    lengths: Sequence[int], plan: Sequence[Sequence[Sequence[int]]], pad_multiple: int
) -> int:
    """Tokens of all micro-batches of ``plan``, padding included."""
    sizes = [sum(lengths[i] for i in indices) for bins in plan for indices in bins]
    return sum(max(1, -(-size // pad_multiple)) * pad_multiple for size in sizes)


def _first_fit(sized: Sequence[tuple[int, int]], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    left: list[int] = []
    for index, length in sized:
        for b, room in enumerate(left):
            if length <= room:
                bins[b].append(index)
                left[b] -= length
                break
        else:
            bins.append([index])
            left.append(capacity - length)
    return bins


def _micro_batch(
    items: Sequence[PackItem],
    indices: Sequence[int],
    names: Sequence[str],
    pad_multiple: int,
    pad_token_id: int,
) -> MicroBatch:
    parts = [(i, n) for i in indices for n in items[i].segments or (len(items[i].tokens),)]
    index, segments = [i for i, _ in parts], [n for _, n in parts]
    total = sum(segments)
    padding = -total % pad_multiple if total else pad_multiple
    if padding:
        segments.append(padding)
        index.append(PADDING)

    def joined(arrays: list[np.ndarray], fill: float, dtype: type) -> Tensor:
        flat: NDArray[Any] = np.full(total + padding, fill, dtype)
        if arrays:
            np.concatenate(arrays, out=flat[:total], casting="same_kind")
        return torch.from_numpy(flat)

    mine = [items[i] for i in indices]
    loss_mask = joined([i.loss_mask for i in mine], False, np.bool_)
    return MicroBatch(
        tokens=joined([i.tokens for i in mine], pad_token_id, np.int64),
        position_ids=torch.cat([torch.arange(n) for n in segments]),
        targets=joined([i.targets for i in mine], pad_token_id, np.int64),
        loss_mask=loss_mask,
        learned=loss_mask.nonzero()[:, 0],
        cu_seqlens=torch.tensor([0, *np.cumsum(segments)], dtype=torch.int32),
        sequence_index=torch.tensor(index, dtype=torch.int64),
        fields={n: joined([i.fields[n] for i in mine], 0.0, np.float32) for n in names},
    )
