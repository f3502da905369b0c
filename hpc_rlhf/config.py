"""The configuration: one dataclass per component, composed by Hydra, checked by type and by value.

Every component receives its own dataclass (or plain values of it), never :class:`Config`.
This module imports neither torch nor Hydra at import time: the command line must answer at once.
"""

from dataclasses import dataclass, field
from enum import EnumMeta, StrEnum
from typing import Any

from omegaconf import MISSING


class _ByAnyCase(EnumMeta):
    """OmegaConf looks choices up by member name; users write them in lower case."""

    def __getitem__(cls, name: str) -> Any:
        return super().__getitem__(name.upper())


class Choice(StrEnum, metaclass=_ByAnyCase):
    """A field with a fixed set of values."""


class Stage(Choice):
    ONLINE = "online"
    SFT = "sft"
    REWARD_MODEL = "reward_model"
    DPO = "dpo"

    @property
    def is_offline(self) -> bool:
        """Whether it learns from a fixed data set: a learner and no sampler."""
        return self is not Stage.ONLINE

    @property
    def learns_from_pairs(self) -> bool:
        return self in (Stage.REWARD_MODEL, Stage.DPO)


class DType(Choice):
    AUTO = "auto"  # bfloat16 on a GPU, float32 on a CPU
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Schedule(Choice):
    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class Recompute(Choice):
    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class AlgorithmName(Choice):
    """How rewards become advantages; what else an algorithm is known for has a field of its own."""

    GRPO = "grpo"
    RLOO = "rloo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    PPO = "ppo"  # generalised advantage estimates from a critic


class CriticKind(Choice):
    SHARED = "shared"  # a value head on the policy's trunk
    SEPARATE = "separate"  # a second model with an optimizer of its own


class Ratio(Choice):
    """What is clipped in the surrogate: the new over the old probability of ..."""

    TOKEN = "token"  # each token: PPO, GRPO
    SEQUENCE = "sequence"  # the completion, to the power of 1 / its length: GSPO


class LossMean(Choice):
    """What a mini-batch loss is a mean over, always over the whole global mini-batch."""

    TOKEN = "token"  # every completion token weighs the same
    SEQUENCE = "sequence"  # every completion weighs the same (GRPO's 1/|o_i|)
    CONSTANT = "constant"  # sum of tokens / (sequences x max_new_tokens): Dr. GRPO, no length bias


class KlPlacement(Choice):
    REWARD = "reward"  # subtracted from the reward, as in PPO-style RLHF
    LOSS = "loss"  # added to the loss, as in GRPO


class KlEstimator(Choice):
    """Schulman, "Approximating KL Divergence" (2020)."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


class Proximal(Choice):
    """The old policy of the surrogate's ratio."""

    LEARNER = "learner"  # recomputed by the learner before the update: decoupled PPO
    SAMPLER = "sampler"  # the behaviour policy itself, as the sampler reported it


class ImportanceWeight(Choice):
    """Truncated importance weight from the behaviour policy (sampler) to the proximal one (learner)."""

    NONE = "none"
    TOKEN = "token"  # min(ratio of the token, cap)
    SEQUENCE = "sequence"  # min(ratio of the completion, cap), for each of its tokens


class DpoLoss(Choice):
    """See :func:`hpc_rlhf.learner.losses.dpo_loss`."""

    SIGMOID = "sigmoid"
    IPO = "ipo"
    CONSERVATIVE = "conservative"


class LongSequences(Choice):
    """What becomes of an offline sequence longer than ``model.max_sequence_tokens``."""

    ERROR = "error"
    DROP = "drop"
    KEEP_START = "keep_start"  # the end of the completion is lost, its end token too
    KEEP_END = "keep_end"  # the beginning of the prompt is lost


class PromptFormat(Choice):
    TEXT = "text"
    MESSAGES = "messages"


class RewardName(Choice):
    EXACT = "exact"
    REGEX = "regex"
    PYTHON = "python"
    MODEL = "model"


