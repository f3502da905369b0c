"""Everything that can be known to fail, before anything is queued or written.

Every refusal is a :class:`~hpc_rlhf.errors.UserError` that names the field or the line, what was
expected, and what to do. Nothing here imports torch.
"""

import re
from pathlib import Path

from hpc_rlhf.config import AlgorithmName, Config, RewardName
from hpc_rlhf.data.chat import check_special_tokens, load_tokenizer
from hpc_rlhf.data.demonstrations import load_demonstrations
from hpc_rlhf.data.prompts import PromptDataset
from hpc_rlhf.errors import UserError
from hpc_rlhf.launch.job_plan import plan_job
from hpc_rlhf.models.hf_layout import HfModelSpec
from hpc_rlhf.scoring.rules import make_rule

# The attention kernel of vLLM's CPU engine is built for these.
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]*")


def check_settings(config: Config) -> None:
    """Check the values of the configuration by themselves; reads no file.

    Raises:
        UserError: the first setting that cannot work.
    """
    _check_numbers(config)
    _check_layout(config)
    _check_algorithm(config)
    _check_engine(config)
    plan_job(config, Path(config.run.root) / config.run.name)
    make_rule(config.reward.name.value, config.reward.pattern, config.reward.function)


def check(config: Config) -> None:
    """Check the model, the tokenizer and every record of the data; a few seconds, most of it imports.

    Raises:
        UserError: the first thing that cannot work.
    """
    directory = Path(config.model.path)
    if not directory.is_dir():
        raise UserError(
            f"model.path={directory}: no such directory; expected a Hugging Face model directory"
        )
    _check_model(config, directory)
    tokenizer = load_tokenizer(directory)
    check_special_tokens(tokenizer, directory)
    dataset = PromptDataset.load(
        config.data, tokenizer, max_sequence_tokens=config.model.max_sequence_tokens
    )
    if len(dataset.prompts) < config.run.prompts_per_step:
        raise UserError(
            f"{config.data.prompts}: {len(dataset.prompts)} usable prompts are fewer than one batch, "
            f"run.prompts_per_step={config.run.prompts_per_step}; lower it or give more prompts"
        )
    if config.reward.name is RewardName.EXACT and config.data.answer_field is None:
        raise UserError("reward.name=exact compares with answers: set data.answer_field")
    if config.warmup.steps:
        assert config.warmup.demonstrations is not None
        load_demonstrations(Path(config.warmup.demonstrations), config.data, tokenizer)


def _check_numbers(config: Config) -> None:
    if not _NAME.fullmatch(config.run.name):
        raise UserError(
            f"run.name={config.run.name!r}: expected a plain directory name of letters, digits and "
            "._=+-; run.root says where it is"
        )
    positive = {
        "run.steps": config.run.steps,
        "run.prompts_per_step": config.run.prompts_per_step,
        "model.max_sequence_tokens": config.model.max_sequence_tokens,
        "learner.micro_batch_tokens": config.learner.micro_batch_tokens,
        "learner.logprob_chunk_tokens": config.learner.logprob_chunk_tokens,
        "learner.collective_timeout_s": config.learner.collective_timeout_s,
        "algorithm.epochs": config.algorithm.epochs,
        "algorithm.mini_batches": config.algorithm.mini_batches,
        "sampling.samples_per_prompt": config.sampling.samples_per_prompt,
        "sampling.max_new_tokens": config.sampling.max_new_tokens,
        "sampling.temperature": config.sampling.temperature,
        "sampling.top_p": config.sampling.top_p,
        "sampler.tensor_parallel": config.sampler.tensor_parallel,
        "sampler.max_concurrency": config.sampler.max_concurrency,
        "sampler.start_timeout_s": config.sampler.start_timeout_s,
        "sampler.request_timeout_s": config.sampler.request_timeout_s,
        "data.max_prompt_tokens": config.data.max_prompt_tokens,
        "reward.timeout_s": config.reward.timeout_s,
        "reward.workers": config.reward.workers,
        "sync.bucket_bytes": config.sync.bucket_bytes,
        "sync.timeout_s": config.sync.timeout_s,
        "sync.attempts": config.sync.attempts,
        "checkpoint.every_steps": config.checkpoint.every_steps,
    }
    for name, value in positive.items():
        if not value > 0:
            raise UserError(f"{name}={value}: must be greater than 0")
    if not config.learner.optimizer.lr > 0:
        raise UserError(
            f"learner.optimizer.lr={config.learner.optimizer.lr}: must be greater than 0, "
            "or nothing is learned"
        )
    if config.sampling.top_p > 1:
        raise UserError(f"sampling.top_p={config.sampling.top_p}: must be at most 1")
    if config.sampling.top_k < 0:
        raise UserError(f"sampling.top_k={config.sampling.top_k}: 0 for all tokens, or a count")
    if config.checkpoint.keep < 0:
        raise UserError(f"checkpoint.keep={config.checkpoint.keep}: 0 keeps all, or a count")
    for name in ("long_prompts", "bad_lines"):
        value = getattr(config.data, name)
        if value not in ("error", "drop"):
            raise UserError(f"data.{name}={value}: expected error or drop")
    if not 0 <= config.reward.max_failure_fraction <= 1:
        raise UserError(
            f"reward.max_failure_fraction={config.reward.max_failure_fraction}: expected 0 to 1"
        )
    if config.warmup.steps < 0:
        raise UserError(f"warmup.steps={config.warmup.steps}: 0 for none, or a count")
    if config.warmup.steps and config.warmup.demonstrations is None:
        raise UserError("warmup.steps needs warmup.demonstrations, a JSONL file")
    if config.warmup.steps and not config.warmup.lr > 0:
        raise UserError(f"warmup.lr={config.warmup.lr}: must be greater than 0")


