"""Every bad input is one message with the place, what was expected and what to do."""

import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from hpc_rlhf import cli
from hpc_rlhf.compose import compose
from hpc_rlhf.config import (
    AlgorithmName,
    Config,
    CriticKind,
    ImportanceWeight,
    PromptFormat,
    Proximal,
    RewardName,
)
from hpc_rlhf.data.quickstart import prepare
from hpc_rlhf.data.tiny import make_tiny_model
from hpc_rlhf.errors import ExitCode, UserError
from hpc_rlhf.planner import preflight


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Config:
    root = tmp_path_factory.mktemp("runs")
    config = compose(["experiment=quickstart", f"run.root={root}"])
    assert config.assets is not None
    prepare(config.assets)
    return config


def _changed(config: Config, changes: dict[str, Any]) -> Config:
    """A copy with fields set by their dotted names."""
    config = copy.deepcopy(config)
    for name, value in changes.items():
        *parents, leaf = name.split(".")
        owner: Any = config
        for parent in parents:
            owner = getattr(owner, parent)
        assert hasattr(owner, leaf), name
        setattr(owner, leaf, value)
    return config


def _refused(check: Callable[[Config], None], config: Config) -> str:
    with pytest.raises(UserError) as caught:
        check(config)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("cluster", ["local", "slurm", "slurm_steps"])
def test_the_quickstart_passes_on_every_cluster(cluster: str, good: Config) -> None:
    config = compose(["experiment=quickstart", f"cluster={cluster}", f"run.root={good.run.root}"])
    preflight.check_settings(config)
    preflight.check(config)


