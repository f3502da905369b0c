"""What a person sees of a run: one line a step while it goes, a summary at its end."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hpc_rlhf.fs import read_json
from hpc_rlhf.observe.metrics import METRICS_FILE, read_metrics
from hpc_rlhf.run_dir import RunDir
from hpc_rlhf.types import Phase

_POLL_S = 0.5
_SHOWN_STEPS = 15
_ENDS = 5  # steps at each end of the run that the summary compares

# metric, heading, format
_COLUMNS = (
    ("reward/mean", "reward", "{:.3f}"),
    ("kl", "KL", "{:.4f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("response_length/mean", "length", "{:.1f}"),
    ("rollout/tokens_per_second", "tok/s", "{:.0f}"),
    ("time/step", "s", "{:.2f}"),
    *((f"time/{phase}", phase.value, "{:.2f}") for phase in Phase if phase is not Phase.SETUP),
)


def follow(run: RunDir, stop: Callable[[], bool], console: Console) -> None:
    """Show the steps of ``run`` as they are recorded, until ``stop()``.

    On a terminal a live table of the last steps and the phase under way; else a plain line a step.
    Steps that were recorded before are not shown.
    """
    shown = max((record["step"] for record in read_metrics(run)), default=0)
    if console.is_terminal:
        with Live(console=console, refresh_per_second=4, transient=False) as live:
            while not stop():
                live.update(Group(_table(read_metrics(run)[-_SHOWN_STEPS:]), _progress(run)))
                time.sleep(_POLL_S)
            live.update(_table(read_metrics(run)[-_SHOWN_STEPS:]))
        return
    size = -1
    while True:
        ending = stop()
        path = run.metrics / METRICS_FILE
        now = path.stat().st_size if path.exists() else 0
        if now != size:
            size = now
            for record in read_metrics(run):
                if record["step"] > shown:
                    shown = record["step"]
                    console.print(line(record), highlight=False, soft_wrap=True)
        if ending:
            return
        time.sleep(_POLL_S)


def line(record: Mapping[str, Any]) -> str:
    """One step as plain text: ``step 12  reward 0.512  KL 0.0123 ...``."""
    cells = [f"{heading} {_cell(record, name, form)}" for name, heading, form in _COLUMNS]
    return f"step {record['step']:>4}  " + "  ".join(cells)


def summary(run: RunDir) -> Table | Text:
    """The run as a whole: how reward moved, what it cost, where things are."""
    records = read_metrics(run)
    if not records:
        return Text("no step was recorded")
    table = Table(title=f"run {run.path.name}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    first, last = records[:_ENDS], records[-_ENDS:]
    for name, heading, form in _COLUMNS[:5]:
        a, b = _mean(first, name), _mean(last, name)
        if a is not None and b is not None:
            text = f"{form.format(a)} -> {form.format(b)}"
            table.add_row(heading, f"{text}   (first {len(first)}, last {len(last)} steps)")
    gain = _gain(first, last)
    if gain is not None:
        table.add_row("reward gain", f"{gain:+.3f}")
    total = sum(record.get("time/step") or 0.0 for record in records)
    phases = [
        f"{phase.value} {sum(r.get(f'time/{phase}') or 0.0 for r in records) / total:.0%}"
        for phase in Phase
        if any(f"time/{phase}" in record for record in records)
    ]
    table.add_row("steps", f"{len(records)} in {total:.0f} s: {', '.join(phases)}")
    idle = _mean(records, "trainer/idle_fraction")
    if idle is not None:
        table.add_row("trainer idle", f"{idle:.0%}")
    table.add_row("attempts", str(len(run.attempt_numbers())))
    if (run.path / "policy").is_dir():
        table.add_row("policy", str(run.path / "policy"))
    table.add_row("metrics", f"{run.metrics / METRICS_FILE}, tensorboard --logdir {run.metrics}")
    return table


def _gain(first: Sequence[Mapping[str, Any]], last: Sequence[Mapping[str, Any]]) -> float | None:
    a, b = _mean(first, "reward/mean"), _mean(last, "reward/mean")
    return None if a is None or b is None else b - a


def _table(records: Sequence[Mapping[str, Any]]) -> Table:
    table = Table()
    table.add_column("step", justify="right")
    for _, heading, _ in _COLUMNS:
        table.add_column(heading, justify="right")
    for record in records:
        cells = [_cell(record, name, form) for name, _, form in _COLUMNS]
        table.add_row(str(record["step"]), *cells)
    return table


def _progress(run: RunDir) -> Text:
    """The phase that the newest attempt is in."""
    numbers = run.attempt_numbers()
    path = run.attempt(numbers[-1]).progress if numbers else None
    if path is None or not path.exists():
        return Text("starting")
    progress = read_json(path)
    waited = time.time() - progress["time"]
    return Text(f"step {progress['step']}: {progress['phase']} ({waited:.0f} s)")


def _cell(record: Mapping[str, Any], name: str, form: str) -> str:
    value = record.get(name)
    return "-" if value is None else form.format(value)


def _mean(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [record[name] for record in records if record.get(name) is not None]
    return sum(values) / len(values) if values else None
