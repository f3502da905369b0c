"""Rules that a verifier process applies to one completion. Nothing heavy is imported here."""

import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from hpc_rlhf.errors import UserError

Rule = Callable[[str, str | None, Mapping[str, Any]], Any]
"""``rule(completion, answer, fields) -> reward``, a finite number; anything else is a failure."""


def make_rule(name: str, pattern: str | None, function: str | None) -> Rule:
    """The rule that ``reward`` configures.

    Raises:
        UserError: a pattern that does not compile or has no group, or a function that cannot be
            imported.
    """
    compiled = None if pattern is None else _compile(pattern)
    if name == "exact":
        if compiled is not None and not compiled.groups:
            raise UserError(
                f"reward.pattern={pattern!r}: has no group; put parentheses around what is the answer"
            )
        return exact_match(compiled)
    if name == "regex":
        if compiled is None:
            raise UserError("reward.name=regex needs reward.pattern, a regular expression")
        return regex_match(compiled)
    if function is None:
        raise UserError("reward.name=python needs reward.function, package.module:function")
    return import_function(function)


def exact_match(pattern: re.Pattern[str] | None) -> Rule:
    """1 if the completion, stripped, is the answer, else 0.

    With a pattern, group 1 of its last match in the completion is what was answered, and numbers are compared as numbers: "1,234.0" is "1234".
    """

    def rule(completion: str, answer: str | None, fields: Mapping[str, Any]) -> float:
        if answer is None:
            raise ValueError("exact match needs an answer (data.answer_field)")
        if pattern is None:
            return float(completion.strip() == answer.strip())
        matches = list(pattern.finditer(completion))
        if not matches:
            return 0.0
        given = matches[-1].group(1) or ""  # the group may be optional
        return float(normalize(given) == normalize(answer))

    return rule


def regex_match(pattern: re.Pattern[str]) -> Rule:
    """1 if the pattern is found in the completion, else 0."""
    return lambda completion, answer, fields: float(pattern.search(completion) is not None)


def normalize(text: str) -> str | Decimal:
    """A number as a number, whatever its commas, currency sign and trailing zeros; else the text."""
    text = text.strip()
    bare = text.replace(",", "").removeprefix("$").removesuffix(".").removesuffix("%")
    try:
        number = Decimal(bare)
    except InvalidOperation:
        return text
    return number if number.is_finite() else text


def import_function(path: str) -> Rule:
    """Import ``package.module:function``.

    Raises:
        UserError: it cannot be imported or is not callable; names the reason.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise UserError(f"reward.function={path}: expected package.module:function")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # the user's module may raise anything while it is imported
        raise UserError(
            f"reward.function={path}: cannot import it: {type(error).__name__}: {error}; "
            "the module must be importable where hpc-rlhf runs (working directory or PYTHONPATH)"
        ) from error
    if not callable(function):
        raise UserError(f"reward.function={path}: it is a {type(function).__name__}, not callable")
    _check_signature(path, function)
    return function


def _check_signature(path: str, function: Callable[..., Any]) -> None:
    if inspect.iscoroutinefunction(function):
        raise UserError(
            f"reward.function={path}: it is an async function, whose reward would be a coroutine; "
            "expected a plain function"
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # of some builtins
        return
    try:
        signature.bind("completion", "answer", {})
    except TypeError as error:
        raise UserError(
            f"reward.function={path}: is called as function(completion, answer, fields), and it is "
            f"{path.partition(':')[2]}{signature}: {error}"
        ) from error


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UserError(f"reward.pattern={pattern!r}: not a regular expression: {error}") from error
