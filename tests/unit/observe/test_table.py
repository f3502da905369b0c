import io
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hpc_rlhf.fs import publish_json
from hpc_rlhf.observe.metrics import METRICS_FILE, MetricsWriter
from hpc_rlhf.observe.table import follow, line, summary
from hpc_rlhf.run_dir import RunDir
from hpc_rlhf.types import Phase


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "demo")
    run.metrics.mkdir(parents=True)
    return run


def _values(step: int) -> dict[str, float]:
    return {
        "reward/mean": step / 20,
        "kl": 0.01 * step,
        "entropy": 1.5,
        "response_length/mean": 2.5,
        "rollout/tokens_per_second": 1000.0,
        "rollout/tokens": 320.0,
        "rollout/seconds": 0.5,
        "time/step": 2.0,
        "time/rollout": 1.0,
        "time/train": 0.5,
        "trainer/idle_fraction": 0.5,
    }


def _record(run: RunDir, steps: range, attempt: int = 1, **values: float) -> None:
    writer = MetricsWriter(run)
    for step in steps:
        writer.write(step, attempt, {**_values(step), **values})
    writer.close()


def _console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=140)


def _text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@contextmanager
def _following(run: RunDir, console: Console, steps: int | None = None) -> Iterator[None]:
    """Follow in a thread, from the time that it has seen what was there before."""
    began, ended = threading.Event(), threading.Event()

    def stop() -> bool:
        began.set()
        return ended.is_set()

    thread = threading.Thread(target=follow, args=(run, stop, console, None, steps))
    thread.start()
    try:
        assert began.wait(30)
        yield
    finally:
        ended.set()
        thread.join(30)
    assert not thread.is_alive()


def _await(console: Console, text: str) -> None:
    deadline = time.monotonic() + 30
    while text not in _text(console):
        assert time.monotonic() < deadline, _text(console)
        time.sleep(0.05)


