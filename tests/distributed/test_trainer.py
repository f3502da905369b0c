"""Optimizer steps against torch's AdamW, and what the trainer does when something is not finite."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpc_rlhf.config import (
    AlgorithmConfig,
    KlConfig,
    LearnerConfig,
    LossMean,
    OptimizerConfig,
    ParallelConfig,
)
from hpc_rlhf.errors import ComponentError
from hpc_rlhf.learner.algorithms import Algorithm, make_algorithm
from hpc_rlhf.learner.objectives import Supervised
from hpc_rlhf.learner.trainer import Trainer
from hpc_rlhf.models.megatron import build_model, load_hf
from hpc_rlhf.types import Completion, Example, Experience, TokenSequence
from tests.distributed.adamw import ADAM, TOTAL_STEPS, adamw_steps, grpo, learning_rate, select
from tests.distributed.learner_fixtures import (
    CLIP,
    KL_COEF,
    TEMPERATURE,
    experience,
    hf_model,
    log_probs,
    make_trainer,
    update,
    whole_tensors,
)
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed


def _algorithm(**options: Any) -> Algorithm:
    return make_algorithm(
        AlgorithmConfig(
            clip_low=CLIP[0],
            clip_high=CLIP[1],
            loss_mean=LossMean.TOKEN,
            kl=KlConfig(coef=KL_COEF),
            **options,
        )
    )


@pytest.fixture(scope="module")
def batch(tiny_models: dict[str, Path]) -> Experience:
    return experience(tiny_models["qwen2-tied"])  # tied, with biases


def test_steps_are_those_of_adamw(tiny_models: dict[str, Path], batch: Experience) -> None:
    """Two epochs of two mini-batches: clipping, decay (not of norms and biases), LR schedule."""
    directory = tiny_models["qwen2-tied"]
    expected = adamw_steps(directory, batch)

    def learn(parallel: ParallelConfig) -> tuple[dict[str, float], dict[str, torch.Tensor], int]:
        trainer = make_trainer(directory, parallel, optimizer=ADAM, total_steps=TOTAL_STEPS)
        stats = update(trainer, grpo(), batch)
        return stats, whole_tensors(trainer.model), trainer.num_steps

    for parallel, dp in [
        (ParallelConfig(), 2),
        (ParallelConfig(tensor=2, pipeline=2, sequence=True), 1),
        (ParallelConfig(pipeline=2), 2),
    ]:
        for stats, weights, num_steps in run_ranks(
            learn, parallel.tensor * parallel.pipeline * dp, parallel
        ):
            assert num_steps == 4
            assert stats["lr"] == pytest.approx(learning_rate(3))
            assert stats["grad_norm"] == pytest.approx(np.mean(expected.norms), rel=1e-4)
            assert stats["tokens"] == 2 * sum(len(r.token_ids) - 1 for r in batch.rollouts)
            for name, weight in weights.items():
                torch.testing.assert_close(weight, expected.weights[name], atol=5e-6, rtol=0)


def test_a_loss_that_is_not_finite_names_the_sample_and_changes_nothing(
    tiny_models: dict[str, Path], batch: Experience
) -> None:
    old = [lp.copy() for lp in batch.old_logprobs]
    old[5][2] = np.nan
    broken = dataclasses.replace(batch, old_logprobs=tuple(old))

    def learn() -> tuple[str, bool]:
        trainer = make_trainer(tiny_models["qwen2-tied"], ParallelConfig(tensor=2))
        before = whole_tensors(trainer.model)
        with pytest.raises(ComponentError) as raised:
            update(trainer, _algorithm(), broken)
        after = whole_tensors(trainer.model)
        return str(raised.value), all(torch.equal(after[n], before[n]) for n in before)

    for message, unchanged in run_ranks(learn, 4):  # on every rank, of both data-parallel ones
        assert "optimizer step 0: loss is nan; samples: p1#1. " in message
        assert unchanged


def test_a_gradient_that_is_not_finite_stops_before_the_step(
    tiny_models: dict[str, Path], batch: Experience
) -> None:
    def learn() -> str:
        trainer = make_trainer(tiny_models["qwen2-tied"], ParallelConfig())
        weight = trainer.model.decoder.final_layernorm.weight
        weight.register_hook(lambda gradient: gradient * math.inf)
        with pytest.raises(ComponentError) as raised:
            update(trainer, _algorithm(), batch)
        assert trainer.num_steps == 0
        return str(raised.value)

    (message,) = run_ranks(learn, 1)
    assert "gradient norm is" in message
    assert "p0#0" in message
    assert "and 4 more" in message


def test_nothing_to_learn_is_an_error_and_empty_completions_are_not(
    tiny_models: dict[str, Path], batch: Experience
) -> None:
    """Completions without a token have no loss, and log-probs of their own length."""
    nothing = Completion(
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        finish_reason="abort",
        versions=(),
        seed=0,
    )
    rollouts = list(batch.rollouts)
    rollouts[3] = dataclasses.replace(rollouts[3], completion=nothing)

    def learn() -> dict[str, float]:
        trainer = make_trainer(tiny_models["qwen2-tied"], ParallelConfig())
        swept = log_probs(trainer, rollouts)
        assert [len(lp) for lp in swept] == [len(r.completion.token_ids) for r in rollouts]
        partly = Experience(
            rollouts=tuple(rollouts),
            rewards=batch.rewards,
            old_logprobs=swept,
            ref_logprobs=None,
        )
        stats = update(trainer, _algorithm(), dataclasses.replace(partly, ref_logprobs=swept))
        with pytest.raises(ComponentError, match="no rollouts"):
            update(trainer, _algorithm(), select(batch, np.zeros(0, np.int64)))
        with pytest.raises(ValueError, match="needs reference log-probs"):
            update(trainer, _algorithm(), partly)
        with pytest.raises(ComponentError, match="none of the sequences has a token"):
            _sft_step(trainer, [(np.array([1, 2]), np.array([True, False]))])
        return stats

    (stats,) = run_ranks(learn, 1)
    assert stats["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert stats["kl"] == pytest.approx(0.0, abs=1e-9)


def _sft_step(trainer: Trainer, sequences: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    examples = [
        Example(uid=str(i), sequences=(TokenSequence(ids, mask),))
        for i, (ids, mask) in enumerate(sequences)
    ]
    return trainer.fit(Supervised(), examples)


def _hf_sft_loss(model: torch.nn.Module, sequences: list[tuple[np.ndarray, np.ndarray]]) -> Any:
    """Token mean of the negative log-likelihood, one sequence at a time."""
    losses = []
    for ids, mask in sequences:
        tokens = torch.from_numpy(ids.astype(np.int64))
        table = (model(tokens[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        losses.append(-table.gather(1, tokens[1:, None])[:, 0][torch.from_numpy(mask[1:])])
    return torch.cat(losses).mean()


def test_fewer_sequences_than_data_parallel_ranks(
    tiny_models: dict[str, Path], batch: Experience
) -> None:
    """The rank without a sequence takes part with an empty micro-batch and adds nothing."""
    directory = tiny_models["qwen2-tied"]
    ids = batch.rollouts[0].token_ids
    sequences = [(ids, np.arange(len(ids)) >= 5)]
    reference = hf_model(directory)
    loss = _hf_sft_loss(reference, sequences)
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in reference.parameters()]).double().norm().item()

    def learn(parallel: ParallelConfig) -> dict[str, float]:
        return _sft_step(make_trainer(directory, parallel), sequences)

    for parallel in (ParallelConfig(pipeline=2), ParallelConfig(tensor=2, sequence=True)):
        for stats in run_ranks(learn, 4, parallel):
            assert stats["loss"] == pytest.approx(loss.item(), rel=1e-5)
            assert stats["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_supervised_steps(tiny_models: dict[str, Path], batch: Experience) -> None:
    """The first loss is the cross-entropy of Hugging Face's model; repeating drives it down."""
    directory = tiny_models["qwen2-tied"]
    sequences = [
        (r.token_ids, np.arange(len(r.token_ids)) >= len(r.prompt.token_ids))
        for r in batch.rollouts[:6]
    ]
    expected = _hf_sft_loss(hf_model(directory), sequences).item()

    def learn() -> list[float]:
        adam = OptimizerConfig(lr=3e-3)
        trainer = make_trainer(directory, ParallelConfig(pipeline=2), optimizer=adam)
        return [_sft_step(trainer, sequences)["loss"] for _ in range(8)]

    ranks = run_ranks(learn, 4)
    assert ranks[0][0] == pytest.approx(expected, rel=1e-5)
    assert ranks[0][-1] < 0.7 * ranks[0][0]
    assert all(losses == ranks[0] for losses in ranks)


