"""Bad input of the offline stages, refused on the login node."""

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_rlhf.compose import compose
from hpc_rlhf.config import Config
from hpc_rlhf.data.tiny import make_tiny_model
from hpc_rlhf.errors import UserError
from hpc_rlhf.planner import preflight

STAGES = ("sft", "reward_model", "dpo")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("offline") / "model", max_positions=64)


def _write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def _record(stage: str, answer: str = "8") -> dict[str, Any]:
    if stage == "sft":
        return {"prompt": "3+5=", "completion": answer}
    return {"prompt": "3+5=", "chosen": answer, "rejected": "9"}


def _config(stage: str, model: Path, data: Path, *overrides: str) -> Config:
    return compose(
        [
            f"experiment={stage}",
            f"model.path={model}",
            f"data.train={data}",
            f"run.root={data.parent / 'runs'}",
            "model.max_sequence_tokens=32",
            "offline.batch_size=2",
            "learner.micro_batch_tokens=32",
            *overrides,
        ]
    )


def _refused(config: Config) -> str:
    def check() -> None:
        preflight.check_settings(config)
        preflight.check(config)

    with pytest.raises(UserError) as caught:
        check()
    return str(caught.value)


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_right(stage: str, model: Path, tmp_path: Path) -> None:
    data = _write(tmp_path / "d.jsonl", _record(stage), _record(stage, "7"))
    config = _config(stage, model, data, f"data.eval={data}")
    preflight.check_settings(config)
    preflight.check(config)


@pytest.mark.parametrize(
    ("stage", "overrides", "message"),
    [
        ("sft", ["sft.loss_mean=constant"], "sft.loss_mean=constant: expected token or sequence"),
        ("sft", ["offline.batch_size=0"], "offline.batch_size=0: must be at least 1"),
        ("sft", ["offline.eval_every_steps=0"], "offline.eval_every_steps=0"),
        ("sft", ["offline.max_skipped_steps=-1"], "offline.max_skipped_steps=-1: must not be"),
        ("reward_model", ["reward_model.centering=-1"], "reward_model.centering=-1"),
        ("dpo", ["dpo.beta=0"], "dpo.beta=0.0: must be greater than 0"),
        ("dpo", ["dpo.loss=conservative"], "dpo.label_smoothing=0.0: the fraction of labels"),
        ("dpo", ["dpo.label_smoothing=0.1"], "needs dpo.loss=conservative"),
        ("dpo", ["model.reference=/nowhere"], "model.reference=/nowhere: no such directory"),
        ("dpo", ["data.eval=/nowhere.jsonl"], "/nowhere.jsonl: no such file"),
        ("sft", ["offline.batch_size=3"], "2 usable records are fewer than one batch"),
        ("sft", ["model.max_sequence_tokens=5"], "d.jsonl:1: 6 tokens, more than"),
        ("sft", ["model.max_sequence_tokens=65"], "a sequence of model.max_sequence_tokens=65"),
        (
            "reward_model",
            ["reward_model.pad_token=x"],
            "reward_model.pad_token='x': not a special token",
        ),
    ],
)
def test_settings_that_cannot_work(
    stage: str, overrides: list[str], message: str, model: Path, tmp_path: Path
) -> None:
    data = _write(tmp_path / "d.jsonl", _record(stage), _record(stage, "7"))
    assert message in _refused(_config(stage, model, data, "data.long_sequences=error", *overrides))


def test_both_answers_must_fit_into_a_micro_batch(model: Path, tmp_path: Path) -> None:
    data = _write(tmp_path / "d.jsonl", _record("dpo"), _record("dpo", "1" * 24))
    message = _refused(_config("dpo", model, data))
    assert "d.jsonl:2: both answers of the pair have 35 tokens" in message
    assert "raise it to at least 35" in message


def test_data_is_needed(model: Path) -> None:
    with pytest.raises(UserError, match=r"missing value: give data\.train=\.\.\."):
        compose(["experiment=sft", f"model.path={model}"])


def test_a_template_is_looked_at_before_the_records(model: Path, tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "m", max_positions=64)
    path = directory / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 2}))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    data = _write(tmp_path / "d.jsonl", {"messages": turns}, {"messages": turns})
    message = _refused(_config("sft", directory, data))
    assert message.startswith(f"{directory}: the chat template ends an answer without an end token")