def test_a_bigger_data_set_is_checked_in_seconds(good: Config, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    record = json.dumps({"prompt": "3+5=" * 3, "answer": "8"}) + "\n"
    path.write_text(record * 20_000)
    began = time.process_time()
    preflight.check(_changed(good, {"data.prompts": str(path)}))
    assert time.process_time() - began < 20


PPO: dict[str, Any] = {"algorithm.name": AlgorithmName.PPO}

SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"run.name": "a/b"}, "run.name='a/b': expected a plain directory name"),
    ({"run.name": ""}, "run.name=''"),
    ({"run.name": ".."}, "run.name='..'"),
    ({"run.steps": 0}, "run.steps=0: must be at least 1"),
    ({"run.prompts_per_step": 0}, "run.prompts_per_step=0: must be"),
    ({"run.seed": -1}, "run.seed=-1: must be at least 0 and at most 4294967295"),
    (
        {"learner.optimizer.lr": 0.0},
        "learner.optimizer.lr=0.0: must be greater than 0 and at most 1: with 0 nothing",
    ),
    ({"learner.optimizer.lr": float("nan")}, "learner.optimizer.lr=nan"),
    ({"learner.optimizer.clip_grad": -1.0}, "learner.optimizer.clip_grad=-1.0: must not be"),
    ({"learner.parallel.tensor": 0}, "tensor=0"),
    ({"learner.parallel.tensor": 4}, "1 nodes x 2 tasks = 2 learner ranks are not divisible by"),
    ({"learner.parallel.pipeline": 2}, "tensor x pipeline = 2 x 2"),
    ({"learner.micro_batch_tokens": 16}, "learner.micro_batch_tokens=16: a sequence of"),
    ({"algorithm.kl.coef": -0.1}, "algorithm.kl.coef=-0.1: must not be negative"),
    ({"algorithm.mini_batches": 129}, "algorithm.mini_batches=129: a step has only 128 samples"),
    ({"sampling.samples_per_prompt": 1}, "grpo compares the samples of a prompt"),
    (
        {"algorithm.name": AlgorithmName.RLOO, "sampling.samples_per_prompt": 1},
        "rloo compares the samples of a prompt, so it needs at least 2",
    ),
    (
        {
            "algorithm.name": AlgorithmName.REINFORCE_PLUS_PLUS,
            "algorithm.group_baseline": True,
            "sampling.samples_per_prompt": 1,
        },
        "reinforce_plus_plus compares the samples of a prompt",
    ),
    ({"algorithm.group_baseline": True}, "grpo has a baseline of its own"),
    ({"algorithm.entropy_coef": -0.1}, "algorithm.entropy_coef=-0.1: must not be negative"),
    (
        {"algorithm.overlong.buffer_fraction": 1.5},
        "algorithm.overlong.buffer_fraction=1.5: must be at least 0 and at most 1: it is",
    ),
    ({"algorithm.overlong.penalty": -1.0}, "algorithm.overlong.penalty=-1.0: must not be"),
    ({"algorithm.kl.target": 0.0}, "algorithm.kl.target=0.0: must be greater than 0"),
    (
        {"algorithm.kl.target": 6.0, "algorithm.kl.coef": 0.0},
        "algorithm.kl.coef=0 stays 0; give it a coefficient to start from",
    ),
    (
        {
            "algorithm.off_policy.proximal": Proximal.SAMPLER,
            "algorithm.off_policy.weight": ImportanceWeight.TOKEN,
        },
        "algorithm.off_policy.weight=token: with proximal=sampler the ratio itself",
    ),
    ({"algorithm.off_policy.weight_cap": 0.5}, "algorithm.off_policy.weight_cap=0.5: must be"),
    (
        {"algorithm.off_policy.token_bounds": [2.0, 0.5]},
        "algorithm.off_policy.token_bounds=[2.0, 0.5]: expected [low, high] of the ratio",
    ),
    ({"algorithm.off_policy.sequence_bounds": [0.5]}, "off_policy.sequence_bounds=[0.5]"),
    ({"algorithm.off_policy.geometric_bounds": [1.1, 1.2]}, "geometric_bounds=[1.1, 1.2]"),
    ({"critic.warmup_steps": 2}, "critic.warmup_steps: algorithm.name=grpo has no critic"),
    ({"critic.path": "/nowhere"}, "critic.path: algorithm.name=grpo has no critic"),
    ({**PPO, "critic.path": "/nowhere"}, "critic.path: with critic.kind=shared the critic is"),
    (
        {**PPO, "critic.kind": CriticKind.SEPARATE, "critic.optimizer.lr": 0.0},
        "critic.optimizer.lr=0.0: must be greater than 0",
    ),
    ({"critic.parallel.tensor": 2}, "critic.parallel.tensor: algorithm.name=grpo has no critic"),
    (
        {**PPO, "critic.parallel.pipeline": 2},
        "critic.parallel.pipeline: with critic.kind=shared the critic is",
    ),
    (
        {**PPO, "critic.kind": CriticKind.SEPARATE, "critic.parallel.tensor": 4},
        "= 2 learner ranks are not divisible by critic.parallel: tensor x pipeline = 4 x 1",
    ),
    ({**PPO, "critic.coef": 0.0}, "critic.coef=0.0: must be greater than 0: with 0 a shared"),
    ({**PPO, "critic.clip": -0.1}, "critic.clip=-0.1: must not be negative"),
    ({**PPO, "critic.warmup_steps": 40}, "of run.steps=40 none would be left for the policy"),
    (
        {**PPO, "critic.warmup_steps": 2, "learner.optimizer.weight_decay": 0.1},
        "learner.optimizer.weight_decay=0.1 would decay the policy while only its critic learns",
    ),
    ({**PPO, "algorithm.gamma": 1.5}, "algorithm.gamma=1.5: must be greater than 0 and at most 1"),
    ({**PPO, "algorithm.lam": -0.1}, "algorithm.lam=-0.1: must be at least 0 and at most 1"),
    ({"algorithm.max_skipped_steps": -1}, "algorithm.max_skipped_steps=-1: must not be negative"),
    ({**PPO, "algorithm.resampling_rounds": 1}, "with algorithm.name=ppo samples of equal reward"),
    ({"reward.name": RewardName.MODEL}, "reward.name=model needs reward.model"),
    ({"reward.model": "/nowhere"}, "are of reward.name=model, and it is exact"),
    ({"algorithm.off_policy.stop_kl": 0.01}, "stop_kl=0.01: must be at least warn_kl=0.1"),
    ({"sampling.temperature": 0.0}, "sampling.temperature=0.0: must be greater than 0"),
    ({"sampling.top_p": 1.5}, "sampling.top_p=1.5: must be greater than 0 and at most 1"),
    ({"sampling.top_k": -1}, "sampling.top_k=-1"),
    ({"sampling.max_new_tokens": 32}, "sampling.max_new_tokens=32 leaves no room for a prompt"),
    ({"sampler.kv_cache_bytes": None}, "sampler.kv_cache_bytes: needed on a CPU"),
    ({"data.long_prompts": "cut"}, "data.long_prompts=cut: expected error or drop"),
    ({"data.bad_lines": "skip"}, "data.bad_lines=skip: expected error or drop"),
    ({"data.answer_pattern": "("}, "data.answer_pattern='(': not a regular expression"),
    ({"data.answer_pattern": "#### .*"}, "has no group; put parentheses around"),
    ({"data.answer_field": None}, "data.answer_field=null: reward.name=exact compares"),
    ({"data.system": "be brief"}, "data.system: a system message needs data.chat_template=true"),
    ({"data.add_bos": True, "data.chat_template": True}, "puts its own BOS in front"),
    ({"reward.pattern": "("}, "reward.pattern='(': not a regular expression"),
    ({"reward.pattern": "[0-9]+"}, "reward.pattern='[0-9]+': has no group; put parentheses"),
    (
        {"learner.optimizer.lr": 1e-6, "learner.optimizer.min_lr": 1e-5},
        "learner.optimizer.min_lr=1e-05: where the learning rate ends, must not be greater than lr",
    ),
    # the layout follows from the nodes, and is not what is wrong
    ({"cluster.learner.nodes": 0, "learner.parallel.pipeline": 0}, "cluster.learner.nodes=0: must"),
    ({"cluster.time_min": 1}, "cluster.signal_delay_s=120: so long before the end"),
    ({"reward.name": RewardName.REGEX}, "reward.name=regex needs reward.pattern"),
    ({"reward.name": RewardName.PYTHON}, "reward.name=python needs reward.function"),
    (
        {"reward.name": RewardName.PYTHON, "reward.function": "no.such:reward"},
        "reward.function=no.such:reward: cannot import it: ModuleNotFoundError",
    ),
    ({"reward.timeout_s": 0.0}, "reward.timeout_s=0.0: must be greater than 0"),
    (
        {"reward.max_failure_fraction": 1.5},
        "reward.max_failure_fraction=1.5: must be at least 0 and at most 1",
    ),
    ({"warmup.demonstrations": None}, "warmup.steps needs warmup.demonstrations"),
    ({"warmup.lr": 0.0}, "warmup.lr=0.0: must be greater than 0"),
    ({"checkpoint.keep": 0}, "checkpoint.keep=0: must be at least 1: a run resumes from one; null"),
    (
        {"learner.parallel.tensor": 1, "learner.parallel.sequence": True},
        "learner.parallel.sequence=true: splits sequences over the tensor-parallel ranks",
    ),
    ({"cluster.time_min": 0}, "cluster.time_min=0: must be at least 1"),
    ({"cluster.learner.nodes": 0}, "cluster.learner"),
]


