"""The policy as a Megatron-core model: built from a Hugging Face config, sharded over TP x PP."""

import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig, TransformerLayer
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from hpc_rlhf.cluster import device
from hpc_rlhf.config import ParallelConfig, Recompute
from hpc_rlhf.errors import ComponentError, UserError
from hpc_rlhf.models.attention import PackedAttention, PackedSequences, RMSNorm
from hpc_rlhf.models.heads import ScoreHead, vocab_parallel_log_probs
from hpc_rlhf.models.hf_files import (
    CONFIG_FILE,
    TOKENIZER_FILES,
    HfWeights,
    plan_files,
    publish_export,
    write_companions,
    write_files,
)
from hpc_rlhf.models.hf_layout import (
    SCORE_WEIGHT,
    HfModelSpec,
    Piece,
    ShardedParameter,
    config_changes,
    stage_parameters,
)
from hpc_rlhf.models.parallel import ParallelLayout, layout_of
from hpc_rlhf.models.rotary import RotaryAngles, rotary_frequencies


class PolicyModel(GPTModel):
    """This rank's shard of a policy or of a reward model: its pipeline stage, its tensor slices.

    The last stage ends with hidden states, of which :meth:`log_probs` and :meth:`scores` make what
    is wanted, where the spec has these heads: at a real vocabulary the logits of a batch do not fit
    in memory, so that they are made chunk by chunk.
    """

    def __init__(
        self,
        spec: HfModelSpec,
        config: TransformerConfig,
        parallel: ParallelLayout,
    ) -> None:
        stages, post_process = config.pipeline_model_parallel_size, parallel.is_last_stage
        super().__init__(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(
                layer_specs=[_layer_spec(spec)] * (spec.num_layers // stages), layer_norm=RMSNorm
            ),
            vocab_size=spec.padded_vocab_size(config.tensor_model_parallel_size),
            max_sequence_length=spec.max_positions,
            pre_process=parallel.is_first_stage,
            post_process=post_process,
            parallel_output=True,
            share_embeddings_and_output_weights=spec.tied_output,
            position_embedding_type="none",  # RotaryAngles below
        )
        self.spec = spec
        self.parallel = parallel
        if post_process and not spec.lm_head:
            # GPTModel always makes one. It reads post_process as "has an output layer"; the decoder
            # has its own, by which it knows that the final norm is its.
            del self.output_layer
            self.post_process = False
        if post_process and spec.score_head:
            self.score_head = ScoreHead(spec.hidden_size, config.params_dtype)
        self.angles = RotaryAngles(spec.rope, spec.head_dim, device.device())

    def layout(self) -> list[ShardedParameter]:
        """The parameters of this stage with what they hold of the Hugging Face checkpoint."""
        return list(
            stage_parameters(
                self.spec,
                tensor=self.config.tensor_model_parallel_size,
                pipeline=self.config.pipeline_model_parallel_size,
                stage=self.parallel.pipeline_rank,
            )
        )

    def forward(
        self, tokens: torch.Tensor, position_ids: torch.Tensor, cu_seqlens: torch.Tensor
    ) -> torch.Tensor:
        """Run this stage over one packed micro-batch.

        Stages after the first take their input from ``set_input_tensor``, which Megatron's
        schedules call; every stage needs all three arguments.

        Args:
            tokens: int64 [T]. Under sequence parallelism T is a multiple of the TP size.
            position_ids: int64 [T], restarting in each sequence.
            cu_seqlens: int [S + 1], from 0 to T. Padding is a sequence of its own.

        Returns:
            [T, 1, hidden_size] (under sequence parallelism this rank's T / TP rows): after the
            final norm on the last stage, else the next stage's input.
        """
        if (
            self.config.sequence_parallel
            and tokens.size(0) % self.config.tensor_model_parallel_size
        ):
            raise ValueError(
                f"{tokens.size(0)} packed tokens are not a multiple of the tensor-parallel size "
                f"{self.config.tensor_model_parallel_size}, as sequence parallelism needs"
            )
        sequences = PackedSequences.from_cu_seqlens(cu_seqlens, tokens.device)
        if sum(sequences.lengths) != tokens.size(0):
            raise ValueError(
                f"cu_seqlens covers {sum(sequences.lengths)} tokens of {tokens.size(0)}"
            )
        embedded = self.embedding(tokens[None], position_ids[None]) if self.pre_process else None
        return self.decoder(
            hidden_states=embedded,
            attention_mask=None,
            rotary_pos_emb=self.angles(position_ids),
            packed_seq_params=sequences,
        )

    def output_weight(self) -> torch.nn.Parameter:
        """This rank's rows of the output matrix, [padded vocabulary / TP, hidden_size]; last stage."""
        assert self.post_process, "not the last stage, or a model without a language-model head"
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def log_probs(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        *,
        temperature: float,
        chunk_tokens: int,
        positions: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of ``targets`` and entropies, from the last stage's output.

        Collective over the tensor-parallel group; see
        :func:`~hpc_rlhf.models.heads.vocab_parallel_log_probs`.

        Args:
            hidden: what :meth:`forward` returned.
            targets: int64 [T], or [len(positions)].
            positions: int64, of the rows that are wanted; the others cost nothing.

        Returns:
            float32 [T] (or [len(positions)]) twice.
        """
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden)
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
        hidden = hidden.squeeze(1)
        if positions is not None:
            hidden = hidden.index_select(0, positions)
        return vocab_parallel_log_probs(
            hidden,
            self.output_weight(),
            targets,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            vocab_size=self.spec.vocab_size,
            group=self.parallel.tensor_group,
        )

    def scores(
        self, hidden: torch.Tensor, *, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The score head's number of every position, float32 [T], from the last stage's output.

        Collective over the tensor-parallel group under sequence parallelism; equal on all its ranks.

        Args:
            hidden: what :meth:`forward` returned.
            positions: int64, of the rows that are wanted.
        """
        if self.config.sequence_parallel:
            # Every rank goes on with the same, so that its gradient is whole and not a summand.
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False
            )
        hidden = hidden.squeeze(1)
        if positions is not None:
            hidden = hidden.index_select(0, positions)
        return self.score_head(hidden)


def build_model(
    spec: HfModelSpec,
    parallel: ParallelConfig,
    *,
    dtype: torch.dtype,
    recompute: Recompute = Recompute.NONE,
) -> PolicyModel:
    """Build this rank's shard, on its device, with zeros for weights.

    Collective over the learner.

    Args:
        parallel: of which :mod:`hpc_rlhf.models.parallel` has made the groups.

    Raises:
        UserError: the model cannot be split as ``parallel`` says.
    """
    spec.check_parallel(parallel.tensor, parallel.pipeline)
    with layout_of(parallel) as layout:
        model = PolicyModel(spec, _transformer_config(spec, parallel, dtype, recompute), layout)
    described = {p.name: p.shard_shape for p in model.layout()}
    built = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert described == built, "hf_layout does not describe this version of megatron-core"
    return model


def freeze(model: PolicyModel) -> PolicyModel:
    """Make ``model`` a reference: no gradients, no recomputation."""
    return model.requires_grad_(False).eval()


@dataclass(frozen=True)
class TensorMeta:
    """A Hugging Face tensor as this system sends and writes it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def hf_metadata(model: PolicyModel, *, value_head: bool = False) -> list[TensorMeta]:
    """What :func:`hf_tensors` will yield, in the same order, without communication."""
    dtype = model.config.params_dtype
    layout = _exported(model, value_head=value_head)
    return [TensorMeta(t.name, dtype, t.shape) for p in layout for t in p.sources]


@torch.no_grad()
def hf_tensors(
    model: PolicyModel,
    of: Callable[[torch.nn.Parameter], torch.Tensor] = lambda p: p,
    *,
    value_head: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this pipeline stage's weights, whole, under their Hugging Face names.

    COLLECTIVE over the tensor-parallel group: all its ranks iterate to the end, in step. One
    parameter is gathered at a time; every rank gets every tensor. A tied output matrix is yielded
    once, by the first stage, as the embedding.

    Args:
        of: what to yield instead of the parameter itself, of the same shape: its ``main_grad``, say.
        value_head: yield the score head of a policy, too. That is its critic's, and no part of the
            model that is sampled from or exported.
    """
    parameters = dict(model.named_parameters())
    group = model.parallel.tensor_group
    size = torch.distributed.get_world_size(group)
    for sharded in _exported(model, value_head=value_head):
        if not sharded.sources:
            continue
        shard = of(parameters[sharded.name]).detach().contiguous()
        if sharded.replicated:
            yield sharded.sources[0].name, shard
            continue
        shards = [shard]
        if size > 1:
            shards = [torch.empty_like(shard) for _ in range(size)]
            torch.distributed.all_gather(shards, shard, group)
        whole = {source.name: shard.new_empty(source.shape) for source in sharded.sources}
        for rank, from_rank in enumerate(shards):
            for piece, offset in _with_offsets(sharded.pieces(rank)):
                target = whole[piece.tensor.name].narrow(piece.dim, piece.start, piece.size)
                target.copy_(from_rank.narrow(sharded.dim, offset, piece.size))
        yield from whole.items()


def _exported(model: PolicyModel, *, value_head: bool) -> list[ShardedParameter]:
    skipped = model.spec.lm_head and model.spec.score_head and not value_head
    return [p for p in model.layout() if not (skipped and p.name == "score_head.weight")]


@torch.no_grad()
def load_hf(
    model: PolicyModel,
    directory: Path | str,
    *,
    new_head: Callable[[int], torch.Tensor] | None = None,
) -> None:
    """Load a Hugging Face checkpoint; each rank reads only its own slices, from memory-mapped files.

    Weights are cast to the model's dtype. An optimizer that keeps its own copy of the parameters
    must be told afterwards (``reload_model_params``).

    Args:
        new_head: makes the weight [1, H] of a score head that ``directory`` does not have, of the
            hidden size; the same on every rank. Default: the directory must have it.

    Raises:
        UserError: no safetensors files, or tensors missing, unknown, or of other shapes than
            config.json says.
    """
    with HfWeights(Path(directory)) as weights:
        optional = [] if new_head is None else [SCORE_WEIGHT]
        weights.check(model.spec, optional=optional)
        parameters = dict(model.named_parameters())
        rank = model.parallel.tensor_rank
        for sharded in model.layout():
            target = parameters[sharded.name]
            if any(source.name not in weights for source in sharded.sources):  # the optional one
                assert new_head is not None
                target.copy_(new_head(model.spec.hidden_size))
                continue
            target.zero_()  # padding rows stay 0
            for piece, offset in _with_offsets(sharded.pieces(rank)):
                target.narrow(sharded.dim, offset, piece.size).copy_(weights.read(piece))


def export_hf(
    model: PolicyModel,
    source: Path | str,
    target: Path | str,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5 << 30,
    pad_token: tuple[str, int] | None = None,
) -> None:
    """Write the model as a Hugging Face directory, whole or not at all.

    A model without a language-model head becomes a sequence classifier of one label; the value head
    of a policy is left out.

    COLLECTIVE over the learner; on return the directory is there for every rank. Each pipeline
    stage's leader writes that stage's files, so no rank gathers the whole model.

    Args:
        source: the directory that configuration, generation settings and tokenizer are copied from.
        target: the new directory. One that exists with the same contents is left as it is.
        dtype: of the written weights; default: the model's.
        pad_token: text and id, which a sequence classifier needs; its tokenizer gets it, too.

    Raises:
        UserError: ``target`` exists and is different.
        ComponentError: a rank could not write; names rank and reason.
    """
    target = Path(target)
    dtype = dtype or model.config.params_dtype
    stages = model.config.pipeline_model_parallel_size
    spec = model.spec.with_heads(lm=True, score=False) if model.spec.lm_head else model.spec
    files = plan_files(spec, stages, dtype.itemsize, max_file_bytes)
    pad_text, pad_id = pad_token or (None, None)
    changes: dict[str, dict[str, Any]] = {CONFIG_FILE: config_changes(spec, pad_token_id=pad_id)}
    if pad_text is not None:
        changes |= {name: {"pad_token": pad_text} for name in TOKENIZER_FILES}
    staging = target.with_name(f".{target.name}.export")
    is_replica = model.parallel.data_rank == 0
    is_writer = is_replica and model.parallel.tensor_rank == 0
    stage = model.parallel.pipeline_rank
    is_leader = is_writer and stage == 0

    try:
        with _all_ranks_agree("prepare", target):
            if is_leader:
                shutil.rmtree(staging, ignore_errors=True)  # of an attempt that was killed
                staging.mkdir(parents=True)
        with _all_ranks_agree("write", target):
            if is_replica:
                tensors = ((name, tensor.to(dtype)) for name, tensor in hf_tensors(model))
                write_files(staging if is_writer else None, files[stage], tensors)
        with _all_ranks_agree("publish", target):
            if is_leader:
                write_companions(staging, Path(source), files, dtype, changes)
                publish_export(staging, target)
    finally:
        if is_leader:
            shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def _all_ranks_agree(action: str, target: Path) -> Iterator[None]:
    """Wait for every rank to leave the block; raise on all of them what one raised."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 - raised again below, on every rank
        error = caught
    mine = error and (isinstance(error, UserError), f"{type(error).__name__}: {error}", str(error))
    everyones: list[tuple[bool, str, str] | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyones, mine)
    for rank, found in enumerate(everyones):
        if found is not None:
            is_users, named, text = found
            if is_users:
                raise UserError(text) from error
            raise ComponentError(
                f"learner rank {rank} could not {action} {target}: {named}"
            ) from error


def _with_offsets(pieces: tuple[Piece, ...]) -> Iterator[tuple[Piece, int]]:
    """Each piece with where it starts in its shard."""
    offset = 0
    for piece in pieces:
        yield piece, offset
        offset += piece.size


def _transformer_config(
    spec: HfModelSpec, parallel: ParallelConfig, dtype: torch.dtype, recompute: Recompute
) -> TransformerConfig:
    _, attention_factor = rotary_frequencies(spec.rope, spec.head_dim)
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.intermediate_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        softmax_scale=attention_factor**2 / math.sqrt(spec.head_dim),
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        qk_layernorm=spec.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # All weights are loaded. Initialisation is not turned off, because it is also what marks
        # parameters as tensor-parallel, without which gradient norms come out wrong.
        init_method=torch.nn.init.zeros_,
        output_layer_init_method=torch.nn.init.zeros_,
        embedding_init_method=torch.nn.init.zeros_,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        sequence_parallel=parallel.sequence and parallel.tensor > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=True,  # packed micro-batches differ in length
        moe_token_dispatcher_type="alltoall",  # variable_seq_lengths demands it, of dense models too
        calculate_per_token_loss=True,  # the learner normalises losses itself, over the whole batch
        deallocate_pipeline_outputs=True,
        cuda_graph_scope=[],  # no CUDA graphs; the default warns that it is deprecated
        # These need Apex, TransformerEngine or CUDA, or are replaced by PackedAttention.
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **_recompute_options(recompute),
    )


def _recompute_options(recompute: Recompute) -> dict[str, Any]:
    match recompute:
        case Recompute.NONE:
            return {}
        case Recompute.SELECTIVE:
            # PackedAttention keeps no T x T matrix; the MLP's activations are what is left to save.
            return {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
        case Recompute.FULL:
            return {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }


def _layer_spec(spec: HfModelSpec) -> ModuleSpec:
    qk_norm = RMSNorm if spec.qk_norm else IdentityOp
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=PackedAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=qk_norm,
                    k_layernorm=qk_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=ModuleSpec(
                module=MLP,
                submodules=MLPSubmodules(
                    linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear
                ),
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )
