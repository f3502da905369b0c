"""What the learner's tests share: an experience, and its loss in plain torch on Hugging Face."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from transformers import AutoModelForCausalLM

from hpc_rlhf.config import LearnerConfig, LossMean, OptimizerConfig, ParallelConfig, Recompute
from hpc_rlhf.learner.actor_critic import ActorCritic
from hpc_rlhf.learner.algorithms import Algorithm
from hpc_rlhf.learner.trainer import Trainer
from hpc_rlhf.models.hf_layout import HfModelSpec
from hpc_rlhf.models.megatron import PolicyModel, build_model, hf_tensors, load_hf
from hpc_rlhf.models.parallel import add_layout, initialize_model_parallel
from hpc_rlhf.types import Completion, Experience, Prompt, Rollout, VersionSpan

TEMPERATURE = 0.7
MAX_NEW_TOKENS = 16
CLIP = (0.2, 0.3)
KL_COEF = 0.05


def rollouts(samples: int = 12, group: int = 4, seed: int = 0) -> tuple[Rollout, ...]:
    """Sequences of 11 to 20 input positions, so that none shares a micro-batch of 20 tokens."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(samples):
        prompt, completion = int(rng.integers(6, 9)), int(rng.integers(6, 13))
        made.append(
            Rollout(
                prompt=Prompt(uid=f"p{i // group}", token_ids=_ids(rng, prompt)),
                sample_index=i % group,
                step=0,
                completion=Completion(
                    token_ids=_ids(rng, completion),
                    logprobs=np.full(completion, -5.0, np.float32),
                    finish_reason="stop",
                    versions=(VersionSpan(version=0, start=0, end=completion),),
                    seed=i,
                ),
            )
        )
    return tuple(made)


def experience(directory: Path, seed: int = 0) -> Experience:
    """Old log-probs are near the model's own, so that some tokens are clipped and others not."""
    rng = np.random.default_rng(seed + 1)
    samples = rollouts(seed=seed)
    model = hf_model(directory)
    with torch.no_grad():
        own = [hf_log_probs(model, r)[0].numpy() for r in samples]
    return Experience(
        rollouts=samples,
        rewards=rng.random(len(samples)).astype(np.float32),
        old_logprobs=tuple(_near(rng, lp, 0.3) for lp in own),
        ref_logprobs=tuple(_near(rng, lp, 0.5) for lp in own),
    )


def hf_model(directory: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )


