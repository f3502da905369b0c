from dataclasses import replace
from pathlib import Path

import pytest

from hpc_rlhf.config import Het
from hpc_rlhf.errors import UserError
from hpc_rlhf.launch.job_plan import ComponentPlan, JobPlan, Resources
from hpc_rlhf.launch.sbatch import render_header, render_script

LEARNER = ComponentPlan("learner", Resources(2, 4, 6, 4, 64000, (("constraint", "a100"),)))
SAMPLER = ComponentPlan("sampler", Resources(1, 1, 16, 2), replicas=1)
PLAN = JobPlan(
    name="demo",
    run_dir=Path("/runs/demo"),
    components=(LEARNER, SAMPLER),
    time_min=30,
    account="proj",
    signal_delay_s=90,
    setup=("module load cuda",),
)


def test_heterogeneous_job() -> None:
    assert render_script(PLAN, ["hpc-rlhf", "run", 'model.path="a b"']) == (
        """\
#!/bin/bash
#SBATCH --job-name=demo
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR2@90
#SBATCH --account=proj
#SBATCH --time=30
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=6
#SBATCH --mem=64000M
#SBATCH --gpus-per-node=4
#SBATCH --constraint=a100
#SBATCH hetjob
#SBATCH --account=proj
#SBATCH --time=30
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=2

module load cuda
exec hpc-rlhf run 'model.path="a b"'
"""
    )


def test_one_allocation_whose_every_node_fits_every_component() -> None:
    plan = replace(PLAN, het=Het.STEPS, account=None, partition="gpu", qos="long")
    assert render_header(plan, output=Path("/runs/%j.out"), error=Path("/runs/%j.err")) == (
        """\
#!/bin/bash
#SBATCH --job-name=demo
#SBATCH --output=/runs/%j.out
#SBATCH --error=/runs/%j.err
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR2@90
#SBATCH --partition=gpu
#SBATCH --qos=long
#SBATCH --time=30
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=6
#SBATCH --mem=64000M
#SBATCH --gpus-per-node=4
#SBATCH --constraint=a100
"""
    )


def test_cpus_of_one_allocation_are_rounded_up() -> None:
    parts = (
        ComponentPlan("learner", Resources(tasks_per_node=3, cpus_per_task=1)),
        ComponentPlan("sampler", Resources(tasks_per_node=1, cpus_per_task=8), replicas=1),
    )
    header = render_header(replace(PLAN, het=Het.STEPS, components=parts))
    assert "--ntasks-per-node=3\n" in header
    assert "--cpus-per-task=3\n" in header  # 9 >= 8


def test_options_of_the_site_come_last_and_win() -> None:
    learner = replace(
        LEARNER, resources=replace(LEARNER.resources, extra=(("gres", "gpu:h100:4"),))
    )
    plan = replace(
        PLAN,
        components=(learner, SAMPLER),
        extra=(("exclusive", ""), ("time", "1-0"), ("signal", "USR1@5")),
    )
    first, second = render_header(plan).split("#SBATCH hetjob\n")
    assert "#SBATCH --gres=gpu:h100:4\n" in first
    assert "gpus-per-node" not in first
    assert "#SBATCH --signal=USR1@5\n" in first
    for part in (first, second):
        assert "#SBATCH --exclusive\n" in part
        assert part.count("--time=") == 1
        assert "#SBATCH --time=1-0\n" in part


def test_no_option_that_was_not_asked_for() -> None:
    header = render_header(PLAN)
    for name in ("wckey", "partition", "qos", "output", "mem=0", "gres"):
        assert name not in header


def test_one_component_is_a_plain_job() -> None:
    assert "hetjob" not in render_header(replace(PLAN, components=(LEARNER,)))


def test_components_that_cannot_share_an_allocation() -> None:
    sampler = replace(
        SAMPLER, resources=replace(SAMPLER.resources, extra=(("constraint", "h100"),))
    )
    plan = replace(PLAN, het=Het.STEPS, components=(LEARNER, sampler))
    with pytest.raises(UserError, match=r"cluster\.sampler\.extra\.constraint=h100.*=a100"):
        render_header(plan)
