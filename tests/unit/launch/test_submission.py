import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from submitit.core.utils import JobPaths

from hpc_rlhf.errors import UserError
from hpc_rlhf.fs import read_json
from hpc_rlhf.launch import slurm
from hpc_rlhf.launch.job_plan import ComponentPlan, JobPlan, Resources
from hpc_rlhf.launch.slurm import (
    HetSlurmExecutor,
    job_script,
    merge_components,
    submit,
    submit_chain,
)

PLAN = JobPlan(
    name="demo",
    run_dir=Path("/runs/demo"),
    components=(
        ComponentPlan("learner", Resources(2)),
        ComponentPlan("sampler", Resources(1), replicas=1),
    ),
    python="/opt/my env/bin/python",
)


def test_job_script_runs_submitit_in_the_batch_script() -> None:
    text = job_script(PLAN)
    assert "#SBATCH --output=/runs/demo/submitit/%j_0_log.out\n" in text
    assert "#SBATCH --error=/runs/demo/submitit/%j_0_log.err\n" in text
    assert text.endswith(
        "export SUBMITIT_EXECUTOR=slurm\n"
        "exec '/opt/my env/bin/python' -u -m submitit.core._submit /runs/demo/submitit\n"
    )
    assert "srun" not in text


def test_the_jobs_of_a_chain_are_queued_all_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = [replace(PLAN, name=name, run_dir=tmp_path / name) for name in ("a", "b", "c")]
    for plan in plans:
        slurm.submission_folder(plan.run).mkdir(parents=True)
    queued: list[tuple[str, ...]] = []
    said: list[list[str]] = []

    def queue(plan: JobPlan, options: tuple[str, ...] = ()) -> SimpleNamespace:
        if plan.name == refused:
            raise UserError("sbatch refused the job: QOSMaxSubmitJobPerUserLimit")
        queued.append(options)
        return SimpleNamespace(job_id=str(10 + len(queued)))

    monkeypatch.setattr(slurm, "_queue", queue)
    monkeypatch.setattr(slurm, "slurm_command", said.append)
    refused = ""
    assert [job.job_id for job in submit_chain(plans)] == ["11", "12", "13"]
    assert queued == [
        ("--hold",),
        ("--dependency=afterok:11", "--kill-on-invalid-dep=yes"),
        ("--dependency=afterok:12", "--kill-on-invalid-dep=yes"),
    ]
    assert said == [["scontrol", "release", "11"]]  # when all are there
    assert [read_json(plan.run.next_job)["job_id"] for plan in plans[:2]] == ["12", "13"]
    assert not plans[2].run.next_job.exists()

    queued.clear()
    said.clear()
    submit_chain(plans[2:])  # the last link alone is left to do
    assert (queued, said) == ([()], [])

    queued.clear()
    refused = "c"
    with pytest.raises(UserError, match="QOSMaxSubmit"):
        submit_chain(plans)
    assert said == [["scancel", "11", "12"]]


def merged(lines: dict[str, str], queued: bool = False) -> str:
    stats = {
        job: {"JobID": job, "State": state, "NodeList": job[-1]} for job, state in lines.items()
    }
    return merge_components(stats, lambda _: queued)["12"]["State"]


def test_states_of_components_merge_into_one() -> None:
    assert merged({"12+0": "COMPLETED", "12+1": "COMPLETED"}) == "COMPLETED"
    assert merged({"12+0": "RUNNING", "12+1": "PENDING"}) == "RUNNING"
    assert merged({"12+0": "COMPLETED", "12+1": "COMPLETING"}) == "COMPLETING"
    assert merged({"12+0": "COMPLETED", "12+1": "CANCELLED by 0"}) == "CANCELLED"
    assert merged({"12+0": "SUSPENDED", "12+1": "SUSPENDED"}) == "RUNNING"
    assert merged({"12": "FAILED"}) == "FAILED"


def test_failure_while_it_is_requeued_is_none() -> None:
    states = {"12+0": "NODE_FAIL", "12+1": "NODE_FAIL"}
    assert merged(states, queued=True) == "REQUEUED"
    assert merged(states) == "NODE_FAIL"
    assert merged({"12": "PREEMPTED"}, queued=True) == "REQUEUED"
    assert merged({"12": "PREEMPTED"}) == "CANCELLED by preemption"


def test_leftovers_of_an_earlier_run_of_the_job_are_removed(tmp_path: Path) -> None:
    paths = JobPaths(tmp_path, job_id="12", task_id=0)
    for name in ("12_0_result.pkl", "12_0_result.pkl.save_tmp", "12_submitted.pkl.save_tmp"):
        (tmp_path / name).touch()
    paths.submitted_pickle.touch()
    slurm._remove_leftovers(paths)
    assert [path.name for path in tmp_path.iterdir()] == ["12_submitted.pkl"]


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for sbatch and srun on the PATH, and keeps what it was given."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for name in ("sbatch", "srun"):
        path = directory / name
        path.write_text(
            f"#!{sys.executable}\nimport json, os, sys\n"
            f"json.dump([sys.argv, dict(os.environ)], open({str(tmp_path / 'given')!r}, 'w'))\n"
            "print('Submitted batch job 42') if 'REFUSE' not in os.environ else "
            "sys.exit('sbatch: error: Invalid account')\n"
        )
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory))
    return tmp_path / "given"


def test_submission_from_within_a_job_hides_that_job(
    sbatch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_HET_SIZE", "2")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    command = HetSlurmExecutor(tmp_path, PLAN)._make_submission_command(Path("x.sh"))
    assert command == ["env", "--unset=SLURM_HET_SIZE", "--unset=SLURM_JOB_ID", "sbatch", "x.sh"]
    monkeypatch.delenv("SLURM_JOB_ID")
    assert HetSlurmExecutor(tmp_path, PLAN)._make_submission_command(Path("x")) == ["sbatch", "x"]


def test_submit(
    sbatch: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = JobPlan("demo", tmp_path / "run", PLAN.components)
    job = submit(plan)
    assert job.job_id == "42"
    folder = tmp_path / "run/submitit"
    assert job.submission().function.plan == plan
    assert job.submission()._timeout_countdown > 10**6  # any number of walltimes
    assert (folder / "42_submission.sh").read_text() == job_script(plan)
    assert json.loads((folder / "submitted.json").read_text())["job_id"] == "42"
    monkeypatch.setenv("REFUSE", "1")
    capsys.readouterr()
    with pytest.raises(UserError, match="sbatch refused the job: sbatch: error: Invalid account"):
        submit(plan)
    assert capsys.readouterr().err == ""  # what prints the error says it once
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="sbatch is not on the PATH"):
        submit(plan)