def test_bfloat16_steps_accumulate_in_float32_master_weights(
    tiny_models: dict[str, Path], batch: Experience
) -> None:
    """Updates too small for a bfloat16 weight are kept, in the state that checkpoints save."""
    directory = tiny_models["qwen2-tied"]

    def masters(trainer: Trainer) -> dict[Any, torch.Tensor]:
        state = trainer.sharded_state_dict(is_loading=False)["optimizer"]["adam"]["param_state"]
        return {
            (index, number): piece.data.clone()
            for index, tensors in state.items()
            for number, piece in enumerate(tensors["param"])
        }

    def moved(now: dict[Any, torch.Tensor], before: dict[Any, torch.Tensor]) -> float:
        """Fraction of numbers that changed."""
        assert now.keys() == before.keys()
        changed = sum(int((now[key] != before[key]).sum()) for key in now)
        return changed / sum(t.numel() for t in now.values())

    def learn() -> tuple[dict[str, float], float, float, float]:
        trainer = make_trainer(
            directory,
            ParallelConfig(tensor=2, pipeline=2, sequence=True),
            optimizer=OptimizerConfig(lr=1e-7),
            dtype=torch.bfloat16,
        )
        swept = zip(log_probs(trainer, batch.rollouts), reference, strict=True)
        gap = max(float(np.abs(a - b).max()) for a, b in swept)
        weights, before = whole_tensors(trainer.model), masters(trainer)
        stats = update(trainer, _algorithm(), batch)
        assert next(trainer.model.parameters()).dtype == torch.bfloat16
        weights_moved = moved(whole_tensors(trainer.model), weights)
        return stats, gap, weights_moved, moved(masters(trainer), before)

    def sweep() -> Any:
        return log_probs(make_trainer(directory, ParallelConfig()), batch.rollouts)

    (reference,) = run_ranks(sweep, 1)
    for stats, gap, weights_moved, masters_moved in run_ranks(learn, 4):
        assert 0.0 < gap < 0.5
        assert all(math.isfinite(value) for value in stats.values())
        assert masters_moved > 0.5
        assert weights_moved < 0.05


