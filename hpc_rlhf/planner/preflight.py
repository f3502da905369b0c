"""Everything that can be known to fail, before anything is queued or written.

Every refusal is a :class:`~hpc_rlhf.errors.UserError` that names the field or the line, what was
expected, and what to do. Nothing here imports torch.
"""

import re
from pathlib import Path

from rich.console import Console

from hpc_rlhf.config import Config, DataConfig, DType, PromptFormat, RewardName, Stage
from hpc_rlhf.data.chat import check_chat_template, check_special_tokens, load_tokenizer
from hpc_rlhf.data.prompts import DROP, ERROR, PromptDataset
from hpc_rlhf.data.tokens import describe
from hpc_rlhf.errors import UserError
from hpc_rlhf.launch.job_plan import plan_job
from hpc_rlhf.models.hf_layout import SCORE_WEIGHT, HfModelSpec
from hpc_rlhf.planner import algorithm, offline
from hpc_rlhf.planner.bounds import check_bounds
from hpc_rlhf.planner.weights import check_weights
from hpc_rlhf.runs import open_examples
from hpc_rlhf.scoring.rules import make_rule
from hpc_rlhf.scoring.verifiers import check_reward

# The attention kernel of vLLM's CPU engine is built for these.
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,99}")


def check_settings(config: Config) -> None:
    """Check the values of the configuration by themselves; reads no file.

    Raises:
        UserError: the first setting that cannot work.
    """
    _check_numbers(config)
    _check_data(config.data, config.stage)
    _check_layout(config)
    plan_job(config, Path(config.run.root) / config.run.name)
    if config.stage.is_offline:
        offline.check_settings(config)
        return
    algorithm.check_settings(config)
    _check_engine(config)
    if config.reward.name is RewardName.EXACT and config.data.answer_field is None:
        raise UserError(
            "data.answer_field=null: reward.name=exact compares with answers; name their field"
        )
    if config.reward.name is RewardName.PYTHON:
        # Imported where training will: in a verifier process, and not in this one.
        check_reward(config.reward)
    elif config.reward.name is not RewardName.MODEL:
        make_rule(config.reward.name.value, config.reward.pattern, None)


def check(config: Config, *, reward_model_to_come: bool = False) -> list[str]:
    """Check the model, the tokenizer and every record of the data; a few seconds, most of it imports.

    Args:
        reward_model_to_come: ``reward.model`` is what a reward model will be trained from.

    Returns:
        What the data holds and what was dropped of it, a line each, for the user.

    Raises:
        UserError: the first thing that cannot work.
    """
    directory = Path(config.model.path)
    if not directory.is_dir():
        raise UserError(
            f"model.path={directory}: no such directory; expected a Hugging Face model directory"
        )
    spec = _check_model(config, directory)
    if config.stage.is_offline:
        return [*_notes(config), *offline.check_files(config, directory, spec)]
    algorithm.check_directories(config)
    _check_sampled_model(config, spec)
    tokenizer = load_tokenizer(directory)
    check_special_tokens(tokenizer, directory)
    if config.data.chat_template or config.data.format is PromptFormat.MESSAGES:
        check_chat_template(tokenizer, directory)
    elif config.data.add_bos and tokenizer.bos_token_id is None:
        raise UserError(f"data.add_bos=true: the tokenizer of {directory} has no bos_token")
    with Console(stderr=True).status("") as status:  # shows nothing but on a terminal
        dataset = PromptDataset.load(
            config.data,
            tokenizer,
            max_sequence_tokens=config.model.max_sequence_tokens,
            exact=config.reward.name is RewardName.EXACT,
            progress=lambda line: status.update(f"{config.data.prompts}: {line} prompts checked"),
        )
    if len(dataset) < config.run.prompts_per_step:
        raise UserError(
            f"{config.data.prompts}: {len(dataset)} usable prompts are fewer than one batch, "
            f"run.prompts_per_step={config.run.prompts_per_step}; lower it or give more prompts"
        )
    largest = max(prompt.token_ids.max() for prompt in dataset.prompts)
    if largest >= spec.vocab_size:
        raise UserError(
            f"{directory}: the tokenizer makes token {largest} of {config.data.prompts}, but the "
            f"model's vocabulary has {spec.vocab_size} ({spec.source}); is it another model's?"
        )
    algorithm.check_models(config, spec, tokenizer, reward_model_to_come=reward_model_to_come)
    notes = [*_notes(config), f"data.prompts={config.data.prompts}: {dataset.describe()}"]
    if config.warmup.steps:
        path = config.warmup.demonstrations
        assert path is not None
        demonstrations = describe(open_examples(config, path, tokenizer), config.data)
        notes += [f"warmup.demonstrations={path}: {line}" for line in demonstrations]
    return notes


