"""Demonstrations for the supervised warm-up: prompt and completion, loss on the completion."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hpc_rlhf.config import DataConfig
from hpc_rlhf.data.prompts import encode_texts, render_prompt
from hpc_rlhf.data.records import BadRecord, read_records
from hpc_rlhf.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COMPLETION_FIELD = "completion"


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One training sequence; ``loss_mask`` marks the tokens to learn, EOS among them."""

    token_ids: NDArray[np.int32]  # [T]
    loss_mask: NDArray[np.bool_]  # [T]


def load_demonstrations(
    path: Path, config: DataConfig, tokenizer: "PreTrainedTokenizerBase"
) -> list[Demonstration]:
    """Read records with the prompt field of ``config`` and a ``completion`` text.

    Raises:
        UserError: a record cannot be used; the message begins with ``file:line``.
    """
    prompts, completions = [], []
    for line, record in read_records(path):
        if isinstance(record, BadRecord):
            raise record
        place = f"{path}:{line}"
        completion = record.get(COMPLETION_FIELD)
        if not isinstance(completion, str) or not completion:
            raise BadRecord(f"{place}: {COMPLETION_FIELD!r} must be text that is not empty")
        prompts.append(render_prompt(record, config, tokenizer, place=place))
        completions.append(completion)
    if not completions:
        raise UserError(f"{path}: no demonstrations in it")
    answers = tokenizer(completions, add_special_tokens=False)["input_ids"]
    return [
        _demonstration(prompt, np.array([*answer, tokenizer.eos_token_id], np.int32))
        for prompt, answer in zip(encode_texts(prompts, config, tokenizer), answers, strict=True)
    ]


def _demonstration(prompt: NDArray[np.int32], answer: NDArray[np.int32]) -> Demonstration:
    token_ids = np.concatenate([prompt, answer])
    return Demonstration(token_ids, np.arange(len(token_ids)) >= len(prompt))


def batches(
    demonstrations: Sequence[Demonstration], size: int, *, seed: int
) -> Iterator[list[Demonstration]]:
    """Endless batches: every epoch once through all, in an order drawn from ``seed`` and its number."""
    pending: list[int] = []
    epoch = 0
    while True:
        while len(pending) < size:
            rng = np.random.default_rng([seed, epoch])
            pending += rng.permutation(len(demonstrations)).tolist()
            epoch += 1
        batch, pending = pending[:size], pending[size:]
        yield [demonstrations[i] for i in batch]
