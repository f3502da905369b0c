import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hpc_rlhf.data.quickstart import DEMONSTRATIONS, HELD_OUT, MODEL, PAIRS, PROMPTS, prepare
from hpc_rlhf.errors import UserError

SMALL: dict[str, Any] = {"hidden": 64, "heads": 2, "demonstrations": 500}


def _lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _sum(prompt: str) -> int:
    a, b = prompt.removesuffix("=").split("+")
    return int(a) + int(b)


def test_prompts_have_right_answers_and_demonstrations_mostly_wrong_ones(tmp_path: Path) -> None:
    directory = prepare({"directory": str(tmp_path / "q"), "demonstrations": 2000})
    prompts = _lines(directory / PROMPTS)
    assert len({record["prompt"] for record in prompts}) == 100
    assert all(int(record["answer"]) == _sum(record["prompt"]) for record in prompts)
    shown = _lines(directory / DEMONSTRATIONS)
    right = sum(int(record["completion"]) == _sum(record["prompt"]) for record in shown)
    # 0.35, and one guess in 19 hits: 0.38; five standard deviations are 0.054
    assert 0.33 < right / len(shown) < 0.44
    assert {record["prompt"] for record in shown} == {record["prompt"] for record in prompts}


def test_pairs_are_of_right_and_wrong_and_held_out_ones_are_others(tmp_path: Path) -> None:
    pairs = {"pairs": 400, "held_out_pairs": 100}
    directory = prepare({"directory": str(tmp_path / "a"), **SMALL, **pairs})
    learned, held_out = _lines(directory / PAIRS), _lines(directory / HELD_OUT)
    assert (len(learned), len(held_out)) == (400, 100)
    every = [tuple(pair.values()) for pair in learned + held_out]
    assert len(set(every)) == 500
    assert all(int(chosen) == _sum(prompt) != int(wrong) for prompt, chosen, wrong in every)

    noisy = {"directory": str(tmp_path / "b"), **SMALL, **pairs, "wrong_labels": 0.25}
    directory = prepare(noisy)
    right = [int(pair["chosen"]) == _sum(pair["prompt"]) for pair in _lines(directory / PAIRS)]
    assert sum(right) == 300
    assert _lines(directory / HELD_OUT) == held_out


def test_assets_of_an_earlier_version_without_pairs_are_still_used(tmp_path: Path) -> None:
    directory = prepare({"directory": str(tmp_path / "a"), **SMALL})
    assert not (directory / PAIRS).exists()
    assert not [key for key in json.loads((directory / "assets.json").read_text()) if "pair" in key]


def test_it_is_made_once_and_equal_for_equal_seeds(tmp_path: Path) -> None:
    first = prepare({"directory": str(tmp_path / "a"), "seed": 3, **SMALL})
    times = {path: path.stat().st_mtime_ns for path in first.rglob("*")}
    prepare({"directory": str(tmp_path / "a"), "seed": 3, **SMALL})
    assert {path: path.stat().st_mtime_ns for path in first.rglob("*")} == times
    again = prepare({"directory": str(tmp_path / "b"), "seed": 3, **SMALL})
    other = prepare({"directory": str(tmp_path / "c"), "seed": 4, **SMALL})
    for name in (f"{MODEL}/model.safetensors", DEMONSTRATIONS):
        assert (first / name).read_bytes() == (again / name).read_bytes()
        assert (first / name).read_bytes() != (other / name).read_bytes()
    assert (first / PROMPTS).read_bytes() == (other / PROMPTS).read_bytes()


def test_what_was_made_from_other_settings_is_not_used(tmp_path: Path) -> None:
    prepare({"directory": str(tmp_path / "a"), **SMALL})
    with pytest.raises(UserError, match=r"assets\.directory=.*/a: was not made from these assets"):
        prepare({"directory": str(tmp_path / "a"), "seed": 1, **SMALL})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(UserError, match="remove it, or give another"):
        prepare({"directory": str(tmp_path / "mine"), **SMALL})


def test_unknown_or_useless_settings(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"assets: .*'depth'; expected directory, seed"):
        prepare({"directory": str(tmp_path / "a"), "depth": 3})
    with pytest.raises(UserError, match=r"assets\.correct_fraction=0: expected"):
        prepare({"directory": str(tmp_path / "a"), "correct_fraction": 0})
    with pytest.raises(UserError, match="there are 1800 with"):
        prepare({"directory": str(tmp_path / "a"), "pairs": 1800, "held_out_pairs": 1})
    with pytest.raises(UserError, match=r"assets\.wrong_labels=0.5"):
        prepare({"directory": str(tmp_path / "a"), "wrong_labels": 0.5})
    assert not (tmp_path / "a").exists()


def test_several_runs_may_prepare_it_at_once(tmp_path: Path) -> None:
    assets = {"directory": str(tmp_path / "a"), **SMALL}
    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(prepare, [assets] * 4, timeout=60)) == {tmp_path / "a"}
    assert [path.name for path in tmp_path.iterdir()] == ["a"]  # nothing half made is left
