"""Supervised warm-up before online training, on demonstrations; its result is the reference."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_rlhf.cluster.control import ControlGroup
from hpc_rlhf.config import Config
from hpc_rlhf.data.order import examples_of_step
from hpc_rlhf.data.tokens import TokenDataset
from hpc_rlhf.errors import UserError
from hpc_rlhf.learner.objectives import Supervised
from hpc_rlhf.learner.trainer import Trainer
from hpc_rlhf.models.megatron import export_hf
from hpc_rlhf.run_dir import RunDir
from hpc_rlhf.runs import open_examples
from hpc_rlhf.stages.world import load_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_LOG_EVERY = 50


def warm_up(
    config: Config,
    run: RunDir,
    control: ControlGroup,
    tokenizer: "PreTrainedTokenizerBase | None",
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

    def prepare() -> Path:
        if warmup.demonstrations is None:
            raise UserError("warmup.demonstrations: warmup.steps needs a file of demonstrations")
        assert tokenizer is not None
        return open_examples(config, warmup.demonstrations, tokenizer).path

    demonstrations = TokenDataset.open(control.from_coordinator(prepare))
    model = load_model(config, source, config.learner.recompute)
    learner = replace(
        config.learner, optimizer=replace(config.learner.optimizer, lr=warmup.lr, warmup_steps=0)
    )
    trainer = Trainer(model, learner, total_steps=warmup.steps)
    objective = Supervised()
    for step in range(1, warmup.steps + 1):
        indices = examples_of_step(
            len(demonstrations), warmup.batch_size, step, seed=config.run.seed
        )
        stats = trainer.fit(objective, demonstrations.examples(indices))
        if step % _LOG_EVERY == 0 or step == warmup.steps:
            logger.info("warm-up step %d of %d: loss %.4f", step, warmup.steps, stats["loss"])
    trainer.close()
    export_hf(model, source, run.warmup)
    return run.warmup
