"""The offline stages (SFT, reward model, DPO): what a learner rank does."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from hpc_rlhf.cluster import device
from hpc_rlhf.cluster.signals import DEFAULT_SIGNALS, StopFlag
from hpc_rlhf.cluster.stopping import SavePoints, StopRequested
from hpc_rlhf.cluster.world import World
from hpc_rlhf.config import Config, Recompute, Stage
from hpc_rlhf.data.chat import load_tokenizer
from hpc_rlhf.data.doctor import check_pad_token
from hpc_rlhf.data.tokens import TokenDataset
from hpc_rlhf.errors import ExitCode
from hpc_rlhf.launch.job_plan import JobPlan
from hpc_rlhf.learner import reference
from hpc_rlhf.learner.objectives import BradleyTerry, DirectPreference, Objective, Supervised
from hpc_rlhf.learner.runner import Runner
from hpc_rlhf.learner.trainer import Trainer
from hpc_rlhf.loop import fit
from hpc_rlhf.models.heads import initial_score_weight
from hpc_rlhf.models.megatron import export_hf, freeze
from hpc_rlhf.observe.metrics import MetricsWriter
from hpc_rlhf.observe.startup import CHECKPOINT, DATA, GROUPS, LOAD, publish_report
from hpc_rlhf.observe.timeline import Timeline
from hpc_rlhf.offline_run import ExampleSet, OfflineCoordinator, OfflineRun
from hpc_rlhf.run_dir import Attempt, RunDir
from hpc_rlhf.runs import data_cache, open_examples, pin_data
from hpc_rlhf.stages.world import (
    LearnerWorld,
    join,
    load_model,
    pin_frozen,
    save_points,
    saving,
    walltime_guard,
)
from hpc_rlhf.types import FrozenRef, Phase


def run_learner(
    config: Config, plan: JobPlan, attempt: Attempt, world: World, timeline: Timeline
) -> ExitCode:
    """One learner rank, from the empty process to the end of the attempt."""
    flag = StopFlag()
    with flag.installed((*DEFAULT_SIGNALS, config.cluster.signal)):
        try:
            with timeline.phase(0, Phase.SETUP):
                timeline.part(GROUPS)
                joined = join(config, attempt, world)
                run = _build(config, plan, attempt, joined, flag, timeline)
        except StopRequested:  # in the sweep of the reference, whose part is kept
            return ExitCode.INTERRUPTED
        timeline.startup.end()
        if joined.control.is_coordinator:
            run.startup = publish_report(attempt, timeline.startup, {}).as_metrics()
        try:
            return fit(run, timeline)
        finally:
            run.close()


def make_objective(config: Config) -> Objective:
    """The objective that ``config.stage`` names."""
    match config.stage:
        case Stage.SFT:
            return Supervised(config.sft.loss_mean)
        case Stage.REWARD_MODEL:
            return BradleyTerry(config.reward_model.centering)
        case Stage.DPO:
            return DirectPreference(config.dpo)
        case Stage.ONLINE:
            raise ValueError("the online stage learns from no data set")


def _build(
    config: Config,
    plan: JobPlan,
    attempt: Attempt,
    world: LearnerWorld,
    flag: StopFlag,
    timeline: Timeline,
) -> OfflineRun:
    """Data, model and optimizer, with the newest checkpoint loaded."""
    timeline.part(DATA)
    run, control, is_reward_model = plan.run, world.control, config.stage is Stage.REWARD_MODEL
    coordinator = None
    if control.is_coordinator:
        coordinator = OfflineCoordinator(MetricsWriter(run), walltime_guard(run, attempt))
    points = save_points(attempt, flag, control, coordinator.walltime if coordinator else None)
    data = _open_all(config, world)
    named = {name: path for name in data if (path := getattr(config.data, name)) is not None}
    hashes = {path: data[name].dataset.sha256 for name, path in named.items()}
    control.from_coordinator(lambda: pin_data(run, hashes))
    if config.stage is Stage.DPO:
        path = Path(config.model.reference or config.model.path)
        model = pin_frozen({"reference": path}, run, control)["reference"]
        data = _with_reference(config, model, data, world, points)

    timeline.part(LOAD)
    source = Path(config.model.path)
    trainer = Trainer(
        load_model(
            config,
            source,
            config.learner.recompute,
            lm=not is_reward_model,
            score=is_reward_model,
            new_head=partial(initial_score_weight, seed=config.run.seed),
        ),
        config.learner,
        total_steps=config.run.steps,
    )
    offline = OfflineRun(
        directory=run,
        attempt=attempt.number,
        config=config.run,
        offline=config.offline,
        objective=make_objective(config),
        trainer=trainer,
        train_set=data["train"],
        order_seed=config.run.seed if config.data.shuffle else None,
        held_out=data.get("eval"),
        saving=saving(config, run, attempt, control),
        control=control,
        save_points=points,
        export=partial(_export, config, trainer, run),
        coordinator=coordinator,
    )
    timeline.part(CHECKPOINT)
    offline.resume()
    return offline


def _open_all(config: Config, world: LearnerWorld) -> dict[str, ExampleSet]:
    """The data sets by their names in the configuration; every rank maps the same files."""

    def prepare() -> dict[str, Path]:
        tokenizer = load_tokenizer(Path(config.model.path))
        named = {"train": config.data.train, "eval": config.data.eval}
        return {
            name: open_examples(config, path, tokenizer).path
            for name, path in named.items()
            if path is not None
        }

    paths = world.control.from_coordinator(prepare)
    return {name: ExampleSet(TokenDataset.open(path)) for name, path in paths.items()}


def _with_reference(
    config: Config,
    model: FrozenRef,
    data: dict[str, ExampleSet],
    world: LearnerWorld,
    points: SavePoints,
) -> dict[str, ExampleSet]:
    """Add the reference's log-probs, computed by the first run that needs them.

    The reference is in memory for this only: before the policy, its gradients and its optimizer are.

    Raises:
        StopRequested: in the middle of it; what is done is kept.
    """
    control = world.control
    dtype = str(device.resolve_dtype(config.model.dtype)).removeprefix("torch.")
    files = {
        name: reference.ReferenceFile.of(data_cache(config), model, one.dataset.path.name, dtype)
        for name, one in data.items()
    }
    found = {
        name: control.broadcast(file.read() if control.is_coordinator else None)
        for name, file in files.items()
    }
    missing = [name for name, values in found.items() if values is None]
    if missing:
        policy = freeze(load_model(config, Path(model.path), Recompute.NONE))
        runner = Runner(policy, config.learner)

        def pause() -> None:
            if points.stop_before():
                raise StopRequested

        for name in missing:
            dataset = data[name].dataset
            found[name] = reference.sweep(
                files[name], policy, runner, len(dataset), dataset.examples, control, pause
            )
    return {name: replace(one, ref_log_probs=found[name]) for name, one in data.items()}


def _export(config: Config, trainer: Trainer, run: RunDir) -> dict[str, str]:
    """Write the policy or the reward model as a Hugging Face directory."""
    source = Path(config.model.path)
    if config.stage is not Stage.REWARD_MODEL:
        export_hf(trainer.model, source, run.policy)
        return {"policy": str(run.policy)}
    pad_token = check_pad_token(load_tokenizer(source), source, config.reward_model.pad_token)
    export_hf(trainer.model, source, run.reward_model, pad_token=pad_token)
    return {"reward_model": str(run.reward_model)}
