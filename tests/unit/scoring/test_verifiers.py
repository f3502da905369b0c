"""Verifiers may hang, crash or return nonsense: that sample is excluded, the next ones are scored."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

from hpc_rlhf.cluster.signals import REQUESTS
from hpc_rlhf.config import RewardConfig, RewardName
from hpc_rlhf.data.chat import load_tokenizer
from hpc_rlhf.data.tiny import write_tokenizer
from hpc_rlhf.errors import ComponentError, UserError
from hpc_rlhf.scoring.verifiers import VerifierPool, check_reward, make_verifier
from hpc_rlhf.types import Completion, FinishReason, Prompt, Rollout, Scores, VersionSpan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EOS = 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> "PreTrainedTokenizerBase":
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, max_positions=512)
    return load_tokenizer(directory)


@pytest.fixture
def pools(
    tokenizer: "PreTrainedTokenizerBase", monkeypatch: pytest.MonkeyPatch
) -> Iterator["Pools"]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    pools = Pools(tokenizer)
    yield pools
    for pool in pools.made:
        pool.close()


class Pools:
    """Makes pools, and rollouts from text."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer
        self.made: list[VerifierPool] = []

    def make(self, function: str | None = None, **config: Any) -> VerifierPool:
        if function is not None:
            config = {"name": RewardName.PYTHON, "function": function, **config}
        self.made.append(make_verifier(RewardConfig(**config), self.tokenizer))
        return self.made[-1]

    def rollouts(
        self,
        texts: Sequence[str],
        *,
        answer: str | None = None,
        fields: Mapping[str, Any] | None = None,
        finish: FinishReason = "stop",
    ) -> list[Rollout]:
        return [self._rollout(text, answer, fields or {}, finish) for text in texts]

    def _rollout(
        self, text: str, answer: str | None, fields: Mapping[str, Any], finish: FinishReason
    ) -> Rollout:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        ids += [EOS] if finish == "stop" else []
        prompt = Prompt(uid="p:1", token_ids=np.array([5], np.int32), answer=answer, fields=fields)
        completion = Completion(
            token_ids=np.array(ids, np.int32),
            logprobs=np.zeros(len(ids), np.float32),
            finish_reason=finish,
            versions=(VersionSpan(version=0, start=0, end=len(ids)),),
            seed=0,
        )
        return Rollout(prompt=prompt, sample_index=0, completion=completion, step=1)


def test_exact_match_of_what_was_sampled(pools: Pools) -> None:
    pool = pools.make()
    scores = pool.score(pools.rollouts(["8", "9", " 8 ", ""], answer="8"))
    assert scores.rewards.tolist() == [1.0, 0.0, 1.0, 0.0]
    assert scores.rewards.dtype == np.float32
    assert scores.excluded == {}
    cut = pools.rollouts(["8"], answer="8", finish="length")
    assert pool.score(cut).rewards.tolist() == [1.0]


def test_a_python_function_gets_completion_answer_and_record(pools: Pools) -> None:
    pool = pools.make("reward_functions:length")
    rollouts = pools.rollouts(["abc"], answer="xy", fields={"bonus": 10, "é": [None, 0.5]})
    assert pool.score(rollouts).rewards.tolist() == [15.0]


def test_what_is_no_finite_number_is_excluded_and_not_a_zero(pools: Pools) -> None:
    pool = pools.make("reward_functions:by_completion", max_failure_fraction=1.0)
    texts = ["nan", "inf", "none", "text", "raise", "exit", "crash", "true", "fine"]
    scores = pool.score(pools.rollouts(texts))
    assert scores.excluded == {
        0: "returned nan",
        1: "returned inf",
        2: "returned None, expected a number",
        3: "returned 'good', expected a number",
        4: "KeyError: 'no such thing'",
        5: "verifier process died, exit code 3",
        6: "verifier process died, exit code 7",
    }
    assert np.isnan(scores.rewards[:7]).all()
    assert scores.rewards[7:].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", ["hang", "spin"])
def test_a_verifier_that_loops_is_killed_and_the_next_samples_are_scored(
    pools: Pools, kind: str
) -> None:
    pool = pools.make("reward_functions:by_completion", timeout_s=0.5)
    pool.score(pools.rollouts(["fine"]))  # so that the time below holds one start less
    began = time.monotonic()
    scores = pool.score(pools.rollouts(["fine", kind, "fine"]))
    assert time.monotonic() - began < 30
    assert scores.excluded == {1: "no reward within 0.5 s"}
    assert scores.rewards[[0, 2]].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("texts", "fraction"), [(["hang"] * 40, 1.0), (["hang", "fine"] * 20, 0.1)]
)
def test_a_function_that_only_hangs_is_named_and_not_waited_for(
    texts: list[str], fraction: float, pools: Pools
) -> None:
    name = "reward_functions:by_completion"
    pool = pools.make(name, timeout_s=0.05, max_failure_fraction=fraction)
    began = time.monotonic()
    with pytest.raises(ComponentError) as caught:
        pool.score(pools.rollouts(texts))
    assert time.monotonic() - began < 30  # of 40 starts of a process
    late = 8 if fraction == 1 else 5
    assert str(caught.value).startswith(
        f"scoring: {name} hangs: no reward within reward.timeout_s=0.05 for {late} of 40 samples, "
    )


