"""The command line on a login node: help, scripts, and refusals that leave nothing behind."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hpc_rlhf import compose
from hpc_rlhf.cli import main
from hpc_rlhf.runs import open_run

REPOSITORY = Path(__file__).resolve().parents[2]


def quickstart(root: Path, *overrides: str) -> list[str]:
    return ["experiment=quickstart", f"run.root={root}", *overrides]


def test_help_does_not_import_what_is_slow() -> None:
    code = (
        "import sys; from hpc_rlhf.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as e: assert e.code == 0\n"
        "slow = {'torch', 'hydra', 'omegaconf', 'transformers', 'rich', 'numpy'} & set(sys.modules)\n"
        "assert not slow, slow"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "submit" in done.stdout
    assert "examples:" in done.stdout


@pytest.mark.parametrize("verb", ["run", "submit", "status", "verify"])
def test_every_command_has_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([verb, "--help"])
    assert exit_info.value.code == 0
    assert f"hpc-rlhf {verb} " in capsys.readouterr().out.partition("example")[2]


@pytest.mark.parametrize(
    ("name", "cluster"), [("online_het", "slurm"), ("online_steps", "slurm_steps")]
)
def test_scripts_for_sbatch_by_hand_are_what_the_code_renders(
    name: str,
    cluster: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = ["experiment=quickstart", f"cluster={cluster}", f"run.name={name}"]
    assert main(["submit", "--script", *overrides]) == 0
    text = (REPOSITORY / f"slurm/{name}.sbatch").read_text()
    program = Path(sys.executable).with_name("hpc-rlhf")  # whatever PATH the job has
    assert program.exists()
    assert capsys.readouterr().out == text.replace("exec hpc-rlhf", f"exec {program}")


def test_the_scripts_of_a_chain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of them, with what makes each wait; the later links' models are not there yet."""
    chain = [f"run.root={tmp_path}", "run.name=c", "experiment=quickstart_ppo", "cluster=slurm"]
    assert main(["submit", "--dry-run", *chain]) == 0
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if line.startswith("# ")] == [
        "# sft",
        "# reward_model: sbatch --dependency=afterok:JOB_OF_sft --kill-on-invalid-dep=yes",
        "# ppo: sbatch --dependency=afterok:JOB_OF_reward_model --kill-on-invalid-dep=yes",
    ]
    assert text.count("#!/bin/bash") == 3
    assert text.count("#SBATCH hetjob") == 1  # PPO alone has samplers
    names = [line for line in text.splitlines() if "--job-name" in line]
    assert [name.rpartition("=")[2] for name in names] == ["c-sft", "c-reward_model", "c-ppo"]
    assert {path.name for path in tmp_path.iterdir()} == {".assets", ".cache"}

    for command, message in (
        (["submit", "--script", *chain], "a chain is one job for each of its links"),
        (["run", *chain], "use `hpc-rlhf submit`"),
        (["submit", *chain, "chain.ppo.critic.warmup_steps=50"], "critic.warmup_steps=50"),
        (["submit", *chain, "chain.ppo.learner.parallel.tensor=3"], "not divisible by"),
        (["submit", *chain, "chain.ppo.run.prompts_per_step=101"], "100 usable prompts are fewer"),
        (["submit", *chain, "chain.ppo.reward.model=/nowhere"], "reward.model=/nowhere: no such"),
    ):
        assert main(command) == 2
        assert message in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {".assets", ".cache"}


def test_a_script_may_be_queued_from_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "--dry-run", *quickstart(tmp_path / "runs", "cluster=slurm")]) == 0
    (assets,) = (tmp_path / "runs/.assets").iterdir()
    data = tmp_path / "my data"
    data.mkdir()
    (data / "p.jsonl").symlink_to(assets / "prompts.jsonl")
    (data / "model").symlink_to(assets / "model")
    monkeypatch.chdir(data)
    capsys.readouterr()
    relative = ["model.path=model", "data.prompts='p.jsonl'", "run.root=../runs", "run.name=x"]
    overrides = ["experiment=quickstart", "cluster=slurm", *relative]
    assert main(["submit", "--script", "--config-dir", ".", *overrides]) == 0
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    monkeypatch.chdir("/")
    assert main([*command[2:], "--cfg", "job"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["model"]["path"] == f"{data}/model"
    assert config["data"]["prompts"] == f"{data}/p.jsonl"
    assert Path(config["run"]["root"]).resolve() == tmp_path / "runs"
    assert command[-2:] == ["--config-dir", str(data)]


def test_ctrl_c_before_an_attempt_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(config: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hpc_rlhf.planner.preflight.check_settings", interrupted)
    assert main(["run", "experiment=quickstart"]) == 75
    assert "interrupted; the same command begins" in capsys.readouterr().err


def test_options_and_overrides_in_any_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "experiment=quickstart", "--cfg", "job", "run.steps=7"]) == 0
    assert "steps: 7" in capsys.readouterr().out
    with pytest.raises(SystemExit) as exit_info:
        main(["run", "--unknown", "run.steps=7"])
    assert exit_info.value.code == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.stepz=3"], "did you mean run.steps?"),
        (["algorithm=ppg"], "Could not find 'algorithm/ppg'"),
        (["learner.optimizer.lr=0"], "learner.optimizer.lr=0"),
        (["learner.parallel.tensor=3"], "not divisible by"),
        (["model.path=/nowhere"], "model.path=/nowhere: no such directory"),
        (["data.prompts=/nowhere.jsonl"], "/nowhere.jsonl: no such file"),
        (["run.prompts_per_step=101"], "100 usable prompts are fewer than one batch"),
        (["sampling.samples_per_prompt=1"], "sampling.samples_per_prompt=1"),
        (["data.max_prompt_tokens=3"], "prompts.jsonl:1"),
        (["run.name=a/b"], "run.name='a/b'"),
    ],
)
@pytest.mark.parametrize("verb", ["run", "submit"])
def test_bad_input_is_refused_with_one_message_and_nothing_is_written(
    verb: str,
    overrides: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster = ["cluster=slurm"] if verb == "submit" else []
    assert main([verb, *quickstart(tmp_path, *cluster, *overrides)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("hpc-rlhf: ")
    assert "Traceback" not in captured.err
    left = [path for path in tmp_path.iterdir() if path.name != ".assets"]
    assert left == []


@pytest.mark.parametrize("verb", ["run", "submit"])
def test_a_run_whose_configuration_is_damaged(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "demo"
    run.mkdir()
    (run / "config.yaml").write_text("run: {name: demo")
    cluster = ["cluster=slurm"] if verb == "submit" else []
    assert main([verb, *quickstart(tmp_path, "run.name=demo", *cluster)]) == 2
    error = capsys.readouterr().err
    assert f"{run / 'config.yaml'}: no configuration of a run that can be read" in error
    assert "Traceback" not in error
    assert (run / "config.yaml").read_text() == "run: {name: demo"


def test_run_on_slurm_nodes_outside_of_an_allocation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *quickstart(tmp_path, "cluster=slurm")]) == 2
    assert "use `hpc-rlhf submit`" in capsys.readouterr().err


def test_status_of_an_unknown_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "nothing", "--root", str(tmp_path)]) == 2
    assert "no run 'nothing'" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    run = open_run(compose.compose([*quickstart(tmp_path), "run.name=a"]))
    reader, writer = os.pipe()
    os.close(reader)
    command = [Path(sys.executable).with_name("hpc-rlhf"), "status", str(run.path)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
