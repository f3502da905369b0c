"""Learning on a Megatron-core model: losses in, optimizer steps out.

The loss of a mini-batch is a sum over its positions of weights times losses. The weights come from
the whole mini-batch, which every rank holds, so the gradient is a plain sum over micro-batches and
data-parallel ranks: Megatron neither divides by token counts nor averages.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from numpy.typing import NDArray
from torch import Tensor

from hpc_rlhf.config import LearnerConfig, LossMean
from hpc_rlhf.errors import ComponentError
from hpc_rlhf.learner.algorithms import Algorithm, Lesson, Loss, Outputs
from hpc_rlhf.learner.losses import sequence_weights
from hpc_rlhf.learner.objectives import Objective
from hpc_rlhf.learner.optimizer import PolicyOptimizer
from hpc_rlhf.learner.packing import WEIGHT, MicroBatch, PackItem, completion_item
from hpc_rlhf.learner.runner import Runner
from hpc_rlhf.learner.stats import StepStats, merge
from hpc_rlhf.models.megatron import PolicyModel
from hpc_rlhf.types import Example, Experience, Rollout

_EVALUATED_AT_ONCE = 128  # examples between two looks at whether to stop


class NotFinite(ComponentError):
    """A loss or gradient is not finite; the optimizer did not step. The message names samples."""


@dataclass(frozen=True, slots=True)
class _LocalStats:
    """Of one micro-batch, on the last pipeline stage."""

    batch: MicroBatch
    loss: Tensor  # []
    not_finite: Tensor  # bool [T]
    sums: Mapping[str, Tensor]  # each []
    maxima: Mapping[str, Tensor]  # each []
    sequences: Tensor | None  # [num_sequences]


@dataclass(frozen=True, slots=True)
class Measured:
    """A loss over a whole mini-batch and what was reported with it, the same on every rank."""

    loss: float
    sums: Mapping[str, float] = field(default_factory=dict)  # over learned tokens
    maxima: Mapping[str, float] = field(default_factory=dict)
    not_finite: tuple[int, ...] = ()  # indices of items with a loss that is not finite
    sequences: NDArray[np.float64] | None = None  # [items, sequences of an item]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedUpdate:
    """An update that was stopped between two of its optimizer steps: what is known of the first ones."""

    first_step: int  # optimizer steps before it: what the order of its samples is drawn from
    mini_batches: int  # done, of :func:`mini_batch_plan`
    steps: tuple[StepStats, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "UnfinishedUpdate":
        return cls(**{**value, "steps": tuple(StepStats(**step) for step in value["steps"])})


class UpdateStopped(Exception):
    """An update was left between two optimizer steps; the weights are those after ``unfinished``."""

    def __init__(self, unfinished: UnfinishedUpdate) -> None:
        super().__init__(f"stopped after {unfinished.mini_batches} mini-batches")
        self.unfinished = unfinished


def _never() -> bool:
    return False


def add(parts: Sequence[Measured]) -> Measured:
    """The sum over parts of a mini-batch whose weights are of the whole."""
    first = parts[0]
    sequences = [part.sequences for part in parts if part.sequences is not None]
    return Measured(
        loss=sum(part.loss for part in parts),
        sums={name: sum(part.sums[name] for part in parts) for name in first.sums},
        maxima={name: max(part.maxima[name] for part in parts) for name in first.maxima},
        sequences=np.concatenate(sequences) if sequences else None,
    )


class Trainer:
    """The policy with its optimizer: one object per rank, every method collective over the learner.

    Owns ``model``'s gradients and moves its parameters into contiguous buffers; the model can still
    be read (exported, synced) at any time between calls. Nothing outside of the model and this
    object is kept, so that trainers can follow each other in one process: :meth:`close` the one
    before.
    """

    def __init__(
        self,
        model: PolicyModel,
        learner: LearnerConfig,
        *,
        total_steps: int,
        temperature: float = 1.0,
        max_new_tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        """Args:
        model: of :func:`hpc_rlhf.models.megatron.build_model`, with its weights loaded.
        total_steps: optimizer steps of the whole run, where the LR schedule ends.
        temperature: of the distribution whose log-probs are learned: the sampler's.
        max_new_tokens: the sampler's; ``LossMean.CONSTANT`` divides by it and needs it.
        seed: of the order of samples in mini-batches.
        """
        self.model = model
        self._max_new_tokens = max_new_tokens
        self._seed = seed
        config = model.config
        self.runner = Runner(config, learner, temperature=temperature)
        assert config.calculate_per_token_loss  # DDP would divide by the data-parallel size
        config.finalize_model_grads_func = _sum_gradients
        self._ddp = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=True,
                overlap_grad_reduce=False,
                check_for_nan_in_grad=False,  # gradient_norm() sees them, and says more
            ),
            model,
        )
        self._optimizer = PolicyOptimizer(self._ddp, learner.optimizer, total_steps=total_steps)

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken."""
        return self._optimizer.num_steps

    def update(
        self,
        algorithm: Algorithm,
        experience: Experience,
        *,
        unfinished: UnfinishedUpdate | None = None,
        stop: Callable[[], bool] = _never,
    ) -> dict[str, float]:
        """Learn from one batch of rollouts: ``epochs`` x ``mini_batches`` optimizer steps.

        Args:
            experience: the same on every rank.
            unfinished: of an earlier update from the same experience, whose weights and optimizer
                state were loaded: only its other mini-batches are learned from. What is learned
                and returned is bitwise what it would have been in one go.
            stop: collective; asked between two optimizer steps, ends the update there.

        Returns:
            The same on every rank. Means over optimizer steps: ``loss``, ``grad_norm`` (before
            clipping). Means over learned tokens: ``entropy`` and what the algorithm reports
            (``policy_loss``, ``ratio_mean``, ``clip_fraction``, ``kl``); maxima: ``ratio_max``.
            ``lr`` of the last step, ``tokens`` read without padding, ``padding_fraction``, and the
            metrics of the algorithm's lesson. ``skipped_steps``: mini-batches all of whose tokens
            were rejected, in which the optimizer did not step.

        Raises:
            UpdateStopped: ``stop`` returned True.
            NotFinite: a loss or gradient is not finite, the optimizer did not step.
            ComponentError: no completion has a token.
            ValueError: the algorithm needs reference log-probs and there are none.
        """
        if not experience.rollouts:
            raise ComponentError("learner: no rollouts to learn from, all were excluded")
        lesson = algorithm.lesson(experience)
        first_step = unfinished.first_step if unfinished else self.num_steps
        done = unfinished.mini_batches if unfinished else 0
        steps = list(unfinished.steps) if unfinished else []
        plan = mini_batch_plan(
            len(experience.rollouts),
            algorithm.epochs,
            algorithm.mini_batches,
            seed=(self._seed, first_step),
        )
        for number, indices in enumerate(plan[done:], done):
            if number > done and stop():
                raise UpdateStopped(
                    UnfinishedUpdate(first_step=first_step, mini_batches=number, steps=tuple(steps))
                )
            items, names = lesson_items(
                lesson, experience.rollouts, indices, algorithm.loss_mean, self._max_new_tokens
            )
            if items:
                steps.append(self.step(algorithm, items, names)[0])
        if not steps:
            raise ComponentError(
                f"learner: optimizer step {self.num_steps}: no token of the batch is to be learned "
                f"from; of all tokens {lesson.metrics['rejected_fraction']:.0%} were rejected by "
                "algorithm.off_policy's bounds"
            )
        return merge(steps) | {**lesson.metrics, "skipped_steps": float(len(plan) - len(steps))}

    def fit(self, objective: Objective, examples: Sequence[Example]) -> dict[str, float]:
        """One optimizer step on the mean loss of ``examples``.

        Args:
            examples: the same on every rank.

        Returns:
            The same on every rank: ``loss``, ``grad_norm`` (before clipping), ``lr``, ``tokens`` read
            without padding, ``padding_fraction``, of a policy ``entropy`` (mean over learned tokens),
            and the objective's metrics.

        Raises:
            NotFinite: a loss or gradient is not finite, the optimizer did not step.
            ComponentError: there is nothing to learn from.
        """
        names = [example.uid for example in examples]
        stats, measured = self.step(objective, objective.items(examples), names)
        return merge([stats]) | objective.metrics(examples, measured.sequences)

    def evaluate(
        self,
        objective: Objective,
        examples: Sequence[Example],
        *,
        pause: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """What :meth:`fit` would report of ``examples``, without learning from them.

        Args:
            pause: called now and then; what it raises ends the evaluation.
        """
        items = objective.items(examples)
        parts = []
        for start in range(0, len(items), _EVALUATED_AT_ONCE):
            pause()
            parts.append(self.measure(objective, items[start : start + _EVALUATED_AT_ONCE]))
        measured = add(parts)
        learned = sum(int(item.loss_mask.sum()) for item in items)
        return {
            "loss": measured.loss,
            **{name: total / learned for name, total in measured.sums.items()},
            **measured.maxima,
            **objective.metrics(examples, measured.sequences),
        }

    def step(
        self, loss: Loss, items: Sequence[PackItem], names: Sequence[str]
    ) -> tuple[StepStats, Measured]:
        """One optimizer step on the sum over ``items`` of weighted losses.

        Args:
            items: the same on every rank, with the field ``WEIGHT`` and those that ``loss`` reads.
            names: of the items, for messages.

        Returns:
            The same on every rank.

        Raises:
            NotFinite: a loss or gradient is not finite, the optimizer did not step.
            ComponentError: there is nothing to learn from.
        """
        learned = sum(int(item.loss_mask.sum()) for item in items)
        if learned == 0:
            raise ComponentError(
                f"learner: optimizer step {self.num_steps}: none of the sequences has a token to "
                "learn from"
            )
        batches, padded = self.runner.pack(items)
        self._ddp.zero_grad_buffer()
        results = self.runner.learn(self.model, self._ddp, batches, partial(_learn, loss))
        measured = self._reduce(items, batches, results)
        if not math.isfinite(measured.loss):
            guilty = [names[i] for i in measured.not_finite]
            raise self._not_finite(f"loss is {measured.loss}", guilty)
        grad_norm = self._optimizer.gradient_norm()
        if not math.isfinite(grad_norm):
            raise self._not_finite(f"gradient norm is {grad_norm} (loss {measured.loss})", names)
        lr = self._optimizer.lr
        self._optimizer.step(grad_norm)
        stats = StepStats(
            loss=measured.loss,
            learned_tokens=learned,
            sums=measured.sums,
            maxima=measured.maxima,
            grad_norm=grad_norm,
            lr=lr,
            tokens=sum(len(item.tokens) for item in items),
            padded_tokens=padded,
        )
        return stats, measured

    def measure(self, loss: Loss, items: Sequence[PackItem]) -> Measured:
        """The loss of ``items`` as :meth:`step` takes it, without learning from it.

        Args:
            items: as for :meth:`step`.
        """
        batches, _ = self.runner.pack(items)
        results = self.runner.sweep(self.model, batches, partial(_measure, loss))
        return self._reduce(items, batches, results)

    def log_probs(
        self, rollouts: Sequence[Rollout], model: PolicyModel | None = None
    ) -> tuple[NDArray[np.float32], ...]:
        """Log-probs of the completions' tokens, at the sampling temperature.

        A forward sweep through the pipeline, packed as for training.

        Args:
            rollouts: the same on every rank.
            model: another model of the same layout, the frozen reference; default: the policy.

        Returns:
            N x float32 [T_i], in rollout order, the same on every rank.
        """
        found = [np.zeros(0, np.float32) for _ in rollouts]
        kept = [i for i, r in enumerate(rollouts) if len(r.completion.token_ids)]
        items = [
            completion_item(rollouts[i].prompt.token_ids, rollouts[i].completion.token_ids)
            for i in kept
        ]
        swept = self.runner.token_log_probs(self.model if model is None else model, items)
        for i, values in zip(kept, swept, strict=True):
            found[i] = values
        return tuple(found)

    def sharded_state_dict(self, *, is_loading: bool) -> dict[str, Any]:
        """Everything to resume from, for ``megatron.core.dist_checkpointing``.

        Weights, master weights and moments are described by their place in the whole tensors, so
        that they load onto any TP x PP x DP.
        """
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        model_state = self.model.sharded_state_dict(metadata=metadata)
        optimizer_state = self._optimizer.sharded_state_dict(
            model_state, is_loading=is_loading, metadata=metadata
        )
        return {"model": model_state, "optimizer": optimizer_state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`sharded_state_dict` described, onto this layout."""
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        """Free gradients and optimizer state. The model keeps its weights, and is not trainable."""
        self.model.config.finalize_model_grads_func = None
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
            parameter.grad = None
            parameter.main_grad = None
        del self._ddp, self._optimizer

    # -- one optimizer step -----------------------------------------------------------------------

    def _not_finite(self, what: str, names: Sequence[str]) -> NotFinite:
        some = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        return NotFinite(
            f"learner: optimizer step {self.num_steps}: {what}; samples: {some}. "
            "The optimizer did not step"
        )

    def _reduce(
        self,
        items: Sequence[PackItem],
        batches: Sequence[MicroBatch],
        results: Sequence[_LocalStats],
    ) -> Measured:
        """Sum over micro-batches and data-parallel ranks; returned on every rank."""
        reduced = None
        if self.runner.is_last_stage:
            sums, maxima = list(results[0].sums), list(results[0].maxima)
            added = torch.stack(
                [torch.stack([r.loss, *(r.sums[n] for n in sums)]) for r in results]
            ).sum(0)
            # The loss stands in where nothing is reported as a maximum: no empty collective.
            largest = torch.stack(
                [torch.stack([r.loss, *(r.maxima[n] for n in maxima)]) for r in results]
            ).amax(0)
            group = parallel_state.get_data_parallel_group()
            dist.all_reduce(added, group=group)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
            loss, *totals = added.tolist()
            reduced = Measured(
                loss=loss,
                sums=dict(zip(sums, totals, strict=True)),
                maxima=dict(zip(maxima, largest.tolist()[1:], strict=True)),
                not_finite=() if math.isfinite(loss) else self._find_not_finite(results),
            )
        box = [(reduced, bool(results) and results[0].sequences is not None)]
        dist.broadcast_object_list(box, src=self.runner.source)
        measured, has_sequences = box[0]
        assert measured is not None
        if not has_sequences:
            return measured
        values = [r.sequences for r in results if r.sequences is not None]
        return replace(measured, sequences=self.runner.sequence_values(items, batches, values))

    def _find_not_finite(self, results: Sequence[_LocalStats]) -> tuple[int, ...]:
        mine = [
            index
            for result in results
            for index, flags in result.batch.segments_of(result.not_finite.cpu().numpy())
            if flags.any()
        ]
        found: list[Any] = [None] * self.runner.dp_size
        dist.all_gather_object(found, mine, group=parallel_state.get_data_parallel_group())
        return tuple(sorted({index for indices in found for index in indices}))


def lesson_items(
    lesson: Lesson,
    rollouts: Sequence[Rollout],
    indices: Sequence[int] | NDArray[np.integer],
    loss_mean: LossMean,
    max_new_tokens: int | None,
) -> tuple[list[PackItem], list[str]]:
    """What one mini-batch learns from, weighted, and the samples' names.

    The mean is over what is learned from: a completion whose tokens were all rejected counts as
    little as one that was never sampled.
    """
    learned = [int(lesson.learned[i].sum()) for i in indices]
    kept = [
        (i, n) for i, n in zip(indices, learned, strict=True) if n or not len(lesson.learned[i])
    ]
    weights = sequence_weights([n for _, n in kept], loss_mean, max_new_tokens)
    items: list[PackItem] = []
    names: list[str] = []
    for (i, count), weight in zip(kept, weights, strict=True):
        if count == 0:  # a completion without a token
            continue
        rollout, mask = rollouts[i], lesson.learned[i]
        item = completion_item(
            rollout.prompt.token_ids,
            rollout.completion.token_ids,
            learned=mask,
            **{WEIGHT: mask * np.float32(weight)},
            **{name: values[i] for name, values in lesson.fields.items()},
        )
        items.append(item)
        names.append(f"{rollout.prompt.uid}#{rollout.sample_index}")
    return items, names


def mini_batch_plan(
    samples: int, epochs: int, mini_batches: int, *, seed: Sequence[int]
) -> list[NDArray[np.intp]]:
    """Which samples each optimizer step learns from, in order.

    Every epoch goes through all samples once, in an order drawn from ``seed`` and the epoch when
    there are several mini-batches. Mini-batches without a sample are left out.

    Example:
        >>> [p.tolist() for p in mini_batch_plan(3, 2, 1, seed=[0])]
        [[0, 1, 2], [0, 1, 2]]
    """
    plan = []
    for epoch in range(epochs):
        order = np.arange(samples)
        if mini_batches > 1:
            order = np.random.default_rng([*seed, epoch]).permutation(samples)
        plan += [part for part in np.array_split(order, mini_batches) if len(part)]
    return plan


# -- of one micro-batch, on the last pipeline stage ------------------------------------------------


def _learn(loss: Loss, batch: MicroBatch, outputs: Outputs) -> tuple[Tensor, Tensor, _LocalStats]:
    """Loss function of Megatron's schedule: this micro-batch's part of the mini-batch loss."""
    token = loss.token_loss(batch, outputs)
    total = (batch.fields[WEIGHT] * token.loss).sum()
    reported = dict(token.means)
    if outputs.entropy is not None:
        reported["entropy"] = outputs.entropy.detach()
    stats = _LocalStats(
        batch=batch,
        loss=total.detach().double(),  # a copy: the schedule frees the loss's own memory
        not_finite=~torch.isfinite(token.loss.detach()),
        sums={name: value.double().sum() for name, value in reported.items()},
        maxima={name: value.double().amax() for name, value in token.maxima.items()},
        sequences=None if token.sequences is None else token.sequences.detach(),
    )
    return total, batch.loss_mask.sum().int(), stats


def _measure(loss: Loss, batch: MicroBatch, outputs: Outputs) -> _LocalStats:
    return _learn(loss, batch, outputs)[2]


def _sum_gradients(
    model: list[torch.nn.Module], num_tokens: Tensor | None = None, **groups: Any
) -> None:
    """Reduce gradients without Megatron's division by ``num_tokens``: losses are normalised."""
    finalize_model_grads(model, None, **groups)
