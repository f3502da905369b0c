import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from hpc_rlhf.cluster.signals import StopFlag
from hpc_rlhf.errors import ExitCode
from hpc_rlhf.fs import read_json
from hpc_rlhf.launch import claim as claims
from hpc_rlhf.launch import supervisor
from hpc_rlhf.launch.claim import Holder, hold, take
from hpc_rlhf.launch.diagnosis import memory_hint
from hpc_rlhf.launch.job_plan import JobPlan
from hpc_rlhf.launch.local import LocalStepLauncher
from hpc_rlhf.launch.supervisor import supervise
from hpc_rlhf.observe.notices import tell
from hpc_rlhf.run_dir import Attempt, RunDir
from tests.launch_driver import Driver, is_alive, wait_until

HOST = os.uname().nodename


class Supervised(threading.Thread):
    """An attempt that runs beside the test."""

    def __init__(self, plan: JobPlan) -> None:
        super().__init__(daemon=True)
        self.attempt: Attempt = plan.run.new_attempt()
        self.flag = StopFlag()
        self.code: ExitCode | None = None
        self._plan = plan
        self.start()

    def run(self) -> None:
        launcher = LocalStepLauncher(self._plan, self.attempt)
        with hold(self._plan.run) as claim:
            ending = supervise(self._plan, self.attempt, launcher, self.flag, claim)
        self.code = ending.exit_code

    def wait(self, timeout_s: float = 30.0) -> tuple[ExitCode | None, dict]:
        self.join(timeout_s)
        assert not self.is_alive()
        return self.code, read_json(self.attempt.ended)


def test_completed_learner_ends_the_attempt_and_the_samplers(driver: Driver) -> None:
    attempt = Supervised(driver.plan(samplers=2, environment=(("OMP_NUM_THREADS", "3"),)))
    ranks = [driver.wait_started(f"learner-{rank}") for rank in (0, 1)]
    driver.wait_started("sampler-0")
    sampler = driver.wait_started("sampler-1")
    assert [rank["world"]["rank"] for rank in ranks] == [0, 1]
    assert ranks[1]["world"] == {
        "component": "learner",
        "rank": 1,
        "size": 2,
        "local_rank": 1,
        "node": HOST,
        "job_id": f"local-{os.getpid()}",
        "attempt": 1,
    }
    assert sampler["world"]["size"] == 1
    assert ranks[0]["omp"] == "3"
    driver.do("finish")
    code, ended = attempt.wait()
    assert code == ExitCode.DONE
    assert ended["exit_code"] == 0
    assert ended["reason"] == "learner completed"
    assert driver.run.joinpath("do/sampler-1.stopped").exists()
    assert "sampler-1 is up" in (attempt.attempt.path / "logs/sampler-1.log").read_text()
    assert JobPlan.from_json(read_json(attempt.attempt.plan)).run_dir == driver.run


def test_killed_learner_rank_ends_everything_and_is_named(
    driver: Driver, capfd: pytest.CaptureFixture[str]
) -> None:
    attempt = Supervised(driver.plan())
    driver.wait_started("learner-0")
    driver.wait_started("sampler-0")
    driver.wait_started("learner-1")
    driver.do("learner-0", "deaf")  # as a rank that is blocked in a collective
    wait_until(lambda: (driver.run / "do/learner-0.deaf").exists(), "rank 0 to be deaf")
    began = time.monotonic()
    driver.do("learner-1", "kill")
    code, ended = attempt.wait()
    assert time.monotonic() - began < 8
    assert code == ExitCode.FAILED
    assert ended["reason"] == (
        f"learner rank 1 on {HOST} was killed by signal 9 (SIGKILL) in phase train of step 7"
        f"; see {attempt.attempt.path}/logs/learner-1.log; {memory_hint('local-')}"
    )
    assert (ended["component"], ended["node"], ended["rank"]) == ("learner", HOST, 1)
    assert (ended["phase"], ended["step"]) == ("train", 7)
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert last.endswith(ended["reason"] + "; attempt 1 ends")
    assert last in (attempt.attempt.path / "logs/supervisor.log").read_text()


def test_what_the_learner_tells_is_said_once(
    driver: Driver, capfd: pytest.CaptureFixture[str]
) -> None:
    attempt = Supervised(driver.plan())
    driver.wait_started("learner-0")
    tell(attempt.attempt, "resumes from step_7")
    log = attempt.attempt.path / "logs/supervisor.log"
    wait_until(lambda: "step_7" in log.read_text(), "it to be said")
    tell(attempt.attempt, "start-up 21.4 s")
    driver.do("finish")
    attempt.wait()
    said = re.findall(r" learner: (.*)", log.read_text())
    assert said[1:] == ["resumes from step_7", "start-up 21.4 s"], said[0]
    assert "learner: resumes from step_7\n" in capfd.readouterr().err


