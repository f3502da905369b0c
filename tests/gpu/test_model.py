"""The model on a GPU against Hugging Face on the same GPU."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hpc_rlhf.cluster import device
from hpc_rlhf.config import ParallelConfig
from hpc_rlhf.models.hf_layout import HfModelSpec
from hpc_rlhf.models.megatron import build_model, export_hf, load_hf
from tests.distributed.correctness import Layout, full_logits, measure_one, reference
from tests.tiny_models import TINY_MODELS

pytestmark = pytest.mark.gpu

# Ten times the CPU's: same formulas and float32 throughout (no TF32), but cuBLAS and the attention
# kernel sum in other orders than Hugging Face's eager attention does.
BOUND = 1e-4
LENGTHS = (300, 17, 1, 194)


def assert_close_to_hugging_face(directory: Path) -> None:
    assert not torch.backends.cuda.matmul.allow_tf32
    found = measure_one(Layout(1, 1, 1), reference(directory, device.device()))
    print(
        f"{directory.name}: logits {found.logits:.1e} of {found.logits_scale:.1f}, "
        f"gradients {found.gradients:.1e} of {found.gradients_scale:.2f}"
    )
    assert found.logits <= BOUND
    assert found.gradients <= BOUND
    assert found.logits_scale > 1.0
    assert found.gradients_scale > 1e-2


@pytest.mark.parametrize("name", TINY_MODELS)
def test_logits_and_gradients_in_float32(name: str, tiny_models: dict[str, Path]) -> None:
    assert_close_to_hugging_face(tiny_models[name])


def test_logits_and_gradients_of_a_medium_model(medium_model: Path) -> None:
    assert_close_to_hugging_face(medium_model)


def rms(values: list[torch.Tensor]) -> float:
    flat = torch.cat([value.double().flatten() for value in values])
    return flat.square().mean().sqrt().item()


def hugging_face(
    directory: Path, dtype: torch.dtype, parts: tuple[torch.Tensor, ...]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Logits, and gradients of the mean of log-probs, of sequences one by one."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(device.device())
    logits = [model(part[None]).logits[0].float() for part in parts]
    loss(logits, parts).backward()
    gradients = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
    return [one.detach() for one in logits], gradients


def loss(logits: list[torch.Tensor], parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Mean log-prob of each token at its own position: no shift, every row counts."""
    picked = [
        one.log_softmax(-1).gather(1, part[:, None])
        for one, part in zip(logits, parts, strict=True)
    ]
    return torch.cat(picked).mean()


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3", "medium"])
def test_bf16_is_as_close_to_float32_as_hugging_face_in_bf16(
    name: str, tiny_models: dict[str, Path], medium_model: Path
) -> None:
    """Flash attention included. Both round at the same places, so the errors are alike in size."""
    directory = medium_model if name == "medium" else tiny_models[name]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 267, (sum(LENGTHS),), generator=generator).to(device.device())
    positions = torch.cat([torch.arange(n) for n in LENGTHS]).to(device.device())
    parts = tokens.split(LENGTHS)
    exact, exact_gradients = hugging_face(directory, torch.float32, parts)
    theirs, their_gradients = hugging_face(directory, torch.bfloat16, parts)

    model = build_model(
        HfModelSpec.from_directory(directory), ParallelConfig(), dtype=torch.bfloat16
    )
    load_hf(model, directory)
    hidden = model(tokens, positions, torch.tensor([0, *LENGTHS]).cumsum(0).int())
    ours = full_logits(model, hidden).float().split(LENGTHS)
    log_probs, _ = model.log_probs(hidden, tokens, temperature=1.0, chunk_tokens=100)
    log_probs.mean().backward()
    own = {}
    for sharded in model.layout():
        gradient = model.get_parameter(sharded.name).grad
        if sharded.replicated and gradient is not None:
            own[sharded.sources[0].name] = gradient.float()

    their_error = rms([a - b for a, b in zip(theirs, exact, strict=True)])
    our_error = rms([a - b for a, b in zip(ours, exact, strict=True)])
    norms = [name for name in own if name in exact_gradients]
    their_gradient_error = rms([their_gradients[n] - exact_gradients[n] for n in norms])
    our_gradient_error = rms([own[n] - exact_gradients[n] for n in norms])
    print(
        f"{name}: logits rms error {our_error:.2e}, Hugging Face's {their_error:.2e}; "
        f"gradients of {len(norms)} norms {our_gradient_error:.2e}, {their_gradient_error:.2e}"
    )
    assert 0 < our_error < 1.2 * their_error
    assert 0 < our_gradient_error < 1.5 * their_gradient_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_is_read_by_hugging_face(
    dtype: torch.dtype, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    directory = tiny_models["qwen2-tied"]
    model = build_model(HfModelSpec.from_directory(directory), ParallelConfig(), dtype=dtype)
    load_hf(model, directory)
    export_hf(model, directory, tmp_path / "exported")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=dtype).state_dict()
    original = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).state_dict()
    assert found.keys() == original.keys()
    assert all(torch.equal(found[name], original[name]) for name in original)
