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
from hpc_rlhf.observe.eta import duration, seconds_left
from hpc_rlhf.observe.metrics import METRICS_FILE, parse_records, read_metrics
from hpc_rlhf.run_dir import RunDir
from hpc_rlhf.types import Phase

_POLL_S = 0.5
_SHOWN_STEPS = 15
_SHOWN_PART_S = 0.05  # of the set-up
_ENDS = 5  # steps at each end of the run that the summary compares

REWARD = "reward/mean"


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


Column = tuple[str, str, Callable[[float], str]]
"""Metric, heading, format."""

_COLUMNS: tuple[Column, ...] = (
    (REWARD, "reward", "{:.3f}".format),
    ("kl", "KL", "{:.4f}".format),
    ("entropy", "entropy", "{:.3f}".format),
    ("response_length/mean", "length", "{:.1f}".format),
    ("rollout/tokens_per_second", "tok/s", "{:.0f}".format),
    ("time/step", "s", _seconds),
    *(
        (f"time/{phase}", "save" if phase is Phase.CHECKPOINT else phase.value, _seconds)
        for phase in Phase
        if phase is not Phase.SETUP
    ),
)
_LEARNING_COLUMNS = 4  # the first ones; the others are speed
# of an algorithm with a critic, behind those
_CRITIC_COLUMNS: tuple[Column, ...] = (
    ("value_loss", "value loss", "{:.4f}".format),
    ("explained_variance", "expl. var.", "{:.3f}".format),
)

# of the offline stages, where a record has them
_OFFLINE_COLUMNS: tuple[Column, ...] = (
    ("loss", "loss", "{:.4f}".format),
    ("eval/loss", "held-out loss", "{:.4f}".format),
    ("pair/accuracy", "accuracy", "{:.3f}".format),
    ("eval/pair/accuracy", "held-out accuracy", "{:.3f}".format),
    ("pair/margin", "margin", "{:.3f}".format),
    ("eval/pair/margin", "held-out margin", "{:.3f}".format),
    ("score/std", "score std", "{:.3f}".format),
    ("entropy", "entropy", "{:.3f}".format),
    ("grad_norm", "gradient", "{:.3g}".format),
    ("lr", "LR", "{:.2e}".format),
    ("train/tokens_per_second", "tok/s", "{:.0f}".format),
    ("time/step", "s", _seconds),
)
_OFFLINE_LEARNING_COLUMNS = 8
_SCALE_NOTE = "only differences between answers to one prompt mean something; the scale does not"
_COUNTS = (
    ("reward/excluded", "samples excluded (verifier failed)"),
    ("rollout/reissued", "samples reissued"),
    ("rollout/deaths", "sampler deaths"),
    ("train/skipped", "steps skipped (loss or gradient not finite)"),
)


def follow(
    run: RunDir,
    stop: Callable[[], bool],
    console: Console,
    after_attempt: int | None = None,
    steps: int | None = None,
) -> None:
    """Show the next attempt of ``run`` until ``stop()``: its set-up by parts, then its steps.

    On a terminal a live table of the last steps and the phase under way; else a plain line for each
    new step.

    Args:
        after_attempt: the newest one that is over; default: the newest that there is.
        steps: of the whole run, for the time that is left.
    """
    path = run.metrics / METRICS_FILE
    records = _Unchanged(path)
    if after_attempt is None:
        after_attempt = max(run.attempt_numbers(), default=0)
    setup = _SetUp(run, after_attempt, steps)
    shown = max(map(_order, records.read()), default=(0, 0))
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            while not stop():
                for text in setup.lines():
                    console.print(text, highlight=False)
                for record in records.read():
                    if _order(record) > shown:
                        shown = _order(record)
                        for note in _excluded(record):
                            console.print(f"step {record['step']}: {note}", highlight=False)
                under_way = Text(setup.under_way + _left(records.read(), steps))
                table = _table(records.read()[-_SHOWN_STEPS:], console.width)
                live.update(Group(table, under_way) if setup.over else under_way, refresh=True)
                time.sleep(_POLL_S)
            live.update(_table(records.read()[-_SHOWN_STEPS:], console.width), refresh=True)
        return
    while True:
        ending = stop()  # asked first, so that what is recorded by then is shown
        for text in setup.lines():
            console.print(text, highlight=False, soft_wrap=True)
        for record in records.read():
            if _order(record) > shown:
                shown = _order(record)
                console.print(line(record), highlight=False, soft_wrap=True)
        if ending:
            return
        time.sleep(_POLL_S)


