import json
from pathlib import Path

import pytest

from hpc_rlhf.config import ComponentResources, Config, Het
from hpc_rlhf.errors import UserError
from hpc_rlhf.launch.job_plan import JobPlan, component_command, plan_job


def make_config() -> Config:
    config = Config()
    config.run.name = "demo"
    config.sampler.max_restarts = 4
    config.cluster.het = Het.STEPS
    config.cluster.learner = ComponentResources(2, 4, 6, 4, 64000, {"constraint": "a100"})
    config.cluster.sampler = ComponentResources(1, 2, 8, 4)
    config.cluster.signal = "SIGUSR2"
    config.cluster.prefix = ["apptainer", "exec", "image.sif"]
    config.cluster.extra = {"exclusive": True, "reservation": None, "mail_type": "END"}
    return config


def test_plan_of_a_configuration() -> None:
    plan = plan_job(make_config(), Path("/scratch/runs/demo"))
    learner, sampler = plan.components
    assert (learner.name, learner.replicated, learner.resources.tasks) == ("learner", False, 8)
    assert learner.resources.extra == (("constraint", "a100"),)
    assert (sampler.name, sampler.replicas, sampler.max_restarts) == ("sampler", 2, 4)
    share = sampler.replica_resources
    assert (share.nodes, share.tasks_per_node, share.gpus_per_node) == (1, 1, 2)
    assert plan.signal == "USR2"
    assert plan.extra == (("exclusive", ""), ("mail-type", "END"))
    assert plan.environment == ()  # it has GPUs
    assert JobPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_ranks_on_shared_cores_use_one_thread_each() -> None:
    config = make_config()
    config.cluster.learner.gpus_per_node = config.cluster.sampler.gpus_per_node = 0
    assert plan_job(config, Path("r")).environment == (("OMP_NUM_THREADS", "1"),)
    config.cluster.environment = {"OMP_NUM_THREADS": "6", "A": "b"}
    plan = plan_job(config, Path("r"))
    assert plan.environment == (("A", "b"), ("OMP_NUM_THREADS", "6"))
    assert plan.run_dir.is_absolute()


def test_component_command() -> None:
    plan = plan_job(make_config(), Path("/runs/demo"))
    command = component_command(plan, "sampler", 3, 1)
    assert command == [
        *("apptainer", "exec", "image.sif", plan.python, "-m", "hpc_rlhf.launch.component"),
        *("sampler", "--run", "/runs/demo", "--attempt", "3", "--replica", "1"),
    ]
    assert component_command(plan, "learner", 3)[-2:] == ["--attempt", "3"]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("signal", "USR9", "cluster.signal=USR9: no signal"),
        ("signal_delay_s", 3600, "would be asked to stop at its start"),
        ("extra", {"--exclusive": True}, "without dashes"),
        ("extra", {"comment": "a\nb"}, "cluster.extra.comment"),
        ("extra", {"comment": {"a": 1}}, "cluster.extra.comment={'a': 1}: expected text, a number"),
        ("partition", "", "cluster.partition='': expected a name, or null"),
        ("account", " ", "cluster.account=' ': expected a name, or null"),
        ("extra", {"N": 2}, "cluster.extra.N: write the long option's name"),
        (
            "extra",
            {"nodes": 2},
            "cluster.extra.nodes: .* use cluster.learner.nodes and cluster.sam",
        ),
        ("extra", {"ntasks": 2}, "cluster.extra.ntasks: .* use cluster.learner.tasks_per_node"),
        (
            "extra",
            {"ntasks_per_node": 2},
            "extra.ntasks_per_node: .* use cluster.learner.tasks_per",
        ),
        ("extra", {"time": "1-0"}, "cluster.extra.time: .* use cluster.time_min"),
        ("extra", {"signal": "B:USR1@5"}, "cluster.extra.signal: .* use cluster.signal and"),
        ("environment", {"NCCL-DEBUG": "INFO"}, "cluster.environment: 'NCCL-DEBUG' can be no"),
        ("environment", {"1A": "x"}, "cluster.environment: '1A' can be no variable"),
        ("environment", {"": "x"}, "cluster.environment: '' can be no variable"),
        ("environment", {"SLURM_NTASKS": "3"}, "cluster.environment.SLURM_NTASKS: SLURM_ and"),
        ("learner", ComponentResources(extra={"nodes": 2}), "cluster.learner.extra.nodes: "),
    ],
)
def test_bad_input(name: str, value: object, message: str) -> None:
    config = make_config()
    setattr(config.cluster, name, value)
    with pytest.raises(UserError, match=message):
        plan_job(config, Path("r"))
