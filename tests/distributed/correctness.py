"""Logits and gradients of the sharded model against Hugging Face in float32.

Measures the rows of the table in docs/correctness.md. The reference runs every sequence by itself
with eager attention: no packing, no padding, no sharding.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from transformers import AutoModelForCausalLM

from hpc_rlhf.cluster import device
from hpc_rlhf.config import ParallelConfig, Recompute
from hpc_rlhf.models.hf_layout import HfModelSpec
from hpc_rlhf.models.megatron import PolicyModel, build_model, hf_tensors, load_hf
from hpc_rlhf.models.parallel import initialize_model_parallel

CPU = torch.device("cpu")
BOUND = 1e-5
LENGTHS = (17, 1, 90, 33, 5, 64, 128, 3)  # uneven, and one without a next token
MICRO_BATCHES = 2
PAD_MULTIPLE = 8
CHUNK_TOKENS = 24  # divides no micro-batch


@dataclass(frozen=True)
class Layout:
    tensor: int
    pipeline: int
    data: int
    sequence: bool = False

    def __str__(self) -> str:
        return f"TP{self.tensor}-PP{self.pipeline}-DP{self.data}" + "-SP" * self.sequence

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(self.tensor, self.pipeline, self.sequence)


LAYOUTS = (
    Layout(1, 1, 2),
    Layout(2, 1, 2),
    Layout(1, 2, 2),
    Layout(2, 2, 2),
    Layout(2, 2, 1, sequence=True),
    Layout(4, 1, 1),  # more ranks than key/value heads
)


@dataclass(frozen=True)
class Reference:
    """What Hugging Face computes from ``sequences``."""

    directory: Path
    sequences: tuple[torch.Tensor, ...]  # int64 [length]
    logits: tuple[torch.Tensor, ...]  # float32 [length, vocabulary]
    gradients: dict[str, torch.Tensor]  # of the mean negative log-likelihood of all next tokens

    @property
    def targets(self) -> int:
        return sum(len(sequence) - 1 for sequence in self.sequences)


@dataclass(frozen=True)
class Difference:
    """Largest absolute differences from the reference, and largest absolute values of it."""

    logits: float
    gradients: float
    logits_scale: float
    gradients_scale: float


def reference(directory: Path, where: torch.device = CPU) -> Reference:
    """Run Hugging Face on random sequences; the result is on ``where``."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).to(where)
    generator = torch.Generator().manual_seed(0)
    # Not token 0, the pad token: Hugging Face gives its embedding no gradient, wherever it stands.
    assert model.config.pad_token_id == 0
    vocabulary = model.config.vocab_size
    drawn = [torch.randint(1, vocabulary, (n,), generator=generator) for n in LENGTHS]
    sequences = [sequence.to(where) for sequence in drawn]
    logits = [model(sequence[None]).logits[0] for sequence in sequences]
    losses = [
        torch.nn.functional.cross_entropy(one[:-1], sequence[1:], reduction="sum")
        for one, sequence in zip(logits, sequences, strict=True)
    ]
    (torch.stack(losses).sum() / sum(n - 1 for n in LENGTHS)).backward()
    return Reference(
        directory,
        tuple(sequences),
        tuple(one.detach() for one in logits),
        {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
    )


def measure(
    layout: Layout, references: dict[str, Reference], recompute: Recompute = Recompute.NONE
) -> dict[str, Difference]:
    """In each rank of ``layout``: build, load and run every model; equal on all ranks."""
    initialize_model_parallel(layout.parallel, seed=1, timeout_s=60)
    return {name: measure_one(layout, ref, recompute) for name, ref in references.items()}


def measure_one(
    layout: Layout, ref: Reference, recompute: Recompute = Recompute.NONE
) -> Difference:
    """Build, load and run one model, with Megatron's groups already made."""
    spec = HfModelSpec.from_directory(ref.directory)
    model = build_model(spec, layout.parallel, dtype=torch.float32, recompute=recompute)
    load_hf(model, ref.directory)
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    wrapped.zero_grad_buffer()
    logits_difference = torch.zeros((), device=device.device())

    def forward_step(batches: Iterator[dict[str, Any]], ddp: torch.nn.Module) -> Any:
        batch = next(batches)
        hidden = ddp(batch["tokens"], batch["position_ids"], batch["cu_seqlens"])

        def loss(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            nonlocal logits_difference
            difference = (full_logits(model, hidden) - batch["logits"])[batch["real"]].abs().max()
            logits_difference = torch.maximum(logits_difference, difference)
            log_probs, _ = model.log_probs(
                hidden, batch["targets"], temperature=1.0, chunk_tokens=CHUNK_TOKENS
            )
            total = -(log_probs * batch["mask"]).sum() / ref.targets
            return total, batch["mask"].sum().int(), {}

        return hidden, loss

    replica = parallel_state.get_data_parallel_rank()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(micro_batches(ref, replica, layout.data)),
        model=[wrapped],
        num_microbatches=MICRO_BATCHES,
        seq_length=1,  # unused: variable_seq_lengths
        micro_batch_size=1,
        forward_only=False,
    )
    finalize_model_grads([wrapped])
    gradients = [
        (gradient - ref.gradients[name]).abs().max()
        for name, gradient in hf_tensors(model, of=lambda p: p.main_grad)
    ]
    both = torch.stack([logits_difference, torch.stack(gradients).max()])
    torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX)
    return Difference(
        logits=both[0].item(),
        gradients=both[1].item(),
        logits_scale=max(one.abs().max().item() for one in ref.logits),
        gradients_scale=max(g.abs().max().item() for g in ref.gradients.values()),
    )