def test_a_plain_line_for_each_new_step(run: RunDir) -> None:
    _record(run, range(1, 3))
    console = _console(terminal=False)
    with _following(run, console):
        writer = MetricsWriter(run)
        writer.write(3, 1, _values(3))
        _await(console, "step    3")
        writer.write(4, 1, _values(4))
        writer.close()
    lines = _text(console).splitlines()
    assert [text.split()[:4] for text in lines] == [
        ["step", "3", "reward", "0.150"],
        ["step", "4", "reward", "0.200"],
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_excluded_samples_are_pointed_out(run: RunDir, terminal: bool) -> None:
    console = _console(terminal=terminal)
    with _following(run, console):
        _record(run, range(1, 2))
        _record(run, range(2, 3), **{"reward/excluded": 3.0})
        _await(console, "3 samples excluded, learner-0.log says why")
    assert _text(console).count("excluded") == 1


def test_steps_that_are_done_again_are_shown_again(run: RunDir) -> None:
    _record(run, range(1, 8))
    console = _console(terminal=False)
    with _following(run, console):
        _record(run, range(6, 9), attempt=2)
        _await(console, "step    8")
    assert [int(text.split()[1]) for text in _text(console).splitlines()] == [6, 7, 8]


def test_a_run_without_metrics_yet(run: RunDir) -> None:
    for terminal in (False, True):
        console = _console(terminal=terminal)
        with _following(run, console):
            if terminal:
                _await(console, "starting")
    assert "starting" in _text(console)


def test_the_live_table_has_the_last_steps_and_the_phase(run: RunDir) -> None:
    _record(run, range(1, 31))
    console = _console(terminal=True)
    with _following(run, console, steps=100):
        progress = {"step": 31, "phase": "rollout", "time": time.time() - 3}
        publish_json(run.new_attempt().progress, progress)
        _await(console, "step 31 of 100: rollout (")
        _await(console, " s), about 2 min left")  # 70 steps of 2 s
    text = _text(console)
    for heading in ("reward", "KL", "entropy", "length", "tok/s", "rollout", "train", "sync"):
        assert heading in text
    assert "1.500" in text  # the reward of step 30
    assert "0.750" not in text  # step 15 is out of the window


@pytest.mark.parametrize("terminal", [False, True])
def test_set_up_is_a_line_for_each_part_and_no_table(run: RunDir, terminal: bool) -> None:
    _record(run, range(1, 3))
    old = run.new_attempt()
    publish_json(old.progress, {"step": 2, "phase": "train", "time": time.time()})
    console = _console(terminal=terminal)
    with _following(run, console):
        attempt = run.new_attempt()
        progress = {"step": 0, "phase": "setup", "time": time.time(), "part": "groups"}
        parts = {"launch": 0.01, "imports": 5.21, "groups": 0.3}
        publish_json(attempt.progress, {**progress, "startup": parts})
        _await(console, "set-up: imports 5.2 s")
        progress["part"] = "load"
        publish_json(attempt.progress, {**progress, "startup": {**parts, "groups": 1.0, "load": 0}})
        _await(console, "set-up: groups 1.0 s")
        during = _text(console)
        publish_json(attempt.progress, {**progress, "step": 3, "phase": "rollout", "startup": {}})
        time.sleep(1)
    assert during.count("imports") == 1
    assert "launch" not in during  # nothing worth a line
    assert "KL" not in during
    assert "train" not in during  # of the attempt before
    assert ("set-up: load" in during) == terminal
    assert ("KL" in _text(console)) == terminal


def test_the_live_table_fits_80_columns(run: RunDir) -> None:
    values = {f"time/{phase}": 12.34 for phase in Phase}
    values |= {"reward/mean": -0.123, "kl": 0.0123, "rollout/tokens_per_second": 123456.0}
    _record(run, range(9999, 10001), **values, **{"time/step": 1234.5})
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with _following(run, console):
        progress = {"step": 10001, "phase": "rollout", "time": time.time()}
        publish_json(run.new_attempt().progress, progress)
        _await(console, "step 10001: rollout")
    text = _text(console)
    for cell in ("10000", "-0.123", "0.0123", "123456", "1234", "12.34", "rollout", "save"):
        assert cell in text
    assert "…" not in text
    console = Console(file=io.StringIO(), force_terminal=True, width=40)
    with _following(run, console):
        publish_json(run.new_attempt().progress, progress)
        _await(console, "step 10001: rollout")
    assert "-0.123 0.0123" in _text(console)
    assert "save" not in _text(console)  # no room: left out rather than cut short


def test_a_value_that_is_missing_is_a_dash() -> None:
    text = line({"step": 3, "reward/mean": None, "kl": 0.5})
    assert text.startswith("step    3  reward -  KL 0.5000  entropy -")


def test_a_critic_is_shown_where_there_is_one(run: RunDir) -> None:
    critic = {"value_loss": 0.25, "explained_variance": 0.5}
    text = line({"step": 3, **_values(3), **critic})
    assert "length 2.5  value loss 0.2500  expl. var. 0.500  tok/s 1000" in text
    assert "value loss" not in line({"step": 3, **_values(3)})
    _record(run, range(1, 3), **critic)
    text = " ".join(_summary(run).split())
    assert "value loss │ 0.2500 -> 0.2500" in text
    assert "expl. var. │ 0.500 -> 0.500" in text


def _summary(run: RunDir) -> str:
    console = _console(terminal=False)
    console.print(summary(run))
    return _text(console)


def test_the_summary_compares_both_ends(run: RunDir) -> None:
    _record(run, range(1, 21), **{"reward/excluded": 1.0})
    (run.path / "policy").mkdir()
    text = " ".join(_summary(run).split())
    # means of 0.05 .. 0.25 and of 0.80 .. 1.00
    assert "0.150 -> 0.900 (+0.750; means of the first 5 and last 5 steps)" in text
    assert "0.0300 -> 0.1800" in text  # KL
    assert "best reward │ 1.000 at step 20" in text
    assert "samples excluded (verifier failed) │ 20" in text
    assert "reissued" not in text
    assert "20 in 40 s: rollout 50%, train 25%" in text
    assert "6400 tokens, 640 tokens/s" in text
    assert "trainer idle │ 50%" in text
    assert str(run.path / "policy")[-20:] in text
    assert METRICS_FILE in text


def test_the_summary_counts_the_start_of_every_attempt(run: RunDir) -> None:
    values: dict[str, Any] = {"startup/seconds": 10.5, "startup/first_token": 0.5}
    _record(run, range(1, 2), attempt=1, **values)
    _record(run, range(2, 3), attempt=2, **values)
    assert "2 in 24 s: setup 83%" in _summary(run)


def test_the_summary_of_nothing(run: RunDir) -> None:
    assert "run demo: no step was recorded" in _summary(run)