def hf_log_probs(model: torch.nn.Module, rollout: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
    """Tempered log-probs and entropies [T] of one completion, unpacked and unpadded."""
    ids = torch.from_numpy(rollout.token_ids.astype(np.int64))
    logits = model(ids[None]).logits[0, :-1] / TEMPERATURE
    table = logits.log_softmax(-1)[len(rollout.prompt.token_ids) - 1 :]
    targets = torch.from_numpy(rollout.completion.token_ids.astype(np.int64))
    entropy = -(table.exp() * table).sum(-1)
    return table.gather(1, targets[:, None])[:, 0], entropy


def hf_loss(
    model: torch.nn.Module,
    batch: Experience,
    advantages: list[float],
    loss_mean: LossMean,
    *,
    kl_coef: float = KL_COEF,
    entropy_coef: float = 0.0,
    sequence_ratio: bool = False,
    weight_cap: float | None = None,
    bounds: tuple[float, float] | None = None,
) -> torch.Tensor:
    """The policy losses written from the papers, one sequence at a time; by default GRPO's.

    Args:
        kl_coef: of the k3 penalty in the loss.
        sequence_ratio: GSPO's ratio, arXiv:2507.18071, eq. 7.
        weight_cap: truncated importance weights of the tokens, learner over sampler.
        bounds: of the tokens' ratio learner over sampler, beyond which they are not learned from.
    """
    assert batch.ref_logprobs is not None
    per_sequence = []
    for rollout, a, old, ref in zip(
        batch.rollouts, advantages, batch.old_logprobs, batch.ref_logprobs, strict=True
    ):
        new, entropy = hf_log_probs(model, rollout)
        ratio = (new - torch.from_numpy(old)).exp()
        if sequence_ratio:
            ratio = (new - torch.from_numpy(old)).mean().exp().expand(len(old))
        clipped = ratio.clamp(1 - CLIP[0], 1 + CLIP[1])
        loss = -torch.minimum(ratio * a, clipped * a)
        off_policy = torch.from_numpy(np.exp(old - rollout.completion.logprobs))
        if weight_cap is not None:
            loss = loss * off_policy.clamp(max=weight_cap)
        d = torch.from_numpy(ref) - new
        loss = loss + kl_coef * (d.exp() - d - 1) - entropy_coef * entropy
        if bounds is not None:
            loss = loss[(off_policy >= bounds[0]) & (off_policy <= bounds[1])]
        per_sequence.append(loss)
    match loss_mean:
        case LossMean.TOKEN:
            return torch.cat(per_sequence).mean()
        case LossMean.SEQUENCE:
            return torch.stack([t.mean() for t in per_sequence if len(t)]).mean()
        case LossMean.CONSTANT:
            assert all(len(t) for t in per_sequence)
            return torch.cat(per_sequence).sum() / (len(per_sequence) * MAX_NEW_TOKENS)


def make_trainer(
    directory: Path,
    parallel: ParallelConfig,
    *,
    optimizer: OptimizerConfig | None = None,
    micro_batch_tokens: int = 48,
    dtype: torch.dtype = torch.float32,
    recompute: Recompute = Recompute.NONE,
    total_steps: int = 100,
    lm: bool = True,
    score: bool = False,
    name: str = "",
) -> Trainer:
    """A trainer on this rank, with the weights of ``directory``; makes Megatron's groups if need be."""
    if not torch.distributed.is_initialized():
        raise RuntimeError("call it inside run_ranks")
    if not parallel_state.model_parallel_is_initialized():
        initialize_model_parallel(parallel, seed=1, timeout_s=60)
    add_layout(parallel, timeout_s=60)
    spec = HfModelSpec.from_directory(directory).with_heads(lm=lm, score=score)
    model = build_model(spec, parallel, dtype=dtype, recompute=recompute)
    load_hf(model, directory, new_head=score_weight)
    return Trainer(
        model,
        LearnerConfig(
            parallel=parallel,
            optimizer=optimizer or OptimizerConfig(),
            micro_batch_tokens=micro_batch_tokens,
            logprob_chunk_tokens=16,
            recompute=recompute,
        ),
        total_steps=total_steps,
        temperature=TEMPERATURE,
        name=name,
    )


def score_weight(hidden_size: int) -> torch.Tensor:
    """Weight [1, H] of a score head that is not there: values of a few tenths."""
    generator = torch.Generator().manual_seed(7)
    return 0.05 * torch.randn(1, hidden_size, generator=generator)


def keep_whole_gradients(trainer: Trainer) -> None:
    """Reduce gradients to every data-parallel rank instead of scattering them."""

    def finalize(model: Any, num_tokens: Any = None, **groups: Any) -> None:
        finalize_model_grads(model, None, **(groups | {"force_all_reduce": True}))

    trainer.model.config.finalize_model_grads_func = finalize


def update(
    trainer: Trainer,
    algorithm: Algorithm,
    batch: Experience,
    *,
    critic: Trainer | None = None,
    **options: Any,
) -> dict[str, float]:
    """One update of a policy, and of a critic of its own."""
    learner = ActorCritic(trainer, critic, max_new_tokens=MAX_NEW_TOKENS)
    return learner.update(algorithm, batch, **options)


def log_probs(trainer: Trainer, rollouts: Sequence[Rollout]) -> tuple[np.ndarray, ...]:
    found = trainer.read(rollouts).log_probs
    assert found is not None
    return found


def whole_tensors(
    model: PolicyModel, of: Callable[[torch.nn.Parameter], torch.Tensor] = lambda p: p
) -> dict[str, torch.Tensor]:
    """This stage's tensors under their Hugging Face names; copies. Collective over TP."""
    return {name: tensor.clone() for name, tensor in hf_tensors(model, of, value_head=True)}


def _ids(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.integers(3, 260, n).astype(np.int32)


def _near(rng: np.random.Generator, values: np.ndarray, scale: float) -> np.ndarray:
    return (values + scale * rng.standard_normal(len(values))).astype(np.float32)


def bits_of(trainer: Trainer | ActorCritic) -> dict[str, bytes]:
    """Weights, master weights and moments of this rank's part of each model."""
    found = {}

    def walk(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{name}/{key}", inner)
        elif isinstance(value, list):
            for number, inner in enumerate(value):
                walk(f"{name}/{number}", inner)
        elif isinstance(getattr(value, "data", None), torch.Tensor):
            found[name] = value.data.detach().float().cpu().numpy().tobytes()

    walk("", trainer.sharded_state_dict(is_loading=False))
    for kind in ("param", "exp_avg", "exp_avg_sq"):
        assert any(f"/{kind}/" in name for name in found)
    return found
