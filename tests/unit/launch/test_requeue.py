import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hpc_rlhf.config import Requeue
from hpc_rlhf.errors import ComponentError, ExitCode, UserError
from hpc_rlhf.fs import publish_json, read_json
from hpc_rlhf.launch import requeue
from hpc_rlhf.launch.diagnosis import Diagnosis
from hpc_rlhf.launch.job_plan import ComponentPlan, JobPlan, Resources
from hpc_rlhf.launch.requeue import (
    ByHand,
    NextJob,
    SelfRequeue,
    Successor,
    check_chain,
    conclude,
    continuation,
    exclude_nodes,
    find_chain,
    is_wanted,
    progress,
)
from hpc_rlhf.launch.srun import CommandKilled, JobRecord
from hpc_rlhf.rollout import spill
from hpc_rlhf.run_dir import Attempt
from hpc_rlhf.types import Completion, FinishReason, Prompt, Rollout, VersionSpan

INTERRUPTED = Diagnosis("learner stopped on request", ExitCode.INTERRUPTED, "learner")
FAILED = Diagnosis("learner rank 0 died", ExitCode.FAILED, "learner")


@pytest.fixture
def plan(tmp_path: Path) -> JobPlan:
    for directory in ("checkpoints", "metrics", "rollouts"):
        (tmp_path / directory).mkdir()
    learner = ComponentPlan("learner", Resources())
    return JobPlan("demo", tmp_path, (learner,), max_attempts_without_progress=3)


def begin(plan: JobPlan, job_id: str = "12") -> Attempt:
    """What a supervisor writes when it begins."""
    chain = find_chain(plan.run, job_id)
    attempt = plan.run.new_attempt()
    record = {"job_id": job_id, "chain": chain.name, "progress": progress(plan.run)}
    publish_json(attempt.started, record)
    return attempt


def save(plan: JobPlan, step: str) -> None:
    directory = plan.run.checkpoints / f"step_{step}"
    directory.mkdir()
    (directory / "manifest.json").touch()


def test_progress_is_what_is_not_done_again(plan: JobPlan) -> None:
    assert progress(plan.run) == [0, 0, 0]
    save(plan, "9")
    save(plan, "10")
    (plan.run.checkpoints / "step_11").mkdir()  # not whole
    # steps that were recorded behind the last checkpoint are done again
    (plan.run.metrics / "metrics.jsonl").write_text(json.dumps({"step": 12}) + "\n")
    assert progress(plan.run) == [10, 0, 0]
    samples = [
        rollout(10, 0, "stop"),
        rollout(11, 0, "stop"),
        rollout(11, 1, "length"),
        rollout(11, 2, "abort"),
    ]
    spill.write(plan.run, 11, samples)
    assert progress(plan.run) == [10, 0, 2]
    save(plan, "10+3")
    assert progress(plan.run) == [10, 3, 2]
    plan.run.partial_rollout.write_bytes(b"not HDF5")
    assert progress(plan.run) == [10, 3, 0]


def rollout(step: int, sample_index: int, finish: FinishReason) -> Rollout:
    completion = Completion(
        token_ids=np.zeros(2, np.int32),
        logprobs=np.zeros(2, np.float32),
        finish_reason=finish,
        versions=(VersionSpan(version=step - 1, start=0, end=2),),
        seed=0,
    )
    prompt = Prompt(uid="a:1", token_ids=np.zeros(1, np.int32))
    return Rollout(prompt=prompt, sample_index=sample_index, completion=completion, step=step)


@pytest.mark.parametrize("ending", [INTERRUPTED, FAILED])
def test_attempts_without_progress_are_bounded(plan: JobPlan, ending: Diagnosis) -> None:
    for step in ("1", "1+4", "2"):
        attempt = begin(plan)
        save(plan, step)
        assert conclude(plan, attempt, ending, by_user=False) == ending
    for _ in range(2):
        assert conclude(plan, begin(plan), ending, by_user=False) == ending
    last = conclude(plan, begin(plan), ending, by_user=False)
    assert (last.exit_code, last.final) == (ExitCode.FAILED, True)
    assert last.reason.startswith(
        "3 attempts in a row made no progress beyond step 2, and "
        f"run.max_attempts_without_progress=3; the last one: {ending.reason}"
    )
    # where all were stopped in time, the time may be what is missing
    assert ("raise cluster.time_min" in last.reason) == (ending is INTERRUPTED)
    # one that Slurm requeues beside us does not begin, one that is submitted anew does
    refused = check_chain(plan, find_chain(plan.run, "12"))
    assert refused is not None
    assert refused.exit_code is ExitCode.FAILED
    assert check_chain(plan, find_chain(plan.run, "13")) is None
    assert conclude(plan, begin(plan, "13"), ending, by_user=False) == ending


