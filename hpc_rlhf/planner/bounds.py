"""What a number in the configuration may be: one table, and a reason for each number that is not in it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpc_rlhf.config import Config
from hpc_rlhf.errors import UserError


@dataclass(frozen=True)
class Bound:
    """A range, its ends included unless they are open. Infinity and NaN are in none."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    why: str = ""  # not the one behind it

    def holds(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return math.isfinite(value) and above and below

    def __str__(self) -> str:
        if self.low == 0 and not self.open_low and self.high == math.inf:
            return "not be negative"
        low = f"be {'greater than' if self.open_low else 'at least'} {_number(self.low)}"
        if self.high == math.inf:
            return low
        return f"{low} and {'less than' if self.open_high else 'at most'} {_number(self.high)}"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"


POSITIVE = Bound(0, open_low=True)
NOT_NEGATIVE = Bound(0)
AT_LEAST_ONE = Bound(1)
FRACTION = Bound(0, 1)
POSITIVE_FRACTION = Bound(0, 1, open_low=True)
MOMENT = Bound(0, 1, open_high=True)
SEED = Bound(0, 2**32 - 1)  # what NumPy, torch and vLLM all take

# In the order in which they are looked at: a quickstart derives its layout from the nodes.
BOUNDS: Mapping[str, Bound] = {
    **{
        f"cluster.{component}.{name}": bound
        for component in ("learner", "sampler")
        for name, bound in {
            "nodes": AT_LEAST_ONE,
            "tasks_per_node": AT_LEAST_ONE,
            "cpus_per_task": AT_LEAST_ONE,
            "gpus_per_node": NOT_NEGATIVE,
            # 0 would ask for all of a node's memory and keep the other components off it
            "mem_per_node_mb": AT_LEAST_ONE,
        }.items()
    },
    # a time limit of 0 is accepted by some sites and then stays pending for ever
    "cluster.time_min": AT_LEAST_ONE,
    "cluster.signal_delay_s": Bound(0, 65535),  # Slurm's
    "run.seed": SEED,
    "run.steps": AT_LEAST_ONE,
    "run.prompts_per_step": AT_LEAST_ONE,
    "run.max_attempts_without_progress": AT_LEAST_ONE,
    "model.max_sequence_tokens": AT_LEAST_ONE,
    **{
        f"{owner}.parallel.{name}": AT_LEAST_ONE
        for owner in ("learner", "critic")
        for name in ("tensor", "pipeline")
    },
    **{
        f"{owner}.optimizer.{name}": bound
        for owner in ("learner", "critic")
        for name, bound in {
            "lr": Bound(0, 1, open_low=True, why="with 0 nothing is learned"),
            "min_lr": FRACTION,
            "warmup_steps": NOT_NEGATIVE,
            "beta1": MOMENT,
            "beta2": MOMENT,
            "eps": Bound(0, 1, open_low=True, open_high=True),
            "weight_decay": FRACTION,
            "clip_grad": NOT_NEGATIVE,
        }.items()
    },
    "learner.micro_batch_tokens": AT_LEAST_ONE,
    "learner.logprob_chunk_tokens": AT_LEAST_ONE,
    "learner.collective_timeout_s": POSITIVE,
    "algorithm.clip_low": FRACTION,
    "algorithm.clip_high": NOT_NEGATIVE,
    "algorithm.epochs": AT_LEAST_ONE,
    "algorithm.mini_batches": AT_LEAST_ONE,
    "algorithm.entropy_coef": NOT_NEGATIVE,
    "algorithm.gamma": POSITIVE_FRACTION,
    "algorithm.lam": FRACTION,
    "algorithm.max_skipped_steps": NOT_NEGATIVE,
    "algorithm.resampling_rounds": NOT_NEGATIVE,
    "critic.coef": Bound(0, open_low=True, why="with 0 a shared critic learns nothing"),
    "critic.clip": NOT_NEGATIVE,
    "critic.warmup_steps": NOT_NEGATIVE,
    "algorithm.kl.coef": NOT_NEGATIVE,
    "algorithm.kl.target": POSITIVE,
    "algorithm.kl.gain": NOT_NEGATIVE,
    "algorithm.overlong.buffer_fraction": Bound(
        0, 1, why="it is a part of sampling.max_new_tokens"
    ),
    "algorithm.overlong.penalty": NOT_NEGATIVE,
    "algorithm.off_policy.weight_cap": Bound(
        1, why="the weight of samples of the learner's own policy"
    ),
    "algorithm.off_policy.warn_kl": NOT_NEGATIVE,
    "algorithm.off_policy.stop_kl": NOT_NEGATIVE,
    "sampling.samples_per_prompt": AT_LEAST_ONE,
    "sampling.max_new_tokens": AT_LEAST_ONE,
    "sampling.temperature": Bound(0, 100, open_low=True, why="greedy samples are all the same"),
    "sampling.top_p": POSITIVE_FRACTION,
    "sampling.top_k": NOT_NEGATIVE,
    "sampling.stop_token_ids": NOT_NEGATIVE,
    "sampler.tensor_parallel": AT_LEAST_ONE,
    "sampler.kv_cache_bytes": AT_LEAST_ONE,
    "sampler.gpu_memory_utilization": POSITIVE_FRACTION,
    "sampler.max_concurrency": AT_LEAST_ONE,
    "sampler.start_timeout_s": POSITIVE,
    "sampler.request_timeout_s": POSITIVE,
    "sampler.max_restarts": NOT_NEGATIVE,
    "sampler.restart_reset_s": NOT_NEGATIVE,
    "data.max_prompt_tokens": AT_LEAST_ONE,
    "reward.timeout_s": POSITIVE,
    "reward.workers": AT_LEAST_ONE,
    "reward.max_failure_fraction": FRACTION,
    "warmup.steps": NOT_NEGATIVE,
    "warmup.batch_size": AT_LEAST_ONE,
    "warmup.lr": Bound(0, 1, open_low=True, why="with 0 nothing is learned"),
    "offline.batch_size": AT_LEAST_ONE,
    "offline.eval_every_steps": AT_LEAST_ONE,
    "offline.eval_examples": AT_LEAST_ONE,
    "offline.max_skipped_steps": NOT_NEGATIVE,
    "reward_model.centering": NOT_NEGATIVE,
    "dpo.beta": POSITIVE,
    "dpo.label_smoothing": Bound(0, 0.5, open_high=True, why="it is how often a label is wrong"),
    "sync.bucket_bytes": AT_LEAST_ONE,
    "sync.timeout_s": POSITIVE,
    "sync.attempts": AT_LEAST_ONE,
    "checkpoint.every_steps": AT_LEAST_ONE,
    "checkpoint.keep": Bound(1, why="a run resumes from one; null keeps all"),
    "checkpoint.keep_every_steps": NOT_NEGATIVE,
}

_A_PAIR = "preflight looks at both ends of the pair together"
UNBOUNDED: Mapping[str, str] = {
    "algorithm.off_policy.token_bounds": _A_PAIR,
    "algorithm.off_policy.sequence_bounds": _A_PAIR,
    "algorithm.off_policy.geometric_bounds": _A_PAIR,
}
"""Numbers without a bound of their own, and why."""


def check_bounds(config: Config) -> None:
    """Refuse a number that cannot be meant.

    Raises:
        UserError: the first one, with what it may be.
    """
    for name, bound in BOUNDS.items():
        value = _value(config, name)
        numbers = value if isinstance(value, list) else [] if value is None else [value]
        for number in numbers:
            if not bound.holds(number):
                why = f": {bound.why}" if bound.why else ""
                raise UserError(f"{name}={value}: must {bound}{why}")


def _value(config: Config, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value
