"""Packed attention and RMSNorm for Megatron's transformer layer, on plain torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig

from hpc_rlhf.cluster import device


@dataclass
class PackedSequences(PackedSeqParams):
    """Where the sequences of a micro-batch begin and end.

    ``qkv_format`` stays "sbhd" (one batch entry of T tokens): with "thd" Megatron would split the
    batch in each layer to restart its rotary table, which :mod:`hpc_rlhf.models.rotary` has done.
    """

    lengths: tuple[int, ...] = ()

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: torch.Tensor, where: torch.device) -> "PackedSequences":
        """From cumulative lengths, int32 [S + 1], starting at 0. Keep them on the CPU: reading them
        from a GPU waits for it."""
        lengths = tuple(cu_seqlens.diff().tolist())
        on_device = cu_seqlens.to(where, torch.int32)
        longest = max(lengths, default=0)
        return cls(
            qkv_format="sbhd",
            cu_seqlens_q=on_device,
            cu_seqlens_kv=on_device,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=lengths,
        )


def sdpa_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequences: PackedSequences,
    scale: float,
) -> torch.Tensor:
    """Causal attention within each sequence: one scaled_dot_product_attention a sequence.

    Args:
        query: [T, heads, head_dim]; ``key`` and ``value`` are [T, kv_heads, head_dim].

    Returns:
        [T, heads, head_dim].
    """

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)
        )  # [1, heads, length, head_dim]
        grouped = q.size(1) != k.size(1)
        output = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=grouped
        )
        return output.squeeze(0).transpose(0, 1)

    parts = zip(*(x.split(sequences.lengths) for x in (query, key, value)), strict=True)
    return torch.cat([attend(q, k, v) for q, k, v in parts if len(q)])


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequences: PackedSequences,
    scale: float,
) -> torch.Tensor:
    """Causal attention within each sequence, all in one flash-attention call; see
    :func:`sdpa_attention`."""
    from torch.nn.attention.varlen import varlen_attn

    bounds, longest = sequences.cu_seqlens_q, sequences.max_seqlen_q
    output = varlen_attn(
        query,
        key,
        value,
        bounds,
        bounds,
        longest,
        longest,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=True,
    )
    assert isinstance(output, torch.Tensor)  # a tuple only with return_aux
    return output


KERNELS: dict[device.AttentionKernel, Callable[..., torch.Tensor]] = {
    "sdpa": sdpa_attention,
    "varlen": varlen_attention,
}


class PackedAttention(torch.nn.Module):
    """``core_attention`` of Megatron's SelfAttention for :class:`PackedSequences`."""

    def __init__(
        self, config: TransformerConfig, softmax_scale: float | None = None, **unused: Any
    ) -> None:
        super().__init__()
        assert config.context_parallel_size == 1, "context parallelism is not implemented"
        assert softmax_scale is not None
        self.scale = softmax_scale
        self.kernel = KERNELS[device.attention_kernel(config.params_dtype)]

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedSequences,
        **unused: Any,
    ) -> torch.Tensor:
        """[T, 1, heads, head_dim] and twice [T, 1, kv_heads, head_dim] -> [T, 1, heads * head_dim]."""
        query, key, value = (x.squeeze(1) for x in (query, key, value))
        return self.kernel(query, key, value, packed_seq_params, self.scale).flatten(1).unsqueeze(1)


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm, computed in float32.

    The weight multiplies after the cast back, as in transformers and in vLLM's kernel: in bfloat16
    ``torch.nn.RMSNorm`` would round differently.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device.device())
        )
        # Under sequence parallelism each rank sees a part of the tokens; Megatron sums such gradients.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.size(-1),), eps=self.eps) * self.weight