def test_attempts_that_were_killed_without_a_word_count(plan: JobPlan) -> None:
    for _ in range(3):
        assert check_chain(plan, find_chain(plan.run, "12")) is None
        begin(plan)
    refused = check_chain(plan, find_chain(plan.run, "12"))
    assert refused is not None
    assert "3 attempts in a row made no progress beyond step 0" in refused.reason


@pytest.mark.parametrize("code", [ExitCode.DONE, ExitCode.BAD_INPUT])
def test_what_ends_a_run_for_good(plan: JobPlan, code: ExitCode) -> None:
    ending = replace(INTERRUPTED, exit_code=code)
    assert conclude(plan, begin(plan), ending, by_user=False) == replace(ending, final=True)


def test_stop_by_hand_is_final(plan: JobPlan) -> None:
    assert conclude(plan, begin(plan), INTERRUPTED, by_user=True) == replace(
        INTERRUPTED, final=True
    )


def test_chain_goes_on_in_requeues_and_successors(
    plan: JobPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(plan, "12")
    attempt = begin(plan, "12")
    publish_json(attempt.successor, {"job_id": "14"})
    chain = find_chain(plan.run, "14")
    assert (chain.name, chain.predecessor, chain.stalled) == ("12", "12", 2)
    assert find_chain(plan.run, "15").name == "15"
    begin(plan, "14")
    assert find_chain(plan.run, "14").name == "12"

    states = {"12": "CANCELLED"}
    monkeypatch.setattr(requeue, "job_record", lambda job: JobRecord(states[job]))
    refused = check_chain(plan, chain)
    assert refused is not None
    assert refused.reason == "job 12 was cancelled: its successor does not go on either"
    states["12"] = "TIMEOUT"
    assert check_chain(plan, chain) is None
    publish_json(plan.run.complete, {})
    complete = check_chain(plan, chain)
    assert complete is not None
    assert complete.exit_code is ExitCode.DONE


def test_job_that_somebody_ended_is_not_brought_back() -> None:
    assert is_wanted(JobRecord("RUNNING"))
    assert is_wanted(JobRecord("COMPLETING", "TimeLimit"))
    assert not is_wanted(JobRecord("COMPLETING"))  # cancelled, or Slurm requeues it
    assert not is_wanted(JobRecord("PENDING"))


@pytest.fixture
def slurm_said(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were run; one with "refused" in it fails."""
    commands: list[list[str]] = []

    def run(command: list[str]) -> str:
        commands.append(command)
        if "refused" in command:
            raise ComponentError("Requested operation is presently disabled")
        if "killed" in command:
            raise CommandKilled("was killed by SIGTERM")
        return ""

    monkeypatch.setattr(requeue, "slurm_command", run)
    monkeypatch.setattr(requeue, "job_record", lambda _job: JobRecord("RUNNING"))
    return commands


def test_self_requeue(
    plan: JobPlan, slurm_said: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, list[str]]] = []

    def queue_again(dependency: str, without: Sequence[str]) -> str:
        asked.append((dependency, list(without)))
        return "13"

    assert SelfRequeue("12", queue_again, NextJob(plan.run)).go_on() == (True, "job 12 is requeued")
    assert slurm_said.pop() == ["scontrol", "requeue", "12"]
    assert asked == []

    # by the requeue itself, which had begun: no second job
    assert SelfRequeue("killed", queue_again, NextJob(plan.run)).go_on() == (
        True,
        "job killed is requeued (was killed by SIGTERM)",
    )
    assert asked == []

    attempt = begin(plan)
    forbidden = SelfRequeue("refused", queue_again, NextJob(plan.run))
    forbidden.begin(attempt)
    assert forbidden.go_on() == (
        True,
        "Requested operation is presently disabled; job 13 is queued in the place of job refused",
    )
    assert asked.pop() == ("afterany:refused", [])
    assert find_chain(plan.run, "13").name == "12"

    def refuse(_dependency: str, _without: Sequence[str]) -> str:
        raise UserError("sbatch refused the job: QOSMaxSubmitJobPerUserLimit")

    nothing_works = SelfRequeue("refused", refuse, NextJob(plan.run))
    nothing_works.begin(attempt)
    goes_on, why = nothing_works.go_on()
    assert not goes_on
    assert "presently disabled; sbatch refused the job: QOSMax" in why

    slurm_said.clear()
    monkeypatch.setattr(requeue, "job_record", lambda _job: JobRecord("COMPLETING"))
    assert SelfRequeue("12", queue_again, NextJob(plan.run)).go_on()[0] is False
    assert (slurm_said, asked) == ([], [])


def test_a_lost_node_is_not_gone_back_to(plan: JobPlan, slurm_said: list[list[str]]) -> None:
    asked: list[list[str]] = []

    def queue_again(_dependency: str, without: Sequence[str]) -> str:
        asked.append(list(without))
        return "13"

    anew = SelfRequeue("12", queue_again, NextJob(plan.run))
    anew.begin(begin(plan))
    how = "job 13 is queued in the place of job 12, without n2, n3"
    assert anew.go_on(["n2", "n3"]) == (True, how)
    assert (asked, slurm_said) == ([["n2", "n3"]], [])

    successor = Successor("12", queue_again, NextJob(plan.run))
    successor.begin(begin(plan))
    assert successor.go_on(["n2"]) == (True, "job 13 goes on, without n2")
    assert slurm_said == [["scontrol", "update", "JobId=13", "ExcNodeList=n2"]]


def test_nodes_are_excluded_from_every_component_of_a_script() -> None:
    script = "#!/bin/sh\n#SBATCH -x n9\n#SBATCH -N2\n#SBATCH hetjob\n#SBATCH -N1\n\nrun\n"
    assert exclude_nodes(script, []) == script
    assert exclude_nodes(script, ["n1", "n2"]).splitlines() == [
        "#!/bin/sh",
        "#SBATCH --exclude=n1,n2",
        "#SBATCH --exclude=n9,n1,n2",
        "#SBATCH -N2",
        "#SBATCH hetjob",
        "#SBATCH --exclude=n1,n2",
        "#SBATCH -N1",
        "",
        "run",
    ]


def test_successor(plan: JobPlan, slurm_said: list[list[str]]) -> None:
    asked = []
    successor = Successor(
        "12", lambda dependency, _: asked.append(dependency) or "13", NextJob(plan.run)
    )
    attempt = begin(plan)
    assert successor.begin(attempt) == "job 13 is queued to succeed this one"
    assert asked == ["afterany:12"]
    assert read_json(attempt.successor)["job_id"] == "13"
    assert successor.go_on() == (True, "job 13 goes on")
    assert successor.stop() == "the successor, job 13, is cancelled"
    assert slurm_said == [["scancel", "13"]]


def test_refused_successor_is_said(plan: JobPlan) -> None:
    def refuse(_dependency: str, _without: Sequence[str]) -> str:
        raise UserError("sbatch refused the job: QOSMaxSubmitJobPerUserLimit")

    successor = Successor("12", refuse, NextJob(plan.run))
    attempt = begin(plan)
    assert "QOSMaxSubmitJobPerUserLimit" in str(successor.begin(attempt))
    assert not attempt.successor.exists()
    assert successor.go_on()[0] is False
    assert successor.stop() is None


def test_the_next_job_of_a_chain_waits_for_the_job_that_goes_on(
    plan: JobPlan, slurm_said: list[list[str]]
) -> None:
    """Not for one that ends: Slurm would cancel it."""

    def waits_for(job: str) -> list[str]:
        return ["scontrol", "update", "JobId=99", f"Dependency=afterok:{job}"]

    publish_json(plan.run.next_job, {"job_id": "99"})
    requeued = SelfRequeue("12", lambda *_: "13", NextJob(plan.run))
    requeued.begin(begin(plan))
    assert requeued.go_on() == (True, "job 12 is requeued")
    assert slurm_said == [["scontrol", "requeue", "12"]]  # its id stays

    slurm_said.clear()
    goes_on, how = requeued.go_on(["n2"])
    assert goes_on
    assert how.endswith("without n2; the chain's next job 99 waits for it")
    assert slurm_said == [waits_for("13")]

    slurm_said.clear()
    successor = Successor("12", lambda *_: "13", NextJob(plan.run))
    assert "job 99 waits for it" in str(successor.begin(begin(plan)))
    successor.stop()  # the run is complete: back to this job before the other is cancelled
    assert slurm_said == [waits_for("13"), waits_for("12"), ["scancel", "13"]]


def test_a_next_job_that_cannot_be_moved_is_said(
    plan: JobPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(command: list[str]) -> str:
        raise ComponentError("Job has already finished")

    assert NextJob(plan.run).wait_for("13") == ""  # no chain
    monkeypatch.setattr(requeue, "slurm_command", gone)
    publish_json(plan.run.next_job, {"job_id": "99"})
    assert "next job 99 does not wait for it (Job has already" in NextJob(plan.run).wait_for("13")


def test_way_of_going_on(plan: JobPlan) -> None:
    def kind(requeue: Requeue, environ: dict[str, str]) -> type:
        return type(continuation(replace(plan, requeue=requeue), str, environ))

    in_job = {"SLURM_JOB_ID": "12"}
    assert kind(Requeue.REQUEUE, in_job) is SelfRequeue
    assert kind(Requeue.SUCCESSOR, in_job) is Successor
    assert kind(Requeue.NONE, in_job) is ByHand
    assert kind(Requeue.REQUEUE, {}) is ByHand