@pytest.mark.parametrize(("changes", "message"), SETTINGS, ids=[str(c) for c, _ in SETTINGS])
def test_settings_that_cannot_work(good: Config, changes: dict[str, Any], message: str) -> None:
    assert message in _refused(preflight.check_settings, _changed(good, changes))


@pytest.mark.parametrize(
    ("sizes", "changes", "message"),
    [
        ({"heads": 3, "head_dim": 32}, {}, "learner.parallel.tensor=2: the model has 3 heads"),
        ({"layers": 3}, {"learner.parallel.pipeline": 2}, "pipeline=2: the model has 3 layers"),
        ({"heads": 4}, {}, "head size 16; the CPU engine runs 32, 64, 80"),
        ({"family": "qwen2", "heads": 4, "head_dim": 32}, {}, "head_dim 32 is not hidden_size"),
        ({"max_positions": 16}, {}, "model.max_sequence_tokens=32: the model's context is 16"),
        ({}, {"sampler.tensor_parallel": 4}, "sampler.tensor_parallel=4: the model has 2 heads"),
        ({}, {"sampling.stop_token_ids": [264]}, "sampling.stop_token_ids: 264 is not in"),
    ],
)
def test_models_that_do_not_fit(
    good: Config, tmp_path: Path, sizes: dict[str, int], changes: dict[str, Any], message: str
) -> None:
    directory = make_tiny_model(tmp_path / "model", **sizes)  # type: ignore[arg-type]
    config = _changed(good, {"model.path": str(directory), **changes})
    assert message in _refused(preflight.check, config)


