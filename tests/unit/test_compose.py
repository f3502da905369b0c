"""Every shipped configuration composes; choices, types and names are checked."""

from pathlib import Path

import pytest

from hpc_rlhf import compose, schema
from hpc_rlhf.chain import compose_links
from hpc_rlhf.config import Het, KlEstimator, Launcher
from hpc_rlhf.errors import UserError
from hpc_rlhf.planner.preflight import check_settings

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
PATHS = ["run.name=a", "model.path=/model", "data.prompts=/prompts.jsonl", "data.train=/t.jsonl"]
EXPERIMENTS = sorted(path.stem for path in CONFIGS.glob("experiment/*.yaml"))
OPTIONS = sorted(f"{path.parent.name}={path.stem}" for path in CONFIGS.glob("*/*.yaml"))


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes(option: str) -> None:
    compose.compose([*PATHS, option])


@pytest.mark.parametrize("cluster", ["local", "slurm", "slurm_steps"])
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_passes_the_checks_on_every_cluster(experiment: str, cluster: str) -> None:
    overrides = [f"experiment={experiment}", f"cluster={cluster}"]
    paths = [] if experiment.startswith("quickstart") else PATHS[1:]
    for link in compose_links([*overrides, *paths]):
        check_settings(link.config)


def test_round_trip_through_the_run_directory(tmp_path: Path) -> None:
    config = compose.compose(
        [*PATHS, "cluster=slurm_steps", "algorithm=rloo", "algorithm.kl.estimator=k2"]
    )
    assert config.algorithm.kl.estimator is KlEstimator.K2
    assert config.cluster.het is Het.STEPS
    assert config.cluster.launcher is Launcher.SLURM
    compose.publish(tmp_path / "config.yaml", config)
    assert compose.load(tmp_path / "config.yaml") == config
    assert compose.differences(config, compose.load(tmp_path / "config.yaml")) == {}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"run: [1, 2",
        b"\xff\xfe\x00",
        b"- a\n- b\n",
        b"just text",
        b"run: {stepz: 3}",
        b"run: {steps: many}",
        b"stage: nothing",
        b"run:\n\tsteps: 3",
    ],
)
def test_a_damaged_configuration_of_a_run_is_one_message(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        compose.load(path)
    assert str(caught.value).startswith(f"{path}: no configuration of a run that can be read (")
    assert "\n" not in str(caught.value)


def test_differences_are_named_by_field() -> None:
    old = compose.compose([*PATHS, "learner.optimizer.lr=1e-6"])
    new = compose.compose([*PATHS, "learner.optimizer.lr=2e-6", "run.seed=1"])
    assert compose.differences(old, new) == {
        "learner.optimizer.lr": (1e-6, 2e-6),
        "run.seed": (0, 1),
    }


def test_missing_values_are_named() -> None:
    with pytest.raises(UserError, match=r"give data.prompts=..., model.path=..., run.name=..."):
        compose.compose([])


@pytest.mark.parametrize(
    ("overrides", "extra"),
    [
        (["cluster.extra.mail-type=END"], {"mail-type": "END"}),
        (["+cluster.extra.mail-type=END"], {"mail-type": "END"}),
        (
            ["cluster.extra={mail-type: END, exclusive: true}"],
            {"mail-type": "END", "exclusive": True},
        ),
        (["cluster.extra.hint=multithread"], {"hint": "multithread"}),
        (
            ["cluster.extra.mail-type=END", "~cluster.extra.hint"],
            {"mail-type": "END", "hint": None},
        ),
        (["cluster.extra.begin='2030-01-01T10:00:00'"], {"begin": "2030-01-01T10:00:00"}),
    ],
)
def test_dictionaries_take_any_key(
    overrides: list[str], extra: dict[str, object], tmp_path: Path
) -> None:
    """Upon those of the profile; a deleted one is there no more."""
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster/here.yaml").write_text("extra: {hint: nomultithread}\n")
    config = compose.compose([*PATHS, "cluster=here", *overrides], config_directory=tmp_path)
    expected = {"hint": "nomultithread"} | extra
    assert config.cluster.extra == {k: v for k, v in expected.items() if v is not None}
    compose.publish(tmp_path / "config.yaml", config)
    assert compose.load(tmp_path / "config.yaml") == config


def test_every_dictionary_can_be_set_on_the_command_line() -> None:
    free = [name for name, kind in schema.fields().items() if schema.is_free(kind)]
    assert set(free) == {
        *("cluster.extra", "cluster.learner.extra", "cluster.sampler.extra"),
        *("cluster.environment", "assets", "chain"),
    }
    config = compose.compose([*PATHS, *(f"{name}.some_key=1" for name in free)])
    assert config.cluster.sampler.extra == config.assets == {"some_key": 1}
    assert config.cluster.environment == {"some_key": "1"}


def test_a_wrong_key_in_a_file_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster/here.yaml").write_text("defaults: [slurm]\nacount: ab12\n")
    with pytest.raises(UserError, match="'acount' not in 'ClusterConfig'"):
        compose.compose([*PATHS, "cluster=here"], config_directory=tmp_path)


def test_groups_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster/here.yaml").write_text("defaults: [slurm]\naccount: ab12\n")
    config = compose.compose([*PATHS, "cluster=here"], config_directory=tmp_path)
    assert config.cluster.account == "ab12"
    assert config.cluster.learner.nodes == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"name: x\nsetup: [module load\n", r"mine\.yaml:3: not YAML: expected ',' or '\]'"),
        (b"name: x\n\tqos: y\n", r"mine\.yaml:2: not YAML: found character '.t'"),
        (b"- a\n", "list is not a subclass of ClusterConfig"),
        (b"nam: x\n", "Key 'nam' not in 'ClusterConfig'"),
        (b"\xff\xfe", "--config-dir .*: a file of it is not UTF-8"),
    ],
)
def test_a_file_of_ones_own_that_is_broken_is_named(
    content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster/mine.yaml").write_bytes(content)
    with pytest.raises(UserError, match=message):
        compose.compose(["experiment=quickstart", "cluster=mine"], config_directory=tmp_path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.seeed=1", "did you mean run.seed?"),
        ("+run.seeed=1", "did you mean run.seed?"),
        ("++run.seeed=1", "did you mean run.seed?"),
        ("lr=1e-5", r"did you mean learner.optimizer.lr or critic.optimizer.lr or warmup.lr\?"),
        ("+foo=1", "no field and no group of configurations of the name 'foo'"),
        ("experimnt=quickstart", r"did you mean experiment\?"),
        ("+algoritm=rloo", r"did you mean algorithm\?"),
        (
            "experiment=quikstart",
            "Could not find 'experiment/quikstart'; Available options.*quickst",
        ),
        ("cluster.learner.extr.gres=x", r"did you mean cluster.learner.extra\?"),
        ("hydra.run.dir=/x", "no field"),
        ("run={name: b, stepz: 3}", "Key 'stepz' not in 'RunConfig'"),
        ("~run.seed", "cannot be deleted"),
        ("run.steps", "missing EQUAL"),
        ("=3", "no field"),
        ("run.steps=many", "could not be converted to Integer"),
        ("algorithm.kl.estimator=k9", r"expected one of \[k1, k2, k3\]"),
        ("algorithm.name=PPP", r"expected one of \[grpo, rloo, reinforce_plus_plus, ppo\]"),
        ("model.path=", "model.path='': expected a path"),
        ("run.root=' '", "run.root=.*: expected a path"),
        ("model.path=/a=b", "quote values"),
    ],
)
def test_what_cannot_be_composed_is_explained(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        compose.compose([*PATHS, override])
