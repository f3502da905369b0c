"""Learning on a Megatron-core model: losses in, optimizer steps out.

The loss of a mini-batch is a sum over its positions of weights times losses. The weights come from
the whole mini-batch, which every rank holds, so the gradient is a plain sum over micro-batches and
data-parallel ranks: Megatron neither divides by token counts nor averages.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from numpy.typing import NDArray
from torch import Tensor

from hpc_rlhf.config import LearnerConfig
from hpc_rlhf.errors import ComponentError
from hpc_rlhf.learner.algorithms import Loss, Outputs
from hpc_rlhf.learner.memory import MemoryUse, resident_bytes
from hpc_rlhf.learner.objectives import Objective
from hpc_rlhf.learner.optimizer import PolicyOptimizer
from hpc_rlhf.learner.packing import WEIGHT, MicroBatch, PackItem, completion_item
from hpc_rlhf.learner.runner import Runner, TokenReadings
from hpc_rlhf.learner.stats import StepStats, merge
from hpc_rlhf.models.megatron import PolicyModel
from hpc_rlhf.types import Example, Rollout

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
    """A model with its optimizer: one object per rank, every method collective over the learner.

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
        name: str = "",
    ) -> None:
        """Args:
        model: of :func:`hpc_rlhf.models.megatron.build_model`, with its weights loaded.
        total_steps: optimizer steps of the whole run, where the LR schedule ends.
        temperature: of the distribution whose log-probs are learned: the sampler's.
        name: of the model, where one checkpoint holds several.
        """
        self.model = model
        self._prefix = f"{name}." if name else ""
        config = model.config
        self.runner = Runner(model, learner, temperature=temperature)
        assert config.calculate_per_token_loss  # DDP would divide by the data-parallel size
        config.finalize_model_grads_func = _sum_gradients
        with model.parallel:
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
        self,
        loss: Loss,
        items: Sequence[PackItem],
        names: Sequence[str],
        *,
        head_only: bool = False,
    ) -> tuple[StepStats, Measured]:
        """One optimizer step on the sum over ``items`` of weighted losses.

        Args:
            items: the same on every rank, with the field ``WEIGHT`` and those that ``loss`` reads.
            names: of the items, for messages.
            head_only: learn the heads alone; without weight decay the trunk stays as it is.

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
        results = self.runner.learn(
            self.model, self._ddp, batches, partial(_learn, loss), head_only=head_only
        )
        measured = self._reduce(items, batches, results)
        if not math.isfinite(measured.loss):
            guilty = [names[i] for i in measured.not_finite]
            raise self._not_finite(f"loss is {measured.loss}", guilty)
        with self.model.parallel:
            grad_norm = self._optimizer.gradient_norm()
        if not math.isfinite(grad_norm):
            raise self._not_finite(f"gradient norm is {grad_norm} (loss {measured.loss})", names)
        lr = self._optimizer.lr
        with self.model.parallel:
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

    def read(self, rollouts: Sequence[Rollout], model: PolicyModel | None = None) -> TokenReadings:
        """What a model says of the completions' tokens, log-probs at the sampling temperature.

        A forward sweep through the pipeline, packed as for training.

        Args:
            rollouts: the same on every rank.
            model: another model of the same layout, the frozen reference; default: the trainer's.

        Returns:
            N x float32 [T_i] of each of the model's heads, in rollout order, the same on every rank.
        """
        kept = [i for i, r in enumerate(rollouts) if len(r.completion.token_ids)]
        items = [
            completion_item(rollouts[i].prompt.token_ids, rollouts[i].completion.token_ids)
            for i in kept
        ]
        found = self.runner.read(self.model if model is None else model, items)

        def with_empty(values: Sequence[NDArray[np.float32]] | None) -> Any:
            if values is None:
                return None
            every = [np.zeros(0, np.float32) for _ in rollouts]
            for i, of_tokens in zip(kept, values, strict=True):
                every[i] = of_tokens
            return tuple(every)

        return TokenReadings(with_empty(found.log_probs), with_empty(found.scores))

    def sharded_state_dict(self, *, is_loading: bool) -> dict[str, Any]:
        """Everything to resume from, for ``megatron.core.dist_checkpointing``.

        Weights, master weights and moments are described by their place in the whole tensors, so
        that they load onto any TP x PP x DP.
        """
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "dp_cp_group": self.model.parallel.data_group,  # there is no context parallelism
        }
        with self.model.parallel:
            model_state = self.model.sharded_state_dict(prefix=self._prefix, metadata=metadata)
            optimizer_state = self._optimizer.sharded_state_dict(
                model_state, is_loading=is_loading, metadata=metadata
            )
        return {"model": model_state, "optimizer": optimizer_state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`sharded_state_dict` described, onto this layout."""
        model_state = state["model"]
        self.model.load_state_dict(
            {name.removeprefix(self._prefix): value for name, value in model_state.items()}
        )
        with self.model.parallel:
            self._optimizer.load_state_dict(state["optimizer"])

    def memory(self) -> MemoryUse:
        """What this rank holds of the model and its training, measured."""
        parameters = list(self.model.parameters())
        buffers = [buffer for buffer in self._ddp.buffers if buffer.grad_data is not None]
        held = [*parameters, *(b.param_data for b in buffers if b.param_data is not None)]
        return MemoryUse(
            parameters=resident_bytes(held),
            gradients=resident_bytes(buffer.grad_data for buffer in buffers),
            optimizer=resident_bytes(self._optimizer.tensors(), without=held),
        )

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
        if self.model.parallel.is_last_stage:
            sums, maxima = list(results[0].sums), list(results[0].maxima)
            added = torch.stack(
                [torch.stack([r.loss, *(r.sums[n] for n in sums)]) for r in results]
            ).sum(0)
            # The loss stands in where nothing is reported as a maximum: no empty collective.
            largest = torch.stack(
                [torch.stack([r.loss, *(r.maxima[n] for n in maxima)]) for r in results]
            ).amax(0)
            group = self.model.parallel.data_group
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
        parallel = self.model.parallel
        found: list[Any] = [None] * parallel.data_size
        dist.all_gather_object(found, mine, group=parallel.data_group)
        return tuple(sorted({index for indices in found for index in indices}))


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