def _notes(config: Config) -> list[str]:
    """What works and is hardly meant."""
    optimizer, updates = config.learner.optimizer, config.run.steps
    if not config.stage.is_offline:
        updates *= config.algorithm.epochs * config.algorithm.mini_batches
    if optimizer.warmup_steps < updates:
        return []
    note = (
        f"learner.optimizer.warmup_steps={optimizer.warmup_steps}: the run has {updates} optimizer "
        f"steps, so that its learning rate does not get to lr={optimizer.lr:g}; fine for a trial"
    )
    return [note]


def _check_numbers(config: Config) -> None:
    if not _NAME.fullmatch(config.run.name):
        raise UserError(
            f"run.name={config.run.name!r}: expected a plain directory name of at most 100 "
            "letters, digits and ._=+-; run.root says where it is"
        )
    check_bounds(config)
    samples = config.run.prompts_per_step * config.sampling.samples_per_prompt
    if config.algorithm.mini_batches > samples:
        raise UserError(
            f"algorithm.mini_batches={config.algorithm.mini_batches}: a step has only {samples} "
            "samples (run.prompts_per_step x sampling.samples_per_prompt)"
        )
    optimizer = config.learner.optimizer
    if optimizer.min_lr > optimizer.lr:
        raise UserError(
            f"learner.optimizer.min_lr={optimizer.min_lr}: where the learning rate ends, must not be "
            f"greater than lr={optimizer.lr}"
        )
    if config.warmup.steps and config.warmup.demonstrations is None:
        raise UserError("warmup.steps needs warmup.demonstrations, a JSONL file")


def _check_data(data: DataConfig, stage: Stage) -> None:
    for name in ("long_prompts", "bad_lines"):
        value = getattr(data, name)
        if value not in (ERROR, DROP):
            raise UserError(f"data.{name}={value}: expected {ERROR} or {DROP}")
    if data.answer_pattern is not None:
        try:
            groups = re.compile(data.answer_pattern).groups
        except re.error as error:
            raise UserError(
                f"data.answer_pattern={data.answer_pattern!r}: not a regular expression: {error}"
            ) from error
        if groups == 0:
            raise UserError(
                f"data.answer_pattern={data.answer_pattern!r}: has no group; put parentheses around "
                "what is the answer"
            )
    templated = data.chat_template or data.format is PromptFormat.MESSAGES
    # offline, a record that holds messages goes through the template by itself
    if data.system is not None and not templated and not stage.is_offline:
        raise UserError("data.system: a system message needs data.chat_template=true")
    if data.add_bos and templated:
        raise UserError("data.add_bos=true: the chat template puts its own BOS in front")


def _check_layout(config: Config) -> None:
    room = config.model.max_sequence_tokens
    resources = config.cluster.learner
    ranks = resources.nodes * resources.tasks_per_node
    layouts = {"learner.parallel": config.learner.parallel}
    if algorithm.has_own_critic(config):
        layouts["critic.parallel"] = config.critic.parallel.over(config.learner.parallel)
    for setting, parallel in layouts.items():
        if ranks % (parallel.tensor * parallel.pipeline):
            raise UserError(
                f"cluster.learner: {resources.nodes} nodes x {resources.tasks_per_node} tasks = "
                f"{ranks} learner ranks are not divisible by {setting}: tensor x pipeline = "
                f"{parallel.tensor} x {parallel.pipeline}"
            )
        if parallel.sequence and parallel.tensor == 1:
            raise UserError(
                f"{setting}.sequence=true: splits sequences over the tensor-parallel ranks, and with "
                f"{setting}.tensor=1 there is one; raise it, or leave sequence out"
            )
        # with sequence parallelism a micro-batch is padded to a multiple of the tensor-parallel size
        multiple = parallel.tensor if parallel.sequence else 1
        if config.learner.micro_batch_tokens // multiple * multiple < room:
            divided = f" (in multiples of {multiple}: {setting}.sequence)" if multiple > 1 else ""
            raise UserError(
                f"learner.micro_batch_tokens={config.learner.micro_batch_tokens}: a sequence of "
                f"model.max_sequence_tokens={room} must fit into a micro-batch{divided}"
            )
    if not config.stage.is_offline and config.sampling.max_new_tokens >= room:
        raise UserError(
            f"sampling.max_new_tokens={config.sampling.max_new_tokens} leaves no room for a prompt in "
            f"model.max_sequence_tokens={room}"
        )


