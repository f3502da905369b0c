"""Optimizer steps in plain torch: the reference of the trainer's, on any device."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hpc_rlhf.config import AlgorithmConfig, KlConfig, LossMean, OptimizerConfig, Schedule
from hpc_rlhf.learner.actor_critic import mini_batch_plan
from hpc_rlhf.learner.algorithms import Algorithm, make_algorithm
from hpc_rlhf.types import Experience
from tests.distributed.learner_fixtures import CLIP, KL_COEF, hf_loss, hf_model

ADAM = OptimizerConfig(
    lr=1e-3,
    min_lr=1e-4,
    warmup_steps=1,
    schedule=Schedule.COSINE,
    beta1=0.8,
    beta2=0.9,
    eps=1e-5,  # above the rounding errors of gradients, which Adam would divide by themselves
    weight_decay=0.1,
    clip_grad=0.3,
)
TOTAL_STEPS = 6
EPOCHS = MINI_BATCHES = 2


@dataclass(frozen=True)
class Steps:
    """What EPOCHS x MINI_BATCHES steps of ADAM did, by torch on the CPU."""

    weights: dict[str, torch.Tensor]
    norms: list[float]  # of the gradients, before clipping


def grpo() -> Algorithm:
    """The algorithm whose loss :func:`hf_loss` writes down."""
    return make_algorithm(
        AlgorithmConfig(
            clip_low=CLIP[0],
            clip_high=CLIP[1],
            loss_mean=LossMean.TOKEN,
            kl=KlConfig(coef=KL_COEF),
            epochs=EPOCHS,
            mini_batches=MINI_BATCHES,
        )
    )


def learning_rate(step: int) -> float:
    """Of 0-based ``step``: one warm-up step at half the rate, then the cosine."""
    if step == 0:
        return ADAM.lr / 2
    progress = (step - 1) / (TOTAL_STEPS - 1)
    return ADAM.min_lr + 0.5 * (ADAM.lr - ADAM.min_lr) * (1 + math.cos(math.pi * progress))


def adamw_steps(directory: Path, batch: Experience) -> Steps:
    """Clipping, decay (not of norms and biases) and the schedule, with torch.optim.AdamW."""
    advantages = [float(a[0]) for a in grpo().lesson(batch).fields["advantages"]]
    model = hf_model(directory)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    adamw = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": ADAM.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        betas=(ADAM.beta1, ADAM.beta2),
        eps=ADAM.eps,
    )
    norms = []
    plan = mini_batch_plan(len(batch.rollouts), EPOCHS, MINI_BATCHES, seed=(0, 0))
    for step, indices in enumerate(plan):
        for group in adamw.param_groups:
            group["lr"] = learning_rate(step)
        adamw.zero_grad()
        part, mine = select(batch, indices), [advantages[i] for i in indices]
        hf_loss(model, part, mine, LossMean.TOKEN).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), ADAM.clip_grad).item())
        adamw.step()
    assert min(norms) > ADAM.clip_grad, "the reference never clips: the test shows nothing"
    return Steps({name: p.detach() for name, p in model.named_parameters()}, norms)


def select(batch: Experience, indices: np.ndarray) -> Experience:
    assert batch.ref_logprobs is not None
    return Experience(
        rollouts=tuple(batch.rollouts[i] for i in indices),
        rewards=batch.rewards[indices],
        old_logprobs=tuple(batch.old_logprobs[i] for i in indices),
        ref_logprobs=tuple(batch.ref_logprobs[i] for i in indices),
    )