def test_the_first_exception_is_the_reason(driver: Driver) -> None:
    attempt = Supervised(driver.plan())
    driver.wait_started("learner-0")
    driver.wait_started("learner-1")
    driver.do("learner-0", "raise 1 ValueError: loss is NaN")
    code, ended = attempt.wait()
    assert code == ExitCode.FAILED
    assert ended["reason"] == (
        f"learner rank 0 on {HOST} failed in phase rollout of step 7: ValueError: loss is NaN"
    )
    assert ended["phase"] == "rollout"


def test_dead_sampler_is_started_again_while_the_learner_goes_on(driver: Driver) -> None:
    attempt = Supervised(driver.plan(max_restarts=2))
    first = driver.wait_started("sampler-0")
    driver.wait_started("learner-0")
    endpoint = attempt.attempt.endpoints / "sampler-0.json"
    wait_until(endpoint.exists, "the endpoint")
    driver.do("sampler-0", "raise 1 RuntimeError: engine died")
    second = driver.wait_started("sampler-0", 1)
    assert second["pid"] != first["pid"]
    assert not is_alive(first["child"])  # what it left behind was ended, too
    wait_until(endpoint.exists, "the new endpoint")
    assert read_json(endpoint)["incarnation"] == 1
    assert not (attempt.attempt.failures / "sampler-0.json").exists()
    assert driver.started("learner-0", 1) is None
    driver.do("finish")
    assert attempt.wait()[0] == ExitCode.DONE
    log = (attempt.attempt.path / "logs/supervisor.log").read_text()
    assert "RuntimeError: engine died; restart 1 of 2 in a row" in log


def test_too_many_deaths_in_a_row_end_the_attempt(driver: Driver) -> None:
    attempt = Supervised(driver.plan(max_restarts=2))
    driver.wait_started("learner-0")
    driver.do("sampler-0", "always kill")
    code, ended = attempt.wait()
    assert code == ExitCode.FAILED
    assert ended["reason"] == (
        f"sampler replica 0 on {HOST} was killed by signal 9 (SIGKILL): "
        f"death 3 in a row, 2 restarts are allowed; see {attempt.attempt.path}/logs/sampler-0.log; "
        + memory_hint("local-")
    )
    assert (ended["component"], ended["rank"]) == ("sampler", 0)
    assert driver.started("sampler-0", 2) is not None
    assert driver.started("sampler-0", 3) is None


def test_replica_that_refuses_its_input_is_not_started_again(driver: Driver) -> None:
    attempt = Supervised(driver.plan(max_restarts=2))
    driver.wait_started("sampler-0")
    driver.do("sampler-0", "raise 2 UserError: no such model")
    code, ended = attempt.wait()
    assert code == ExitCode.BAD_INPUT
    assert ended["reason"] == f"sampler replica 0 on {HOST} failed: UserError: no such model"


def test_a_long_life_starts_a_new_row(driver: Driver) -> None:
    attempt = Supervised(driver.plan(max_restarts=1, restart_reset_s=0.3))
    for incarnation in range(4):
        driver.wait_started("sampler-0", incarnation)
        time.sleep(0.4)
        driver.do("sampler-0", "kill")
    driver.wait_started("sampler-0", 4)
    driver.do("finish")
    assert attempt.wait()[0] == ExitCode.DONE


@pytest.mark.parametrize(
    ("action", "expected"),
    [("raise 2 UserError: no", 2), ("exit 2", 1), ("exit 75", 75), ("exit 9", 1)],
)
def test_exit_code_of_the_learner_decides(driver: Driver, action: str, expected: int) -> None:
    attempt = Supervised(driver.plan(learners=1))
    driver.wait_started("learner-0")
    driver.do("learner-0", action)
    code, ended = attempt.wait()
    assert code == expected
    assert ended["exit_code"] == expected


def test_peers_of_a_rank_that_stopped_on_request_are_waited_for(driver: Driver) -> None:
    attempt = Supervised(driver.plan())
    for rank in (0, 1):
        driver.wait_started(f"learner-{rank}")
    driver.do("learner-0", "deaf")  # as one that still writes
    wait_until(lambda: (driver.run / "do/learner-0.deaf").exists(), "rank 0 to be deaf")
    attempt.flag.request("SIGUSR2")
    wait_until(lambda: (driver.run / "do/learner-1.stopped").exists(), "rank 1 to stop")
    time.sleep(4)  # longer than the peers of a failed rank have
    driver.do("learner-0", "exit 75")
    code, _ = attempt.wait()
    assert code == ExitCode.INTERRUPTED
    assert len(list(driver.run.glob("do/learner-0.done-*"))) == 2  # it was there to be told


