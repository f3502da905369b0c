"""Packing keeps every token, respects the limits and does not depend on anything but its input."""

import numpy as np
import pytest
import torch

from hpc_rlhf.errors import UserError
from hpc_rlhf.learner.packing import (
    PADDING,
    MicroBatch,
    PackItem,
    assign,
    completion_item,
    joined_item,
    masked_item,
    pack,
    scored_item,
)


def _items(lengths: list[int]) -> list[PackItem]:
    rng = np.random.default_rng(0)
    return [
        completion_item(
            rng.integers(1, 99, 2),
            rng.integers(1, 99, n - 1),
            advantages=rng.standard_normal(n - 1).astype(np.float32),
        )
        for n in lengths
    ]


def _real_sequences(batches: list[list[MicroBatch]]) -> list[int]:
    indices = [i for rank in batches for b in rank for i in b.sequence_index.tolist()]
    return sorted(i for i in indices if i != PADDING)


def test_completion_values_sit_on_the_position_that_predicts_them() -> None:
    item = completion_item(
        np.array([5, 6, 7]), np.array([8, 9]), advantages=np.array([0.5, -1.0], np.float32)
    )
    assert item.tokens.tolist() == [5, 6, 7, 8]
    assert item.targets.tolist() == [6, 7, 8, 9]
    assert item.loss_mask.tolist() == [False, False, True, True]
    assert item.fields["advantages"].tolist() == [0.0, 0.0, 0.5, -1.0]


def test_masked_item_shifts_the_mask_to_the_predicting_position() -> None:
    item = masked_item(np.array([1, 2, 3, 4]), np.array([True, False, True, True]))
    assert item.targets.tolist() == [2, 3, 4]
    assert item.loss_mask.tolist() == [False, True, True]


def test_items_without_a_predicting_position_are_refused() -> None:
    with pytest.raises(ValueError, match="empty prompt"):
        completion_item(np.array([], np.int32), np.array([1]))
    with pytest.raises(ValueError, match=">= 2"):
        masked_item(np.array([1]), np.array([True]))


def test_two_sequences_and_padding_laid_out_by_hand() -> None:
    first = completion_item(np.array([11, 12]), np.array([13]))
    second = completion_item(np.array([21]), np.array([22, 23]), x=np.array([3.0, 4.0], np.float32))
    first = PackItem(
        tokens=first.tokens,
        targets=first.targets,
        loss_mask=first.loss_mask,
        fields={"x": np.array([0.0, 2.0], np.float32)},
    )
    ((batch,),) = pack([first, second], max_tokens=6, pad_multiple=3, pad_token_id=7)
    assert batch.tokens.tolist() == [11, 12, 21, 22, 7, 7]
    assert batch.targets.tolist() == [12, 13, 22, 23, 7, 7]
    assert batch.position_ids.tolist() == [0, 1, 0, 1, 0, 1]
    assert batch.loss_mask.tolist() == [False, True, True, True, False, False]
    assert batch.cu_seqlens.tolist() == [0, 2, 4, 6]
    assert batch.sequence_index.tolist() == [0, 1, PADDING]
    assert batch.fields["x"].tolist() == [0.0, 2.0, 3.0, 4.0, 0.0, 0.0]
    assert batch.num_padding == 2
    assert batch.learned.tolist() == [1, 2, 3]
    assert (batch.tokens.dtype, batch.cu_seqlens.dtype) == (torch.int64, torch.int32)
    split = batch.unpack(np.arange(6, dtype=np.float32))
    assert [(i, v.tolist()) for i, v in split] == [(0, [1.0]), (1, [2.0, 3.0])]


