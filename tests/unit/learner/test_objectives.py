"""Offline objectives by hand: their items, their losses on packed micro-batches, their metrics."""

import math

import numpy as np
import pytest
import torch

from hpc_rlhf.config import DpoConfig, DpoLoss, LossMean
from hpc_rlhf.learner.algorithms import Outputs
from hpc_rlhf.learner.losses import bradley_terry_loss, dpo_loss
from hpc_rlhf.learner.objectives import BradleyTerry, DirectPreference, Objective, Supervised
from hpc_rlhf.learner.packing import MicroBatch, pack
from hpc_rlhf.types import Example, TokenSequence


def _log_sigmoid(x: float) -> float:
    return -math.log(1 + math.exp(-x))


def _sequence(length: int, prompt: int) -> TokenSequence:
    return TokenSequence(np.arange(length, dtype=np.int32), np.arange(length) >= prompt)


PAIRS = [
    Example(
        uid="p:1",
        sequences=(_sequence(4, 2), _sequence(3, 2)),
        margin=0.5,
        ref_log_probs=(-1.0, -2.0),
    ),
    Example(uid="p:2", sequences=(_sequence(3, 1), _sequence(4, 1)), ref_log_probs=(-3.0, -4.0)),
]


def _batch(objective: Objective, examples: list[Example]) -> MicroBatch:
    ((batch,),) = pack(objective.items(examples), max_tokens=64, pad_multiple=16)
    return batch


def test_supervised_weights_are_token_or_sequence_means() -> None:
    examples = [
        Example(uid="d:1", sequences=(_sequence(3, 1),)),
        Example(uid="d:2", sequences=(_sequence(4, 3),)),
    ]
    for mean, expected in ((LossMean.TOKEN, [1 / 3, 1 / 3]), (LossMean.SEQUENCE, [1 / 4, 1 / 2])):
        items = Supervised(mean).items(examples)
        assert [item.fields["weight"].max() for item in items] == pytest.approx(expected)
        assert items[0].fields["weight"].tolist() == pytest.approx([expected[0]] * 2)
        assert sum(item.fields["weight"].sum() for item in items) == pytest.approx(1.0)


def test_bradley_terry_by_hand() -> None:
    chosen, rejected = torch.tensor([2.0, 0.0]), torch.tensor([1.0, 3.0])
    margin = torch.tensor([0.5, 0.0])
    loss = bradley_terry_loss(chosen, rejected, margin, centering=0.1)
    expected = [-_log_sigmoid(0.5) + 0.1 * 9, -_log_sigmoid(-3.0) + 0.1 * 9]
    assert loss.tolist() == pytest.approx(expected)


def test_only_differences_of_scores_count() -> None:
    a, b, zero = torch.tensor([0.3]), torch.tensor([-1.0]), torch.zeros(1)
    assert bradley_terry_loss(a + 7, b + 7, zero).item() == pytest.approx(
        bradley_terry_loss(a, b, zero).item()
    )


@pytest.mark.parametrize(
    ("kind", "smoothing", "expected"),
    [
        (DpoLoss.SIGMOID, 0.0, -_log_sigmoid(0.3)),
        (DpoLoss.CONSERVATIVE, 0.1, -0.9 * _log_sigmoid(0.3) - 0.1 * _log_sigmoid(-0.3)),
        (DpoLoss.IPO, 0.0, (1.5 - 1 / 0.4) ** 2),
    ],
)
def test_dpo_by_hand(kind: DpoLoss, smoothing: float, expected: float) -> None:
    chosen, rejected = torch.tensor([1.0]), torch.tensor([-0.5])
    loss = dpo_loss(chosen, rejected, kind=kind, beta=0.2, label_smoothing=smoothing)
    assert loss.item() == pytest.approx(expected)


def test_a_packed_reward_model() -> None:
    """Scores on the last token of each sequence, in packing order; the loss sits with the weight."""
    objective = BradleyTerry()
    batch = _batch(objective, PAIRS)
    scores = torch.zeros(16)
    scores[batch.last_positions] = torch.tensor([1.0, 2.0, 5.0, 3.0])
    out = objective.token_loss(batch, Outputs(scores=scores))
    by_example = dict(
        zip(batch.sequence_index.tolist()[:4:2], ((1.0, 2.0), (5.0, 3.0)), strict=True)
    )
    expected = sum(
        -_log_sigmoid(by_example[i][0] - by_example[i][1] - PAIRS[i].margin) / 2 for i in (0, 1)
    )
    assert (batch.fields["weight"] * out.loss).sum().item() == pytest.approx(expected)
    assert out.sequences is not None
    assert out.sequences.tolist() == [1.0, 2.0, 5.0, 3.0]


def test_reward_metrics_count_a_tie_as_lost() -> None:
    sequences = np.array([[2.0, 1.0], [1.0, 1.0], [0.0, 3.0], [4.0, 0.0]])
    found = BradleyTerry().metrics([], sequences)
    assert found["pair/accuracy"] == 0.5
    assert found["pair/margin"] == pytest.approx((1 + 0 - 3 + 4) / 4)
    assert (found["score/chosen"], found["score/rejected"]) == (1.75, 1.25)
    assert found["score/std"] == pytest.approx(sequences.std())
    assert found["score/p50"] == 1.0


@pytest.mark.parametrize("kind", list(DpoLoss))
def test_a_packed_dpo_batch(kind: DpoLoss) -> None:
    """With -1 for every learned token: sums over answers, less the reference's."""
    smoothing = 0.1 if kind is DpoLoss.CONSERVATIVE else 0.0
    objective = DirectPreference(DpoConfig(kind, 0.5, smoothing))
    batch = _batch(objective, PAIRS)
    log_probs = torch.where(batch.loss_mask, -1.0, 0.0)
    out = objective.token_loss(batch, Outputs(log_probs=log_probs))
    ratios = {0: (-2.0 + 1.0, -1.0 + 2.0), 1: (-2.0 + 3.0, -3.0 + 4.0)}
    if kind is DpoLoss.IPO:
        ratios = {0: (-1.0 / 2, 1.0 / 1), 1: (1.0 / 2, 1.0 / 3)}
    losses = [
        dpo_loss(
            torch.tensor([a]), torch.tensor([b]), kind=kind, beta=0.5, label_smoothing=smoothing
        ).item()
        for a, b in ratios.values()
    ]
    total = (batch.fields["weight"] * out.loss).sum().item()
    assert total == pytest.approx(sum(losses) / 2)

    found = objective.metrics(PAIRS, np.array([[-2.0, -1.0], [-2.0, -3.0]]))
    assert found["pair/margin"] == pytest.approx(0.5 * ((-1 - 1) + (1 - 1)) / 2)
    assert found["pair/accuracy"] == 0.0
    assert found["log_prob/chosen"] == -2.0
    assert found["implicit_reward/rejected"] == pytest.approx(0.5)