def test_learner_that_does_not_stop_is_ended_after_the_delay(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "STOP_GRACE_S", 1.0)
    attempt = Supervised(driver.plan(learners=1, signal_delay_s=1))
    driver.wait_started("learner-0")
    driver.do("learner-0", "deaf")
    wait_until(lambda: (driver.run / "do/learner-0.deaf").exists(), "the learner to be deaf")
    attempt.flag.request("SIGUSR2")
    code, ended = attempt.wait()
    assert code == ExitCode.INTERRUPTED
    assert ended["reason"].startswith("SIGUSR2; the learner was not done within 1 s")
    assert ended["signals"][0][0] == "SIGUSR2"


def test_learner_is_not_waited_for_beyond_the_walltime(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "STOP_GRACE_S", 1.0)
    end = time.time() + supervisor.ENDING_S + 4
    monkeypatch.setattr(supervisor, "allocation_end", lambda _environ, _start: end)
    attempt = Supervised(driver.plan(learners=1, signal_delay_s=600))
    driver.wait_started("learner-0")
    driver.do("learner-0", "deaf")
    wait_until(lambda: (driver.run / "do/learner-0.deaf").exists(), "the learner to be deaf")
    attempt.flag.request("SIGUSR2")
    code, ended = attempt.wait()
    assert code == ExitCode.INTERRUPTED
    assert "the learner was not done within" in ended["reason"]
    assert time.time() < end
    assert read_json(attempt.attempt.started)["end_time"] == end


def test_supervisor_that_was_taken_for_dead_ends_its_steps(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "BEAT_S", 0.1)
    attempt = Supervised(driver.plan())
    driver.wait_started("learner-0")
    monkeypatch.setattr(claims, "is_running", lambda _pid, _started: False)
    take(RunDir(driver.run), Holder.this_process({}))
    code, ended = attempt.wait()
    assert code == ExitCode.FAILED
    assert ended["reason"].startswith("the run was taken over (pid ")
    wait_until(lambda: not driver.processes(), "its processes to be gone", 5)


def test_launcher_that_fails_leaves_nothing_running(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = driver.plan()
    attempt = plan.run.new_attempt()
    launcher = LocalStepLauncher(plan, attempt)
    start = launcher.start

    def start_or_fail(component: str, replica: int | None = None) -> object:
        if component == "sampler":
            raise OSError("no more processes")
        return start(component, replica)

    monkeypatch.setattr(launcher, "start", start_or_fail)
    with hold(plan.run) as claim, pytest.raises(OSError, match="no more processes"):
        supervise(plan, attempt, launcher, StopFlag(), claim)
    assert "no more processes" in read_json(attempt.ended)["reason"]


SUPERVISOR = """
import json, sys
from hpc_rlhf.launch.job_plan import JobPlan
from hpc_rlhf.launch.local import LocalStepLauncher
from hpc_rlhf.launch.supervisor import run_attempt
sys.exit(run_attempt(JobPlan.from_json(json.loads(sys.argv[1])), LocalStepLauncher))
"""


@pytest.fixture
def supervisor_process(driver: Driver) -> subprocess.Popen[str]:
    plan = json.dumps(driver.plan(samplers=2).to_json())
    return subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, plan], stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
def test_signal_is_forwarded_and_the_run_is_resumable(
    driver: Driver, supervisor_process: subprocess.Popen[str], number: signal.Signals
) -> None:
    for name in ("learner-0", "learner-1", "sampler-0", "sampler-1"):
        driver.wait_started(name)
    supervisor_process.send_signal(number)
    _, err = supervisor_process.communicate(timeout=30)
    assert supervisor_process.returncode == ExitCode.INTERRUPTED
    assert re.search(rf"stopped on request \({number.name}\)", err)
    assert (driver.run / "do/learner-1.stopped").exists()


def test_killed_supervisor_leaves_no_process(
    driver: Driver, supervisor_process: subprocess.Popen[str]
) -> None:
    for name in ("learner-0", "learner-1", "sampler-1"):
        driver.wait_started(name)
    supervisor_process.kill()
    supervisor_process.communicate(timeout=10)
    wait_until(lambda: not driver.processes(), "all processes to be gone", 5)
