"""How Hugging Face checkpoints of the supported families map onto Megatron's sharded parameters.

A pure description, without torch: which Hugging Face tensors exist, and for each local Megatron
parameter the ordered slices of them it consists of. Loading concatenates those slices, export and
weight sync copy them back; there is no second place that knows the layout.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from hpc_rlhf.errors import UserError

FAMILIES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")

LM_WEIGHT, SCORE_WEIGHT = "lm_head.weight", "score.weight"
_ARCHITECTURES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding: ``rope_parameters`` of transformers 5, or ``rope_scaling`` of 4."""

    rope_type: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_positions: int = 0  # llama3, yarn: context length of pre-training
    attention_factor: float | None = None  # yarn: scale of cos and sin; None: from `factor`
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions


@dataclass(frozen=True)
class HfModelSpec:
    """The architecture of a Hugging Face decoder, as its config.json describes it, and its heads.

    A policy has the language-model head. The score head, one number a position from the same hidden
    states, is that of a reward model (``XForSequenceClassification`` with one label) or of a critic;
    with both, a critic shares the policy's trunk.
    """

    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    tied_embeddings: bool
    rope: RopeSpec
    source: str = ""  # the file it was read from, for messages
    lm_head: bool = True
    score_head: bool = False
    is_classifier: bool = False  # the directory's model, whatever heads are asked for

    @classmethod
    def from_directory(cls, directory: Path | str) -> "HfModelSpec":
        """Read ``directory/config.json``.

        Raises:
            UserError: no such file, not a supported family, or a feature this system would get wrong.
        """
        path = Path(directory) / "config.json"
        try:
            config = json.loads(path.read_text())
        except FileNotFoundError:
            raise UserError(
                f"{directory}: no config.json; expected a Hugging Face model directory"
            ) from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: not valid JSON ({error})") from None
        if not isinstance(config, dict):
            raise UserError(f"{path}: expected a JSON object, got {type(config).__name__}")
        return cls.from_config(config, source=str(path))

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, source: str = "config.json"
    ) -> "HfModelSpec":
        """Interpret the contents of a config.json, written by transformers 4 or 5.

        Raises:
            UserError: as :meth:`from_directory`.
        """
        family = config.get("model_type")
        if family not in FAMILIES:
            raise UserError(
                f"{source}: model_type {family!r} is not supported, only {', '.join(FAMILIES)}"
            )
        _refuse_unsupported(config, source)
        try:
            hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
            default_head_dim = 128 if family == "qwen3" else hidden // heads
            return cls(
                family=family,
                hidden_size=hidden,
                intermediate_size=int(config["intermediate_size"]),
                num_layers=int(config["num_hidden_layers"]),
                num_heads=heads,
                num_kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or default_head_dim),
                vocab_size=int(config["vocab_size"]),
                max_positions=int(config["max_position_embeddings"]),
                norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                tied_embeddings=bool(config.get("tie_word_embeddings", False)),
                rope=_rope_spec(config, source),
                source=source,
                is_classifier=any(
                    name.endswith("ForSequenceClassification")
                    for name in config.get("architectures") or ()
                ),
            )
        except KeyError as error:
            raise UserError(f"{source}: key {error} is missing") from None
        except (TypeError, ValueError) as error:
            raise UserError(f"{source}: a value has the wrong type ({error})") from None

    def with_heads(self, *, lm: bool, score: bool) -> "HfModelSpec":
        """The same decoder under other heads."""
        return replace(self, lm_head=lm, score_head=score)

    @property
    def tied_output(self) -> bool:
        """Whether the language-model head is the embedding matrix."""
        return self.tied_embeddings and self.lm_head

    @property
    def qkv_bias(self) -> bool:
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.family == "qwen3"

    def padded_vocab_size(self, tensor: int) -> int:
        """Rows of the sharded embedding: the vocabulary rounded up to ``tensor`` equal shards."""
        return math.ceil(self.vocab_size / tensor) * tensor

    def check_parallel(
        self, tensor: int, pipeline: int, *, setting: str = "learner.parallel"
    ) -> None:
        """Check that the model can be split over ``tensor`` x ``pipeline`` ranks.

        Args:
            setting: that the numbers are from, for messages.

        Raises:
            UserError: names what is not divisible, and what would be.
        """
        for name, count in (("heads", self.num_heads), ("MLP columns", self.intermediate_size)):
            if count % tensor:
                raise UserError(
                    f"{setting}.tensor={tensor}: the model has {count} {name}, "
                    f"not divisible by {tensor} ({self.source})"
                )
        if self.num_kv_heads % tensor and tensor % self.num_kv_heads:
            raise UserError(
                f"{setting}.tensor={tensor}: the model has {self.num_kv_heads} key/value "
                f"heads, neither divisible by {tensor} nor dividing it ({self.source})"
            )
        if self.num_layers % pipeline:
            raise UserError(
                f"{setting}.pipeline={pipeline}: the model has {self.num_layers} layers, "
                f"not divisible by {pipeline} ({self.source})"
            )


