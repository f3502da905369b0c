from pathlib import Path

import pytest

from hpc_rlhf.errors import UserError
from hpc_rlhf.launch.job_plan import ComponentPlan, JobPlan, Resources
from hpc_rlhf.launch.local import _assign_gpus

PLAN = JobPlan(
    name="demo",
    run_dir=Path("/runs/demo"),
    components=(
        ComponentPlan("learner", Resources(nodes=1, tasks_per_node=2, gpus_per_node=2)),
        ComponentPlan("sampler", Resources(nodes=1, tasks_per_node=2, gpus_per_node=4), replicas=2),
        ComponentPlan("scorer", Resources(), replicas=1),
    ),
)


def test_every_step_has_gpus_of_its_own() -> None:
    expected = {
        "learner": ["0", "1"],
        "sampler-0": ["2", "3"],
        "sampler-1": ["4", "5"],
        "scorer-0": [],
    }
    assert _assign_gpus(PLAN, None) == expected
    assert _assign_gpus(PLAN, "7,6,5,4,3,2,1")["sampler-1"] == ["3", "2"]
    with pytest.raises(UserError, match=r"CUDA_VISIBLE_DEVICES=0,1,2: the plan needs more than 3"):
        _assign_gpus(PLAN, "0,1,2")
