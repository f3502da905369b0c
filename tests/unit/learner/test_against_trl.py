"""Policy losses and their gradients against TRL's own code, run on the same tensors."""

import importlib
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hpc_rlhf.config import (
    AlgorithmConfig,
    ImportanceWeight,
    KlConfig,
    LossMean,
    OffPolicyConfig,
    Ratio,
)
from hpc_rlhf.learner.actor_critic import lesson_items
from hpc_rlhf.learner.algorithms import Outputs, make_algorithm
from hpc_rlhf.learner.packing import pack
from hpc_rlhf.types import Completion, Experience, Prompt, Rollout

LENGTHS = [5, 2, 7, 1, 4, 3]
MAX_NEW_TOKENS = 11
LOSS_TYPES = {LossMean.TOKEN: "dapo", LossMean.SEQUENCE: "grpo", LossMean.CONSTANT: "dr_grpo"}


@pytest.fixture(scope="module")
def compute_loss() -> Any:
    """``GRPOTrainer._compute_loss``; importing it must not import vLLM, which takes long."""
    with pytest.MonkeyPatch.context() as patch:
        utils = importlib.import_module("trl.import_utils")
        patch.setattr(utils, "is_vllm_available", lambda *args, **kwargs: False)
        from trl.trainer.grpo_trainer import GRPOTrainer
    return GRPOTrainer._compute_loss


@pytest.fixture(scope="module")
def experience() -> Experience:
    rng = np.random.default_rng(0)
    sampler = [-3 * rng.random(n) for n in LENGTHS]
    return Experience(
        rollouts=tuple(
            Rollout(
                prompt=Prompt(uid=f"p{i // 3}", token_ids=np.array([1, 2], np.int32)),
                sample_index=i % 3,
                step=0,
                completion=Completion(
                    token_ids=rng.integers(3, 99, len(lp)).astype(np.int32),
                    logprobs=lp.astype(np.float32),
                    finish_reason="stop",
                    versions=(),
                    seed=i,
                ),
            )
            for i, lp in enumerate(sampler)
        ),
        rewards=rng.random(len(LENGTHS)).astype(np.float32),
        old_logprobs=tuple(_near(rng, lp, 0.5) for lp in sampler),
        ref_logprobs=tuple(_near(rng, lp, 0.4) for lp in sampler),
    )


def _near(rng: np.random.Generator, values: np.ndarray, scale: float) -> np.ndarray:
    return (values + scale * rng.standard_normal(len(values))).astype(np.float32)


def _padded(rows: Any) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.as_tensor(row) for row in rows], True)


def _trl(
    compute_loss: Any,
    experience: Experience,
    new: list[torch.Tensor],
    entropy: list[torch.Tensor],
    advantages: list[float],
    config: AlgorithmConfig,
    **inputs: torch.Tensor,
) -> torch.Tensor:
    """TRL's loss of one batch on one process, without gradient accumulation."""
    mask = _padded([torch.ones(n, dtype=torch.long) for n in LENGTHS])
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (_padded(new), _padded(entropy), None),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=config.ratio.value,
        beta=config.kl.coef,
        loss_type=LOSS_TYPES[config.loss_mean],
        epsilon_low=config.clip_low,
        epsilon_high=config.clip_high,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        use_vllm="importance_sampling_ratio" in inputs,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_NEW_TOKENS,
        _entropy_bonus_enabled=config.entropy_coef != 0,
        use_adaptive_entropy=False,
        entropy_coef=config.entropy_coef,
        _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(
            num_processes=1,
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
            sync_gradients=True,
        ),
    )
    return compute_loss(
        trainer,
        None,
        {
            "prompt_ids": torch.ones(len(LENGTHS), 2, dtype=torch.long),
            "prompt_mask": torch.ones(len(LENGTHS), 2, dtype=torch.long),
            "completion_ids": mask,
            "completion_mask": mask,
            "advantages": torch.tensor(advantages),
            "old_per_token_logps": _padded(experience.old_logprobs),
            "ref_per_token_logps": _padded(experience.ref_logprobs),
            "num_items_in_batch": mask.sum(),
            **inputs,
        },
    )


