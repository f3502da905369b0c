from pathlib import Path

import pytest

from hpc_rlhf.errors import ExitCode
from hpc_rlhf.fs import publish_json
from hpc_rlhf.launch.diagnosis import (
    FailureRecord,
    Progress,
    diagnose,
    memory_hint,
    read_failures,
    read_progress,
)
from hpc_rlhf.launch.steps import StepExit, TaskDeath
from hpc_rlhf.run_dir import RunDir

AT = Progress(7, "train")


def record(rank: int, time: float, error: str = "ValueError: no") -> FailureRecord:
    return FailureRecord(rank, f"node{rank}", "score", error, time)


def test_killed_task_comes_before_the_peers_that_lost_it() -> None:
    ended = StepExit(1, (TaskDeath(0, "node0", exit_code=1), TaskDeath(1, "node1", signal=9)))
    found = diagnose("learner", ended, {0: record(0, 5.0, "RuntimeError: connection reset")}, AT)
    assert found.reason == (
        "learner rank 1 on node1 was killed by signal 9 (SIGKILL) in phase train of step 7"
    )
    assert (found.rank, found.node, found.phase, found.step) == (1, "node1", "train", 7)
    assert not found.of_a_peer
    assert found.exit_code is ExitCode.FAILED


def test_first_exception_comes_before_later_ones() -> None:
    ended = StepExit(1, (TaskDeath(2, "node2", exit_code=1),))
    records = {2: record(2, 9.0, "RuntimeError: connection reset"), 0: record(0, 8.5)}
    found = diagnose("learner", ended, records, AT)
    assert found.reason == "learner rank 0 on node0 failed in phase score of step 7: ValueError: no"


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:2",
        "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited",
        "BrokenPipeError: [Errno 32] Broken pipe",
    ],
)
def test_clocks_of_nodes_may_differ(error: str) -> None:
    """Rank 1 lost its peer, by its own clock before that raised."""
    ended = StepExit(1, (TaskDeath(1, "node1", exit_code=1),))
    found = diagnose("learner", ended, {1: record(1, 8.0, error), 0: record(0, 300.0)}, AT)
    assert found.rank == 0
    assert not found.of_a_peer
    # where all have lost a peer, the first to say so is named
    found = diagnose("learner", ended, {1: record(1, 8.0, error), 0: record(0, 9.0, error)}, AT)
    assert found.rank == 1
    assert found.of_a_peer


def test_abort_of_a_peer_is_a_consequence() -> None:
    ended = StepExit(134, (TaskDeath(1, "node1", signal=6), TaskDeath(0, "node0", exit_code=1)))
    found = diagnose("learner", ended, {0: record(0, 8.5)}, AT)
    assert found.rank == 0


TIMED_OUT = "RuntimeError: [/gloo/unbound_buffer.cc:81] Timed out waiting 9000ms for recv operation"
CLOSED = "RuntimeError: [/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:2"


def test_who_was_waited_for_in_vain_hangs() -> None:
    """Rank 2 says nothing, and has to be killed; rank 0 by its own clock lost rank 1 before that."""
    ended = StepExit(1, (TaskDeath(1, "n0", exit_code=1),))
    records = {1: record(1, 20.0, TIMED_OUT), 0: record(0, 8.0, CLOSED)}
    nodes = ["n0", "n0", "n1", "n1"]
    found = diagnose("learner", ended, {**records, 3: record(3, 9.0, CLOSED)}, AT, nodes=nodes)
    assert found.reason == (
        f"learner rank 2 on n1 hangs in phase score of step 7: rank 1 on node1 waited for it: {TIMED_OUT}"
    )
    assert (found.rank, found.node, found.phase) == (2, "n1", "score")
    assert found.exit_code is ExitCode.FAILED
    # of two it is not known which one
    assert diagnose("learner", ended, records, AT, nodes=nodes).reason.startswith(
        "learner rank 2 on n1 hangs in phase score of step 7, rank 3 on n1 said nothing either: "
    )
    # where somebody failed, or everybody spoke, nobody hangs
    failed = diagnose("learner", ended, {**records, 3: record(3, 21.0)}, AT, nodes=nodes)
    assert (failed.rank, "hangs" in failed.reason) == (3, False)
    assert diagnose("learner", ended, records, AT, nodes=nodes[:2]).rank == 0