def test_any_head_size_is_fine_with_gpus(good: Config, tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "model", heads=4)
    config = _changed(good, {"model.path": str(directory), "cluster.sampler.gpus_per_node": 1})
    preflight.check(config)


def test_a_missing_model(good: Config, tmp_path: Path) -> None:
    message = _refused(preflight.check, _changed(good, {"model.path": str(tmp_path / "absent")}))
    assert message.startswith(f"model.path={tmp_path / 'absent'}: no such directory; expected")
    message = _refused(preflight.check, _changed(good, {"model.path": str(tmp_path)}))
    assert "no config.json; expected a Hugging Face model directory" in message


def _edited(good: Config, target: Path, name: str, **entries: Any) -> Config:
    """A configuration whose model has other entries in one of its JSON files; None removes one."""
    make_tiny_model(target)
    path = target / name
    values = json.loads(path.read_text()) | entries
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return _changed(good, {"model.path": str(target)})


def test_an_unknown_family(good: Config, tmp_path: Path) -> None:
    config = _edited(good, tmp_path / "m", "config.json", model_type="mamba")
    message = _refused(preflight.check, config)
    assert "model_type 'mamba' is not supported, only llama, qwen2, qwen3" in message


def test_no_weights(good: Config, tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "m")
    (directory / "model.safetensors").unlink()
    config = _changed(good, {"model.path": str(directory)})
    message = _refused(preflight.check, config)
    assert "neither model.safetensors nor model.safetensors.index.json is there" in message


def test_weights_that_are_not_whole(good: Config, tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "m")
    weights = directory / "model.safetensors"
    size = weights.stat().st_size
    os.truncate(weights, size - 100)
    refused = f"{weights}: truncated: expected {size} bytes by its header, found {size - 100}"
    message = _refused(preflight.check, _changed(good, {"model.path": str(directory)}))
    assert message.startswith(refused)
    message = _refused(preflight.check, _changed(good, {"model.reference": str(directory)}))
    assert message.startswith(refused)


@pytest.mark.parametrize("role", ["pad_token", "eos_token"])
def test_a_tokenizer_without_pad_or_eos(good: Config, tmp_path: Path, role: str) -> None:
    config = _edited(good, tmp_path / "m", "tokenizer_config.json", **{role: None})
    message = _refused(preflight.check, config)
    assert message.startswith(f"{tmp_path / 'm' / 'tokenizer_config.json'}: no {role}: ")
    assert f"set {role} to one of the vocabulary's special tokens" in message


def test_a_tokenizer_without_what_the_data_ask_for(good: Config, tmp_path: Path) -> None:
    config = _edited(good, tmp_path / "a", "tokenizer_config.json", bos_token=None)
    message = _refused(preflight.check, _changed(config, {"data.add_bos": True}))
    assert "data.add_bos=true: the tokenizer of" in message
    config = _edited(good, tmp_path / "b", "tokenizer_config.json", chat_template=None)
    for change in ({"data.chat_template": True}, {"data.format": PromptFormat.MESSAGES}):
        assert "no chat template" in _refused(preflight.check, _changed(config, change))


def test_a_tokenizer_of_another_model(good: Config, tmp_path: Path) -> None:
    config = _edited(good, tmp_path / "m", "config.json", vocab_size=20)
    weights = tmp_path / "m/model.safetensors"
    tensors = load_file(weights)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:20].copy()
    save_file(tensors, weights)
    message = _refused(preflight.check, config)
    assert "the model's vocabulary has 20" in message