def test_trainers_follow_each_other_in_one_process(
    tiny_models: dict[str, Path], batch: Experience
) -> None:
    """A closed trainer leaves its model readable and nothing behind that the next one notices."""
    directory = tiny_models["qwen2-tied"]

    def alone() -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        trainer = make_trainer(directory, ParallelConfig(), optimizer=ADAM)
        return update(trainer, _algorithm(), batch), whole_tensors(trainer.model)

    def after_another() -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        first = make_trainer(directory, ParallelConfig(), optimizer=OptimizerConfig(lr=1e-2))
        _sft_step(first, [(np.array([5, 6, 7]), np.array([False, True, True]))])
        before = whole_tensors(first.model)
        first.close()
        assert all(torch.equal(t, before[n]) for n, t in whole_tensors(first.model).items())
        model = build_model(first.model.spec, ParallelConfig(), dtype=torch.float32)
        load_hf(model, directory)
        second = Trainer(
            model,
            LearnerConfig(optimizer=ADAM, micro_batch_tokens=48, logprob_chunk_tokens=16),
            total_steps=100,
            temperature=TEMPERATURE,
        )
        return update(second, _algorithm(), batch), whole_tensors(model)

    ((stats, weights),) = run_ranks(alone, 1)
    ((stats_after, weights_after),) = run_ranks(after_another, 1)
    assert stats_after == stats
    assert all(torch.equal(weights_after[n], weights[n]) for n in weights)