def _left(records: Sequence[Mapping[str, Any]], steps: int | None) -> str:
    left = seconds_left(records, steps) if steps and records else None
    return f", about {duration(left)} left" if left else ""


class _SetUp:
    """The set-up of one attempt as the coordinator publishes it, and what it does after that."""

    def __init__(self, run: RunDir, after_attempt: int, steps: int | None) -> None:
        self._run = run
        self._after_attempt = after_attempt
        self._of = f" of {steps}" if steps else ""
        self._shown: dict[str, float] = {}  # part -> seconds
        self.over = False
        self.under_way = "starting"

    def lines(self) -> list[str]:
        """A line for each part that has ended since the last call."""
        number = max(self._run.attempt_numbers(), default=0)
        path = self._run.attempt(number).progress
        if number <= self._after_attempt or not path.exists():
            return []
        progress = read_json(path)
        waited = time.time() - progress["time"]
        self.over = progress["phase"] != Phase.SETUP
        doing = progress["phase"] if self.over else progress.get("part", progress["phase"])
        where = f"step {progress['step']}{self._of}" if self.over else "set-up"
        self.under_way = f"{where}: {doing} ({waited:.0f} s)"
        lines = []
        for part, seconds in progress.get("startup", {}).items():
            spent = seconds - self._shown.get(part, 0.0)
            if part != progress["part"] and spent >= _SHOWN_PART_S:
                lines.append(f"set-up: {part} {spent:.1f} s")
                self._shown[part] = seconds
        return lines


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
    return "  ".join([f"step {record['step']:>4}", *cells, *_excluded(record)])


def _excluded(record: Mapping[str, Any]) -> list[str]:
    count = record.get("reward/excluded")
    return [f"{count:.0f} samples excluded, learner-0.log says why"] if count else []


def _columns(records: Sequence[Mapping[str, Any]]) -> Sequence[Column]:
    """Those of the stage that the records are of."""
    if not any("epoch" in record for record in records):
        critic = [c for c in _CRITIC_COLUMNS if any(c[0] in record for record in records)]
        return [*_COLUMNS[:_LEARNING_COLUMNS], *critic, *_COLUMNS[_LEARNING_COLUMNS:]]
    return [column for column in _OFFLINE_COLUMNS if any(column[0] in r for r in records)]


def summary(run: RunDir) -> Table | Text:
    """The run as a whole: how reward moved, what it cost, where things are."""
    records = read_metrics(run)
    if not records:
        return Text(f"run {run.path.name}: no step was recorded")
    table = Table(title=f"run {run.path.name}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    learning = {c[0] for c in (*_COLUMNS[:_LEARNING_COLUMNS], *_CRITIC_COLUMNS)}
    learning |= {c[0] for c in _OFFLINE_COLUMNS[:_OFFLINE_LEARNING_COLUMNS]}
    for name, heading, form in _columns(records):
        if name not in learning:
            continue
        having = [record for record in records if record.get(name) is not None]
        ends = 1 if name.startswith("eval/") else _ENDS
        first, last = having[:ends], having[-ends:]
        a, b = _mean(first, name), _mean(last, name)
        if a is not None and b is not None:
            text = f"{form(a)} -> {form(b)}"
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
    # the first token's part of the start is in the time of its step
    seconds[Phase.SETUP] = _total(records, "startup/seconds") - _total(
        records, "startup/first_token"
    )
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
    for result in (run.policy, run.reward_model):
        if result.is_dir():
            table.add_row(result.name.replace("_", " "), str(result))
    table.add_row("metrics", f"{run.metrics / METRICS_FILE}\ntensorboard --logdir {run.metrics}")
    return table


def _table(records: Sequence[Mapping[str, Any]], width: int) -> Table:
    """The columns that ``width`` has room for, the first ones first."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    steps = [str(record["step"]) for record in records]
    table.add_column("step", justify="right")
    columns = []
    room = width - max(map(len, ["step", *steps])) - 1
    for name, heading, form in _columns(records):
        cells = [_cell(record, name, form) for record in records]
        room -= max(map(len, [*heading.split(), *cells])) + 1
        if room < 0:
            break
        table.add_column(heading, justify="right")
        columns.append(cells)
    for row in zip(steps, *columns, strict=True):
        table.add_row(*row)
    return table


def _cell(record: Mapping[str, Any], name: str, form: Callable[[float], str]) -> str:
    value = record.get(name)
    return "-" if value is None else form(value)


def _mean(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [record[name] for record in records if record.get(name) is not None]
    return sum(values) / len(values) if values else None


def _total(records: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(record.get(name) or 0.0 for record in records)
