"""Optimizer steps on a GPU against those of torch on the CPU, and in bfloat16 against float32."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from hpc_rlhf.config import OptimizerConfig, ParallelConfig
from hpc_rlhf.learner.objectives import Supervised
from hpc_rlhf.types import Example, Experience, TokenSequence
from tests.distributed.adamw import ADAM, TOTAL_STEPS, adamw_steps, grpo, learning_rate
from tests.distributed.learner_fixtures import (
    TEMPERATURE,
    experience,
    hf_log_probs,
    hf_model,
    log_probs,
    make_trainer,
    update,
    whole_tensors,
)

pytestmark = pytest.mark.gpu

# The CPU's tests allow 5e-6 to one layout or another of the same sums.
WEIGHTS_BOUND = 2e-5


@pytest.fixture(scope="module")
def batch(tiny_models: dict[str, Path]) -> Experience:
    return experience(tiny_models["qwen2-tied"])


def test_float32_steps_are_those_of_adamw_on_the_cpu(
    tiny_models: dict[str, Path], batch: Experience
) -> None:
    directory = tiny_models["qwen2-tied"]
    expected = adamw_steps(directory, batch)
    trainer = make_trainer(directory, ParallelConfig(), optimizer=ADAM, total_steps=TOTAL_STEPS)
    stats = update(trainer, grpo(), batch)
    weights = whole_tensors(trainer.model)
    trainer.close()
    assert stats["lr"] == pytest.approx(learning_rate(3))
    assert stats["grad_norm"] == pytest.approx(np.mean(expected.norms), rel=1e-4)
    largest = max(
        (weight.cpu() - expected.weights[name]).abs().max().item()
        for name, weight in weights.items()
    )
    print(f"largest difference of a weight after {len(expected.norms)} steps: {largest:.1e}")
    assert largest <= WEIGHTS_BOUND


def test_log_probs_are_those_of_hugging_face_on_the_cpu(
    tiny_models: dict[str, Path], batch: Experience
) -> None:
    directory = tiny_models["qwen2-tied"]
    model = hf_model(directory)
    with torch.no_grad():
        expected = [hf_log_probs(model, rollout)[0] for rollout in batch.rollouts]
    assert TEMPERATURE != 1.0
    for dtype, bound in ((torch.float32, 2e-5), (torch.bfloat16, 0.15)):
        trainer = make_trainer(directory, ParallelConfig(), dtype=dtype)
        found = log_probs(trainer, batch.rollouts)
        trainer.close()
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound)


def test_bf16_statistics_are_near_those_of_float32(
    tiny_models: dict[str, Path], batch: Experience
) -> None:
    """bfloat16 has 8 bits: three digits at best, and log-probs of 4 layers keep two."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        trainer = make_trainer(
            tiny_models["qwen2-tied"],
            ParallelConfig(),
            optimizer=ADAM,
            total_steps=TOTAL_STEPS,
            dtype=dtype,
        )
        found[dtype] = update(trainer, grpo(), batch)
        trainer.close()
    exact, half = found[torch.float32], found[torch.bfloat16]
    assert half["lr"] == exact["lr"]
    assert half["tokens"] == exact["tokens"]
    assert half["entropy"] == pytest.approx(exact["entropy"], rel=0.02)
    assert half["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.1)
    assert half["loss"] == pytest.approx(exact["loss"], abs=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_text_is_learned(dtype: torch.dtype, tiny_models: dict[str, Path]) -> None:
    """Thirty steps on one batch: from a guess among 267 tokens to knowing most of it."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(3, 260, 24) for _ in range(4)]
    trainer = make_trainer(
        tiny_models["llama"],
        ParallelConfig(),
        optimizer=OptimizerConfig(lr=3e-3, weight_decay=0.0),
        dtype=dtype,
    )
    examples = [
        Example(
            uid=str(number),
            sequences=(
                TokenSequence(
                    token_ids=text.astype(np.int32), loss_mask=np.ones(len(text), np.bool_)
                ),
            ),
        )
        for number, text in enumerate(texts)
    ]
    losses = [trainer.fit(Supervised(), examples)["loss"] for _ in range(30)]
    trainer.close()
    print(f"{dtype}: loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    assert losses[0] > 0.8 * math.log(267)
    assert losses[-1] < 0.5 * losses[0]
