"""What a person sees of a run: one line a step while it goes, a summary at its end."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hpc_rlhf.fs import read_json
from hpc_rlhf.observe.metrics import METRICS_FILE, parse_records, read_metrics
from hpc_rlhf.run_dir import RunDir
from hpc_rlhf.types import Phase

_POLL_S = 0.5
_SHOWN_STEPS = 15
_ENDS = 5  # steps at each end of the run that the summary compares

REWARD = "reward/mean"

# metric, heading, format
_COLUMNS = (
    (REWARD, "reward", "{:.3f}"),
    ("kl", "KL", "{:.4f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("response_length/mean", "length", "{:.1f}"),
    ("rollout/tokens_per_second", "tok/s", "{:.0f}"),
    ("time/step", "s", "{:.2f}"),
    *((f"time/{phase}", phase.value, "{:.2f}") for phase in Phase if phase is not Phase.SETUP),
)
_LEARNING_COLUMNS = 4  # the first ones; the others are speed

# of the offline stages, where a record has them
_OFFLINE_COLUMNS = (
    ("loss", "loss", "{:.4f}"),
    ("eval/loss", "held-out loss", "{:.4f}"),
    ("pair/accuracy", "accuracy", "{:.3f}"),
    ("eval/pair/accuracy", "held-out accuracy", "{:.3f}"),
    ("pair/margin", "margin", "{:.3f}"),
    ("eval/pair/margin", "held-out margin", "{:.3f}"),
    ("score/std", "score std", "{:.3f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("grad_norm", "gradient", "{:.3g}"),
    ("lr", "LR", "{:.2e}"),
    ("train/tokens_per_second", "tok/s", "{:.0f}"),
    ("time/step", "s", "{:.2f}"),
)
_OFFLINE_LEARNING_COLUMNS = 8
_SCALE_NOTE = "only differences between answers to one prompt mean something; the scale does not"
_COUNTS = (
    ("reward/excluded", "samples excluded (verifier failed)"),
    ("rollout/reissued", "samples reissued"),
    ("rollout/deaths", "sampler deaths"),
    ("train/skipped", "steps skipped (loss or gradient not finite)"),
)


def follow(run: RunDir, stop: Callable[[], bool], console: Console) -> None:
    """Show the steps of ``run`` as they are recorded, until ``stop()``.

    On a terminal a live table of the last steps and the phase under way; else a plain line for each
    new step.
    """
    path = run.metrics / METRICS_FILE
    records = _Unchanged(path)
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            while not stop():
                table = _table(records.read()[-_SHOWN_STEPS:])
                live.update(Group(table, _progress(run)), refresh=True)
                time.sleep(_POLL_S)
            live.update(_table(records.read()[-_SHOWN_STEPS:]), refresh=True)
        return
    shown = max(map(_order, records.read()), default=(0, 0))
    while True:
        ending = stop()  # asked first, so that what is recorded by then is shown
        for record in records.read():
            if _order(record) > shown:
                shown = _order(record)
                console.print(line(record), highlight=False, soft_wrap=True)
        if ending:
            return
        time.sleep(_POLL_S)


class _Unchanged:
    """Records of a metrics file, parsed again only when the file has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._state: tuple[int, int] | None = None
        self._records: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return []
        # A resumed run replaces the file: another inode, perhaps of the same size.
        state = (status.st_ino, status.st_size)
        if state != self._state:
            self._state, self._records = state, parse_records(self._path.read_bytes())
        return self._records


def _order(record: Mapping[str, Any]) -> tuple[int, int]:
    """A resumed attempt does some steps again: they are newer than the same ones before."""
    return record["attempt"], record["step"]


def line(record: Mapping[str, Any]) -> str:
    """One step as plain text: ``step 12  reward 0.512  KL 0.0123 ...``."""
    cells = [f"{heading} {_cell(record, name, form)}" for name, heading, form in _columns([record])]
    return f"step {record['step']:>4}  " + "  ".join(cells)


def _columns(records: Sequence[Mapping[str, Any]]) -> Sequence[tuple[str, str, str]]:
    """Those of the stage that the records are of."""
    if not any("epoch" in record for record in records):
        return _COLUMNS
    return [column for column in _OFFLINE_COLUMNS if any(column[0] in r for r in records)]


def summary(run: RunDir) -> Table | Text:
    """The run as a whole: how reward moved, what it cost, where things are."""
    records = read_metrics(run)
    if not records:
        return Text(f"run {run.path.name}: no step was recorded")
    table = Table(title=f"run {run.path.name}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    learning = {c[0] for c in _COLUMNS[:_LEARNING_COLUMNS]}
    learning |= {c[0] for c in _OFFLINE_COLUMNS[:_OFFLINE_LEARNING_COLUMNS]}
    for name, heading, form in _columns(records):
        if name not in learning:
            continue
        having = [record for record in records if record.get(name) is not None]
        ends = 1 if name.startswith("eval/") else _ENDS
        first, last = having[:ends], having[-ends:]
        a, b = _mean(first, name), _mean(last, name)
        if a is not None and b is not None:
            text = f"{form.format(a)} -> {form.format(b)}"
            if name == REWARD:
                text += (
                    f"   ({b - a:+.3f}; means of the first {len(first)} and last {len(last)} steps)"
                )
            table.add_row(heading, text)
    rewarded = [record for record in records if record.get(REWARD) is not None]
    if rewarded:
        best = max(rewarded, key=lambda record: record[REWARD])
        table.add_row("best reward", f"{best[REWARD]:.3f} at step {best['step']}")
    for name, heading in _COUNTS:
        count = _total(records, name)
        if count:
            table.add_row(heading, f"{count:.0f}")
    seconds = {phase: _total(records, f"time/{phase}") for phase in Phase}
    total = _total(records, "time/step") + seconds[Phase.SETUP]
    shares = [f"{phase} {spent / total:.0%}" for phase, spent in seconds.items() if spent]
    table.add_row("steps", f"{len(records)} in {total:.0f} s: {', '.join(shares)}")
    sampling = _total(records, "rollout/seconds")
    if sampling:
        tokens = _total(records, "rollout/tokens")
        table.add_row("sampled", f"{tokens:.0f} tokens, {tokens / sampling:.0f} tokens/s")
    idle = _mean(records, "trainer/idle_fraction")
    if idle is not None and sampling:
        table.add_row("trainer idle", f"{idle:.0%}")
    table.add_row("attempts", str(len(run.attempt_numbers())))
    if any("score/std" in record for record in records):
        table.add_row("scores", _SCALE_NOTE)
    for result in ("policy", "reward_model"):
        if (run.path / result).is_dir():
            table.add_row(result.replace("_", " "), str(run.path / result))
    table.add_row("metrics", f"{run.metrics / METRICS_FILE}\ntensorboard --logdir {run.metrics}")
    return table


def _table(records: Sequence[Mapping[str, Any]]) -> Table:
    table = Table()
    table.add_column("step", justify="right")
    columns = _columns(records)
    for _, heading, _ in columns:
        table.add_column(heading, justify="right")
    for record in records:
        cells = [_cell(record, name, form) for name, _, form in columns]
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


def _total(records: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(record.get(name) or 0.0 for record in records)
