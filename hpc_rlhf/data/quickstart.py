"""The quickstart's model and data, made on the spot: sums, and somebody who is bad at them.

Prompts are ``3+5=``, the answer is ``8``. The demonstrations that the warm-up imitates are right in
only a fraction of cases and otherwise any number that a sum could be. A policy that imitates them
well is right about as often; reinforcement learning against the verifier must do the rest. How
often the demonstrator is right, not how long the warm-up is, sets where online training begins.

Pairs, for reward models, are of the right answer and a wrong one; no pair is both learned from and
held out.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_rlhf.data.tiny import make_tiny_model
from hpc_rlhf.errors import UserError
from hpc_rlhf.fs import (
    DamagedFile,
    publish_directory,
    publish_json,
    read_json,
    system_error,
    write_failure,
)

MODEL, PROMPTS, DEMONSTRATIONS = "model", "prompts.jsonl", "demonstrations.jsonl"
PAIRS, HELD_OUT = "pairs.jsonl", "held_out.jsonl"
_SPECIFICATION = "assets.json"
_OF_PAIRS = ("pairs", "held_out_pairs", "wrong_labels")


@dataclass(frozen=True, kw_only=True)
class QuickstartAssets:
    """What to make; the fields of ``assets`` in the configuration."""

    directory: str
    seed: int = 0
    largest: int = 9  # summands are 0..largest: (largest + 1)^2 prompts
    demonstrations: int = 2048
    correct_fraction: float = 0.35  # of the demonstrations
    hidden: int = 128
    layers: int = 2  # two pipeline stages at most
    heads: int = 4  # of 32 dimensions, the least that the CPU engine runs
    init_std: float = 0.1  # larger than usual: a tiny model learns sums in far fewer steps
    pairs: int = 0  # to train a reward model on; of the 2 * largest wrong answers to each prompt
    held_out_pairs: int = 0
    wrong_labels: float = (
        0.0  # fraction of the pairs, but not of those held out, with the wrong one chosen
    )

    def __post_init__(self) -> None:
        if self.largest < 1 or self.demonstrations < 1:
            raise UserError("assets.largest and assets.demonstrations must be at least 1")
        if not 0 < self.correct_fraction <= 1:
            raise UserError(f"assets.correct_fraction={self.correct_fraction}: expected (0, 1]")
        there_are = (self.largest + 1) ** 2 * 2 * self.largest
        if min(self.pairs, self.held_out_pairs) < 0 or self.pairs + self.held_out_pairs > there_are:
            raise UserError(
                f"assets.pairs={self.pairs} and assets.held_out_pairs={self.held_out_pairs}: there are "
                f"{there_are} with assets.largest={self.largest}"
            )
        if not 0 <= self.wrong_labels < 0.5:
            raise UserError(f"assets.wrong_labels={self.wrong_labels}: expected [0, 0.5)")


def prepare(assets: Mapping[str, Any]) -> Path:
    """Make the model, the prompts and the demonstrations, unless they are there.

    Everything is a function of the settings. The directory appears whole, so that several runs may
    prepare it at the same time.

    Returns:
        The directory that holds :data:`MODEL`, :data:`PROMPTS`, :data:`DEMONSTRATIONS`, and
        :data:`PAIRS` and :data:`HELD_OUT` where they are asked for.

    Raises:
        UserError: an unknown setting; the directory was made from other settings, or cannot be written.
    """
    try:
        wanted = QuickstartAssets(**assets)
    except TypeError as error:
        known = ", ".join(QuickstartAssets.__dataclass_fields__)
        raise UserError(f"assets: {error}; expected {known}") from error
    directory = Path(wanted.directory)
    if not directory.exists():
        try:
            publish_directory(directory, lambda target: _write(target, wanted))
        except FileExistsError:
            pass  # another run was faster; what it made is checked below
        except Exception as error:  # safetensors and tokenizers have errors of their own
            cause = system_error(error)
            if cause is None:
                raise
            failure = write_failure(cause, directory, setting="assets.directory")
            raise UserError(f"assets.directory={directory}: {failure}") from error
    if not _is_made_from(directory, wanted):
        raise UserError(
            f"assets.directory={directory}: was not made from these assets; "
            "remove it, or give another assets.directory"
        )
    return directory


def _is_made_from(directory: Path, wanted: QuickstartAssets) -> bool:
    try:
        return read_json(directory / _SPECIFICATION) == _specification(wanted)
    except (FileNotFoundError, NotADirectoryError, DamagedFile):
        return False


def _specification(assets: QuickstartAssets) -> dict[str, Any]:
    """The settings that the content depends on."""
    of_pairs = (
        () if assets.pairs or assets.held_out_pairs else _OF_PAIRS
    )  # as before there were any
    return {k: v for k, v in asdict(assets).items() if k not in ("directory", *of_pairs)}


def _write(directory: Path, assets: QuickstartAssets) -> None:
    make_tiny_model(
        directory / MODEL,
        hidden=assets.hidden,
        layers=assets.layers,
        heads=assets.heads,
        init_std=assets.init_std,
        max_positions=64,
        seed=assets.seed,
    )
    numbers = range(assets.largest + 1)
    prompts = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in numbers for b in numbers]
    _write_jsonl(directory / PROMPTS, prompts)
    rng = random.Random(assets.seed)
    demonstrations = [_demonstration(rng, assets) for _ in range(assets.demonstrations)]
    _write_jsonl(directory / DEMONSTRATIONS, demonstrations)
    pairs, held_out = _pairs(assets)
    for name, records in ((PAIRS, pairs), (HELD_OUT, held_out)):
        if records:
            _write_jsonl(directory / name, records)
    publish_json(directory / _SPECIFICATION, _specification(assets))


def _demonstration(rng: random.Random, assets: QuickstartAssets) -> dict[str, str]:
    a, b = rng.randint(0, assets.largest), rng.randint(0, assets.largest)
    right = rng.random() < assets.correct_fraction
    given = a + b if right else rng.randint(0, 2 * assets.largest)
    return {"prompt": f"{a}+{b}=", "completion": str(given)}


def _pairs(assets: QuickstartAssets) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Pairs to learn from and pairs held out, drawn without repetition."""
    numbers, answers = range(assets.largest + 1), range(2 * assets.largest + 1)
    every = [(a, b, wrong) for a in numbers for b in numbers for wrong in answers if wrong != a + b]
    rng = random.Random(f"pairs of {assets.seed}")
    drawn = rng.sample(every, assets.pairs + assets.held_out_pairs)
    pairs = [_pair(*one) for one in drawn]
    learned, held_out = pairs[: assets.pairs], pairs[assets.pairs :]
    for pair in rng.sample(learned, round(assets.wrong_labels * len(learned))):
        pair["chosen"], pair["rejected"] = pair["rejected"], pair["chosen"]
    return learned, held_out


def _pair(a: int, b: int, wrong: int) -> dict[str, str]:
    return {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(wrong)}


def _write_jsonl(path: Path, records: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