def _check_layout(config: Config) -> None:
    parallel = config.learner.parallel
    if parallel.tensor < 1 or parallel.pipeline < 1:
        raise UserError(
            f"learner.parallel: tensor={parallel.tensor} pipeline={parallel.pipeline}: "
            "must be at least 1"
        )
    resources = config.cluster.learner
    ranks = resources.nodes * resources.tasks_per_node
    if ranks % (parallel.tensor * parallel.pipeline):
        raise UserError(
            f"cluster.learner: {resources.nodes} nodes x {resources.tasks_per_node} tasks = {ranks} "
            f"learner ranks are not divisible by learner.parallel: tensor x pipeline = "
            f"{parallel.tensor} x {parallel.pipeline}"
        )
    room = config.model.max_sequence_tokens
    if config.learner.micro_batch_tokens < room:
        raise UserError(
            f"learner.micro_batch_tokens={config.learner.micro_batch_tokens}: a sequence of "
            f"model.max_sequence_tokens={room} must fit into a micro-batch"
        )
    if config.sampling.max_new_tokens >= room:
        raise UserError(
            f"sampling.max_new_tokens={config.sampling.max_new_tokens} leaves no room for a prompt in "
            f"model.max_sequence_tokens={room}"
        )


def _check_algorithm(config: Config) -> None:
    groups = config.algorithm.name in (AlgorithmName.GRPO, AlgorithmName.RLOO)
    if groups and config.sampling.samples_per_prompt < 2:
        raise UserError(
            f"sampling.samples_per_prompt={config.sampling.samples_per_prompt}: "
            f"{config.algorithm.name} compares the samples of a prompt, so it needs at least 2"
        )
    kl = config.algorithm.kl
    if kl.coef < 0:
        raise UserError(f"algorithm.kl.coef={kl.coef}: must not be negative")
    if config.model.reference is not None:
        reference = Path(config.model.reference)
        if not reference.is_dir():
            raise UserError(f"model.reference={reference}: no such directory")
        if kl.coef == 0:
            raise UserError("model.reference is given, but algorithm.kl.coef=0 holds no reference")


def _check_engine(config: Config) -> None:
    if config.cluster.sampler.gpus_per_node == 0 and config.sampler.kv_cache_bytes is None:
        raise UserError(
            "sampler.kv_cache_bytes: needed on a CPU, where vLLM would otherwise take nearly all "
            "memory of the node; set it to the bytes that the KV cache may use"
        )


def _check_model(config: Config, directory: Path) -> None:
    spec = HfModelSpec.from_directory(directory)
    spec.check_parallel(config.learner.parallel.tensor, config.learner.parallel.pipeline)
    if not any(directory.glob("*.safetensors")):
        raise UserError(f"model.path={directory}: no *.safetensors file there")
    if config.model.max_sequence_tokens > spec.max_positions:
        raise UserError(
            f"model.max_sequence_tokens={config.model.max_sequence_tokens}: the model's context is "
            f"{spec.max_positions} tokens ({spec.source})"
        )
    if spec.num_heads % config.sampler.tensor_parallel:
        raise UserError(
            f"sampler.tensor_parallel={config.sampler.tensor_parallel}: the model has "
            f"{spec.num_heads} heads, not divisible by it"
        )
    if config.cluster.sampler.gpus_per_node == 0 and spec.head_dim not in CPU_HEAD_DIMS:
        raise UserError(
            f"{spec.source}: head size {spec.head_dim}; the CPU engine runs "
            f"{', '.join(map(str, CPU_HEAD_DIMS))}. Ask for GPUs: cluster.sampler.gpus_per_node"
        )
    if config.model.reference is not None:
        HfModelSpec.from_directory(config.model.reference)
