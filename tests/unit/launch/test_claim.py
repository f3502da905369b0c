import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_rlhf.errors import ComponentError, ExitCode, UserError
from hpc_rlhf.fs import read_json
from hpc_rlhf.launch import claim
from hpc_rlhf.launch.claim import Claim, Holder, Verdict, hold, judge, take
from hpc_rlhf.launch.srun import GONE, JobRecord
from hpc_rlhf.run_dir import RunDir
from tests.launch_driver import Driver, wait_until

ME = Holder.this_process({})
ELSEWHERE = replace(ME, host="node7", pid=4, boot_id="b", nonce="other")
IN_JOB = replace(ELSEWHERE, job_id="12", restart_count=1)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def verdict(
    holder: Holder, job: JobRecord | None = None, *, me: Holder = ME, running: bool = False
) -> Verdict:
    return judge(holder, me, lambda _pid, _started: running, job)


def test_verdict_on_a_holder_without_a_job() -> None:
    assert verdict(ME, running=True) is Verdict.ALIVE
    assert verdict(ME) is Verdict.DEAD
    assert verdict(replace(ME, released=True), running=True) is Verdict.DEAD
    assert verdict(ELSEWHERE, running=True) is Verdict.UNKNOWN  # the pid is not of this machine
    # another container, or another machine of the same name
    assert verdict(replace(ME, pid_namespace=1)) is Verdict.UNKNOWN
    assert verdict(replace(ME, boot_id="b")) is Verdict.UNKNOWN


def test_verdict_on_a_holder_in_a_job() -> None:
    assert verdict(IN_JOB, JobRecord("RUNNING", restarts=1)) is Verdict.ALIVE
    assert verdict(IN_JOB, JobRecord("SUSPENDED", restarts=1)) is Verdict.UNKNOWN
    assert verdict(IN_JOB, JobRecord("COMPLETING", restarts=1)) is Verdict.ENDING
    assert (
        verdict(IN_JOB, JobRecord("RUNNING", restarts=2)) is Verdict.DEAD
    )  # it was requeued since
    assert verdict(IN_JOB, JobRecord("PENDING", restarts=1)) is Verdict.DEAD
    assert verdict(IN_JOB, JobRecord("TIMEOUT", restarts=1)) is Verdict.DEAD
    assert verdict(IN_JOB, GONE) is Verdict.DEAD
    assert verdict(IN_JOB, None) is Verdict.UNKNOWN  # Slurm does not answer


def test_verdict_on_an_earlier_attempt_of_the_own_job() -> None:
    requeued = replace(ME, job_id="12", restart_count=2)
    assert verdict(IN_JOB, None, me=requeued) is Verdict.DEAD
    here = replace(ME, job_id="12", restart_count=2)
    assert verdict(here, JobRecord("RUNNING", restarts=2), me=requeued) is Verdict.DEAD
    assert (
        verdict(here, JobRecord("RUNNING", restarts=2), me=requeued, running=True) is Verdict.ALIVE
    )
    # the steps of another job whose supervisor is gone are about to be ended
    assert verdict(here, JobRecord("RUNNING", restarts=2)) is Verdict.ENDING


def test_held_claim_is_refused_with_its_holder_and_nothing_written(run: RunDir) -> None:
    with hold(run) as held:
        held.name_attempt(3)
        before = sorted(run.path.rglob("*"))
        with pytest.raises(UserError, match=rf"attempt 3, pid {ME.pid} on {ME.host}, since 20"):
            take(run, Holder.this_process({}))
        with pytest.raises(UserError, match="is being worked on"):
            claim.check_free(run)
        assert sorted(run.path.rglob("*")) == before
    claim.check_free(run)
    assert take(run, ME).beat() is None
    assert [path.name for path in run.claims.iterdir()] == ["2.json"]


