"""Offline losses on a GPU against plain torch on the CPU, and a score head under bfloat16."""

from pathlib import Path

import pytest
import torch

from hpc_rlhf.config import LearnerConfig, OptimizerConfig, ParallelConfig
from hpc_rlhf.learner.trainer import Trainer
from hpc_rlhf.models.hf_layout import HfModelSpec
from hpc_rlhf.models.megatron import build_model, load_hf
from tests.distributed.learner_fixtures import keep_whole_gradients, whole_tensors
from tests.distributed.offline_references import (
    OBJECTIVES,
    examples_of,
    gradients,
    hf_model,
    is_scored,
    plain_loss,
    relative_error,
    reward_directory,
)

pytestmark = pytest.mark.gpu

BOUND = 1e-4  # other kernels sum in another order


@pytest.fixture(scope="module")
def directories(
    tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[bool, Path]:
    """By whether it is a reward model."""
    policy = tiny_models["qwen3"]
    return {False: policy, True: reward_directory(policy, tmp_path_factory.mktemp("r") / "model")}


def _trainer(directory: Path, *, scored: bool, dtype: torch.dtype, lr: float) -> Trainer:
    spec = HfModelSpec.from_directory(directory).with_heads(lm=not scored, score=scored)
    model = build_model(spec, ParallelConfig(), dtype=dtype)
    load_hf(model, directory)
    learner = LearnerConfig(optimizer=OptimizerConfig(lr=lr, clip_grad=0.0), micro_batch_tokens=100)
    return Trainer(model, learner, total_steps=100)


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_losses_are_those_of_plain_torch_on_the_cpu(
    name: str, directories: dict[bool, Path]
) -> None:
    directory, examples = directories[is_scored(name)], examples_of(name)
    reference = hf_model(directory, scored=is_scored(name))
    loss, expected = gradients(lambda: plain_loss(name, reference), reference)
    trainer = _trainer(directory, scored=is_scored(name), dtype=torch.float32, lr=0.0)
    keep_whole_gradients(trainer)
    assert trainer.evaluate(OBJECTIVES[name], examples)["loss"] == pytest.approx(loss, rel=BOUND)
    assert trainer.fit(OBJECTIVES[name], examples)["loss"] == pytest.approx(loss, rel=BOUND)
    found = {n: t.cpu() for n, t in whole_tensors(trainer.model, lambda p: p.main_grad).items()}
    trainer.close()
    assert relative_error(found, expected) <= BOUND


@pytest.mark.parametrize("name", ["reward-margin-centred", "dpo"])
def test_pairs_are_learned_in_bfloat16(name: str, directories: dict[bool, Path]) -> None:
    trainer = _trainer(
        directories[is_scored(name)], scored=is_scored(name), dtype=torch.bfloat16, lr=1e-3
    )
    examples = examples_of(name)
    stats = [trainer.fit(OBJECTIVES[name], examples) for _ in range(20)]
    trainer.close()
    print(f"{name}: loss {stats[0]['loss']:.3f} -> {stats[-1]['loss']:.3f}")
    assert stats[-1]["loss"] < 0.5 * stats[0]["loss"]
    assert stats[-1]["pair/accuracy"] == 1.0
