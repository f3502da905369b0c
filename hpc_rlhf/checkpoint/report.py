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


def show_verification(run: RunDir) -> bool:
    """Verify ``run`` and print a table; returns whether all of it is whole.

    On a terminal, progress goes to stderr meanwhile.
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
    console.print(_table(findings))
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


def _table(findings: list[Finding]) -> Table:
    table = Table("what", "", box=None)
    table.add_column("files", justify="right")
    table.add_column("size", justify="right")
    for finding in findings:
        verdict = Text("whole", "green") if finding.whole else Text("BROKEN", "bold red")
        table.add_row(Text(finding.what), verdict, str(finding.files), decimal(finding.size))
    return table