def compete(run: RunDir, competitors: int) -> tuple[list[Claim], list[UserError]]:
    """Take the claim in several threads at once; who got it, and how the others were refused."""
    winners: list[Claim] = []
    losers: list[UserError] = []
    barrier = threading.Barrier(competitors)

    def take_it() -> None:
        barrier.wait()
        try:
            winners.append(take(run, Holder.this_process({})))
        except UserError as error:
            losers.append(error)

    threads = [threading.Thread(target=take_it) for _ in range(competitors)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return winners, losers


def test_only_one_of_many_takes_a_dead_claim(run: RunDir) -> None:
    for _ in range(20):
        take(run, replace(Holder.this_process({}), pid_started=1))  # of a process that is gone
        winners, losers = compete(run, 6)
        assert (len(winners), len(losers)) == (1, 5)
        assert len(list(run.claims.iterdir())) == 1
        winners[0].release()


def test_late_competitor_does_not_take_an_old_generation(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that saw generation 1 dead makes 2, while 3 is held already and 2 was removed."""
    take(run, replace(ME, pid_started=1))
    seen = claim._newest(run.claims)
    take(run, replace(ME, pid_started=1, nonce="second"))
    take(run, Holder.this_process({}))
    looks = iter([seen])
    newest = claim._newest
    monkeypatch.setattr(claim, "_newest", lambda path: next(looks, None) or newest(path))
    with pytest.raises(UserError, match="is being worked on"):
        take(run, Holder.this_process({}))
    assert [path.name for path in run.claims.iterdir()] == ["3.json"]


def test_holder_that_was_taken_for_dead_learns_who_has_the_run(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "BEAT_S", 0.0)
    lost = take(run, replace(ME, pid_started=1))
    assert lost.beat() is None
    successor = replace(Holder.this_process({}), attempt=2)
    take(run, successor)
    assert lost.beat() == successor


def age(run: RunDir, seconds: float) -> Path:
    path = next(run.claims.iterdir())
    then = time.time() - seconds
    os.utime(path, (then, then))
    return path


def test_heartbeat_decides_on_a_holder_that_nobody_can_ask(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "WATCH_S", 0.3)
    take(run, ELSEWHERE)
    for seconds in (0, claim.STALE_S - 5):
        age(run, seconds)
        with pytest.raises(UserError, match="on node7"):
            take(run, Holder.this_process({}))
    age(run, claim.STALE_S + 5)
    take(run, Holder.this_process({}))


@pytest.mark.parametrize("skew_s", [3600, -3600])
def test_skewed_clock_of_a_living_holder(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, skew_s: float
) -> None:
    """A filesystem that takes the time of the writing node, whose clock is an hour off."""
    monkeypatch.setattr(claim, "WATCH_S", 0.6)
    take(run, ELSEWHERE)
    age(run, skew_s)
    alive = threading.Event()

    def beat() -> None:
        while not alive.wait(0.1):
            age(run, skew_s)

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(UserError, match="on node7"):
        take(run, Holder.this_process({}))
    alive.set()
    thread.join()
    age(run, skew_s)
    take(run, Holder.this_process({}))  # nothing touches it any more


def test_job_that_is_being_ended_is_waited_for(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [JobRecord("COMPLETING", restarts=1)]
    take(run, IN_JOB)

    def record(_job: str) -> JobRecord:
        return answers.pop() if answers else JobRecord("COMPLETED", restarts=1)

    monkeypatch.setattr(claim, "job_record", record)
    take(run, Holder.this_process({}))
    assert not answers


def test_heartbeat_decides_where_slurm_does_not_answer(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(_job: str) -> JobRecord:
        raise ComponentError("scontrol: no answer")

    monkeypatch.setattr(claim, "job_record", record)
    take(run, IN_JOB)
    with pytest.raises(UserError, match=r"job 12, .*`scancel 12`"):
        take(run, Holder.this_process({}))


# ----------------------------------------------------------------------------------- whole supervisors

SUPERVISOR = """
import json, sys
from hpc_rlhf.errors import UserError
from hpc_rlhf.launch.job_plan import JobPlan
from hpc_rlhf.launch.local import LocalStepLauncher
from hpc_rlhf.launch.supervisor import run_attempt
try:
    sys.exit(run_attempt(JobPlan.from_json(json.loads(sys.argv[1])), LocalStepLauncher))
except UserError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""


def supervisor(driver: Driver) -> subprocess.Popen[str]:
    plan = json.dumps(driver.plan(learners=1).to_json())
    return subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, plan], stderr=subprocess.PIPE, text=True
    )


def test_two_supervisors_at_once_and_one_that_is_killed(driver: Driver) -> None:
    run = RunDir(driver.run)
    both = [supervisor(driver), supervisor(driver)]
    wait_until(lambda: any(p.poll() is not None for p in both), "one of them to be refused")
    loser, winner = sorted(both, key=lambda p: p.poll() is None)
    _, err = loser.communicate(timeout=10)
    assert loser.returncode == ExitCode.BAD_INPUT
    assert f"pid {winner.pid} on {ME.host}, since" in err
    assert len(err.splitlines()) == 1
    driver.wait_started("learner-0")
    assert run.attempt_numbers() == [1]

    winner.kill()
    winner.communicate(timeout=10)
    began = time.monotonic()
    third = supervisor(driver)
    driver.wait_started("learner-0", 1)
    assert time.monotonic() - began < 10
    assert run.attempt_numbers() == [1, 2]
    assert read_json(next(run.claims.iterdir()))["pid"] == third.pid
    driver.do("finish")
    third.communicate(timeout=20)
    assert third.returncode == ExitCode.DONE
    claim.check_free(run)