class Launcher(Choice):
    LOCAL = "local"
    SLURM = "slurm"


class Het(Choice):
    """How a plan of several components becomes Slurm allocations."""

    JOB = "job"  # one heterogeneous job, one component each
    STEPS = "steps"  # one plain allocation split by `srun --nodes --relative`


class Requeue(Choice):
    """How a run goes on by itself when an attempt ended before the run is complete."""

    REQUEUE = "requeue"  # the job asks Slurm to requeue it
    SUCCESSOR = "successor"  # the same job is queued beforehand, with --dependency=afterany
    NONE = "none"  # it does not: the same command resumes it


@dataclass
class RunConfig:
    name: str = MISSING
    root: str = "runs"  # the run directory is ROOT/NAME
    seed: int = 0
    steps: int = 100  # optimizer phases (one batch of rollouts each)
    prompts_per_step: int = 8
    # resume as if uninterrupted: unfinished samples from their seeds, kernels that repeat bit by bit
    deterministic: bool = False
    max_attempts_without_progress: int = 5  # then a run that is requeued fails


@dataclass
class ModelConfig:
    path: str = MISSING  # a Hugging Face directory: config.json, *.safetensors, tokenizer files
    reference: str | None = None  # frozen reference for the KL term; default: the initial policy
    dtype: DType = DType.AUTO
    max_sequence_tokens: int = 1024  # prompt + completion


@dataclass
class ParallelConfig:
    """The learner's layout; the data-parallel size is what is left of its ranks."""

    tensor: int = 1
    pipeline: int = 1
    sequence: bool = False  # Megatron's sequence parallelism, over the tensor-parallel group


@dataclass
class OptimizerConfig:
    lr: float = 1e-6
    min_lr: float = 0.0
    warmup_steps: int = 0  # optimizer steps of linear LR warm-up
    schedule: Schedule = Schedule.CONSTANT
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0  # biases and norms are never decayed
    clip_grad: float = 1.0  # global L2 norm; 0 turns clipping off


@dataclass
class LearnerConfig:
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    micro_batch_tokens: int = 4096  # packed tokens of one micro-batch, padding included
    logprob_chunk_tokens: int = 1024  # fp32 logits exist for this many tokens at once
    recompute: Recompute = Recompute.NONE
    # of a rank that hangs; the ranks wait for rank 0 through a whole rollout, too
    collective_timeout_s: float = 1800.0


@dataclass
class KlConfig:
    coef: float = 0.0  # 0: no reference model is held
    placement: KlPlacement = KlPlacement.LOSS
    estimator: KlEstimator = KlEstimator.K3
    target: float | None = None  # nats a completion: coef is where an adaptive coefficient starts
    gain: float = 0.1  # of the adaptive coefficient


@dataclass
class OverlongConfig:
    """What becomes of completions that are cut, or nearly so, at sampling.max_new_tokens."""

    buffer_fraction: float = 0.0  # the last part of max_new_tokens, over which the reward falls
    penalty: float = 1.0  # by how much, at max_new_tokens
    drop_truncated: bool = False  # learn nothing from completions that were cut


@dataclass
class OffPolicyConfig:
    """Correction for samples whose policy (the sampler's) is not the learner's.

    Bounds are ``[low, high]`` of the ratio learner / sampler; what is outside is not learned from.
    """

    proximal: Proximal = Proximal.LEARNER
    weight: ImportanceWeight = ImportanceWeight.NONE
    weight_cap: float = 2.0
    token_bounds: list[float] | None = None  # of a token's ratio
    sequence_bounds: list[float] | None = None  # of the product over a completion
    geometric_bounds: list[float] | None = None  # of the geometric mean over a completion
    warn_kl: float = 0.1  # nats a token, KL(sampler || learner), above which a step warns
    stop_kl: float | None = None  # above which the attempt ends before it learns