def test_a_kill_that_nobody_explains_has_a_hint() -> None:
    killed = StepExit(137, (TaskDeath(0, "n0", signal=9),))
    assert diagnose("learner", killed, {}, AT).killed
    explained = StepExit(137, (TaskDeath(0, "n0", signal=9, cause="out of memory"),))
    assert not diagnose("learner", explained, {}, AT).killed
    assert not diagnose("learner", StepExit(139, (TaskDeath(0, "n0", signal=11),)), {}, AT).killed
    assert memory_hint("17") == (
        "often that is the out-of-memory killer; compare with the memory asked for: "
        "sacct -j 17 --format=JobID,State,MaxRSS"
    )
    assert "dmesg" in memory_hint("local-4711")


def test_out_of_memory_node_failure_and_plain_exit() -> None:
    oom = StepExit(137, (TaskDeath(3, "n3", signal=9, cause="out of memory"),))
    assert diagnose("learner", oom, {}, Progress()).reason == (
        "learner rank 3 on n3 was killed by signal 9 (SIGKILL, out of memory)"
    )
    # Slurm requeues the job, and signals what is left of it
    node = StepExit(140, (TaskDeath(None, "n3", node_failed=True),))
    lost = diagnose("learner", node, {0: record(0, 1.0)}, AT, asked_by="SIGTERM")
    assert lost.reason == "learner on n3 lost that node in phase train of step 7"
    assert lost.exit_code is ExitCode.INTERRUPTED
    code = StepExit(3, (TaskDeath(0, "n0", exit_code=3),))
    assert (
        diagnose("learner", code, {}, Progress()).reason
        == "learner rank 0 on n0 exited with code 3"
    )
    srun = StepExit(1, detail="srun: Requested nodes are busy")
    assert diagnose("learner", srun, {}, Progress()).reason == (
        "learner ended with exit code 1: srun: Requested nodes are busy"
    )


def test_replica_is_named_by_its_number_and_has_no_phase() -> None:
    ended = StepExit(137, (TaskDeath(0, "n4", signal=9),))
    found = diagnose("sampler", ended, {}, AT, replica=2)
    assert found.reason == "sampler replica 2 on n4 was killed by signal 9 (SIGKILL)"
    assert (found.rank, found.phase) == (2, None)


def test_exit_codes() -> None:
    codes = {code: diagnose("learner", StepExit(code), {}, AT).exit_code for code in (0, 2, 75, 9)}
    assert codes == {0: 0, 2: ExitCode.FAILED, 75: ExitCode.INTERRUPTED, 9: ExitCode.FAILED}
    refused = diagnose("learner", StepExit(2), {0: record(0, 1.0, "UserError: another model")}, AT)
    assert refused.exit_code == ExitCode.BAD_INPUT
    assert refused.reason.endswith(": UserError: another model")
    # asked to stop before it had a handler for that
    for code in (75, 143, 140):
        found = diagnose("learner", StepExit(code), {}, AT, asked_by="SIGUSR2")
        assert found.exit_code == ExitCode.INTERRUPTED
        assert found.reason == "learner stopped on request (SIGUSR2) in phase train of step 7"


def test_reading(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path).new_attempt()
    assert read_progress(attempt) == Progress()
    publish_json(attempt.progress, {"step": 3, "phase": "rollout", "time": 1.0})
    assert read_progress(attempt) == Progress(3, "rollout")
    value = {"component": "learner", "rank": 12, "node": "n", "phase": None, "error": "E: x"}
    publish_json(attempt.failures / "learner-12.json", {**value, "traceback": "...", "time": 4.5})
    publish_json(attempt.failures / "sampler-0.json", {**value, "rank": 0})
    (attempt.failures / "learner-1.json").write_text("{")  # a process that died while it wrote
    assert read_failures(attempt, "learner") == {12: FailureRecord(12, "n", None, "E: x", 4.5)}
