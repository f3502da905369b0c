"""Every number of the configuration has a bound, or a reason to have none."""

import copy
import math
from typing import Any

import pytest

from hpc_rlhf import schema
from hpc_rlhf.config import Config
from hpc_rlhf.errors import UserError
from hpc_rlhf.planner.bounds import BOUNDS, UNBOUNDED, Bound, check_bounds

NUMBERS = {name: kind for name, kind in schema.fields().items() if schema.is_numeric(kind)}


def _set(config: Config, name: str, value: Any) -> None:
    *parents, leaf = name.split(".")
    owner: Any = config
    for parent in parents:
        owner = getattr(owner, parent)
    assert hasattr(owner, leaf)
    setattr(owner, leaf, value)


def test_every_number_is_in_the_table() -> None:
    assert "learner.optimizer.lr" in NUMBERS
    assert "sampling.stop_token_ids" in NUMBERS
    assert "sampler.kv_cache_bytes" in NUMBERS
    assert "run.deterministic" not in NUMBERS
    missing = NUMBERS.keys() - BOUNDS.keys() - UNBOUNDED.keys()
    assert not missing, "give it a bound in planner/bounds.py, or a reason"
    assert BOUNDS.keys() | UNBOUNDED.keys() == NUMBERS.keys()
    assert not BOUNDS.keys() & UNBOUNDED.keys()


def test_the_defaults_are_within() -> None:
    check_bounds(Config())


@pytest.mark.parametrize("name", BOUNDS)
def test_what_is_outside_is_refused_and_what_is_at_the_end_is_not(name: str) -> None:
    bound, is_list = BOUNDS[name], list in schema._parts(NUMBERS[name])
    is_float = float in schema._parts(NUMBERS[name])
    outside = [bound.low if bound.open_low else bound.low - 1]
    inside = [] if bound.open_low else [bound.low]
    if bound.high != math.inf:
        outside.append(bound.high if bound.open_high else bound.high + 1)
        inside += [] if bound.open_high else [bound.high]
    if is_float:
        outside += [math.inf, -math.inf, math.nan]
    config = copy.deepcopy(Config())
    for value in inside:
        _set(config, name, [value] if is_list else value)
        check_bounds(config)
    for value in outside:
        _set(config, name, [value] if is_list else value)
        with pytest.raises(UserError, match=rf"^{name}=.*: must "):
            check_bounds(config)


def test_how_a_bound_reads() -> None:
    assert str(Bound(0)) == "not be negative"
    assert str(Bound(0, open_low=True)) == "be greater than 0"
    assert str(Bound(1)) == "be at least 1"
    assert str(Bound(0, 1, open_low=True)) == "be greater than 0 and at most 1"
    assert str(Bound(0, 0.5, open_high=True)) == "be at least 0 and less than 0.5"
