"""One mini-batch has one gradient, whatever the packing, micro-batching and layout.

The reference is Hugging Face's model in fp32, one unpadded sequence at a time, under a loss written
from the papers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.distributed import finalize_model_grads

from hpc_rlhf.config import (
    AlgorithmConfig,
    KlConfig,
    LossMean,
    OptimizerConfig,
    ParallelConfig,
    Recompute,
)
from hpc_rlhf.learner.algorithms import Algorithm, make_algorithm
from hpc_rlhf.learner.trainer import Trainer
from hpc_rlhf.types import Experience
from tests.distributed.learner_fixtures import (
    CLIP,
    KL_COEF,
    experience,
    hf_log_probs,
    hf_loss,
    hf_model,
    make_trainer,
    rollouts,
    whole_tensors,
)
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed

MICRO_BATCH_TOKENS = (20, 48, 4096)  # one sequence each, some, all in one
NO_STEP = OptimizerConfig(lr=0.0, clip_grad=0.0)


@dataclass(frozen=True)
class Reference:
    directory: Path
    experience: Experience
    losses: dict[LossMean, float]
    gradients: dict[LossMean, dict[str, torch.Tensor]]
    norms: dict[LossMean, float]
    log_probs: list[torch.Tensor]
    entropy: float  # token mean


def _algorithm(loss_mean: LossMean) -> Algorithm:
    return make_algorithm(
        AlgorithmConfig(
            clip_low=CLIP[0], clip_high=CLIP[1], loss_mean=loss_mean, kl=KlConfig(coef=KL_COEF)
        )
    )


@pytest.fixture(scope="module")
def reference(tiny_models: dict[str, Path]) -> Reference:
    directory = tiny_models["qwen3"]  # tied embeddings and q/k norms: the hardest to get right
    batch = experience(directory)
    model = hf_model(directory)
    losses, gradients = {}, {}
    for loss_mean in LossMean:
        advantages = [float(a[0]) for a in _algorithm(loss_mean).advantages(batch)]
        model.zero_grad()
        loss = hf_loss(model, batch, advantages, loss_mean)
        loss.backward()
        losses[loss_mean] = loss.item()
        gradients[loss_mean] = {n: p.grad.clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        swept = [hf_log_probs(model, r) for r in batch.rollouts]
    return Reference(
        directory=directory,
        experience=batch,
        losses=losses,
        gradients=gradients,
        norms={m: _norm(g) for m, g in gradients.items()},
        log_probs=[lp for lp, _ in swept],
        entropy=torch.cat([e for _, e in swept]).mean().item(),
    )


def _keep_whole_gradients(trainer: Trainer) -> None:
    """Reduce gradients to every data-parallel rank instead of scattering them."""

    def finalize(model: Any, num_tokens: Any = None, **groups: Any) -> None:
        finalize_model_grads(model, None, **(groups | {"force_all_reduce": True}))

    trainer.model.config.finalize_model_grads_func = finalize


def _relative_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest over tensors of |found - expected| / |expected| (L2)."""
    return max(((found[n] - expected[n]).norm() / expected[n].norm()).item() for n in found)


def _norm(tensors: dict[str, torch.Tensor]) -> float:
    return torch.cat([t.flatten() for t in tensors.values()]).double().norm().item()


LAYOUTS = [
    pytest.param(ParallelConfig(tensor=tp, pipeline=pp, sequence=sp), dp, id=f"{tp}x{pp}x{dp}{s}")
    for tp, pp, dp, sp, s in [
        (1, 1, 1, False, ""),
        (2, 1, 1, False, ""),
        (1, 2, 1, False, ""),
        (2, 2, 1, False, ""),
        (1, 1, 2, False, ""),
        (2, 1, 2, False, ""),
        (1, 2, 2, False, ""),
        (2, 2, 2, False, ""),
        (2, 1, 1, True, "-sequence"),
        (2, 2, 1, True, "-sequence"),
    ]
]


@pytest.mark.parametrize(("parallel", "dp"), LAYOUTS)
def test_gradient_does_not_depend_on_the_layout(
    reference: Reference, parallel: ParallelConfig, dp: int
) -> None:
    def measure() -> list[tuple[LossMean, dict[str, float], float]]:
        return list(_measure(reference, parallel))

    ranks = run_ranks(measure, parallel.tensor * parallel.pipeline * dp)
    for rank, measured in enumerate(ranks):
        for loss_mean, stats, gradient_error in measured:
            assert gradient_error <= 1e-5, (rank, loss_mean)
            assert stats["loss"] == pytest.approx(reference.losses[loss_mean], rel=1e-5)
            assert stats["entropy"] == pytest.approx(reference.entropy, rel=1e-5)
            assert stats["grad_norm"] == pytest.approx(reference.norms[loss_mean], rel=1e-5)
        assert [m[1] for m in measured] == [m[1] for m in ranks[0]], "ranks report different stats"


def _measure(
    reference: Reference, parallel: ParallelConfig
) -> Iterator[tuple[LossMean, dict[str, float], float]]:
    trainer = make_trainer(reference.directory, parallel, optimizer=NO_STEP)
    _keep_whole_gradients(trainer)
    cases = [(LossMean.SEQUENCE, size) for size in MICRO_BATCH_TOKENS]
    cases += [(LossMean.TOKEN, 48), (LossMean.CONSTANT, 48)]
    for loss_mean, micro_batch_tokens in cases:
        trainer.micro_batch_tokens = micro_batch_tokens
        stats = trainer.update(_algorithm(loss_mean), reference.experience)
        gradients = whole_tensors(trainer.model, lambda p: p.main_grad)
        yield loss_mean, stats, _relative_error(gradients, reference.gradients[loss_mean])


def test_recomputation_does_not_change_the_gradient(reference: Reference) -> None:
    def measure(recompute: Recompute) -> float:
        trainer = make_trainer(
            reference.directory, ParallelConfig(tensor=2), optimizer=NO_STEP, recompute=recompute
        )
        _keep_whole_gradients(trainer)
        trainer.update(_algorithm(LossMean.TOKEN), reference.experience)
        gradients = whole_tensors(trainer.model, lambda p: p.main_grad)
        return _relative_error(gradients, reference.gradients[LossMean.TOKEN])

    for recompute in (Recompute.FULL, Recompute.SELECTIVE):
        assert max(run_ranks(measure, 2, recompute)) <= 1e-5


@pytest.mark.parametrize(("parallel", "dp"), LAYOUTS[3:5] + LAYOUTS[-1:])
def test_log_probs_sweep(reference: Reference, parallel: ParallelConfig, dp: int) -> None:
    """Log-probs of every completion, in rollout order, on every rank."""
    samples = reference.experience.rollouts

    def sweep() -> tuple[Any, ...]:
        trainer = make_trainer(reference.directory, parallel)
        return trainer.log_probs(samples), trainer.log_probs(samples[:1], model=trainer.model)

    for found, (first,) in run_ranks(sweep, parallel.tensor * parallel.pipeline * dp):
        assert len(found) == len(samples)
        for ours, expected in zip(found, reference.log_probs, strict=True):
            torch.testing.assert_close(torch.from_numpy(ours), expected, atol=2e-5, rtol=0)
        expected = reference.log_probs[0]
        torch.testing.assert_close(torch.from_numpy(first), expected, atol=2e-5, rtol=0)


def test_rollouts_are_long_enough_to_be_alone() -> None:
    """The smallest micro-batch of these tests holds one sequence each, as they claim."""
    lengths = [len(r.token_ids) - 1 for r in rollouts()]
    assert 2 * min(lengths) > MICRO_BATCH_TOKENS[0] >= max(lengths)