def _compare(
    compute_loss: Any, experience: Experience, config: AlgorithmConfig, **inputs: torch.Tensor
) -> None:
    rng = np.random.default_rng(1)
    new = [torch.from_numpy(_near(rng, lp, 0.3)).requires_grad_() for lp in experience.old_logprobs]
    entropy = [torch.rand(n).requires_grad_() for n in LENGTHS]
    algorithm = make_algorithm(config, max_new_tokens=MAX_NEW_TOKENS)
    lesson = algorithm.lesson(experience)
    advantages = [float(a[0]) for a in lesson.fields["advantages"]]
    expected = _trl(compute_loss, experience, new, entropy, advantages, config, **inputs)
    leaves = [*new, *entropy] if config.entropy_coef else new
    expected_gradient = torch.cat(torch.autograd.grad(expected, leaves))

    items, _ = lesson_items(
        lesson, experience.rollouts, range(len(LENGTHS)), config.loss_mean, MAX_NEW_TOKENS
    )
    total = torch.zeros(())
    (batches,) = pack(items, max_tokens=10)  # one or two completions each, out of order
    assert len(batches) > 2
    for batch in batches:
        order = [i for i in batch.sequence_index.tolist() if i >= 0]
        prompt = torch.zeros(1)  # the position in the prompt that predicts a token of it
        outputs = Outputs(
            log_probs=torch.cat([t for i in order for t in (prompt, new[i])]),
            entropy=torch.cat([t for i in order for t in (prompt, entropy[i])]),
        )
        total = total + (batch.fields["weight"] * algorithm.token_loss(batch, outputs).loss).sum()
    assert total.item() == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(
        torch.cat(torch.autograd.grad(total, leaves)), expected_gradient, atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("loss_mean", list(LossMean))
def test_grpo_dapo_and_dr_grpo(
    compute_loss: Any, experience: Experience, loss_mean: LossMean
) -> None:
    config = AlgorithmConfig(loss_mean=loss_mean, clip_high=0.28, kl=KlConfig(coef=0.1))
    _compare(compute_loss, experience, config)


@pytest.mark.parametrize("clip", [(0.2, 0.28), (3e-4, 4e-4)])
def test_gspo(compute_loss: Any, experience: Experience, clip: tuple[float, float]) -> None:
    config = AlgorithmConfig(ratio=Ratio.SEQUENCE, clip_low=clip[0], clip_high=clip[1])
    _compare(compute_loss, experience, config)


def test_entropy_bonus(compute_loss: Any, experience: Experience) -> None:
    _compare(compute_loss, experience, AlgorithmConfig(loss_mean=LossMean.TOKEN, entropy_coef=0.05))


@pytest.mark.parametrize("weight", [ImportanceWeight.TOKEN, ImportanceWeight.SEQUENCE])
def test_truncated_importance_sampling(
    compute_loss: Any, experience: Experience, weight: ImportanceWeight
) -> None:
    """With the ratio as TRL's `_generate_and_score_completions` makes it, modes `*_truncate`."""
    old = _padded(experience.old_logprobs)
    difference = old - _padded([r.completion.logprobs for r in experience.rollouts])
    if weight is ImportanceWeight.SEQUENCE:
        difference = difference.sum(dim=-1, keepdim=True)
    ratio = torch.clamp(torch.exp(difference), min=None, max=1.3)
    assert (ratio == 1.3).any()
    assert (ratio < 1.3).any()
    config = AlgorithmConfig(off_policy=OffPolicyConfig(weight=weight, weight_cap=1.3))
    _compare(compute_loss, experience, config, importance_sampling_ratio=ratio)