@pytest.mark.parametrize("dp_size", [1, 2, 3])
@pytest.mark.parametrize("pad_multiple", [1, 2, 8])
@pytest.mark.parametrize("seed", range(5))
def test_every_sequence_once_within_the_limit(dp_size: int, pad_multiple: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = [int(n) for n in rng.integers(2, 40, rng.integers(1, 30))]
    items = _items(lengths)
    batches = pack(items, max_tokens=41, pad_multiple=pad_multiple, dp_size=dp_size)
    assert len(batches) == dp_size
    assert len({len(rank) for rank in batches}) == 1, "the pipeline schedule needs equal counts"
    assert _real_sequences(batches) == list(range(len(items)))
    for batch in (b for rank in batches for b in rank):
        assert len(batch.tokens) % pad_multiple == 0
        assert 0 < len(batch.tokens) <= 41
        assert int(batch.cu_seqlens[-1]) == len(batch.tokens)
        for index, start in zip(
            batch.sequence_index.tolist(), batch.cu_seqlens.tolist(), strict=False
        ):
            if index != PADDING:
                n = len(items[index].tokens)
                assert batch.tokens[start : start + n].tolist() == items[index].tokens.tolist()
                field = batch.fields["advantages"][start : start + n]
                assert field.tolist() == items[index].fields["advantages"].tolist()


def test_tokens_are_balanced_over_ranks() -> None:
    lengths = [30, 20, 10, 30, 20, 10, 15, 25]
    plan = assign(lengths, 64, 1, 2)
    loads = [sum(lengths[i] for b in rank for i in b) for rank in plan]
    assert abs(loads[0] - loads[1]) <= 10


def test_a_rank_without_sequences_gets_an_empty_micro_batch() -> None:
    _, (empty,) = pack(_items([9]), max_tokens=16, pad_multiple=4, dp_size=2)
    assert len(empty.tokens) == 4
    assert not empty.loss_mask.any()
    assert empty.fields["advantages"].tolist() == [0.0] * 4
    assert empty.unpack(np.zeros(4, np.float32)) == []


def test_packing_is_deterministic() -> None:
    items = _items([7, 3, 9, 9, 3, 12])
    once, again = (pack(items, max_tokens=16, dp_size=2) for _ in range(2))
    assert [[b.tokens.tolist() for b in r] for r in once] == [
        [b.tokens.tolist() for b in r] for r in again
    ]


def test_a_sequence_longer_than_a_micro_batch_is_the_users_mistake() -> None:
    with pytest.raises(
        UserError, match=r"micro_batch_tokens=10 .* longer than 8 .* sequence 1 has 9"
    ):
        pack(_items([5, 9]), max_tokens=10, pad_multiple=4)


def _pair(first: int, second: int, **fields: float) -> PackItem:
    ids = np.arange(first + second)
    parts = [scored_item(ids[:first]), scored_item(ids[first:])]
    return joined_item(parts, **fields)


def test_a_pair_shares_a_micro_batch_whatever_the_split() -> None:
    """Two segments each, with positions of their own, their numbers on the last position."""
    items = [_pair(2, 3, weight=0.5), _pair(4, 1, weight=0.25), _pair(1, 1, weight=1.0)]
    for dp_size, max_tokens in ((1, 100), (1, 8), (2, 8), (3, 8)):
        batches = [
            batch
            for rank in pack(items, max_tokens=max_tokens, dp_size=dp_size, pad_multiple=4)
            for batch in rank
        ]
        found = sorted(i for b in batches for i in b.sequence_index.tolist() if i != PADDING)
        assert found == [0, 0, 1, 1, 2, 2]
        for batch in batches:
            assert len(batch.tokens) % 4 == 0
            segments = batch.segments_of(batch.tokens.numpy())
            assert batch.num_sequences == len(segments)
            for (i, chosen), (j, rejected) in zip(segments[::2], segments[1::2], strict=True):
                assert i == j
                assert (len(chosen), len(rejected)) == items[i].segments
            ends = batch.last_positions
            assert batch.position_ids[ends].tolist() == [len(part) - 1 for _, part in segments]
            assert batch.loss_mask.nonzero()[:, 0].tolist() == ends.tolist()
            weights = batch.fields["weight"]
            expected = [w for i, _ in segments[::2] for w in (0.0, _WEIGHTS[i])]
            assert weights[ends].tolist() == expected
            assert weights.sum() == sum(expected)


_WEIGHTS = (0.5, 0.25, 1.0)


def test_sums_of_sequences_with_their_gradient() -> None:
    ((batch,),) = pack([_pair(2, 3), _pair(1, 1)], max_tokens=8, pad_multiple=8)
    values = torch.arange(8.0, requires_grad=True)
    sums = batch.sequence_sums(values)
    assert sums.dtype == torch.float64
    assert sums.tolist() == [0 + 1, 2 + 3 + 4, 5, 6]
    (sums * torch.tensor([1.0, 10.0, 100.0, 1000.0])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1, 1, 10, 10, 10, 100, 1000, 0]


def test_sums_of_an_empty_micro_batch_keep_the_graph() -> None:
    """The rank without a pair takes part in the backward pass."""
    empty = pack([_pair(2, 2)], max_tokens=8, dp_size=2, pad_multiple=4)[1][0]
    values = torch.zeros(4, requires_grad=True)
    sums = empty.sequence_sums(values)
    assert len(sums) == 0
    sums.sum().backward()
    assert values.grad is not None


def test_a_scored_item_reads_its_last_token() -> None:
    item = scored_item(np.array([5, 6, 7]))
    assert item.tokens.tolist() == [5, 6, 7]
    assert item.loss_mask.tolist() == [False, False, True]
