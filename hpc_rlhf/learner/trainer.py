"""Learning from experience on a Megatron-core model: losses in, optimizer steps out.

The loss of a mini-batch is a sum over its tokens of weights times token losses. The weights come
from the whole mini-batch, which every rank holds, so the gradient is a plain sum over micro-batches
and data-parallel ranks: Megatron neither divides by token counts nor averages.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray
from torch import Tensor

from hpc_rlhf.cluster import device
from hpc_rlhf.config import LearnerConfig, LossMean
from hpc_rlhf.errors import ComponentError
from hpc_rlhf.learner.algorithms import Algorithm, Lesson, Loss, Outputs, Supervised
from hpc_rlhf.learner.losses import sequence_weights
from hpc_rlhf.learner.optimizer import PolicyOptimizer
from hpc_rlhf.learner.packing import (
    MicroBatch,
    PackItem,
    assign,
    build,
    completion_item,
    masked_item,
    padded_tokens,
)
from hpc_rlhf.learner.stats import StepStats, merge
from hpc_rlhf.models.megatron import PolicyModel
from hpc_rlhf.types import Experience, Rollout

_WEIGHT = "weight"  # field of the loss weights


@dataclass(frozen=True, slots=True)
class _LocalStats:
    """Of one micro-batch, on the last pipeline stage."""

    batch: MicroBatch
    loss: Tensor  # []
    not_finite: Tensor  # bool [T]
    sums: Mapping[str, Tensor]  # each []
    maxima: Mapping[str, Tensor]  # each []


@dataclass(frozen=True, slots=True)
class _Reduced:
    """Local statistics of a mini-batch summed over micro-batches and data-parallel ranks."""

    loss: float
    sums: Mapping[str, float] = field(default_factory=dict)
    maxima: Mapping[str, float] = field(default_factory=dict)
    not_finite: tuple[int, ...] = ()  # indices of sequences with a loss that is not finite


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
        self._temperature = temperature
        self._max_new_tokens = max_new_tokens
        self._seed = seed
        self.micro_batch_tokens = learner.micro_batch_tokens
        self._chunk_tokens = learner.logprob_chunk_tokens
        config = model.config
        self._pad_multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self._dp_rank = parallel_state.get_data_parallel_rank()
        self._dp_size = parallel_state.get_data_parallel_world_size()
        self._is_last_stage = parallel_state.is_pipeline_last_stage()
        # Of the ranks that hold the statistics of their data-parallel rank, the one all listen to.
        self._speaks = self._is_last_stage and parallel_state.get_tensor_model_parallel_rank() == 0
        self._source = _index_of_first(self._speaks and self._dp_rank == 0)

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
            ComponentError: a loss or gradient is not finite (the optimizer did not step), or no
                completion has a token.
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
                steps.append(self._step(algorithm, items, names))
        if not steps:
            raise ComponentError(
                f"learner: optimizer step {self.num_steps}: no token of the batch is to be learned "
                f"from; of all tokens {lesson.metrics['rejected_fraction']:.0%} were rejected by "
                "algorithm.off_policy's bounds"
            )
        return merge(steps) | {**lesson.metrics, "skipped_steps": float(len(plan) - len(steps))}

    def sft_step(
        self, sequences: Sequence[tuple[NDArray[np.integer], NDArray[np.bool_]]]
    ) -> dict[str, float]:
        """One optimizer step of supervised learning on the mean negative log-likelihood.

        Args:
            sequences: token ids [L] and a mask [L] of the tokens to learn, the same on every rank.

        Returns:
            ``loss``, ``entropy``, ``grad_norm``, ``lr``, ``tokens``, ``padding_fraction``.

        Raises:
            ComponentError: as :meth:`update`.
        """
        masked = [masked_item(ids, mask) for ids, mask in sequences]
        lengths = [int(item.loss_mask.sum()) for item in masked]
        weights = sequence_weights(lengths, LossMean.TOKEN)
        items = [
            PackItem(
                tokens=item.tokens,
                targets=item.targets,
                loss_mask=item.loss_mask,
                fields={_WEIGHT: item.loss_mask * np.float32(weight)},
            )
            for item, weight in zip(masked, weights, strict=True)
        ]
        names = [f"sequence {i}" for i in range(len(items))]
        return merge([self._step(Supervised(), items, names)])

    @torch.no_grad()
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
        model = self.model if model is None else model
        lengths = [len(r.completion.token_ids) for r in rollouts]
        kept = [i for i, length in enumerate(lengths) if length]
        items = [
            completion_item(rollouts[i].prompt.token_ids, rollouts[i].completion.token_ids)
            for i in kept
        ]
        batches, _ = self._pack(items)
        swept = self._run(model, batches, partial(_score, self._head(model)), forward_only=True)

        flat = np.zeros(sum(lengths), np.float32)
        parts = np.split(flat, np.cumsum(lengths)[:-1])
        if self._speaks:
            for batch, values in zip(batches, swept, strict=True):
                for index, found in batch.unpack(values.cpu().numpy()):
                    parts[kept[index]][:] = found
        # Each number is set by one rank and 0 elsewhere, so the sum is exact.
        everywhere = torch.from_numpy(flat).to(device.device())
        dist.all_reduce(everywhere)
        return tuple(np.split(everywhere.cpu().numpy(), np.cumsum(lengths)[:-1]))

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

    def _step(self, loss: Loss, items: Sequence[PackItem], names: Sequence[str]) -> StepStats:
        learned = sum(int(item.loss_mask.sum()) for item in items)
        if learned == 0:
            raise ComponentError(
                f"learner: optimizer step {self.num_steps}: none of the sequences has a token to "
                "learn from"
            )
        batches, padded = self._pack(items)
        self._ddp.zero_grad_buffer()
        results = self._run(
            self._ddp, batches, partial(_learn, self._head(self.model), loss), forward_only=False
        )
        reduced = self._reduce(results)
        if not math.isfinite(reduced.loss):
            guilty = [names[i] for i in reduced.not_finite]
            raise self._not_finite(f"loss is {reduced.loss}", guilty)
        grad_norm = self._optimizer.gradient_norm()
        if not math.isfinite(grad_norm):
            raise self._not_finite(f"gradient norm is {grad_norm} (loss {reduced.loss})", names)
        lr = self._optimizer.lr
        self._optimizer.step(grad_norm)
        return StepStats(
            loss=reduced.loss,
            learned_tokens=learned,
            sums=reduced.sums,
            maxima=reduced.maxima,
            grad_norm=grad_norm,
            lr=lr,
            tokens=sum(len(item.tokens) for item in items),
            padded_tokens=padded,
        )

    def _not_finite(self, what: str, names: Sequence[str]) -> ComponentError:
        some = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        return ComponentError(
            f"learner: optimizer step {self.num_steps}: {what}; samples: {some}. "
            "The optimizer did not step"
        )

    def _pack(self, items: Sequence[PackItem]) -> tuple[list[MicroBatch], int]:
        """This data-parallel rank's micro-batches, and the padded tokens of all ranks."""
        lengths = [len(item.tokens) for item in items]
        plan = assign(lengths, self.micro_batch_tokens, self._pad_multiple, self._dp_size)
        batches = build(items, plan[self._dp_rank], pad_multiple=self._pad_multiple)
        return batches, padded_tokens(lengths, plan, self._pad_multiple)

    def _head(self, model: PolicyModel) -> Callable[[MicroBatch, Tensor], tuple[Tensor, Tensor]]:
        return partial(
            _log_probs, model, temperature=self._temperature, chunk_tokens=self._chunk_tokens
        )

    def _run(
        self,
        model: torch.nn.Module,
        batches: Sequence[MicroBatch],
        head: Callable[..., Any],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """Run Megatron's pipeline schedule; returns what ``head`` returned, on the last stage."""
        where = device.device()

        def forward_step(
            iterator: Iterator[MicroBatch], module: torch.nn.Module
        ) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(iterator)
            hidden = module(batch.tokens, batch.position_ids, batch.cu_seqlens)
            return hidden, partial(head, batch)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=(batch.to(where) for batch in batches),
            model=model,
            num_microbatches=len(batches),
            seq_length=1,  # shapes travel with the tensors (variable_seq_lengths)
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _reduce(self, results: Sequence[_LocalStats]) -> _Reduced:
        """Sum over micro-batches and data-parallel ranks; returned on every rank."""
        reduced = None
        if self._is_last_stage:
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
            reduced = _Reduced(
                loss=loss,
                sums=dict(zip(sums, totals, strict=True)),
                maxima=dict(zip(maxima, largest.tolist()[1:], strict=True)),
                not_finite=() if math.isfinite(loss) else self._find_not_finite(results),
            )
        box = [reduced]
        dist.broadcast_object_list(box, src=self._source)
        assert box[0] is not None
        return box[0]

    def _find_not_finite(self, results: Sequence[_LocalStats]) -> tuple[int, ...]:
        mine = [
            index
            for result in results
            for index, flags in result.batch.unpack(result.not_finite.float().cpu().numpy())
            if flags.any()
        ]
        found: list[Any] = [None] * self._dp_size
        dist.all_gather_object(found, mine, group=parallel_state.get_data_parallel_group())
        return tuple(sorted(index for indices in found for index in indices))


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
            **{_WEIGHT: mask * np.float32(weight)},
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


# -- the head, on the last pipeline stage ---------------------------------------------------------


def _log_probs(
    model: PolicyModel, batch: MicroBatch, hidden: Tensor, *, temperature: float, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets and entropies [T], 0 where the mask is False."""
    log_probs, entropy = model.log_probs(
        hidden,
        batch.targets[batch.learned],
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        positions=batch.learned,
    )
    nothing = torch.zeros(len(batch.tokens), dtype=torch.float32, device=hidden.device)
    return (
        nothing.index_copy(0, batch.learned, log_probs),
        nothing.index_copy(0, batch.learned, entropy),
    )


def _score(
    head: Callable[[MicroBatch, Tensor], tuple[Tensor, Tensor]],
    batch: MicroBatch,
    hidden: Tensor,
    non_loss_data: bool = True,
) -> Tensor:
    return head(batch, hidden)[0]


def _learn(
    head: Callable[[MicroBatch, Tensor], tuple[Tensor, Tensor]],
    loss: Loss,
    batch: MicroBatch,
    hidden: Tensor,
) -> tuple[Tensor, Tensor, _LocalStats]:
    """Loss function of Megatron's schedule: this micro-batch's part of the mini-batch loss."""
    log_probs, entropy = head(batch, hidden)
    token = loss.token_loss(batch, Outputs(log_probs=log_probs, entropy=entropy))
    total = (batch.fields[_WEIGHT] * token.loss).sum()
    stats = _LocalStats(
        batch=batch,
        loss=total.detach().double(),  # a copy: the schedule frees the loss's own memory
        not_finite=~torch.isfinite(token.loss.detach()),
        sums={
            "entropy": entropy.detach().double().sum(),
            **{name: value.double().sum() for name, value in token.means.items()},
        },
        maxima={name: value.double().amax() for name, value in token.maxima.items()},
    )
    return total, batch.loss_mask.sum().int(), stats


def _sum_gradients(
    model: list[torch.nn.Module], num_tokens: Tensor | None = None, **groups: Any
) -> None:
    """Reduce gradients without Megatron's division by ``num_tokens``: losses are normalised."""
    finalize_model_grads(model, None, **groups)


def _index_of_first(flag: bool) -> int:
    """Lowest rank on which ``flag`` is set."""
    flags: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(flags, flag)
    return flags.index(True)
