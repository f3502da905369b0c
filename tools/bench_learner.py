"""Measures the learner's throughput on one GPU, beside plain transformers with torch's AdamW.

Both learn the same sequences with the same loss (GRPO without a KL term) from random weights of
one shape, in bfloat16 with float32 master weights:

``python -m tools.bench_learner --shape qwen2.5-1.5b --lengths ragged --tokens 65536``
"""

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hpc_rlhf.cluster import device
from hpc_rlhf.config import (
    AlgorithmConfig,
    LearnerConfig,
    LossMean,
    OptimizerConfig,
    ParallelConfig,
    Recompute,
)
from hpc_rlhf.learner.actor_critic import ActorCritic
from hpc_rlhf.learner.algorithms import make_algorithm
from hpc_rlhf.learner.trainer import Trainer
from hpc_rlhf.models.hf_layout import HfModelSpec
from hpc_rlhf.models.megatron import build_model
from hpc_rlhf.models.parallel import initialize_model_parallel
from hpc_rlhf.types import Completion, Experience, Prompt, Rollout, VersionSpan

SHAPES = {
    # of the models' config.json; the weights are random
    "qwen2.5-1.5b": {
        "model_type": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
}
ADAM = OptimizerConfig(lr=1e-6, weight_decay=0.01, clip_grad=1.0)
CLIP = 0.2


@dataclass(frozen=True)
class Result:
    """Of the updates after the first one, which warms up."""

    seconds: float  # median of an update
    peak_bytes: int
    loss: float  # of the last update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-1.5b")
    parser.add_argument("--lengths", choices=("equal", "ragged"), default="ragged")
    parser.add_argument("--tokens", type=int, default=65536, help="of an update")
    parser.add_argument("--longest", type=int, default=2048, help="prompt and completion")
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="dense bf16: H100, H200")
    parser.add_argument("--all", action="store_true", help="every variant, not only two")
    arguments = parser.parse_args()
    device.prepare_process()
    experience = sequences(arguments)
    lengths = [len(rollout.token_ids) for rollout in experience.rollouts]
    work = flops(SHAPES[arguments.shape], lengths)
    print(
        f"{arguments.shape}, {len(lengths)} sequences of {min(lengths)} to {max(lengths)} tokens, "
        f"{sum(lengths)} in all, micro-batches of {arguments.micro_batch_tokens}; "
        f"{work / 1e12:.0f} TFLOP an update"
    )
    print("| variant | s / update | tokens / s | MFU | peak memory |\n|---|---|---|---|---|")
    for variant in VARIANTS if arguments.all else ("learner", "transformers"):
        try:
            result = VARIANTS[variant](arguments)
        except torch.OutOfMemoryError:
            print(f"| {variant} | out of memory | | | |", flush=True)
            continue
        finally:
            gc.collect()
            torch.cuda.empty_cache()
        mfu = work / result.seconds / (arguments.peak_tflops * 1e12)
        print(
            f"| {variant} | {result.seconds:.2f} | {sum(lengths) / result.seconds:,.0f} "
            f"| {mfu:.1%} | {result.peak_bytes / 1e9:.1f} GB |",
            flush=True,
        )


def flops(shape: dict[str, object], lengths: list[int]) -> float:
    """Of a forward and backward pass without recomputation: 6 a weight and token, and attention.

    The embedding is a look-up and does not count, the output matrix does. Causal attention of a
    sequence of n tokens is two products of n^2 / 2 pairs by heads x head_dim, three times.
    """
    spec = HfModelSpec.from_config(shape)
    heads = spec.num_heads * spec.head_dim
    layer = spec.hidden_size * (2 * heads + 2 * spec.num_kv_heads * spec.head_dim)
    layer += 3 * spec.hidden_size * spec.intermediate_size
    weights = spec.num_layers * layer + spec.vocab_size * spec.hidden_size
    pairs = sum(n * n / 2 for n in lengths)
    return 6.0 * weights * sum(lengths) + 12.0 * spec.num_layers * heads * pairs


def sequences(arguments: argparse.Namespace) -> Experience:
    """Groups of eight completions of 128-token prompts; ragged lengths are log-normal, as real ones."""
    rng = np.random.default_rng(0)
    vocabulary = SHAPES[arguments.shape]["vocab_size"]
    prompt_tokens, longest = 128, arguments.longest
    rollouts: list[Rollout] = []
    total = 0
    while total < arguments.tokens:
        length = longest - prompt_tokens
        if arguments.lengths == "ragged":
            length = int(np.clip(rng.lognormal(np.log(longest / 4), 0.8), 16, length))
        length = min(length, max(arguments.tokens - total - prompt_tokens, 16))
        i = len(rollouts)
        if i % 8 == 0:
            prompt = Prompt(uid=f"p{i // 8}", token_ids=_ids(rng, prompt_tokens, vocabulary))
        completion = Completion(
            token_ids=_ids(rng, length, vocabulary),
            logprobs=np.full(length, -float(np.log(vocabulary)), np.float32),
            finish_reason="stop",
            versions=(VersionSpan(version=0, start=0, end=length),),
            seed=i,
        )
        rollouts.append(Rollout(prompt=prompt, sample_index=i % 8, step=0, completion=completion))
        total += prompt_tokens + length
    return Experience(
        rollouts=tuple(rollouts),
        rewards=rng.random(len(rollouts)).astype(np.float32),
        old_logprobs=tuple(r.completion.logprobs for r in rollouts),
        ref_logprobs=None,
    )