@dataclass(frozen=True)
class HfTensor:
    """A tensor of the Hugging Face checkpoint."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """Rows (``dim`` 0) or columns (1) ``start:stop`` of a Hugging Face tensor."""

    tensor: HfTensor
    dim: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter of Megatron's GPTModel and the Hugging Face tensors it holds.

    ``name`` is that of ``named_parameters()``, its layer index local to the pipeline stage.
    """

    name: str
    sources: tuple[HfTensor, ...]  # in export order
    shards: tuple[tuple[Piece, ...], ...]  # one per TP rank; a single one if replicated
    dim: int  # the dimension along which pieces are concatenated
    shard_shape: tuple[int, ...]  # of one rank, padding included
    replicated: bool = False  # every rank holds all of it

    def pieces(self, tensor_rank: int) -> tuple[Piece, ...]:
        """What rank ``tensor_rank`` holds, in order; rows beyond them are padding."""
        return self.shards[0 if self.replicated else tensor_rank]


def stage_parameters(
    spec: HfModelSpec, *, tensor: int, pipeline: int, stage: int
) -> Iterator[ShardedParameter]:
    """The parameters of pipeline stage ``stage``, in the order of the Hugging Face checkpoint.

    With tied embeddings and several stages the last one has its own copy of the embedding as
    ``output_layer.weight``: its ``sources`` is empty, because the first stage exports it.
    """
    first, last = stage == 0, stage == pipeline - 1
    embedding = HfTensor("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size))
    if first:
        yield _vocabulary("embedding.word_embeddings.weight", embedding, spec, tensor)
    per_stage = spec.num_layers // pipeline
    for local in range(per_stage):
        yield from _layer(spec, local, stage * per_stage + local, tensor)
    if last:
        yield _replicated("decoder.final_layernorm.weight", "model.norm.weight", spec.hidden_size)
        if spec.lm_head and not spec.tied_embeddings:
            head = HfTensor(LM_WEIGHT, embedding.shape)
            yield _vocabulary("output_layer.weight", head, spec, tensor)
        elif spec.lm_head and not first:
            copy = _vocabulary("output_layer.weight", embedding, spec, tensor)
            yield ShardedParameter(copy.name, (), copy.shards, copy.dim, copy.shard_shape)
        if spec.score_head:
            yield _replicated("score_head.weight", SCORE_WEIGHT, 1, spec.hidden_size)


def hf_tensors_of(spec: HfModelSpec) -> list[HfTensor]:
    """Every tensor of the Hugging Face checkpoint."""
    parameters = stage_parameters(spec, tensor=1, pipeline=1, stage=0)
    return [source for parameter in parameters for source in parameter.sources]


def config_changes(spec: HfModelSpec, *, pad_token_id: int | None = None) -> dict[str, Any]:
    """What config.json of an export says otherwise than that of the model it was made from.

    Args:
        pad_token_id: of a reward model, whose score Hugging Face takes at the last token that is not
            this one.
    """
    name = _ARCHITECTURES[spec.family]
    if spec.lm_head:
        return {"architectures": [f"{name}ForCausalLM"]}
    return {
        "architectures": [f"{name}ForSequenceClassification"],
        "id2label": {"0": "score"},  # its length is the number of labels
        "label2id": {"score": 0},
        "pad_token_id": pad_token_id,
    }


def ignorable(spec: HfModelSpec, name: str) -> bool:
    """Whether a checkpoint may hold tensor ``name`` although the model has no such parameter."""
    unused_head = name == LM_WEIGHT and (spec.tied_embeddings or not spec.lm_head)
    return name.endswith("rotary_emb.inv_freq") or unused_head


def check_tensors(
    spec: HfModelSpec,
    found: Mapping[str, tuple[int, ...]],
    *,
    where: Path,
    optional: Collection[str] = (),
) -> None:
    """Compare a checkpoint's names and shapes with what ``spec`` needs.

    Args:
        found: shape of each tensor of the checkpoint, by name.
        where: its directory, for messages.
        optional: names of tensors that may be missing.

    Raises:
        UserError: names the tensors that are missing, unknown or of another shape.
    """
    expected = {tensor.name: tensor.shape for tensor in hf_tensors_of(spec)}
    expected = {n: s for n, s in expected.items() if n in found or n not in optional}
    if missing := sorted(expected.keys() - found.keys()):
        raise UserError(f"{where}: tensors are missing: {_some(missing)}")
    if unknown := sorted(n for n in found.keys() - expected.keys() if not ignorable(spec, n)):
        raise UserError(
            f"{where}: tensors that a {spec.family} model with this config.json does not have: "
            f"{_some(unknown)}"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise UserError(f"{where}: {name} has shape {found[name]}, config.json says {shape}")


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _layer(spec: HfModelSpec, local: int, index: int, tensor: int) -> Iterator[ShardedParameter]:
    ours, theirs = f"decoder.layers.{local}", f"model.layers.{index}"
    hidden, width = spec.hidden_size, spec.intermediate_size
    yield _replicated(f"{ours}.input_layernorm.weight", f"{theirs}.input_layernorm.weight", hidden)
    yield _qkv(spec, ours, theirs, "weight", tensor)
    if spec.qkv_bias:
        yield _qkv(spec, ours, theirs, "bias", tensor)
    if spec.qk_norm:
        for side in ("q", "k"):
            yield _replicated(
                f"{ours}.self_attention.{side}_layernorm.weight",
                f"{theirs}.self_attn.{side}_norm.weight",
                spec.head_dim,
            )
    attention_out = HfTensor(
        f"{theirs}.self_attn.o_proj.weight", (hidden, spec.num_heads * spec.head_dim)
    )
    yield _row_parallel(f"{ours}.self_attention.linear_proj.weight", attention_out, tensor)
    yield _replicated(
        f"{ours}.pre_mlp_layernorm.weight", f"{theirs}.post_attention_layernorm.weight", hidden
    )
    yield _gated(
        f"{ours}.mlp.linear_fc1.weight",
        HfTensor(f"{theirs}.mlp.gate_proj.weight", (width, hidden)),
        HfTensor(f"{theirs}.mlp.up_proj.weight", (width, hidden)),
        tensor,
    )
    down = HfTensor(f"{theirs}.mlp.down_proj.weight", (hidden, width))
    yield _row_parallel(f"{ours}.mlp.linear_fc2.weight", down, tensor)


def _replicated(name: str, hf_name: str, *shape: int) -> ShardedParameter:
    source = HfTensor(hf_name, shape)
    whole = Piece(source, 0, 0, shape[0])
    return ShardedParameter(name, (source,), ((whole,),), 0, shape, replicated=True)


def _row_parallel(name: str, source: HfTensor, tensor: int) -> ShardedParameter:
    """Megatron's RowParallelLinear: the input dimension is split."""
    rows, columns = source.shape
    step = columns // tensor
    shards = tuple((Piece(source, 1, r * step, (r + 1) * step),) for r in range(tensor))
    return ShardedParameter(name, (source,), shards, 1, (rows, step))


def _vocabulary(name: str, source: HfTensor, spec: HfModelSpec, tensor: int) -> ShardedParameter:
    """Rows of the vocabulary, in equal shards; the last ones may be short, or empty."""
    step = spec.padded_vocab_size(tensor) // tensor
    bounds = [min(r * step, spec.vocab_size) for r in range(tensor + 1)]
    shards = tuple(
        (Piece(source, 0, start, stop),) if stop > start else () for start, stop in pairwise(bounds)
    )
    return ShardedParameter(name, (source,), shards, 0, (step, spec.hidden_size))


def _gated(name: str, gate: HfTensor, up: HfTensor, tensor: int) -> ShardedParameter:
    """Megatron's gated linear unit: every rank holds its gate rows, then its up rows."""
    rows, columns = gate.shape
    step = rows // tensor
    shards = tuple(
        tuple(Piece(source, 0, r * step, (r + 1) * step) for source in (gate, up))
        for r in range(tensor)
    )
    return ShardedParameter(name, (gate, up), shards, 0, (2 * step, columns))


def _qkv(spec: HfModelSpec, ours: str, theirs: str, kind: str, tensor: int) -> ShardedParameter:
    """Megatron's fused projection: for each key/value head its query heads, its key, its value.

    Ranks hold equal consecutive rows of that order. With more ranks than key/value heads a cut goes
    through a group; Megatron then gathers the projection's output and picks its heads.
    """
    columns = (spec.hidden_size,) if kind == "weight" else ()
    query_rows = spec.num_heads // spec.num_kv_heads * spec.head_dim

    def source(letter: str, rows: int) -> HfTensor:
        return HfTensor(f"{theirs}.self_attn.{letter}_proj.{kind}", (rows, *columns))

    kv_rows = spec.num_kv_heads * spec.head_dim
    sources = (
        (source("q", spec.num_heads * spec.head_dim), query_rows),
        (source("k", kv_rows), spec.head_dim),
        (source("v", kv_rows), spec.head_dim),
    )
    order = [
        Piece(tensor_, 0, group * rows, (group + 1) * rows)
        for group in range(spec.num_kv_heads)
        for tensor_, rows in sources
    ]
    step = sum(piece.size for piece in order) // tensor
    return ShardedParameter(
        f"{ours}.self_attention.linear_qkv.{kind}",
        tuple(tensor_ for tensor_, _ in sources),
        tuple(tuple(_cut(order, r * step, (r + 1) * step)) for r in range(tensor)),
        0,
        (step, *columns),
    )


def _cut(order: list[Piece], start: int, stop: int) -> Iterator[Piece]:
    """The part ``start:stop`` of the concatenation of ``order``."""
    offset = 0
    for piece in order:
        low, high = max(start - offset, 0), min(stop - offset, piece.size)
        if low < high:
            yield Piece(piece.tensor, piece.dim, piece.start + low, piece.start + high)
        offset += piece.size


def _rope_spec(config: Mapping[str, Any], source: str) -> RopeSpec:
    """Read both spellings; defaults are those of transformers' ``RotaryEmbeddingConfigMixin``."""
    values: dict[str, Any] = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    rope_type = values.get("rope_type", values.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise UserError(
            f"{source}: rope_type {rope_type!r} is not supported, only {', '.join(ROPE_TYPES)}"
        )
    partial = values.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UserError(f"{source}: partial_rotary_factor={partial} is not supported, only 1.0")
    theta = values.get("rope_theta", config.get("rope_theta", 10000.0))
    if rope_type == "default":
        return RopeSpec(rope_type, float(theta))
    original = values.get("original_max_position_embeddings") or config["max_position_embeddings"]
    factor = values.get("factor")
    if factor is None:  # DeepSeek's convention, which transformers follows for yarn
        factor = config["max_position_embeddings"] / original
    return RopeSpec(
        rope_type=rope_type,
        theta=float(theta),
        factor=float(factor),
        low_freq_factor=float(values.get("low_freq_factor", 1.0)),
        high_freq_factor=float(values.get("high_freq_factor", 4.0)),
        original_max_positions=int(original),
        attention_factor=values.get("attention_factor"),
        beta_fast=float(values.get("beta_fast") or 32.0),
        beta_slow=float(values.get("beta_slow") or 1.0),
        mscale=values.get("mscale"),
        mscale_all_dim=values.get("mscale_all_dim"),
        truncate=bool(values.get("truncate", True)),
    )


def _refuse_unsupported(config: Mapping[str, Any], source: str) -> None:
    """Refuse what would load without complaint and compute something else."""
    refusals = {
        "attention_bias": config["model_type"] != "qwen2" and config.get("attention_bias"),
        "mlp_bias": config.get("mlp_bias"),
        "quantization_config": config.get("quantization_config"),
        "use_sliding_window": config.get("use_sliding_window") and config.get("sliding_window"),
    }
    for key, refused in refusals.items():
        if refused:
            raise UserError(f"{source}: {key}={config[key]!r} is not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(
            f"{source}: hidden_act {config['hidden_act']!r} is not supported, only silu"
        )
