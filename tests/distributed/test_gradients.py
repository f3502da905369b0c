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

from hpc_rlhf.config import (
    AlgorithmConfig,
    ImportanceWeight,
    KlConfig,
    LossMean,
    OffPolicyConfig,
    OptimizerConfig,
    ParallelConfig,
    Ratio,
    Recompute,
)
from hpc_rlhf.learner.algorithms import make_algorithm
from hpc_rlhf.types import Experience
from tests.distributed.learner_fixtures import (
    CLIP,
    KL_COEF,
    experience,
    hf_log_probs,
    hf_loss,
    hf_model,
    keep_whole_gradients,
    log_probs,
    make_trainer,
    rollouts,
    update,
    whole_tensors,
)
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed

MICRO_BATCH_TOKENS = (20, 48, 4096)  # one sequence each, some, all in one
NO_STEP = OptimizerConfig(lr=0.0, clip_grad=0.0)


def _config(**options: Any) -> AlgorithmConfig:
    return AlgorithmConfig(clip_low=CLIP[0], clip_high=CLIP[1], **options)


# A loss, and how the reference is asked for the same one.
CASES: dict[str, tuple[AlgorithmConfig, dict[str, Any]]] = {
    **{
        loss_mean.value: (_config(loss_mean=loss_mean, kl=KlConfig(coef=KL_COEF)), {})
        for loss_mean in LossMean
    },
    "gspo": (_config(ratio=Ratio.SEQUENCE), {"sequence_ratio": True, "kl_coef": 0.0}),
    "corrected": (
        _config(
            loss_mean=LossMean.TOKEN,
            entropy_coef=0.05,
            kl=KlConfig(coef=KL_COEF),
            off_policy=OffPolicyConfig(
                weight=ImportanceWeight.TOKEN, weight_cap=1.1, token_bounds=[0.5, 1.4]
            ),
        ),
        {"entropy_coef": 0.05, "weight_cap": 1.1, "bounds": (0.5, 1.4)},
    ),
}


@dataclass(frozen=True)
class Reference:
    directory: Path
    experience: Experience
    losses: dict[str, float]
    gradients: dict[str, dict[str, torch.Tensor]]
    norms: dict[str, float]
    log_probs: list[torch.Tensor]
    entropy: float  # token mean


@pytest.fixture(scope="module")
def reference(tiny_models: dict[str, Path]) -> Reference:
    directory = tiny_models["qwen3"]  # tied embeddings and q/k norms: the hardest to get right
    batch = experience(directory)
    model = hf_model(directory)
    losses, gradients = {}, {}
    for name, (config, options) in CASES.items():
        lesson = make_algorithm(config).lesson(batch)
        advantages = [float(a[0]) for a in lesson.fields["advantages"]]
        model.zero_grad()
        loss = hf_loss(model, batch, advantages, config.loss_mean, **options)
        loss.backward()
        losses[name] = loss.item()
        gradients[name] = {n: p.grad.clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        swept = [hf_log_probs(model, r) for r in batch.rollouts]
    return Reference(
        directory=directory,
        experience=batch,
        losses=losses,
        gradients=gradients,
        norms={name: _norm(g) for name, g in gradients.items()},
        log_probs=[lp for lp, _ in swept],
        entropy=torch.cat([e for _, e in swept]).mean().item(),
    )


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
    def measure() -> list[tuple[str, dict[str, float], float]]:
        return list(_measure(reference, parallel))

    ranks = run_ranks(measure, parallel.tensor * parallel.pipeline * dp)
    for rank, measured in enumerate(ranks):
        for case, stats, gradient_error in measured:
            assert gradient_error <= 1e-5, (rank, case)
            assert stats["loss"] == pytest.approx(reference.losses[case], rel=1e-5, abs=1e-6)
            assert stats["grad_norm"] == pytest.approx(reference.norms[case], rel=1e-5)
            if case == "corrected":
                assert 0.1 < stats["rejected_fraction"] < 0.9, "the case shows nothing"
            else:
                assert stats["entropy"] == pytest.approx(reference.entropy, rel=1e-5)
        assert [m[1] for m in measured] == [m[1] for m in ranks[0]], "ranks report different stats"


def _measure(
    reference: Reference, parallel: ParallelConfig
) -> Iterator[tuple[str, dict[str, float], float]]:
    trainer = make_trainer(reference.directory, parallel, optimizer=NO_STEP)
    keep_whole_gradients(trainer)
    cases = [("sequence", size) for size in MICRO_BATCH_TOKENS]
    cases += [("token", 48), ("constant", 48), ("gspo", 48), ("corrected", 48)]
    for case, micro_batch_tokens in cases:
        trainer.runner.micro_batch_tokens = micro_batch_tokens
        stats = update(trainer, make_algorithm(CASES[case][0]), reference.experience)
        gradients = whole_tensors(trainer.model, lambda p: p.main_grad)
        yield case, stats, _relative_error(gradients, reference.gradients[case])


def test_recomputation_does_not_change_the_gradient(reference: Reference) -> None:
    def measure(recompute: Recompute) -> float:
        trainer = make_trainer(
            reference.directory, ParallelConfig(tensor=2), optimizer=NO_STEP, recompute=recompute
        )
        keep_whole_gradients(trainer)
        update(trainer, make_algorithm(CASES["token"][0]), reference.experience)
        gradients = whole_tensors(trainer.model, lambda p: p.main_grad)
        return _relative_error(gradients, reference.gradients["token"])

    for recompute in (Recompute.FULL, Recompute.SELECTIVE):
        assert max(run_ranks(measure, 2, recompute)) <= 1e-5


@pytest.mark.parametrize(("parallel", "dp"), LAYOUTS[3:5] + LAYOUTS[-1:])
def test_log_probs_sweep(reference: Reference, parallel: ParallelConfig, dp: int) -> None:
    """Log-probs of every completion, in rollout order, on every rank."""
    samples = reference.experience.rollouts

    def sweep() -> tuple[Any, ...]:
        trainer = make_trainer(reference.directory, parallel)
        return log_probs(trainer, samples), log_probs(trainer, samples[:1])

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
