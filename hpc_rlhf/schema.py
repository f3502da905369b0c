"""The configuration's fields by their dotted names, read from its dataclasses."""

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hpc_rlhf.config import Config

NUMERIC = (int, float)


@functools.cache
def fields() -> Mapping[str, Any]:
    """Every leaf with its annotated type: ``{"run.steps": int, "cluster.extra": dict[str, Any], ...}``."""
    return dict(_leaves("", Config))


def _leaves(prefix: str, owner: type) -> Iterator[tuple[str, Any]]:
    for name, kind in typing.get_type_hints(owner).items():
        if dataclasses.is_dataclass(kind):
            yield from _leaves(f"{prefix}{name}.", typing.cast(type, kind))
        else:
            yield f"{prefix}{name}", kind


def is_free(kind: Any) -> bool:
    """Whether a field is a dictionary whose keys the user chooses."""
    return dict in _parts(kind)


def is_numeric(kind: Any) -> bool:
    """Whether a field holds a number, a list of numbers, or optionally one of both."""
    return any(part in NUMERIC for part in _parts(kind))


def _parts(kind: Any) -> set[Any]:
    """The types within an annotation: ``list[float] | None`` -> {list, float, NoneType}."""
    origin = typing.get_origin(kind)
    if origin is None:
        return {kind}
    inner = [_parts(argument) for argument in typing.get_args(kind)]
    if origin in (typing.Union, types.UnionType):
        return set().union(*inner)
    if origin is list:
        return {list}.union(*inner)
    return {origin}


def closest(name: str, known: Iterable[str]) -> str | None:
    """The name among ``known`` that was probably meant, or those with the same last part."""
    known = list(known)
    same_end = [other for other in known if other.endswith(f".{name}")]
    if same_end:
        return " or ".join(same_end[:3])
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return found[0] if found else None
