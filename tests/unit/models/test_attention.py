import math

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hpc_rlhf.models.attention import PackedSequences, RMSNorm, sdpa_attention, varlen_attention

CPU = torch.device("cpu")


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """softmax(q k / scale) v by definition; [length, heads, head_dim]."""
    repeat = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    future = torch.ones(len(query), len(query)).triu(1).bool()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), value)


def test_packed_sequences_do_not_see_each_other() -> None:
    torch.manual_seed(0)
    lengths = [3, 1, 0, 6]
    packed = PackedSequences.from_cu_seqlens(torch.tensor([0, 3, 4, 4, 10]), CPU)
    assert packed.lengths == (3, 1, 0, 6) and packed.max_seqlen_q == 6
    query = torch.randn(10, 4, 8, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(10, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    scale = 1.3 / math.sqrt(8)
    found = sdpa_attention(query, key, value, packed, scale)
    parts = zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
    expected = torch.cat([causal_attention(q, k, v, scale) for q, k, v in parts])
    torch.testing.assert_close(found, expected)

    weights = torch.randn_like(found)
    gradients = torch.autograd.grad((found * weights).sum(), (query, key, value))
    references = torch.autograd.grad((expected * weights).sum(), (query, key, value))
    torch.testing.assert_close(gradients, references)


def test_flash_kernel_is_called_as_torch_defines_it() -> None:
    """Shapes and argument names only, on the meta device; tests/gpu compares the numbers."""
    packed = PackedSequences.from_cu_seqlens(torch.tensor([0, 3, 10]), torch.device("meta"))
    assert packed.lengths == (3, 7)
    query = torch.empty(10, 4, 64, dtype=torch.bfloat16, device="meta")
    key = torch.empty(10, 2, 64, dtype=torch.bfloat16, device="meta")
    output = varlen_attention(query, key, key, packed, 0.125)
    assert output.shape == query.shape and output.dtype == query.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_rounds_as_transformers_does(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=1, params_dtype=dtype, cuda_graph_scope=[]
    )
    ours, theirs = RMSNorm(config, 64, eps=1e-6), LlamaRMSNorm(64, eps=1e-6).to(dtype)
    weight = torch.randn(64).to(dtype)
    ours.load_state_dict({"weight": weight})
    theirs.load_state_dict({"weight": weight})
    x = torch.randn(50, 64).to(dtype)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 0.0}[dtype]
    torch.testing.assert_close(ours(x), theirs(x), rtol=tolerance, atol=tolerance)
