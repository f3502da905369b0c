"""Supervised warm-up before online training, on demonstrations; its result is the reference."""

import logging
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hpc_rlhf.cluster import device
from hpc_rlhf.cluster.control import ControlGroup
from hpc_rlhf.config import Config
from hpc_rlhf.data.demonstrations import Demonstration, batches, load_demonstrations
from hpc_rlhf.errors import UserError
from hpc_rlhf.learner.trainer import Trainer
from hpc_rlhf.models.hf_layout import HfModelSpec
from hpc_rlhf.models.megatron import build_model, export_hf, load_hf
from hpc_rlhf.run_dir import RunDir

logger = logging.getLogger(__name__)

_LOG_EVERY = 50


def warm_up(
    config: Config,
    run: RunDir,
    control: ControlGroup,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Path:
    """Return the Hugging Face directory that online training starts from.

    Without warm-up that is the model's own. With it, ``RUN/warmup``: made once, by the first
    attempt that gets through, and found by the others.

    Collective over the learner; ``tokenizer`` is rank 0's.
    """
    source = Path(config.model.path)
    warmup = config.warmup
    if warmup.steps == 0:
        return source
    if control.broadcast(run.warmup.is_dir()):
        return run.warmup
    if warmup.demonstrations is None:
        raise UserError("warmup.demonstrations: warmup.steps needs a JSONL file of demonstrations")

    demonstrations: list[Demonstration] = []
    if tokenizer is not None:
        demonstrations = load_demonstrations(Path(warmup.demonstrations), config.data, tokenizer)
    demonstrations = control.broadcast(demonstrations)
    model = build_model(
        HfModelSpec.from_directory(source),
        config.learner.parallel,
        dtype=device.resolve_dtype(config.model.dtype),
        recompute=config.learner.recompute,
    )
    load_hf(model, source)
    learner = replace(
        config.learner, optimizer=replace(config.learner.optimizer, lr=warmup.lr, warmup_steps=0)
    )
    trainer = Trainer(model, learner, total_steps=warmup.steps)
    order = batches(demonstrations, warmup.batch_size, seed=config.run.seed)
    for step in range(1, warmup.steps + 1):
        batch = next(order)
        stats = trainer.sft_step([(d.token_ids, d.loss_mask) for d in batch])
        if step % _LOG_EVERY == 0 or step == warmup.steps:
            logger.info("warm-up step %d of %d: loss %.4f", step, warmup.steps, stats["loss"])
    trainer.close()
    export_hf(model, source, run.warmup)
    return run.warmup