@torch.no_grad()
def full_logits(model: PolicyModel, hidden: torch.Tensor) -> torch.Tensor:
    """[T, vocabulary], gathered over the tensor-parallel group; for tests only."""
    if model.config.sequence_parallel:
        hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden)
    logits = hidden.squeeze(1) @ model.output_weight().T
    logits = tensor_parallel.gather_from_tensor_model_parallel_region(logits)
    return logits[:, : model.spec.vocab_size]


def micro_batches(ref: Reference, replica: int, replicas: int) -> list[dict[str, torch.Tensor]]:
    """This replica's share of the sequences, packed into MICRO_BATCHES padded micro-batches."""
    mine = list(zip(ref.sequences, ref.logits, strict=True))[replica::replicas]
    return [_pack(mine[i::MICRO_BATCHES]) for i in range(MICRO_BATCHES)]


def _pack(items: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    length = sum(len(sequence) for sequence, _ in items)
    where = items[0][0].device
    padding = torch.zeros(-length % PAD_MULTIPLE, dtype=torch.int64, device=where)
    sequences = [sequence for sequence, _ in items] + [padding]
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    logits = torch.cat([one for _, one in items])
    padded_logits = torch.cat([logits, logits.new_zeros(len(padding), logits.size(1))])
    tokens = torch.cat(sequences)
    positions = torch.cat([torch.arange(len(s), device=where) for s in sequences])
    ends = lengths.cumsum(0)
    mask = torch.ones(len(tokens), device=where)
    mask[ends - 1] = 0.0  # the last token of a sequence predicts nothing
    mask[length:] = 0.0
    return {
        "tokens": tokens,
        "position_ids": positions,
        "cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int64), ends]).int(),  # on the CPU
        "targets": tokens.roll(-1),
        "mask": mask,
        "real": torch.arange(len(tokens), device=where) < length,
        "logits": padded_logits,
    }


def table_rows(models: Iterable[str]) -> list[tuple[str, ...]]:
    """Model, TP, PP, DP and SP of each row of the documented table."""
    return [
        (
            name,
            str(layout.tensor),
            str(layout.pipeline),
            str(layout.data),
            "yes" if layout.sequence else "no",
        )
        for name in models
        for layout in LAYOUTS
    ]
