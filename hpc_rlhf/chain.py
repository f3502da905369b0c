"""A chain: runs of which each begins with what those before it have made, as one experiment.

``chain`` in the configuration names the links in their order, and says by field what differs in the run
of each::

    chain:
      sft: {stage: sft, run: {steps: 200}}
      ppo: {model: {path: '${run.root}/${run.name}-sft/policy'}}

Each link is a run of its own, ``NAME-LINK``, and ordinary in every other respect. A field that the user
sets is set in every link, ``chain.LINK.FIELD`` in one.
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_rlhf import compose
from hpc_rlhf.config import Config, Stage
from hpc_rlhf.errors import UserError
from hpc_rlhf.run_dir import RunDir
from hpc_rlhf.runs import run_directory

_NAME = re.compile(r"\w+")
_OF_A_LINK = re.compile(r"([+~]*)chain\.(\w+)\.(.+)", re.DOTALL)


@dataclass(frozen=True)
class Link:
    """One run; the only one, without a name, of an experiment that is no chain."""

    name: str
    config: Config

    @property
    def run(self) -> RunDir:
        return run_directory(self.config)

    @property
    def result(self) -> Path:
        """The model that the run will have made when it is complete."""
        is_reward_model = self.config.stage is Stage.REWARD_MODEL
        return self.run.reward_model if is_reward_model else self.run.policy


def compose_links(
    overrides: Sequence[str], *, config_directory: Path | None = None
) -> tuple[Link, ...]:
    """Compose the configurations of all runs of an experiment, in their order.

    Args:
        overrides: Hydra overrides; they come after the links' own values.
        config_directory: see :func:`hpc_rlhf.compose.compose`.

    Raises:
        UserError: see :func:`hpc_rlhf.compose.compose`; or a link that the experiment does not have.
    """
    found = [(text, _OF_A_LINK.fullmatch(text)) for text in overrides]
    general = [text for text, match in found if match is None]
    chain = compose.compose_section(general, "chain", config_directory=config_directory)
    for text, match in found:
        if match is not None and match[2] not in chain:
            links = f"the links are {', '.join(chain)}" if chain else "it is no chain of runs"
            raise UserError(f"{text}: the experiment has no link {match[2]!r}; {links}")
    if not chain:
        return (Link("", compose.compose(general, config_directory=config_directory)),)
    name = compose.compose_section(general, "run.name", config_directory=config_directory)
    composed = []
    for link, values in chain.items():
        if not _NAME.fullmatch(str(link)) or not isinstance(values, Mapping):
            raise UserError(
                f"chain.{link}: expected a name of letters, digits and _, and below it the fields that "
                "differ in the link's run"
            )
        own = [match[1] + match[3] for _, match in found if match is not None and match[2] == link]
        run_name = f"{name}-{link}"
        lines = [*_as_overrides(values), *general, f"run.name={_literal(run_name)}", *own]
        try:
            config = compose.compose(lines, config_directory=config_directory)
        except UserError as error:
            raise UserError(f"chain.{link}: {error}") from error
        if config.run.name != run_name:
            raise UserError(f"chain.{link}.run.name: follows from run.name={name}, give that one")
        config.chain = {}  # of the experiment, not of the run
        composed.append(Link(str(link), config))
    return tuple(composed)


@dataclass(frozen=True)
class Checkable:
    """A link's configuration with files that are there now."""

    config: Config
    reward_model_to_come: bool = False  # see planner.preflight.check


def before_the_chain(links: Sequence[Link]) -> Iterator[Checkable]:
    """What can be checked of every link while those before it are not complete.

    In the place of a model that is still to be made is the one that it will descend from: of the same
    sizes, with the same tokenizer.
    """
    origins: dict[str, str] = {}
    for link in links:
        config = copy.deepcopy(link.config)
        for owner, field in (
            (config.model, "path"),
            (config.model, "reference"),
            (config.critic, "path"),
            (config.reward, "model"),
        ):
            value = getattr(owner, field)
            setattr(owner, field, origins.get(value, value))
        yield Checkable(config, reward_model_to_come=link.config.reward.model in origins)
        if not link.result.is_dir():
            origins[str(link.result)] = config.model.path


def _as_overrides(values: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _as_overrides(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={_literal(value)}"


def _literal(value: Any) -> str:
    """A plain value in the grammar of Hydra's overrides."""
    from hydra.core.override_parser.types import Quote, QuotedString

    if value is None:
        return "null"
    if isinstance(value, str):
        return QuotedString(value, Quote.double).with_quotes()
    if isinstance(value, list):
        return f"[{','.join(map(_literal, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_literal(child)}' for key, child in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)
