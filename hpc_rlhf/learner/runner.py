"""Models over packed micro-batches, through Megatron's pipeline schedule."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray
from torch import Tensor

from hpc_rlhf.cluster import device
from hpc_rlhf.config import LearnerConfig
from hpc_rlhf.learner.algorithms import Outputs
from hpc_rlhf.learner.packing import MicroBatch, PackItem, assign, build, padded_tokens
from hpc_rlhf.models.megatron import PolicyModel


@dataclass(frozen=True, slots=True)
class TokenReadings:
    """Numbers of the tokens of N sequences, N x float32 [T_i]; None where there is no such head."""

    log_probs: tuple[NDArray[np.float32], ...] | None = None
    scores: tuple[NDArray[np.float32], ...] | None = None


class Runner:
    """Packs items and runs models of one layout over them. Every method is collective.

    Needs no optimizer: a frozen model is swept with it.
    """

    def __init__(
        self, model: PolicyModel, learner: LearnerConfig, *, temperature: float = 1.0
    ) -> None:
        """Args:
        model: of the layout of those that will be run.
        temperature: of the distribution whose log-probs are wanted.
        """
        self.micro_batch_tokens = learner.micro_batch_tokens
        config, self.parallel = model.config, model.parallel
        self.pad_multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self._temperature = temperature
        self._chunk_tokens = learner.logprob_chunk_tokens
        # Of the ranks that hold the results of their data-parallel rank, the one all listen to.
        self.speaks = self.parallel.is_last_stage and self.parallel.tensor_rank == 0
        self.source = _index_of_first(self.speaks and self.parallel.data_rank == 0)

    @property
    def capacity(self) -> int:
        """Tokens of the longest item."""
        return self.micro_batch_tokens // self.pad_multiple * self.pad_multiple

    def pack(self, items: Sequence[PackItem]) -> tuple[list[MicroBatch], int]:
        """This data-parallel rank's micro-batches, and the padded tokens of all ranks.

        Args:
            items: the same on every rank.
        """
        lengths = [len(item.tokens) for item in items]
        plan = assign(lengths, self.micro_batch_tokens, self.pad_multiple, self.parallel.data_size)
        batches = build(items, plan[self.parallel.data_rank], pad_multiple=self.pad_multiple)
        return batches, padded_tokens(lengths, plan, self.pad_multiple)

    def learn(
        self,
        model: PolicyModel,
        wrapped: torch.nn.Module,
        batches: Sequence[MicroBatch],
        loss: Callable[[MicroBatch, Outputs], tuple[Tensor, Tensor, Any]],
        *,
        head_only: bool = False,
    ) -> list[Any]:
        """Forward and backward; gradients accumulate in ``wrapped``, Megatron's DDP of ``model``.

        Args:
            head_only: the gradient ends at the last hidden states: below them it is zero.
            loss: of a micro-batch: its part of the mini-batch's loss, its learned tokens, and what
                is to be reported.

        Returns:
            What ``loss`` reported of each micro-batch, on the last pipeline stage.
        """

        def head(batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
            if head_only:  # and not detached: the pipeline's schedule sends gradients backwards
                hidden = hidden.detach() + 0.0 * hidden
            return loss(batch, self._outputs(model, batch, hidden))

        return self._run(wrapped, batches, head, forward_only=False)

    @torch.no_grad()
    def sweep(
        self,
        model: PolicyModel,
        batches: Sequence[MicroBatch],
        read: Callable[[MicroBatch, Outputs], Any],
    ) -> list[Any]:
        """Forward only; returns what ``read`` made of each micro-batch, on the last stage."""

        def head(batch: MicroBatch, hidden: Tensor, non_loss_data: bool = True) -> Any:
            return read(batch, self._outputs(model, batch, hidden))

        return self._run(model, batches, head, forward_only=True)

    def read(self, model: PolicyModel, items: Sequence[PackItem]) -> TokenReadings:
        """What the model's heads say of every item's masked positions, the same on every rank."""
        heads = [
            name
            for name, there in (
                ("log_probs", model.spec.lm_head),
                ("scores", model.spec.score_head),
            )
            if there
        ]
        counts = [int(item.loss_mask.sum()) for item in items]
        flat = np.zeros((len(heads), sum(counts)), np.float32)
        parts = np.split(flat, np.cumsum(counts)[:-1], axis=1) if items else []
        if items:
            batches, _ = self.pack(items)
            swept = self.sweep(model, batches, partial(_numbers, heads))
            if self.speaks:
                for batch, values in zip(batches, swept, strict=True):
                    for head, of_head in enumerate(values.cpu().numpy()):
                        for index, found in batch.unpack(of_head):
                            parts[index][head] = found
            parts = np.split(self.sum_everywhere(flat), np.cumsum(counts)[:-1], axis=1)
        found_of = {name: tuple(part[k] for part in parts) for k, name in enumerate(heads)}
        return TokenReadings(**found_of)

    def token_log_probs(
        self, model: PolicyModel, items: Sequence[PackItem]
    ) -> tuple[NDArray[np.float32], ...]:
        """Log-probs of every item's masked targets, in order, the same on every rank."""
        log_probs = self.read(model, items).log_probs
        assert log_probs is not None
        return log_probs

    def sequence_values(
        self,
        items: Sequence[PackItem],
        batches: Sequence[MicroBatch],
        values: Sequence[Tensor],
    ) -> NDArray[np.float64]:
        """Gather one number a sequence of every item, [items, sequences of an item], on every rank.

        Args:
            values: by micro-batch, [num_sequences] each, on the last stage.
        """
        width = max(len(item.segments) or 1 for item in items)
        found = np.zeros((len(items), width))
        if self.speaks:
            for batch, numbers in zip(batches, values, strict=True):
                indices = batch.sequence_index[: batch.num_sequences].numpy()
                if len(indices):
                    found[indices[::width]] = numbers.cpu().numpy().reshape(-1, width)
        return self.sum_everywhere(found)

    def sum_everywhere(self, values: NDArray[Any]) -> NDArray[Any]:
        """Sum over all ranks: exact where each number is set by one and 0 elsewhere."""
        total = torch.from_numpy(values).to(device.device())
        dist.all_reduce(total)
        return total.cpu().numpy()

    def _outputs(self, model: PolicyModel, batch: MicroBatch, hidden: Tensor) -> Outputs:
        """Collective over the tensor-parallel group."""
        nothing = torch.zeros(len(batch.tokens), dtype=torch.float32, device=hidden.device)
        place = partial(nothing.index_copy, 0, batch.learned)
        log_probs = entropy = scores = None
        if model.spec.lm_head:
            log_probs, entropy = map(
                place,
                model.log_probs(
                    hidden,
                    batch.targets[batch.learned],
                    temperature=self._temperature,
                    chunk_tokens=self._chunk_tokens,
                    positions=batch.learned,
                ),
            )
        if model.spec.score_head:
            scores = place(model.scores(hidden, positions=batch.learned))
        return Outputs(log_probs=log_probs, entropy=entropy, scores=scores)

    def _run(
        self,
        model: torch.nn.Module,
        batches: Sequence[MicroBatch],
        head: Callable[..., Any],
        *,
        forward_only: bool,
    ) -> list[Any]:
        where = device.device()

        def forward_step(
            iterator: Iterator[MicroBatch], module: torch.nn.Module
        ) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(iterator)
            hidden = module(batch.tokens, batch.position_ids, batch.cu_seqlens)
            return hidden, partial(head, batch)

        with self.parallel:
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


def _numbers(heads: Sequence[str], batch: MicroBatch, outputs: Outputs) -> Tensor:
    """Of each of ``heads``, [heads, T]."""
    return torch.stack([getattr(outputs, name) for name in heads])


def _index_of_first(flag: bool) -> int:
    """Lowest rank on which ``flag`` is set."""
    flags: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(flags, flag)
    return flags.index(True)