def test_requests_to_stop_do_not_end_a_verifier_but_what_it_starts(pools: Pools) -> None:
    """Slurm sends them to every process of a step, from the first moment of each on."""
    me = psutil.Process()
    before = {child.pid for child in me.children()}
    pool = pools.make("reward_functions:starts_a_sleep")
    scored = threading.Thread(target=lambda: results.append(pool.score(pools.rollouts(["a"]))))
    results: list[Scores] = []
    scored.start()
    signalled: set[tuple[int, bool]] = set()
    while scored.is_alive():
        for child in me.children():
            if child.pid not in before:
                slept = False
                with contextlib.suppress(psutil.NoSuchProcess):
                    for number in REQUESTS:
                        child.send_signal(number)
                    for grandchild in child.children():
                        grandchild.terminate()
                        slept = True
                signalled.add((child.pid, slept))
        time.sleep(0.002)
    scored.join()
    assert len({pid for pid, _ in signalled}) == 1
    assert any(slept for _, slept in signalled)
    assert results[0].excluded == {}
    assert results[0].rewards.tolist() == [-signal.SIGTERM]


def test_the_children_of_a_killed_verifier_die_with_it(pools: Pools, tmp_path: Path) -> None:
    pool = pools.make("reward_functions:by_completion", timeout_s=2.0, max_failure_fraction=1.0)
    pid_file = tmp_path / "pid"
    rollouts = pools.rollouts(["hang with a child"], fields={"pid_file": str(pid_file)})
    assert pool.score(rollouts).excluded == {0: "no reward within 2 s"}
    _await_end(int(pid_file.read_text()))


def _await_end(pid: int) -> None:
    """Wait until process ``pid`` has ended, reaped by its parent or not."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} is alive")


def test_a_verifier_that_prints_or_reads_does_not_disturb_the_protocol(pools: Pools) -> None:
    pool = pools.make("reward_functions:by_completion")
    scores = pool.score(pools.rollouts(["print", "read", "fine"]))
    assert scores.rewards[[0, 2]].tolist() == [1.0, 1.0]
    assert scores.excluded == {1: "EOFError: EOF when reading a line"}


def test_a_line_says_how_many_were_excluded_and_why(
    pools: Pools, caplog: pytest.LogCaptureFixture
) -> None:
    pool = pools.make("reward_functions:by_completion", max_failure_fraction=1.0)
    pool.score(pools.rollouts(["fine", "fine"]))
    assert caplog.messages == []
    rollouts = pools.rollouts(["nan", "raise", "fine", "raise"])
    pool.score(rollouts)
    assert caplog.messages == [
        (
            f"step {rollouts[0].step}: verifiers failed on 3 of 4 samples, which are excluded; "
            "2 of them: KeyError: 'no such thing'"
        )
    ]


def test_too_many_failures_end_the_attempt(pools: Pools) -> None:
    pool = pools.make("reward_functions:by_completion", max_failure_fraction=0.5)
    assert len(pool.score(pools.rollouts(["raise", "fine"])).excluded) == 1
    with pytest.raises(
        ComponentError, match=r"failed on 2 of 3 samples.*=0\.5; 2 of them: KeyError"
    ):
        pool.score(pools.rollouts(["raise", "raise", "fine"]))


def test_several_workers_keep_the_order(pools: Pools) -> None:
    pool = pools.make("reward_functions:length", workers=3)
    texts = ["x" * (n % 7) for n in range(100)]
    assert pool.score(pools.rollouts(texts)).rewards.tolist() == [len(text) for text in texts]


def test_no_process_is_left_after_close(pools: Pools) -> None:
    others = set(psutil.Process().children())
    pool = pools.make()
    pool.score(pools.rollouts(["8"], answer="8"))
    (process,) = set(psutil.Process().children()) - others
    assert process.is_running()
    pool.close()
    assert not process.is_running()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("reward_functions:length", None),
        ("reward_functions:missing", "cannot import it: AttributeError"),
        ("reward_functions:constant", "it is a float, not callable"),
        ("broken_module:f", "RuntimeError: the data base is down"),
    ],
)
def test_the_function_is_checked_where_it_will_run(
    pools: Pools, function: str, message: str | None
) -> None:
    config = RewardConfig(name=RewardName.PYTHON, function=function)
    if message is None:
        check_reward(config)
    else:
        with pytest.raises(UserError, match=message):
            check_reward(config)


def test_verifier_processes_start_without_heavy_imports() -> None:
    heavy = {"torch", "transformers", "numpy", "omegaconf"}
    code = f"import sys, hpc_rlhf.scoring.worker; print(sorted({heavy} & set(sys.modules)))"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "[]"
