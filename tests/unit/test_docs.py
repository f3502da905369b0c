"""Documentation: links lead somewhere, and the commands it shows are accepted by the program."""

import re
import shlex
from pathlib import Path

import pytest

from hpc_rlhf.chain import compose_links
from hpc_rlhf.cli import _parse
from hpc_rlhf.planner import preflight

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
_LINK = re.compile(r"\[[^\]]+\]\(([^)#]+)(?:#[^)]*)?\)")
_BLOCK = re.compile(r"```(?:bash)?\n(.*?)```", re.DOTALL)


def commands() -> list[str]:
    """Every ``hpc-rlhf`` command line of the documentation."""
    lines = [
        line.split("#")[0].strip()
        for page in PAGES
        for block in _BLOCK.findall(page.read_text())
        for line in block.replace("\\\n", " ").splitlines()
    ]
    return sorted({line for line in lines if line.startswith("hpc-rlhf ")})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in _LINK.findall(page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_there_are_commands_to_check() -> None:
    assert len(commands()) >= 6


@pytest.mark.parametrize("command", commands())
def test_commands_are_accepted(command: str, tmp_path: Path) -> None:
    arguments = _parse(shlex.split(command)[1:])
    if "overrides" in arguments:
        directory = tmp_path if arguments.config_dir else None
        if directory is not None:  # the example of a centre's own configuration
            (directory / "cluster").mkdir()
            text = (REPOSITORY / "docs/sites.md").read_text()
            example = re.search(r"```yaml\n(.*?)```", text, re.DOTALL)
            assert example is not None
            (directory / "cluster/mycentre.yaml").write_text(example[1])
        for link in compose_links(arguments.overrides, config_directory=directory):
            preflight.check_settings(link.config)


def test_documented_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    used = {
        target
        for page in PAGES
        for block in _BLOCK.findall(page.read_text())
        for target in re.findall(r"^make ([a-z]+)", block, re.MULTILINE)
    }
    assert used
    assert used <= targets