def test_missing_prompts(good: Config, tmp_path: Path) -> None:
    config = _changed(good, {"data.prompts": str(tmp_path / "absent.jsonl")})
    assert _refused(preflight.check, config).startswith(
        f"{tmp_path / 'absent.jsonl'}: no such file; expected JSONL or Parquet"
    )


LONG = json.dumps({"prompt": "1+" * 20, "answer": "8"})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "3+5=", "answer": "8"', "as if the line were cut short"),
        ("", "blank line"),
        ("\ufeff{}", "byte order mark"),
        ('{"prompt": "3+5="}', "no key 'answer'"),
        (LONG, "40 tokens, more than data.max_prompt_tokens=16; 1 of 22 prompts are too long"),
    ],
)
def test_bad_prompts_are_named_by_file_and_line(
    good: Config, tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "p.jsonl"
    fine = '{"prompt": "3+5=", "answer": "8"}\n'
    path.write_text(fine * 20 + line + "\n" + fine)
    config = _changed(good, {"data.prompts": str(path)})
    refusal = _refused(preflight.check, config)
    assert refusal.startswith(f"{path}:21: ")
    assert message in refusal
    preflight.check(_changed(config, {"data.bad_lines": "drop", "data.long_prompts": "drop"}))


def test_what_the_data_holds_is_said(good: Config) -> None:
    assert preflight.check(good) == [
        f"data.prompts={good.data.prompts}: 100 prompts, 4 to 4 tokens (median 4)",
        (
            f"warmup.demonstrations={good.warmup.demonstrations}: 2048 demonstrations, "
            "6 to 7 tokens (median 6)"
        ),
    ]


def test_a_cache_for_less_than_one_sequence(good: Config) -> None:
    """The quickstart's model has 2 layers of 4 heads of 32; 32 tokens in float32."""
    needed = 2 * 2 * 4 * 32 * 4 * 32
    preflight.check(_changed(good, {"sampler.kv_cache_bytes": needed}))
    message = _refused(preflight.check, _changed(good, {"sampler.kv_cache_bytes": needed - 1}))
    assert message.startswith(
        f"sampler.kv_cache_bytes={needed - 1}: one sequence of model.max_sequence_tokens=32 needs "
        f"{needed} (keys and values x 2 layers x 4 heads x 32 x 4 bytes a token)"
    )


def test_a_run_that_is_all_warm_up_is_said(good: Config) -> None:
    steps = {"run.steps": 5, "algorithm.mini_batches": 2, "algorithm.epochs": 2}
    name = "learner.optimizer.warmup_steps"
    (note, *_) = preflight.check(_changed(good, {**steps, name: 20}))
    assert note.startswith(f"{name}=20: the run has 20 optimizer steps, so that its learning rate")
    (note, *_) = preflight.check(_changed(good, {**steps, name: 19}))
    assert note.startswith("data.prompts=")


def test_fewer_prompts_than_a_batch(good: Config) -> None:
    message = _refused(preflight.check, _changed(good, {"run.prompts_per_step": 101}))
    assert "100 usable prompts are fewer than one batch, run.prompts_per_step=101" in message


def test_demonstrations(good: Config, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    config = _changed(good, {"warmup.demonstrations": str(path)})
    assert f"{path}: no such file" in _refused(preflight.check, config)
    path.write_text('{"prompt": "3+5=", "completion": "8"}\n{"prompt": "3+5="}\n')
    assert f"{path}:2: no key 'completion'" in _refused(preflight.check, config)
    path.write_text('{"prompt": "3+5=", "completion": "' + "8" * 40 + '"}\n')
    assert f"{path}:1: 45 tokens, more than model.max" in _refused(preflight.check, config)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("model.reference", {}),
        ("critic.path", {**PPO, "critic.kind": CriticKind.SEPARATE}),
        ("reward.model", {"reward.name": RewardName.MODEL}),
    ],
)
def test_models_that_are_not_there(good: Config, name: str, changes: dict[str, Any]) -> None:
    config = _changed(good, {**changes, name: "/nowhere"})
    preflight.check_settings(config)
    assert f"{name}=/nowhere: no such directory" in _refused(preflight.check, config)


