"""The flash-attention kernel against the one that the CPU tests hold to the definition."""

import pytest
import torch

from hpc_rlhf.cluster import device
from hpc_rlhf.models.attention import PackedSequences, sdpa_attention, varlen_attention

pytestmark = pytest.mark.gpu(cuda_only=True)


@pytest.mark.parametrize("kv_heads", [2, 8])
def test_varlen_equals_one_call_a_sequence(kv_heads: int) -> None:
    torch.manual_seed(0)
    where = device.device()
    bounds = torch.tensor([0, 3, 4, 300, 512])
    packed = PackedSequences.from_cu_seqlens(bounds, where)

    def random(heads: int) -> torch.Tensor:
        x = torch.randn(512, heads, 64, dtype=torch.bfloat16, device=where)
        return x.requires_grad_()

    inputs = random(8), random(kv_heads), random(kv_heads)
    exact = tuple(x.detach().float().requires_grad_() for x in inputs)
    found = varlen_attention(*inputs, packed, 0.125)
    expected = sdpa_attention(*exact, packed, 0.125)
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)

    weights = torch.randn_like(expected)
    gradients = torch.autograd.grad(found, inputs, weights.bfloat16())
    references = torch.autograd.grad(expected, exact, weights)
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient.float(), reference, rtol=5e-2, atol=5e-2)


def test_the_kernel_of_half_precision_is_flash_attention() -> None:
    assert device.attention_kernel(torch.bfloat16) == "varlen"
    assert device.attention_kernel(torch.float32) == "sdpa"