@dataclass
class AlgorithmConfig:
    name: AlgorithmName = AlgorithmName.GRPO
    ratio: Ratio = Ratio.TOKEN
    clip_low: float = 0.2  # ratio clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2
    normalize_std: bool = (
        True  # GRPO: divide group-centred rewards by the group's standard deviation
    )
    group_baseline: bool = False  # REINFORCE++: subtract the mean reward of the group first
    loss_mean: LossMean = LossMean.SEQUENCE
    epochs: int = 1  # passes over one batch of rollouts
    mini_batches: int = 1  # optimizer steps per pass
    resampling_rounds: int = 0  # DAPO: rounds in which groups of equal rewards are replaced
    max_skipped_steps: int = 10  # of a run, whose loss or gradient is not finite; one more ends it
    entropy_coef: float = 0.0  # of the entropy bonus
    gamma: float = 1.0  # PPO: discount of a token
    lam: float = 0.95  # PPO: lambda of the generalised advantage estimates
    kl: KlConfig = field(default_factory=KlConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    off_policy: OffPolicyConfig = field(default_factory=OffPolicyConfig)


@dataclass
class CriticParallelConfig:
    """The layout of a critic of its own, over the same ranks; what is null is as the learner's."""

    tensor: int | None = None
    pipeline: int | None = None
    sequence: bool | None = None

    def over(self, learner: ParallelConfig) -> ParallelConfig:
        tensor = learner.tensor if self.tensor is None else self.tensor
        return ParallelConfig(
            tensor=tensor,
            pipeline=learner.pipeline if self.pipeline is None else self.pipeline,
            sequence=learner.sequence and tensor > 1 if self.sequence is None else self.sequence,
        )


@dataclass
class CriticConfig:
    """The value function that ``algorithm.name=ppo`` learns beside the policy."""

    kind: CriticKind = CriticKind.SHARED
    path: str | None = None  # separate: the model it begins as; default: the policy's
    parallel: CriticParallelConfig = field(default_factory=CriticParallelConfig)  # separate
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))  # separate
    coef: float = 0.1  # shared: weight of the value loss beside the policy's
    clip: float = 0.2  # values are clipped to old ones -+ clip; 0: they are not
    warmup_steps: int = 0  # first steps of the run, in which only the critic learns


@dataclass
class SamplingConfig:
    """The decoding regime the policy is trained under."""

    samples_per_prompt: int = 8
    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    stop_token_ids: list[int] = field(default_factory=list)  # besides EOS


@dataclass
class SamplerConfig:
    """The vLLM servers."""

    tensor_parallel: int = 1
    kv_cache_bytes: int | None = None  # required on CPU; on GPU gpu_memory_utilization decides
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    max_concurrency: int = 256  # requests in flight per replica
    start_timeout_s: float = 600.0
    request_timeout_s: float = 1800.0
    max_restarts: int = 2  # deaths in a row beyond this end the attempt
    restart_reset_s: float = 600.0  # a replica that lived this long starts a new row


@dataclass
class DataConfig:
    """Prompts of the online stage; demonstrations or pairs of the offline ones.

    Files are JSONL, gzipped or not, or Parquet.
    """

    prompts: str | None = None  # online
    train: str | None = None  # offline
    eval: str | None = None  # offline: held out, never learned from
    cache: str | None = None  # offline: directory of tokenised data; default: run.root/.cache
    format: PromptFormat = (
        PromptFormat.TEXT
    )  # of prompts; offline records show theirs by themselves
    prompt_field: str = "prompt"
    messages_field: str = "messages"
    completion_field: str = "completion"
    chosen_field: str = "chosen"
    rejected_field: str = "rejected"
    margin_field: str | None = None  # by how much the chosen one is better, a number
    answer_field: str | None = "answer"
    answer_pattern: str | None = None  # regular expression, group 1 is the answer
    system: str | None = None  # system message, with the chat template
    chat_template: bool = False  # TEXT prompts become one user message
    add_bos: bool = False  # TEXT prompts without a template: put the BOS token in front
    max_prompt_tokens: int = 512
    long_prompts: str = "error"  # "error" | "drop"
    long_sequences: LongSequences = LongSequences.ERROR
    bad_lines: str = "error"  # "error" | "drop"
    shuffle: bool = True