def test_the_reference(good: Config, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", vocab_size=300)
    config = _changed(good, {"model.reference": str(other)})
    preflight.check_settings(config)
    assert "a vocabulary of 300, but the policy's has 264" in _refused(preflight.check, config)
    config = _changed(config, {"algorithm.kl.coef": 0.0})
    assert "algorithm.kl.coef=0 holds no reference" in _refused(preflight.check_settings, config)


def _as_classifier(directory: Path) -> Path:
    """Make a tiny model a reward model."""
    path = directory / "config.json"
    entries = json.loads(path.read_text()) | {"architectures": ["LlamaForSequenceClassification"]}
    path.write_text(json.dumps(entries))
    weights = load_file(directory / "model.safetensors")
    weights["score.weight"] = weights.pop("lm_head.weight")[:1].copy()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_the_reward_model(good: Config, tmp_path: Path) -> None:
    def asks(directory: Path, **changes: Any) -> Config:
        reward = {"reward.name": RewardName.MODEL, "reward.model": str(directory)}
        return _changed(good, reward | changes)

    language_model = make_tiny_model(tmp_path / "language_model")
    assert "a language model (" in _refused(preflight.check, asks(language_model))
    preflight.check(asks(language_model), reward_model_to_come=True)
    preflight.check(asks(_as_classifier(language_model)))

    short = _as_classifier(make_tiny_model(tmp_path / "short", max_positions=16))
    refused = _refused(preflight.check, asks(short))
    assert "reward.model: a context of 16 tokens" in refused
    assert "fewer than model.max_sequence_tokens=32" in refused

    other = _as_classifier(make_tiny_model(tmp_path / "other"))
    path = other / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": "{{ messages }}"}))
    assert "set reward.retokenize=true" in _refused(preflight.check, asks(other))
    preflight.check(asks(other, **{"reward.retokenize": True}))


def test_the_critics_model(good: Config, tmp_path: Path) -> None:
    def asks(directory: Path) -> Config:
        critic = {"critic.kind": CriticKind.SEPARATE, "critic.path": str(directory)}
        return _changed(good, PPO | critic)

    preflight.check(asks(make_tiny_model(tmp_path / "good", hidden=128)))
    other = make_tiny_model(tmp_path / "other", vocab_size=300)
    assert "a vocabulary of 300, but the policy's has 264" in _refused(preflight.check, asks(other))
    swapped = make_tiny_model(tmp_path / "swapped")
    path = swapped / "tokenizer.json"
    tokens = json.loads(path.read_text())
    vocabulary = tokens["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    path.write_text(json.dumps(tokens))
    assert "the critic reads the policy's tokens and" in _refused(preflight.check, asks(swapped))
    odd = make_tiny_model(tmp_path / "odd", heads=3, head_dim=32)
    assert "critic.parallel.tensor=2: the model has 3 heads" in _refused(preflight.check, asks(odd))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learner.optimizer.lr=0", "learner.optimizer.lr=0.0: must be greater than 0"),
        ("learner.optimiser.lr=1", "optimiser"),
        ("run.name=a/b", "run.name='a/b'"),
    ],
)
@pytest.mark.parametrize("command", ["run", "submit"])
def test_bad_input_ends_with_code_2_and_nothing_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    override: str,
    message: str,
) -> None:
    root = tmp_path / "runs"
    code = cli.main([command, "experiment=quickstart", f"run.root={root}", override])
    assert code == ExitCode.BAD_INPUT
    captured = capsys.readouterr()
    assert captured.err.startswith("hpc-rlhf: ")
    assert message in captured.err
    assert captured.out == ""
    assert not root.exists()


def test_preflight_does_not_import_torch() -> None:
    code = "import sys, hpc_rlhf.planner.preflight; print('torch' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120
    )
    assert run.stdout.strip() == "False"
