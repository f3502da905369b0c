"""The types that travel between components. Frozen; arrays are NumPy with stated shapes and dtypes.

Tokens in, tokens out: text is never re-tokenised between sampler and trainer.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "abort"]


class Phase(StrEnum):
    """The phases of a step, in the order of the loop; every wall-clock second belongs to one."""

    SETUP = "setup"
    ROLLOUT = "rollout"
    SCORE = "score"
    TRAIN = "train"
    SYNC = "sync"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One tokenised prompt.

    Example:
        >>> Prompt(uid="train.jsonl:17", token_ids=np.array([5, 6], np.int32), answer="4")
    """

    uid: str  # stable over shuffles and epochs: file name and line
    token_ids: NDArray[np.int32]  # [P]
    answer: str | None = None  # what verifiers compare with
    fields: Mapping[str, Any] = field(
        default_factory=dict
    )  # the whole record, for Python verifiers


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Completion tokens ``start:end`` were sampled under policy ``version``."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Sampled tokens, the stop token included.

    ``logprobs`` are of the distribution really sampled from (temperature, top-p, top-k applied).
    """

    token_ids: NDArray[np.int32]  # [T]
    logprobs: NDArray[np.float32]  # [T]
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]  # contiguous, cover 0:T
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One finished sample. Samples of one prompt in one step form its group."""

    prompt: Prompt
    sample_index: int  # 0 <= sample_index < samples_per_prompt
    completion: Completion
    step: int

    @property
    def key(self) -> tuple[int, str, int]:
        """Names the sample within its run, as it does the request for it."""
        return (self.step, self.prompt.uid, self.sample_index)

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Prompt and completion, [P + T]."""
        return np.concatenate([self.prompt.token_ids, self.completion.token_ids])


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Rewards of N rollouts; an excluded one (its verifier failed) is not a zero and is not trained on."""

    rewards: NDArray[np.float32]  # [N], NaN where excluded
    excluded: Mapping[int, str] = field(default_factory=dict)  # rollout index -> reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """What the learner's models say of N completions' tokens before a step, in rollout order."""

    old: tuple[NDArray[np.float32], ...]  # N x [T_i], log-probs of the policy
    reference: tuple[NDArray[np.float32], ...] | None  # N x [T_i], log-probs
    values: tuple[NDArray[np.float32], ...] | None = None  # N x [T_i], of the critic


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """What the learner trains on: N rollouts with their scores and log-probs, in rollout order."""

    rollouts: tuple[Rollout, ...]  # N
    rewards: NDArray[np.float32]  # [N], all finite
    old_logprobs: tuple[NDArray[np.float32], ...]  # N x [T_i], the learner's own recomputation
    ref_logprobs: tuple[NDArray[np.float32], ...] | None  # N x [T_i]; None without a reference
    values: tuple[NDArray[np.float32], ...] | None = None  # N x [T_i]; None without a critic


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """A prompt and its completion, or a conversation; ``loss_mask`` marks what is to be learned.

    The mask holds the end token of every answer.
    """

    token_ids: NDArray[np.int32]  # [T]
    loss_mask: NDArray[np.bool_]  # [T]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One record of an offline data set: a demonstration, or a pair of answers to one prompt.

    Example:
        >>> Example(uid="pairs.jsonl:7", sequences=(chosen, rejected))
    """

    uid: str  # file name and line
    sequences: tuple[TokenSequence, ...]  # one, or (chosen, rejected)
    margin: float = 0.0  # by how much the chosen one is better, as far as the data says
    ref_log_probs: tuple[float, ...] | None = None  # of each sequence's learned tokens, summed


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenRef:
    """A frozen model by identity: checkpoints hold this instead of a copy."""

    role: str  # "reference", "reward", ...
    name: str
    sha256: str  # of the concatenated sha256 of its safetensors files, sorted by name
    path: str


def sample_seed(run_seed: int, step: int, prompt_uid: str, sample_index: int) -> int:
    """Sampling seed of one sample: a counter, not a stream, so it is the same on any sampler.

    Returns:
        A non-negative 63-bit integer.
    """
    return _hashed_seed(f"{run_seed}:{step}:{prompt_uid}:{sample_index}")


def continuation_seed(seed: int, tokens: int) -> int:
    """Seed of the rest of a completion that was cut short behind ``tokens`` tokens.

    An engine's noise starts with the request, so under the same seed the rest would repeat it.
    """
    return _hashed_seed(f"{seed}:{tokens}")


def _hashed_seed(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