def _check_engine(config: Config) -> None:
    if config.cluster.sampler.gpus_per_node == 0 and config.sampler.kv_cache_bytes is None:
        raise UserError(
            "sampler.kv_cache_bytes: needed on a CPU, where vLLM would otherwise take nearly all "
            "memory of the node; set it to the bytes that the KV cache may use"
        )


def _check_model(config: Config, directory: Path) -> HfModelSpec:
    spec = HfModelSpec.from_directory(directory)
    spec.check_parallel(config.learner.parallel.tensor, config.learner.parallel.pipeline)
    is_score_model = config.stage is Stage.REWARD_MODEL
    check_weights(
        directory,
        spec.with_heads(lm=not is_score_model, score=is_score_model),
        optional=(SCORE_WEIGHT,),
    )
    if config.model.max_sequence_tokens > spec.max_positions:
        raise UserError(
            f"model.max_sequence_tokens={config.model.max_sequence_tokens}: the model's context is "
            f"{spec.max_positions} tokens ({spec.source})"
        )
    return spec


def _check_kv_cache(config: Config, spec: HfModelSpec) -> None:
    """The engine does not start when not even one sequence fits."""
    given, tokens = config.sampler.kv_cache_bytes, config.model.max_sequence_tokens
    if given is None:
        return
    on_gpu = config.cluster.sampler.gpus_per_node > 0
    half = config.model.dtype is DType.BFLOAT16 or (config.model.dtype is DType.AUTO and on_gpu)
    heads = -(-spec.num_kv_heads // config.sampler.tensor_parallel)
    needed = 2 * spec.num_layers * heads * spec.head_dim * (2 if half else 4) * tokens
    if given < needed:
        raise UserError(
            f"sampler.kv_cache_bytes={given}: one sequence of model.max_sequence_tokens={tokens} needs "
            f"{needed} (keys and values x {spec.num_layers} layers x {heads} heads x {spec.head_dim} x "
            f"{2 if half else 4} bytes a token); give it as many times that as are to be sampled at once"
        )


def _check_sampled_model(config: Config, spec: HfModelSpec) -> None:
    """What the samplers and the loss against a reference ask of the model."""
    if spec.num_heads % config.sampler.tensor_parallel:
        raise UserError(
            f"sampler.tensor_parallel={config.sampler.tensor_parallel}: the model has "
            f"{spec.num_heads} heads, not divisible by it"
        )
    # vLLM's Qwen2 takes no head_dim from config.json
    head_dim = spec.hidden_size // spec.num_heads if spec.family == "qwen2" else spec.head_dim
    if spec.family == "qwen2" and head_dim != spec.head_dim:
        raise UserError(
            f"{spec.source}: head_dim {spec.head_dim} is not hidden_size / num_attention_heads = "
            f"{head_dim}, which is what the sampler takes for this family"
        )
    if config.cluster.sampler.gpus_per_node == 0 and head_dim not in CPU_HEAD_DIMS:
        raise UserError(
            f"{spec.source}: head size {head_dim}; the CPU engine runs "
            f"{', '.join(map(str, CPU_HEAD_DIMS))}. Ask for GPUs: cluster.sampler.gpus_per_node"
        )
    _check_kv_cache(config, spec)
    largest_stop = max(config.sampling.stop_token_ids, default=0)
    if largest_stop >= spec.vocab_size:
        raise UserError(
            f"sampling.stop_token_ids: {largest_stop} is not in the model's vocabulary of "
            f"{spec.vocab_size} ({spec.source})"
        )
    if config.model.reference is not None:
        reference = HfModelSpec.from_directory(config.model.reference)
        reference.check_parallel(config.learner.parallel.tensor, config.learner.parallel.pipeline)
        if reference.vocab_size != spec.vocab_size:
            raise UserError(
                f"model.reference={config.model.reference}: a vocabulary of {reference.vocab_size}, "
                f"but the policy's has {spec.vocab_size}; KL needs the same tokens"
            )
        check_weights(Path(config.model.reference), reference.with_heads(lm=True, score=False))
