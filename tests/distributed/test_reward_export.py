"""A reward model as a Hugging Face directory: the same scores there, and what is loaded from one."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hpc_rlhf.config import LearnerConfig, OptimizerConfig, ParallelConfig
from hpc_rlhf.errors import UserError
from hpc_rlhf.learner.objectives import BradleyTerry
from hpc_rlhf.learner.trainer import Trainer
from hpc_rlhf.models.heads import initial_score_weight
from hpc_rlhf.models.hf_layout import HfModelSpec
from hpc_rlhf.models.megatron import build_model, export_hf, load_hf
from hpc_rlhf.models.parallel import initialize_model_parallel
from tests.distributed.offline_references import pairs
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        ("llama", ParallelConfig(tensor=2)),
        ("qwen2-untied", ParallelConfig(pipeline=2)),
        ("qwen3", ParallelConfig(tensor=2, pipeline=2, sequence=True)),
    ],
)
def test_hugging_face_gives_the_same_scores(
    family: str, parallel: ParallelConfig, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """From a head that was drawn, trained for two steps."""
    source, target = tiny_models[family], tmp_path / "reward_model"
    examples = pairs()

    def train() -> np.ndarray:
        initialize_model_parallel(parallel, seed=1, timeout_s=60)
        spec = HfModelSpec.from_directory(source).with_heads(lm=False, score=True)
        model = build_model(spec, parallel, dtype=torch.float32)
        with pytest.raises(UserError, match=r"tensors are missing: score\.weight"):
            load_hf(model, source)
        load_hf(model, source, new_head=partial(initial_score_weight, seed=3))
        optimizer = OptimizerConfig(lr=1e-3)
        learner = LearnerConfig(parallel=parallel, optimizer=optimizer, micro_batch_tokens=80)
        trainer = Trainer(model, learner, total_steps=10)
        objective = BradleyTerry()
        for _ in range(2):
            trainer.fit(objective, examples)
        export_hf(model, source, target, pad_token=("<pad>", 0))
        scores = trainer.measure(objective, objective.items(examples)).sequences
        assert scores is not None
        load_hf(model, target)  # it is one's own now
        again = trainer.measure(objective, objective.items(examples)).sequences
        assert np.array_equal(again, scores)
        return scores

    ranks = run_ranks(train, parallel.tensor * parallel.pipeline)
    assert all(np.array_equal(scores, ranks[0]) for scores in ranks)

    model = AutoModelForSequenceClassification.from_pretrained(target, dtype=torch.float32)
    name = {"llama": "Llama", "qwen2-untied": "Qwen2", "qwen3": "Qwen3"}[family]
    assert type(model).__name__ == f"{name}ForSequenceClassification"
    assert model.config.num_labels == 1
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer.pad_token_id == model.config.pad_token_id == 0
    inputs = tokenizer.pad(
        {"input_ids": [s.token_ids.tolist() for e in examples for s in e.sequences]},
        return_tensors="pt",
    )
    with torch.no_grad():
        scores = model(**inputs).logits[:, 0].numpy().reshape(-1, 2)
    assert np.abs(scores - ranks[0]).max() <= 1e-5
    assert scores.std() > 0.1


def test_a_head_is_drawn_alike_on_every_rank(tiny_models: dict[str, Path]) -> None:
    def draw(parallel: ParallelConfig, seed: int) -> torch.Tensor:
        initialize_model_parallel(parallel, seed=1, timeout_s=60)
        spec = HfModelSpec.from_directory(tiny_models["llama"]).with_heads(lm=True, score=True)
        model = build_model(spec, parallel, dtype=torch.float32)
        load_hf(model, tiny_models["llama"], new_head=partial(initial_score_weight, seed=seed))
        return model.score_head.weight.detach().clone()

    one, other = run_ranks(draw, 2, ParallelConfig(tensor=2), 3)
    assert torch.equal(one, other)
    (another,) = run_ranks(draw, 1, ParallelConfig(), 4)
    assert not torch.equal(another, one)
    assert one.std().item() == pytest.approx(1 / np.sqrt(65), rel=0.3)


def test_config_of_the_export_is_that_of_a_classifier(tiny_models: dict[str, Path]) -> None:
    config = json.loads((tiny_models["llama"] / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]  # the export changed the copy only