def _ids(rng: np.random.Generator, count: int, vocabulary: object) -> np.ndarray:
    return rng.integers(1, vocabulary, count).astype(np.int32)


def _algorithm() -> AlgorithmConfig:
    return AlgorithmConfig(clip_low=CLIP, clip_high=CLIP, loss_mean=LossMean.TOKEN)


# ---------------------------------------------------------------------------------------- variants


def learner(
    arguments: argparse.Namespace, recompute: Recompute = Recompute.NONE, packed: int = 1
) -> Result:
    """This system's Trainer; ``packed`` times the tokens in a micro-batch."""
    spec = HfModelSpec.from_config(SHAPES[arguments.shape])
    if not torch.distributed.is_initialized():
        store = Path(tempfile.mkdtemp()) / "store"
        torch.distributed.init_process_group(
            device.backend(), init_method=f"file://{store}", rank=0, world_size=1
        )
        initialize_model_parallel(ParallelConfig(), seed=0, timeout_s=60)
    model = build_model(spec, ParallelConfig(), dtype=device.resolve_dtype(), recompute=recompute)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02)
    trainer = Trainer(
        model,
        LearnerConfig(
            optimizer=ADAM,
            micro_batch_tokens=arguments.micro_batch_tokens * packed,
            recompute=recompute,
        ),
        total_steps=100,
    )
    algorithm, experience = make_algorithm(_algorithm()), sequences(arguments)
    try:
        learner = ActorCritic(trainer)
        return _timed(arguments.updates, lambda: learner.update(algorithm, experience)["loss"])
    finally:
        trainer.close()


def transformers(arguments: argparse.Namespace) -> Result:
    """Float32 weights under autocast, sequences of like length padded together, whole logits."""
    shape = {k: v for k, v in SHAPES[arguments.shape].items() if k != "model_type"}
    where = device.device()
    config = AutoConfig.for_model(SHAPES[arguments.shape]["model_type"], **shape)
    with where:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        )
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=ADAM.lr,
        betas=(ADAM.beta1, ADAM.beta2),
        eps=ADAM.eps,
        weight_decay=ADAM.weight_decay,
        fused=True,
    )
    experience = sequences(arguments)
    advantages = [
        a[0] for a in make_algorithm(_algorithm()).lesson(experience).fields["advantages"]
    ]
    batches = _padded_batches(experience, arguments.micro_batch_tokens)
    learned = sum(len(rollout.completion.token_ids) for rollout in experience.rollouts)

    def update() -> float:
        total = 0.0
        for indices in batches:
            rollouts = [experience.rollouts[i] for i in indices]
            longest = max(len(rollout.token_ids) for rollout in rollouts)
            ids = torch.zeros(len(rollouts), longest, dtype=torch.int64)
            attended, mask = torch.zeros_like(ids), torch.zeros(len(rollouts), longest - 1)
            old, weights = torch.zeros_like(mask), torch.zeros(len(rollouts), 1)
            for row, (i, rollout) in enumerate(zip(indices, rollouts, strict=True)):
                n, prompt = len(rollout.token_ids), len(rollout.prompt.token_ids)
                ids[row, :n] = torch.from_numpy(rollout.token_ids.astype(np.int64))
                attended[row, :n] = 1
                mask[row, prompt - 1 : n - 1] = 1.0
                old[row, prompt - 1 : n - 1] = torch.from_numpy(experience.old_logprobs[i])
                weights[row] = float(advantages[i])
            ids, attended, mask, old, weights = (
                x.to(where) for x in (ids, attended, mask, old, weights)
            )
            # Without padding the mask says nothing, and sdpa then takes its flash kernel.
            padded = not bool((attended == 1).all())
            with torch.autocast(where.type, torch.bfloat16):
                logits = model(ids, attention_mask=attended if padded else None).logits[:, :-1]
            table = logits.float().log_softmax(-1)
            new = table.gather(-1, ids[:, 1:, None])[..., 0]
            ratio = (new - old).mul(mask).exp()
            surrogate = torch.minimum(ratio * weights, ratio.clamp(1 - CLIP, 1 + CLIP) * weights)
            loss = -(surrogate * mask).sum() / learned
            loss.backward()
            total += loss.item()
            del logits, table
        torch.nn.utils.clip_grad_norm_(model.parameters(), ADAM.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return _timed(arguments.updates, update)


def _padded_batches(experience: Experience, micro_batch_tokens: int) -> list[list[int]]:
    """Sequences in order of length, as many together as fit when padded to the longest of them."""
    lengths = [len(rollout.token_ids) for rollout in experience.rollouts]
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= micro_batch_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def _timed(updates: int, update: Callable[[], float]) -> Result:
    update()
    device.synchronize()
    device.reset_peak_memory()
    seconds = []
    for _ in range(updates):
        start = time.perf_counter()
        loss = update()
        device.synchronize()
        seconds.append(time.perf_counter() - start)
    return Result(float(np.median(seconds)), device.peak_memory_bytes(), loss)


VARIANTS: dict[str, Callable[[argparse.Namespace], Result]] = {
    "learner": learner,
    "learner, micro-batches x 4": lambda arguments: learner(arguments, packed=4),
    "learner, full recomputation": lambda arguments: learner(arguments, Recompute.FULL, packed=4),
    "transformers": transformers,
}


if __name__ == "__main__":
    main()
