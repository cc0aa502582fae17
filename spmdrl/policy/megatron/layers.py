"""Implements modules missing in Megatron, and the layer specs that use them.

Shapes: S tokens on a rank, D hidden size.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import multi_latent_attention as mla
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import nn

from spmdrl.policy.contract import Head
from spmdrl.policy.megatron.arch import Architecture
from spmdrl.policy.megatron.attention import CoreAttention
from spmdrl.policy.megatron.layout import Layout, as_list
from spmdrl.policy.megatron.routing import Router, attach


def _parameter(config: Any, *shape: int, fill: Any = torch.empty) -> nn.Parameter:
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    parameter = nn.Parameter(fill(*shape, dtype=config.params_dtype, device=device))
    # This attribute makes finalize_model_grads reduce the gradient over tp, as each tp rank only processes a part of
    # the tokens.
    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return parameter


class Norm(nn.Module):
    """RMSNorm, which scales by 1 + weight (Gemma) if `layernorm_zero_centered_gamma` is true."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any):
        super().__init__()
        self.eps, self.centered = eps, config.layernorm_zero_centered_gamma
        self.weight = _parameter(config, hidden_size, fill=torch.ones)

    def forward(self, x):
        """Normalize the last dimension of x, [..., D]."""
        if self.centered:
            # As in transformers, round after multiplying by the weight, not before.
            return F.rms_norm(x.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps).type_as(x)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class DuplicatedLinear(nn.Module):
    """A linear layer that is replicated on all tensor-parallel ranks, for the down projections of latent attention."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **unused: Any):
        super().__init__()
        self.weight = _parameter(config, output_size, input_size)

    def forward(self, x):
        """Map [..., input] to [..., output]. The second result is None, because there is no bias to add later."""
        return F.linear(x, self.weight), None


@cache
def normed(linear: type, norm: type) -> type:
    """Return a subclass of the row-parallel layer `linear` that applies `norm` to its output (for Gemma)."""

    class Normed(linear):
        def __init__(self, input_size, output_size, *, config, **kwargs):
            super().__init__(input_size, output_size, config=config, **kwargs)
            self.post_norm = norm(config=config, hidden_size=output_size, eps=config.layernorm_epsilon)

        def forward(self, x):
            out, bias = super().forward(x)
            return self.post_norm(out), bias

    return Normed


class States(ColumnParallelLinear):
    """Replaces the output layer. It stores the weight, but its forward pass returns hidden states unchanged.

    `schedule.py` applies the head, whose backward gives every tensor-parallel rank the full gradient of the hidden
    states.
    """

    def forward(self, input_, weight=None, runtime_gather_output=None):
        """Return the states of all tokens, [S, 1, D]; with sequence parallelism, the input is [S / tp, 1, D]."""
        if self.sequence_parallel:
            # The backward of this gather gives each rank the gradient for its own tokens.
            return gather_from_sequence_parallel_region(input_, False, self.tp_group), None
        return input_, None


class Scalar(nn.Module):
    """Like `States`, for a scalar or classification head, whose weight [labels, D] is replicated on all tp ranks."""

    def __init__(self, config: Any, tp_group: Any, labels: int, bias: bool):
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        options: dict[str, Any] = dict(dtype=config.params_dtype, device=device)
        self.weight = nn.Parameter(torch.zeros(labels, config.hidden_size, **options))
        self.bias = nn.Parameter(torch.zeros(labels, **options)) if bias else None
        self.sequence_parallel, self.tp_group = config.sequence_parallel, tp_group

    def forward(self, input_, weight=None, runtime_gather_output=None):
        """Return the hidden states, as `States` does."""
        return States.forward(self, input_)  # type: ignore[arg-type]


class Model(GPTModel):
    """A GPTModel that outputs hidden states."""

    def __init__(
        self,
        config: Any,
        arch: Architecture,
        layout: Layout,
        head: Head,
        stage: int | None,
        engine: bool,
        labels: int = 1,
        bias: bool = False,
    ):
        """stage: index of the virtual stage. engine: use TransformerEngine. labels, bias: for a `Scalar` head, the
        number of outputs and whether it has a bias.
        """
        place: dict[str, Any] = {} if stage is None else dict(ignore_virtual=False, vp_stage=stage)
        first = parallel_state.is_pipeline_first_stage(**place)
        last = parallel_state.is_pipeline_last_stage(**place)
        super().__init__(
            config,
            block(config, arch, stage, engine),  # type: ignore[arg-type]
            vocab_size=-(-arch.vocab // layout.tp) * layout.tp,
            max_sequence_length=arch.positions,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=arch.tied and head == "lm",
            position_embedding_type="rope",
            rotary_base=arch.rope_base,  # type: ignore[arg-type]
            rotary_percent=arch.rotary_share,
            vp_stage=stage,
        )
        self.arch, self.layout, self.head = arch, layout, head
        if last and head == "lm":
            self.output_layer.__class__ = States  # type: ignore[assignment]
        elif last:
            self.output_layer = Scalar(config, self.pg_collection.tp, labels, bias)
        attach(self, arch)
        if first and arch.embedding_scale:
            self.embedding.register_forward_hook(self._scaled)
        for name, p in self.named_parameters():
            if ".mlp.experts." in name:
                # Megatron only sets this attribute if ep > 1. Without it, expert gradients would not be reduced over tp
                # if etp < tp.
                p.allreduce = False  # type: ignore[attr-defined]
        if arch.frequencies is not None:
            module: Any
            for module in self.modules():
                if hasattr(module, "rotary_pos_emb"):
                    module.rotary_pos_emb.inv_freq = arch.frequencies.clone()

    def _scaled(self, module, args, output):
        return output * torch.tensor(self.arch.embedding_scale, dtype=output.dtype, device=output.device)

    def _is_in_embd_group(self):
        # Both copies of a tied embedding are loaded from files. If this were True, Megatron would replace them with
        # their sum at startup.
        return False


def block(config: Any, arch: Architecture, stage: int | None, engine: bool) -> TransformerBlockSubmodules:
    """Return the layer specs of a pipeline stage. stage, engine: as in `Model`."""
    sparse = as_list(config.moe_layer_freq) if config.num_moe_experts else [0] * config.num_layers
    first = get_transformer_layer_offset(config, vp_stage=stage)
    mine = sparse[first : first + get_num_layers_to_build(config, vp_stage=stage)]
    kinds = {kind: layer(config, arch, bool(kind), engine) for kind in set(mine)}
    return TransformerBlockSubmodules([kinds[kind] for kind in mine], layer_norm=_norm(engine))


def _norm(engine: bool) -> Any:
    if not engine:
        return Norm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def layer(config: Any, arch: Architecture, sparse: bool, engine: bool) -> ModuleSpec:
    """Return the spec of one layer. sparse: True for an MoE layer. engine: as in `Model`."""
    column, row, down, core = ColumnParallelLinear, RowParallelLinear, DuplicatedLinear, CoreAttention
    norm = _norm(engine)
    if engine:
        from megatron.core.extensions import transformer_engine as te

        column, row, down = te.TEColumnParallelLinear, te.TERowParallelLinear, te.TELinear
        # Models with attention softcapping need our attention, because TransformerEngine does not support it.
        core = CoreAttention if arch.softcap else te.TEDotProductAttention
    else:
        # Megatron's latent attention treats layers of the class `mla.Linear` as replicated over tp.
        mla.Linear = DuplicatedLinear
    core = ModuleSpec(core, params={"softcap": arch.softcap} if core is CoreAttention else {})
    out = normed(row, norm) if arch.post_norms else row
    qk = norm if config.qk_layernorm else IdentityOp
    params = {"attn_mask_type": AttnMaskType.causal}
    join: Any = get_bias_dropout_add
    if config.multi_latent_attention:
        parts = mla.MLASelfAttentionSubmodules(
            linear_q_proj=column,
            linear_q_down_proj=down,
            linear_q_up_proj=column,
            linear_kv_down_proj=down,
            linear_kv_up_proj=column,
            core_attention=core,
            linear_proj=out,
            q_layernorm=qk,
            kv_layernorm=qk,
        )
        attention = ModuleSpec(mla.MLASelfAttention, params, parts)
    else:
        parts = SelfAttentionSubmodules(column, core, out, q_layernorm=qk, k_layernorm=qk)
        attention = ModuleSpec(SelfAttention, params, parts)
    forward: Any = MLPSubmodules(linear_fc1=column, linear_fc2=out)
    mlp = ModuleSpec(MLP, submodules=forward)
    if sparse:
        experts = ModuleSpec(SequentialMLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row))
        if engine and config.moe_grouped_gemm:
            from megatron.core.extensions import transformer_engine as te
            from megatron.core.transformer.moe.experts import TEGroupedMLP

            grouped = MLPSubmodules(te.TEColumnParallelGroupedLinear, te.TERowParallelGroupedLinear)
            experts = ModuleSpec(TEGroupedMLP, submodules=grouped)
        shared = ModuleSpec(SharedExpertMLP, submodules=forward)
        mlp = ModuleSpec(MoELayer, submodules=MoESubmodules(experts, shared, router=Router))
    norms, joins = dict(input_layernorm=norm, pre_mlp_layernorm=norm), dict(self_attn_bda=join, mlp_bda=join)
    parts = TransformerLayerSubmodules(self_attention=attention, mlp=mlp, **norms, **joins)
    return ModuleSpec(TransformerLayer, submodules=parts)
