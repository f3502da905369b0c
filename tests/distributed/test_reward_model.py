"""Rewards from a co-located reward model, against Hugging Face's sequence classifier."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file

from hpc_rlhf.cluster.control import ControlGroup
from hpc_rlhf.config import DataConfig, LearnerConfig, ParallelConfig, PromptFormat
from hpc_rlhf.data.chat import eos_token_ids, load_tokenizer
from hpc_rlhf.errors import ComponentError
from hpc_rlhf.learner.runner import Runner
from hpc_rlhf.models.hf_layout import HfModelSpec
from hpc_rlhf.models.megatron import build_model, freeze, load_hf
from hpc_rlhf.models.parallel import initialize_model_parallel
from hpc_rlhf.scoring.reward_model import ChatTranslation, RewardModelScorer
from hpc_rlhf.types import Completion, Prompt, Rollout, Scores
from tests.distributed.learner_fixtures import rollouts
from tests.distributed.offline_references import hf_model, reward_directory
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def directory(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reward_directory(tiny_models["qwen3"], tmp_path_factory.mktemp("reward") / "model")


def _scorer(directory: Path, parallel: ParallelConfig, **options: Any) -> RewardModelScorer:
    if not parallel_state.model_parallel_is_initialized():
        initialize_model_parallel(parallel, seed=1, timeout_s=60)
    spec = HfModelSpec.from_directory(directory).with_heads(lm=False, score=True)
    model = build_model(spec, parallel, dtype=torch.float32)
    load_hf(model, directory)
    options = {"max_tokens": 512, "max_failure_fraction": 0.5} | options
    learner = LearnerConfig(parallel=parallel, micro_batch_tokens=48)
    runner = Runner(model, learner)
    return RewardModelScorer(freeze(model), runner, ControlGroup(60.0), **options)


def _expected(directory: Path, sequences: list[np.ndarray]) -> list[float]:
    model = hf_model(directory, scored=True)
    found = []
    with torch.no_grad():
        for ids in sequences:
            hidden = model.model(torch.from_numpy(ids.astype(np.int64))[None]).last_hidden_state
            found.append(float(model.score(hidden)[0, -1, 0]))
    return found


@pytest.mark.parametrize(
    ("parallel", "dp"),
    [
        (ParallelConfig(), 2),
        (ParallelConfig(tensor=2, pipeline=2, sequence=True), 1),
    ],
)
def test_scores_are_hugging_faces(directory: Path, parallel: ParallelConfig, dp: int) -> None:
    samples = rollouts()
    expected = _expected(directory, [r.token_ids for r in samples])

    def score() -> tuple[Scores, dict[str, float]]:
        scorer = _scorer(directory, parallel)
        return scorer.start(samples).result(), scorer.memory()

    for scores, memory in run_ranks(score, parallel.tensor * parallel.pipeline * dp):
        np.testing.assert_allclose(scores.rewards, expected, atol=1e-5)
        assert scores.excluded == {}
        assert memory["memory/reward_parameters_bytes"] > 0


def test_what_cannot_be_scored_is_excluded_and_not_a_zero(directory: Path, tmp_path: Path) -> None:
    samples = rollouts()
    limit = max(len(r.token_ids) for r in samples) - 1
    broken = tmp_path / "broken"
    shutil.copytree(directory, broken)
    weights = load_file(broken / "model.safetensors")
    for name in ("model.norm.weight", "score.weight"):  # finite themselves, and no score is
        weights[name] *= 1e30
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})

    def score() -> tuple[Scores, str]:
        scores = _scorer(directory, ParallelConfig(), max_tokens=limit).start(samples).result()
        scorer = _scorer(broken, ParallelConfig())
        with pytest.raises(ComponentError) as raised:
            scorer.start(samples).result()
        return scores, str(raised.value)

    ((scores, message),) = run_ranks(score, 1)
    longer = [i for i, r in enumerate(samples) if len(r.token_ids) > limit]
    assert list(scores.excluded) == longer
    assert np.isnan(scores.rewards[longer]).all()
    assert np.isfinite(np.delete(scores.rewards, longer)).all()
    assert "could not score 12 of 12 samples" in message
    assert re.search(r"score is (nan|-?inf)", message)


TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("is_chat", [True, False])
def test_another_tokenizer_reads_the_same_text(
    directory: Path, tmp_path: Path, is_chat: bool
) -> None:
    """A completion that was cut has no end token for the reward model either."""
    policy, reward = load_tokenizer(directory), load_tokenizer(directory)
    reward.chat_template = TEMPLATE
    data = DataConfig(prompts="p.jsonl")
    fields: dict[str, Any] = {"prompt": "2+3="}
    if is_chat:
        data = replace(data, format=PromptFormat.MESSAGES)
        fields = {"prompt": [{"role": "user", "content": "2+3="}]}
    translation = ChatTranslation(policy, reward, eos_token_ids(reward, directory), data)

    def sample(finish: Any) -> Rollout:
        ids = policy("5")["input_ids"] + ([policy.eos_token_id] if finish == "stop" else [])
        return Rollout(
            prompt=Prompt(uid="p.jsonl:1", token_ids=np.array([7], np.int32), fields=fields),
            sample_index=0,
            step=1,
            completion=Completion(
                token_ids=np.array(ids, np.int32),
                logprobs=np.zeros(len(ids), np.float32),
                finish_reason=finish,
                versions=(),
                seed=0,
            ),
        )

    found = translation([sample("stop"), sample("length")])
    eos = reward.eos_token
    text = f"<user>2+3={eos}<assistant>5" if is_chat else "2+3=5"
    cut = reward(text, add_special_tokens=False)["input_ids"]
    assert [list(ids) for ids in found] == [[*cut, reward.eos_token_id], cut]

    expected = _expected(directory, [np.array(ids) for ids in found])

    def score() -> Scores:
        mine = translation if torch.distributed.get_rank() == 0 else None
        scorer = _scorer(directory, ParallelConfig(tensor=2), translation=mine)
        return scorer.start([sample("stop"), sample("length")]).result()

    for scores in run_ranks(score, 2):
        np.testing.assert_allclose(scores.rewards, expected, atol=1e-5)
