"""Examples for the offline losses, and what plain torch on Hugging Face and TRL make of them."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hpc_rlhf.config import DpoConfig, DpoLoss, LossMean
from hpc_rlhf.learner.objectives import BradleyTerry, DirectPreference, Objective, Supervised
from hpc_rlhf.types import Example, TokenSequence

PAIR_TOKENS = 40  # of both sequences of every pair: a micro-batch holds a known number of them
SEQUENCE_TOKENS = 20
COUNT = 8
CENTERING = 0.05
SMOOTHING = 0.2
BETA = 0.3

OBJECTIVES: dict[str, Objective] = {
    "sft": Supervised(),
    "sft-sequence": Supervised(LossMean.SEQUENCE),
    "reward": BradleyTerry(),
    "reward-margin-centred": BradleyTerry(CENTERING),
    "dpo": DirectPreference(DpoConfig(DpoLoss.SIGMOID, BETA)),
    "dpo-ipo": DirectPreference(DpoConfig(DpoLoss.IPO, BETA)),
    "dpo-conservative": DirectPreference(DpoConfig(DpoLoss.CONSERVATIVE, BETA, SMOOTHING)),
}


def is_scored(name: str) -> bool:
    return name.startswith("reward")


def demonstrations() -> list[Example]:
    rng = np.random.default_rng(0)
    return [
        Example(uid=f"d:{i}", sequences=(_sequence(rng, SEQUENCE_TOKENS, 4 + i),))
        for i in range(COUNT)
    ]


def pairs(*, margins: bool = False) -> list[Example]:
    """Answers of different lengths to one prompt, with log-probs of some reference."""
    rng = np.random.default_rng(1)
    made = []
    for i in range(COUNT):
        prompt, chosen = 5 + i % 3, 15 + i
        one = _sequence(rng, chosen, prompt)
        other = _sequence(rng, PAIR_TOKENS - chosen, prompt)
        other.token_ids[:prompt] = one.token_ids[:prompt]
        learned = [int(s.loss_mask.sum()) for s in (one, other)]
        made.append(
            Example(
                uid=f"p:{i}",
                sequences=(one, other),
                margin=float(rng.uniform(0, 2)) if margins else 0.0,
                # single precision, as both sides use it
                ref_log_probs=tuple(float(np.float32(-5.5 * n + rng.normal())) for n in learned),
            )
        )
    return made


def examples_of(name: str) -> list[Example]:
    return demonstrations() if name.startswith("sft") else pairs(margins="margin" in name)


def reward_directory(source: Path, target: Path) -> Path:
    """A sequence classifier of one label on the decoder of ``source``."""
    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    weights.pop("lm_head.weight", None)
    hidden = weights["model.norm.weight"].numel()
    generator = torch.Generator().manual_seed(5)
    weights["score.weight"] = 0.3 * torch.randn(1, hidden, generator=generator)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    family = config["architectures"][0].removesuffix("ForCausalLM")
    config |= {"architectures": [f"{family}ForSequenceClassification"], "id2label": {"0": "score"}}
    (target / "config.json").write_text(json.dumps(config | {"label2id": {"score": 0}}))
    return target


def hf_model(directory: Path, *, scored: bool) -> Any:
    kind = AutoModelForSequenceClassification if scored else AutoModelForCausalLM
    return kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


# -- plain torch, one sequence at a time, written from the papers -----------------------------------


def plain_loss(name: str, model: Any) -> torch.Tensor:
    examples = examples_of(name)
    if name.startswith("sft"):
        tokens = [-_token_log_probs(model, e.sequences[0]) for e in examples]
        if name == "sft":
            return torch.cat(tokens).mean()
        return torch.stack([t.mean() for t in tokens]).mean()
    return torch.stack([_plain_pair(name, model, e) for e in examples]).mean()


def _plain_pair(name: str, model: Any, example: Example) -> torch.Tensor:
    if is_scored(name):
        chosen, rejected = (
            model.score(model.model(_ids(s)[None]).last_hidden_state)[0, -1, 0]
            for s in example.sequences
        )
        loss = -logsigmoid(chosen - rejected - example.margin)
        return loss + (CENTERING * (chosen + rejected) ** 2 if "centred" in name else 0.0)
    assert example.ref_log_probs is not None
    tokens = [_token_log_probs(model, s) for s in example.sequences]
    ratios = [t.sum() - ref for t, ref in zip(tokens, example.ref_log_probs, strict=True)]
    if name == "dpo-ipo":
        chosen, rejected = (r / len(t) for r, t in zip(ratios, tokens, strict=True))
        return (chosen - rejected - 1 / (2 * BETA)) ** 2
    h = BETA * (ratios[0] - ratios[1])
    if name == "dpo-conservative":
        return -(1 - SMOOTHING) * logsigmoid(h) - SMOOTHING * logsigmoid(-h)
    return -logsigmoid(h)


def _token_log_probs(model: Any, sequence: TokenSequence) -> torch.Tensor:
    ids = _ids(sequence)
    table = model(ids[None]).logits[0, :-1].log_softmax(-1)
    log_probs = table.gather(1, ids[1:, None])[:, 0]
    return log_probs[torch.from_numpy(sequence.loss_mask[1:])]


# -- TRL's trainers on the same batch ---------------------------------------------------------------


def trl_loss(name: str, directory: Path, output: Path) -> tuple[torch.Tensor, Any]:
    """The loss of TRL's trainer, with its graph, and the model that it is of."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

    examples = examples_of(name)
    model = hf_model(directory, scored=is_scored(name))
    common: dict[str, Any] = {
        "output_dir": str(output),
        "per_device_train_batch_size": COUNT,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "gradient_checkpointing": False,
    }
    options: dict[str, Any] = {
        "model": model,
        "processing_class": AutoTokenizer.from_pretrained(directory),
    }
    columns: list[dict[str, Any]] = []
    trainer: Any
    if name.startswith("sft"):
        for e in examples:
            (s,) = e.sequences
            labels = np.where(s.loss_mask, s.token_ids, -100)
            columns.append({"input_ids": s.token_ids.tolist(), "labels": labels.tolist()})
        data = Dataset.from_list(columns)
        trainer = SFTTrainer(
            args=SFTConfig(**common, max_length=None), train_dataset=data, **options
        )
    elif is_scored(name):
        for e in examples:
            sides = [s.token_ids.tolist() for s in e.sequences]
            columns.append({"chosen_ids": sides[0], "rejected_ids": sides[1], "margin": e.margin})
        data = Dataset.from_list(columns)
        centering = CENTERING if "centred" in name else None
        args = RewardConfig(**common, max_length=None, center_rewards_coefficient=centering)
        trainer = RewardTrainer(args=args, train_dataset=data, **options)
    else:
        for e in examples:
            prompt = int(np.argmax(e.sequences[0].loss_mask))
            sides = [s.token_ids.tolist() for s in e.sequences]
            row = {"prompt_ids": sides[0][:prompt], "chosen_ids": sides[0][prompt:]}
            columns.append({**row, "rejected_ids": sides[1][prompt:]})
        # it takes text only; the tokens come in at the collator, which is behind its tokenisation
        data = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])
        kind = "ipo" if name == "dpo-ipo" else "sigmoid"
        args = DPOConfig(**common, max_length=None, loss_type=kind, beta=BETA)
        trainer = DPOTrainer(args=args, train_dataset=data, **options)
        trainer.precompute_ref_logps = True
    inputs = trainer.data_collator(columns)
    if name.startswith("dpo"):
        refs = np.array([e.ref_log_probs for e in examples], np.float32)
        inputs["ref_chosen_logps"], inputs["ref_rejected_logps"] = torch.from_numpy(refs).unbind(1)
    trainer.model.train()
    return trainer.compute_loss(trainer.model, inputs), trainer.model


def gradients(
    loss: Callable[[], torch.Tensor], model: Any
) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    value = loss()
    value.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return value.item(), found


def _sequence(rng: np.random.Generator, length: int, prompt: int) -> TokenSequence:
    ids = rng.integers(3, 260, length).astype(np.int32)
    return TokenSequence(ids, np.arange(length) >= prompt)


def _ids(sequence: TokenSequence) -> torch.Tensor:
    return torch.from_numpy(sequence.token_ids.astype(np.int64))


def relative_error(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], names: Sequence[str] = ()
) -> float:
    """Largest over tensors of |found - expected| / |expected| (L2)."""
    return max(
        ((found[n] - expected[n]).norm() / expected[n].norm()).item() for n in names or found
    )
