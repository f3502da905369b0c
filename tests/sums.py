"""Demonstrations and pairs with a known rule: sums of two digits, right and wrong."""

import json
import random
from pathlib import Path


def write_demonstrations(path: Path) -> Path:
    """Every sum once, right."""
    records = [
        {"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(10) for b in range(10)
    ]
    return _write(path, records)


def write_pairs(path: Path, held_out: Path, *, count: int, held_out_count: int) -> None:
    """Right answers over wrong ones; no pair is in both files."""
    pairs = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(wrong)}
        for a in range(10)
        for b in range(10)
        for wrong in range(19)
        if wrong != a + b
    ]
    random.Random(0).shuffle(pairs)
    _write(path, pairs[:count])
    _write(held_out, pairs[count : count + held_out_count])


def _write(path: Path, records: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
