"""What can be known to fail of an offline run, before anything is queued or written."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from hpc_rlhf.config import Config, DpoLoss, LossMean, Stage
from hpc_rlhf.data.chat import check_chat_template, check_special_tokens, load_tokenizer
from hpc_rlhf.data.dialogues import is_chat
from hpc_rlhf.data.doctor import check_learning, check_pad_token
from hpc_rlhf.data.records import BadRecord, read_records
from hpc_rlhf.data.tokens import TokenDataset, describe
from hpc_rlhf.errors import UserError
from hpc_rlhf.models.hf_layout import HfModelSpec
from hpc_rlhf.planner.weights import check_weights
from hpc_rlhf.runs import open_examples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_settings(config: Config) -> None:
    """Check the values of an offline stage by themselves; reads no file.

    Raises:
        UserError: the first setting that cannot work.
    """
    if config.sft.loss_mean is LossMean.CONSTANT:
        raise UserError("sft.loss_mean=constant: expected token or sequence")
    dpo = config.dpo
    if dpo.loss is DpoLoss.CONSERVATIVE and not 0 < dpo.label_smoothing < 0.5:
        raise UserError(
            f"dpo.label_smoothing={dpo.label_smoothing}: the fraction of labels that dpo.loss="
            "conservative takes for wrong, expected between 0 and 0.5"
        )
    if dpo.loss is not DpoLoss.CONSERVATIVE and dpo.label_smoothing != 0:
        raise UserError(f"dpo.label_smoothing={dpo.label_smoothing} needs dpo.loss=conservative")


def check_files(config: Config, directory: Path, spec: HfModelSpec) -> list[str]:
    """Check the tokenizer and every record; tokenises the data for the run that follows.

    Args:
        directory: the model's.
        spec: of the model.

    Returns:
        What the data holds, a line each.

    Raises:
        UserError: the first thing that cannot work.
    """
    tokenizer = load_tokenizer(directory)
    check_special_tokens(tokenizer, directory)
    if config.stage is Stage.REWARD_MODEL:
        check_pad_token(tokenizer, directory, config.reward_model.pad_token)
    if config.stage is Stage.DPO and config.model.reference is not None:
        _check_reference(config, spec)
    notes = []
    for name in ("train", "eval"):
        path = getattr(config.data, name)
        if path is not None:
            chat = _is_chat(path, config)
            if chat:
                check_chat_template(tokenizer, directory)
            check_learning(tokenizer, directory, chat=chat)
            dataset = _check_data(config, name, path, tokenizer, spec)
            notes += [f"data.{name}={path}: {line}" for line in describe(dataset, config.data)]
    return notes


def _check_data(
    config: Config,
    name: str,
    path: str,
    tokenizer: "PreTrainedTokenizerBase",
    spec: HfModelSpec,
) -> TokenDataset:
    with Console(stderr=True).status("") as status:  # shows nothing but on a terminal
        dataset = open_examples(
            config,
            path,
            tokenizer,
            progress=lambda line: status.update(f"{path}: {line} records tokenised"),
        )
    largest = int(dataset.tokens.max())
    if largest >= spec.vocab_size:
        raise UserError(
            f"{config.model.path}: the tokenizer makes token {largest} of {path}, but the model's "
            f"vocabulary has {spec.vocab_size} ({spec.source}); is it another model's?"
        )
    _check_room(config, path, dataset)
    if name == "train" and len(dataset) < config.offline.batch_size:
        raise UserError(
            f"{path}: {len(dataset)} usable records are fewer than one batch, "
            f"offline.batch_size={config.offline.batch_size}; lower it or give more"
        )
    return dataset


def _check_room(config: Config, path: str, dataset: TokenDataset) -> None:
    """Both answers of a pair go into one micro-batch."""
    parallel = config.learner.parallel
    multiple = parallel.tensor if parallel.sequence else 1
    room = config.learner.micro_batch_tokens // multiple * multiple
    totals = dataset.lengths.sum(1)
    longest = int(np.argmax(totals))
    if totals[longest] > room:
        what = "both answers of the pair have" if dataset.width == 2 else "the sequence has"
        raise UserError(
            f"{path}:{dataset.lines[longest]}: {what} {totals[longest]} tokens, more than a micro-batch "
            f"holds, learner.micro_batch_tokens={config.learner.micro_batch_tokens}; raise it to at "
            f"least {-(-int(totals[longest]) // multiple) * multiple}, or bound the sequences "
            "(model.max_sequence_tokens with data.long_sequences)"
        )


def _check_reference(config: Config, spec: HfModelSpec) -> None:
    directory = Path(str(config.model.reference))
    if not directory.is_dir():
        raise UserError(f"model.reference={directory}: no such directory")
    reference = HfModelSpec.from_directory(directory)
    reference.check_parallel(config.learner.parallel.tensor, config.learner.parallel.pipeline)
    if reference.vocab_size != spec.vocab_size:
        raise UserError(
            f"model.reference={directory}: a vocabulary of {reference.vocab_size}, but the policy's "
            f"has {spec.vocab_size}; they must read the same tokens"
        )
    check_weights(directory, reference.with_heads(lm=True, score=False))


def _is_chat(path: str, config: Config) -> bool:
    """Whether the first usable record needs a chat template."""
    for _, record in read_records(Path(path)):
        if not isinstance(record, BadRecord):
            return is_chat(record, config.data)
    return config.data.chat_template
