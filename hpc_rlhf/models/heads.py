"""What is made of the hidden states: log-probabilities and entropies, and scores.

Log-probabilities are over a vocabulary split across tensor-parallel ranks. The float32 logits of a batch never exist at once: they are made, used and dropped for
``chunk_tokens`` tokens at a time, in the forward pass and again in the backward pass.
"""

import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hpc_rlhf.cluster import device

ROW_BLOCK = 8192  # rows of the output matrix whose gradient is computed at once


class ScoreHead(torch.nn.Module):
    """One number a position: the score of a reward model, the value of a critic.

    ``weight`` [1, H] is ``score.weight`` of Hugging Face's ``XForSequenceClassification``, in the
    dtype of the model; the product is in float32 whatever that is. Every tensor-parallel rank holds
    all of it and computes the same.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        weight = torch.zeros(1, hidden_size, dtype=dtype, device=device.device())
        self.weight = torch.nn.Parameter(weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores float32 [T] of hidden states [T, H]."""
        return hidden.float() @ self.weight[0].float()


def initial_score_weight(hidden_size: int, seed: int) -> torch.Tensor:
    """Weight [1, H] of a new head, normal with variance 1 / (H + 1), the same on every rank.

    Stiennon et al., arXiv:2009.01325, appendix B.1.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, hidden_size, generator=generator) / math.sqrt(hidden_size + 1)


def zero_score_weight(hidden_size: int) -> torch.Tensor:
    """Weight [1, H] of a critic that knows nothing yet: every value is 0."""
    return torch.zeros(1, hidden_size)


def vocab_parallel_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    vocab_size: int,
    group: torch.distributed.ProcessGroup,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of ``targets`` under softmax(hidden @ weight.T / temperature), and entropies.

    Both are of the tempered distribution, the one really sampled from. Collective over ``group``,
    with equal ``hidden`` and ``targets`` on all its ranks.

    Args:
        hidden: [T, H]. Its gradient on each rank is that rank's part of a sum over ``group``: let
            it come out of Megatron's ``copy_to_tensor_model_parallel_region``, or of its gather
            from the sequence-parallel region, whose backward passes do that sum.
        weight: [rows, H], this rank's rows of the output matrix, in rank order and equal numbers.
        targets: int64 [T], each below ``vocab_size``.
        chunk_tokens: tokens whose logits exist at once; it changes results by rounding at most.
        vocab_size: rows of the matrix that count; those from there on are padding.

    Returns:
        float32 [T] twice, equal on all ranks; gradients flow through both.

    Raises:
        ValueError: ``temperature`` is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} is not positive")
    first = torch.distributed.get_rank(group) * weight.size(0)
    rows = min(max(vocab_size - first, 0), weight.size(0))
    return _ChunkedLogProbs.apply(
        hidden, weight, targets - first, rows, temperature, chunk_tokens, group
    )


class _ChunkedLogProbs(torch.autograd.Function):
    """Saves the hidden states and two numbers a token; the backward pass makes the logits again.

    With z the tempered logits, p = softmax(z) and H the entropy:
    d log p_t / d z = onehot(t) - p, and d H / d z = -p * (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        local_targets: torch.Tensor,
        rows: int,
        temperature: float,
        chunk_tokens: int,
        group: torch.distributed.ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs, entropy, log_normalizer = (
            hidden.new_empty(hidden.size(0), dtype=torch.float32) for _ in range(3)
        )
        for start in range(0, hidden.size(0), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            log_probs[part], entropy[part], log_normalizer[part] = _chunk_statistics(
                hidden[part], weight[:rows], local_targets[part], temperature, group
            )
        ctx.save_for_backward(hidden, weight, local_targets, entropy, log_normalizer)
        ctx.options = rows, temperature, chunk_tokens
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: torch.Tensor, grad_entropy: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, local_targets, entropy, log_normalizer = ctx.saved_tensors
        rows, temperature, chunk_tokens = ctx.options
        grad_hidden = torch.empty_like(hidden)
        # Summed over chunks in float32: bfloat16 would lose the small ones.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, hidden.size(0), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            grad_logits = _chunk_grad_logits(
                hidden[part],
                weight[:rows],
                local_targets[part],
                temperature,
                entropy[part],
                log_normalizer[part],
                grad_log_probs[part],
                grad_entropy[part],
            )
            grad_hidden[part] = grad_logits @ weight[:rows]
            # By blocks of rows: the product of all of them would be as large as the output matrix.
            for block in range(0, rows, ROW_BLOCK):
                columns = slice(block, min(block + ROW_BLOCK, rows))
                grad_weight[columns] += grad_logits[:, columns].T @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


# One function a chunk, so that a chunk's float32 logits are gone before the next one's are made.


def _chunk_statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    group: torch.distributed.ProcessGroup,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probability of the target, entropy and log of the normalizer; float32 [C] each."""
    logits = _tempered_logits(hidden, weight, temperature)
    maximum = logits.amax(-1) if len(weight) else logits.new_full((len(logits),), -torch.inf)
    torch.distributed.all_reduce(maximum, torch.distributed.ReduceOp.MAX, group)
    logits -= maximum[:, None]
    target = _pick(logits, targets)
    exponentials = logits.exp()
    total = exponentials.sum(-1)
    weighted = exponentials.mul_(logits).sum(-1)
    sums = torch.stack((target, total, weighted))
    torch.distributed.all_reduce(sums, group=group)
    target, total, weighted = sums
    log_total = total.log()
    return target - log_total, log_total - weighted / total, log_total + maximum


def _chunk_grad_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    entropy: torch.Tensor,
    log_normalizer: torch.Tensor,
    grad_log_probs: torch.Tensor,
    grad_entropy: torch.Tensor,
) -> torch.Tensor:
    """Gradient of the untempered logits, [C, rows], in the dtype of ``hidden``.

    In place throughout: g_logp * onehot - p * (g_logp + g_H * (log p + H)), over the temperature.
    """
    log_p = _tempered_logits(hidden, weight, temperature).sub_(log_normalizer[:, None])
    p = log_p.exp()
    inner = log_p.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad_log_probs[:, None])
    grad = inner.mul_(p).neg_()
    del p
    _add_at(grad, targets, grad_log_probs)
    return grad.div_(temperature).to(hidden.dtype)


def _tempered_logits(
    hidden: torch.Tensor, weight: torch.Tensor, temperature: float
) -> torch.Tensor:
    """float32 [C, rows], from a product in the dtype of the weights (as the sampler does)."""
    return (hidden @ weight.T).float().div_(temperature)


def _pick(values: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """``values[i, columns[i]]``, 0 where that column is another rank's."""
    if not values.size(1):
        return values.new_zeros(values.size(0))
    index, mine = _own_columns(values, columns)
    return values[index] * mine


def _add_at(values: torch.Tensor, columns: torch.Tensor, amounts: torch.Tensor) -> None:
    """``values[i, columns[i]] += amounts[i]`` where that column is this rank's."""
    if values.size(1):
        index, mine = _own_columns(values, columns)
        values[index] += amounts * mine


def _own_columns(
    values: torch.Tensor, columns: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """One column of each row, and whether it is the one asked for: a mask of fixed size, because
    selecting rows would make the host wait for the device."""
    last = values.size(1) - 1
    mine = (columns >= 0) & (columns <= last)
    return (torch.arange(values.size(0), device=values.device), columns.clamp(0, last)), mine
