"""What is learned from an offline data set: demonstrations, or pairs of answers.

An :class:`Objective` makes items of examples, a loss of the model's outputs, and metrics of one
number a sequence. The loop, the trainer and the packing are the same for all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpc_rlhf.config import DpoConfig, DpoLoss, LossMean
from hpc_rlhf.learner.algorithms import Loss, Outputs, TokenLoss
from hpc_rlhf.learner.losses import bradley_terry_loss, dpo_loss, sequence_weights, sft_loss
from hpc_rlhf.learner.packing import (
    WEIGHT,
    MicroBatch,
    PackItem,
    joined_item,
    masked_item,
    scored_item,
)
from hpc_rlhf.types import Example

PERCENTILES = (10, 50, 90)


class Objective(Loss, Protocol):
    """An offline loss together with what goes into it and what comes out."""

    def items(self, examples: Sequence[Example]) -> list[PackItem]:
        """One item an example, weighted so that the losses of all of them sum up to their mean."""
        ...

    def metrics(
        self, examples: Sequence[Example], sequences: NDArray[np.float64] | None
    ) -> dict[str, float]:
        """What to report of ``examples`` besides the loss.

        Args:
            sequences: what :class:`TokenLoss` reported of them, [examples, sequences of one].
        """
        ...


@dataclass(frozen=True, slots=True)
class Supervised:
    """Negative log-likelihood of the masked tokens."""

    loss_mean: LossMean = LossMean.TOKEN

    def items(self, examples: Sequence[Example]) -> list[PackItem]:
        bare = [masked_item(s.token_ids, s.loss_mask) for e in examples for s in e.sequences]
        lengths = [int(item.loss_mask.sum()) for item in bare]
        return [
            masked_item(s.token_ids, s.loss_mask, **{WEIGHT: item.loss_mask * np.float32(weight)})
            for (s,), item, weight in zip(
                (e.sequences for e in examples),
                bare,
                sequence_weights(lengths, self.loss_mean),
                strict=True,
            )
        ]

    def token_loss(self, batch: MicroBatch, outputs: Outputs) -> TokenLoss:
        assert outputs.log_probs is not None
        return TokenLoss(loss=sft_loss(outputs.log_probs, batch.loss_mask))

    def metrics(
        self, examples: Sequence[Example], sequences: NDArray[np.float64] | None
    ) -> dict[str, float]:
        return {}


@dataclass(frozen=True, slots=True)
class BradleyTerry:
    """A reward model: the score at the last token of the chosen answer above the rejected one's.

    Only differences of scores are learned: their absolute scale means nothing.
    """

    centering: float = 0.0

    def items(self, examples: Sequence[Example]) -> list[PackItem]:
        return [
            joined_item(
                [scored_item(s.token_ids) for s in e.sequences],
                **{WEIGHT: 1.0 / len(examples), "margin": e.margin},
            )
            for e in examples
        ]

    def token_loss(self, batch: MicroBatch, outputs: Outputs) -> TokenLoss:
        """Reads the field ``margin``; reports the score of every sequence."""
        assert outputs.scores is not None
        scores = batch.sequence_sums(outputs.scores)
        chosen, rejected = scores.view(-1, 2).unbind(1)
        margin = batch.fields["margin"][_last_positions(batch)].double()
        loss = bradley_terry_loss(chosen, rejected, margin, self.centering)
        return TokenLoss(loss=_at_last_positions(batch, loss), sequences=scores)

    def metrics(
        self, examples: Sequence[Example], sequences: NDArray[np.float64] | None
    ) -> dict[str, float]:
        """Accuracy and margin of the pairs, and the distribution of the scores."""
        assert sequences is not None
        percentiles = np.percentile(sequences, PERCENTILES)
        return {
            **_pair_metrics(sequences),
            "score/chosen": float(sequences[:, 0].mean()),
            "score/rejected": float(sequences[:, 1].mean()),
            "score/std": float(sequences.std()),
            **{f"score/p{p}": float(v) for p, v in zip(PERCENTILES, percentiles, strict=True)},
        }


@dataclass(frozen=True, slots=True)
class DirectPreference:
    """DPO: the policy's log-probs of both answers, against those of a frozen reference."""

    config: DpoConfig

    def items(self, examples: Sequence[Example]) -> list[PackItem]:
        return [self._item(example, 1.0 / len(examples)) for example in examples]

    def _item(self, example: Example, weight: float) -> PackItem:
        assert example.ref_log_probs is not None
        parts = []
        for s, ref in zip(example.sequences, example.ref_log_probs, strict=True):
            item = masked_item(s.token_ids, s.loss_mask)
            at_last = np.zeros(len(item.tokens), np.float32)
            at_last[-1] = 1.0
            fields = {"ref_log_prob": at_last * np.float32(ref)}
            if self.config.loss is DpoLoss.IPO:
                fields["length"] = at_last * np.float32(item.loss_mask.sum())
            parts.append(masked_item(s.token_ids, s.loss_mask, **fields))
        return joined_item(parts, **{WEIGHT: weight})

    def token_loss(self, batch: MicroBatch, outputs: Outputs) -> TokenLoss:
        """Reads ``ref_log_prob`` and, for IPO, ``length``; reports every answer's log-prob."""
        assert outputs.log_probs is not None
        log_probs = batch.sequence_sums(outputs.log_probs)
        ratios = log_probs - batch.sequence_sums(batch.fields["ref_log_prob"])
        if self.config.loss is DpoLoss.IPO:
            ratios = ratios / batch.sequence_sums(batch.fields["length"])
        chosen, rejected = ratios.view(-1, 2).unbind(1)
        loss = dpo_loss(
            chosen,
            rejected,
            kind=self.config.loss,
            beta=self.config.beta,
            label_smoothing=self.config.label_smoothing,
        )
        return TokenLoss(loss=_at_last_positions(batch, loss), sequences=log_probs)

    def metrics(
        self, examples: Sequence[Example], sequences: NDArray[np.float64] | None
    ) -> dict[str, float]:
        """Accuracy and margin of the implicit rewards ``beta * log-ratio``, and what they are of."""
        assert sequences is not None
        reference = np.array([e.ref_log_probs for e in examples])
        rewards = self.config.beta * (sequences - reference)
        return {
            **_pair_metrics(rewards),
            "implicit_reward/chosen": float(rewards[:, 0].mean()),
            "implicit_reward/rejected": float(rewards[:, 1].mean()),
            "log_prob/chosen": float(sequences[:, 0].mean()),
            "log_prob/rejected": float(sequences[:, 1].mean()),
        }


def _pair_metrics(scores: NDArray[np.float64]) -> dict[str, float]:
    """Of (chosen, rejected) scores [N, 2]; a tie is not a win."""
    margins = scores[:, 0] - scores[:, 1]
    return {"pair/accuracy": float((margins > 0).mean()), "pair/margin": float(margins.mean())}


def _last_positions(batch: MicroBatch) -> Tensor:
    """Last position of each pair, on the device of the batch."""
    return batch.last_positions[1::2].to(batch.tokens.device)


def _at_last_positions(batch: MicroBatch, values: Tensor) -> Tensor:
    """Values of the pairs where their weights are, float32 [T]."""
    nothing = torch.zeros(len(batch.tokens), dtype=torch.float32, device=values.device)
    return nothing.index_copy(0, _last_positions(batch), values.float())