@dataclass
class RewardConfig:
    name: RewardName = RewardName.EXACT
    pattern: str | None = None  # regex: what to find; exact: group 1 is the answer given
    function: str | None = None  # python: "package.module:function"
    model: str | None = None  # model: its directory, a sequence classifier of one label
    retokenize: bool = False  # model: render and tokenise text again for another tokenizer
    timeout_s: float = 10.0  # of one sample
    workers: int = 1
    max_failure_fraction: float = 0.5  # of one batch; above it the attempt ends


@dataclass
class WarmupConfig:
    """Supervised warm-up before the first rollout; the warmed-up policy becomes the reference."""

    steps: int = 0
    demonstrations: str | None = None  # JSONL with data.prompt_field and `completion`
    batch_size: int = 32
    lr: float = 1e-3


@dataclass
class OfflineConfig:
    """Steps of SFT, reward-model training and DPO, and how they are watched."""

    batch_size: int = 32  # demonstrations or pairs of one optimizer step
    eval_every_steps: int = 50  # measure on data.eval; also after the last step
    eval_examples: int = 1024  # the first ones of data.eval
    max_skipped_steps: int = 10  # whose loss or gradient is not finite; one more ends the run


@dataclass
class SftConfig:
    loss_mean: LossMean = LossMean.TOKEN


@dataclass
class RewardModelConfig:
    centering: float = 0.0  # coefficient of (chosen + rejected)^2, which holds scores around 0
    pad_token: str | None = None  # of the exported model; default: the tokenizer's


@dataclass
class DpoConfig:
    loss: DpoLoss = DpoLoss.SIGMOID
    beta: float = 0.1  # strength of the pull towards the reference (IPO: its tau)
    label_smoothing: float = 0.0  # conservative: how often a label is wrong


@dataclass
class SyncConfig:
    bucket_bytes: int = 64 << 20
    timeout_s: float = 60.0  # of one bucket, and of forming a group
    attempts: int = 3  # publishing again to the replicas that are left


@dataclass
class CheckpointConfig:
    every_steps: int = 10
    keep: int | None = 3  # newest ones; null keeps all
    keep_every_steps: int = 0  # those of every so many steps are kept, too
    asynchronous: bool = True  # train on while it is written; costs its size in host memory


@dataclass
class ComponentResources:
    """What one component asks of the scheduler."""

    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int = 1
    gpus_per_node: int = 0
    mem_per_node_mb: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # further sbatch options of this component


@dataclass
class ClusterConfig:
    name: str = "local"  # of this profile
    launcher: Launcher = Launcher.LOCAL
    het: Het = Het.JOB
    learner: ComponentResources = field(default_factory=ComponentResources)
    sampler: ComponentResources = field(default_factory=ComponentResources)  # one replica a task
    time_min: int = 60
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    signal: str = "USR2"
    signal_delay_s: int = 120
    requeue: Requeue = Requeue.NONE
    network_interface: str | None = None  # for NCCL and gloo; default: the node's own address
    setup: list[str] = field(default_factory=list)  # shell lines before the run (module load ...)
    prefix: list[str] = field(
        default_factory=list
    )  # command prefix of every task (apptainer exec ...)
    environment: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)  # further sbatch options of the whole job


@dataclass
class Config:
    """The whole run. Composed once, written to ``config.yaml``, immutable from then on."""

    stage: Stage = Stage.ONLINE
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    offline: OfflineConfig = field(default_factory=OfflineConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    dpo: DpoConfig = field(default_factory=DpoConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    # quickstart only: what to generate, see data/quickstart.py; empty: nothing
    assets: dict[str, Any] = field(default_factory=dict)
    # link -> what differs in its run, by field, in the order of the runs; see chain.py. Empty in a run
    chain: dict[str, Any] = field(default_factory=dict)
