"""What ``hpc-rlhf verify`` prints."""

import sys

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from hpc_rlhf.checkpoint.verify import Finding, total_bytes, verify_run
from hpc_rlhf.run_dir import RunDir

_ROLLOUTS = "rollouts/"


def show_verification(run: RunDir, *, verbose: bool = False) -> bool:
    """Verify ``run`` and print a table; returns whether all of it is whole.

    On a terminal, progress goes to stderr meanwhile.

    Args:
        verbose: a line for every file of rollouts; else those that are whole are summed up.
    """
    progress = Progress(
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with progress:
        task = progress.add_task("read", total=total_bytes(run))
        findings = list(verify_run(run, on_bytes=lambda n: progress.advance(task, n)))
    console = Console(soft_wrap=True)
    console.print(_table(findings if verbose else _summed_up(findings)))
    broken = [finding for finding in findings if not finding.whole]
    for finding in broken:
        for problem in finding.problems:
            console.print(Text(f"{finding.what}: {problem}"))
    if not findings:
        console.print(Text(f"{run.path}: nothing was written yet"))
    elif broken:
        console.print(Text(f"{len(broken)} of {len(findings)} are not whole; nothing was changed"))
    else:
        console.print(Text(f"all {len(findings)} are whole"))
    return not broken


def _summed_up(findings: list[Finding]) -> list[Finding]:
    """The findings with one in the place of all whole rollouts, where the first of them was."""
    whole = [one for one in findings if one.whole and one.what.startswith(_ROLLOUTS)]
    if len(whole) < 2:
        return findings
    files, size = sum(one.files for one in whole), sum(one.size for one in whole)
    total = Finding(f"{_ROLLOUTS}* ({len(whole)} steps)", files, size, ())
    return [total if one is whole[0] else one for one in findings if one not in whole[1:]]


def _table(findings: list[Finding]) -> Table:
    table = Table("what", "", box=None)
    table.add_column("files", justify="right")
    table.add_column("size", justify="right")
    for finding in findings:
        verdict = Text("whole", "green") if finding.whole else Text("BROKEN", "bold red")
        table.add_row(Text(finding.what), verdict, str(finding.files), decimal(finding.size))
    return table
