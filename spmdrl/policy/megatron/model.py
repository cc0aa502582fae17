"""Creates Megatron's process groups and builds HF models as Megatron GPTModels.

On GPUs, TransformerEngine's layers are used if TransformerEngine is installed. Otherwise, Megatron's plain torch layers
are used. Parameter names are the same in both cases, because norms are always separate modules instead of being fused
into the next layer.
"""

import logging
from contextlib import nullcontext
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spmdrl.hub.build import scores_tokens
from spmdrl.policy.contract import Head
from spmdrl.policy.megatron import convert, cpu, ranks, repairs
from spmdrl.policy.megatron.arch import Architecture
from spmdrl.policy.megatron.families import describe
from spmdrl.policy.megatron.layout import Layout, check_model, check_ranks
from spmdrl.spmd.devices import kind_of

log = logging.getLogger("spmdrl")
SEED = 1
"""Seed for Megatron's RNG states. Megatron requires one, but training does not draw random numbers from them."""
FUSED = ("bias_dropout", "bias_activation", "masked_softmax", "gradient_accumulation", "apply_rope")
"""Setting prefixes of Megatron's fused operations, which are all disabled."""
TESTED = "0.16."
"""Prefix of megatron-core versions that cause no warning. The exception is 0.16.0, which does cause a warning."""


def require() -> None:
    """Install the patches in `repairs.py`, and on CPU also those in `cpu.py`.

    Raises:
        ValueError: megatron-core is not installed.
    """
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        raise ValueError(
            "--policy.backend megatron needs megatron-core: "
            './launch/install.sh, or pip install "megatron-core>=0.16.1,<0.18" einops'
        )
    _warn_of(version("megatron-core"))
    repairs.install()
    cpu.install()


@cache
def _warn_of(found: str) -> None:
    if not found.startswith(TESTED) or found.startswith(TESTED + "0"):
        log.warning("megatron-core %s: --policy.backend megatron is tested with 0.16.1 only", found)


def initialize(layout: Layout, group: dist.ProcessGroup | None = None) -> None:
    """Create Megatron's process groups over the ranks in `group`. Collective over these ranks.

    The order of axes, innermost first, is tp, cp, data, pp. For experts, it is etp, ep, data, pp. A second call
    replaces the process groups with those of another layout. group: as in `ranks.over`.

    Raises:
        ValueError: the axes do not fit the number of ranks, or megatron-core is not installed.
    """
    require()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    place = ranks.over(group)
    check_ranks(layout, len(place))
    for old in parallel_state._global_process_group_list or []:
        if old in dist.distributed_c10d._world.pg_map:
            # Destroy the groups of an earlier layout, because the thread of each gloo group wakes up a hundred times a
            # second.
            dist.destroy_process_group(old)
    parallel_state.destroy_model_parallel()
    with ranks.making_groups(place):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.virtual_stages if layout.virtual_stages > 1 else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            order="tp-cp-ep-dp-pp",
        )
    model_parallel_cuda_manual_seed(SEED, force_reset_rng=True)


def transformer_config(
    arch: Architecture, layout: Layout, dtype: torch.dtype, device: torch.device, **more: Any
) -> Any:
    """Return Megatron's config for a model. more: TransformerConfig keyword arguments that override the defaults."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    # With two stages, the layer count of the last stage determines that of the first. Only pass one of them to
    # Megatron: with both, it would divide by the number of intermediate stages, which is 0.
    first = 0 if layout.pp == 2 and layout.last_stage_layers else layout.first_stage_layers
    make: Any = MLATransformerConfig if arch.settings.get("multi_latent_attention") else TransformerConfig
    settings = arch.settings | dict(
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.sp,
        context_parallel_size=layout.cp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.virtual_stages if layout.virtual_stages > 1 else None,
        num_layers_in_first_pipeline_stage=first or None,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers or None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        # This makes Megatron sum gradients over ranks. Losses are already normalised by global counts.
        calculate_per_token_loss=True,
        # Weights need no initialization, because they are loaded from files.
        **dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method"), _leave),
        use_cpu_initialization=kind_of(device) == "cpu",
        # Micro-batches differ in length, except with virtual stages, where `attention.make_packs` pads them.
        variable_seq_lengths=layout.pp > 1 and layout.virtual_stages == 1,
        moe_token_dispatcher_type="alltoall",
        batch_p2p_comm=kind_of(device) != "cpu",
        attention_softmax_in_fp32=True,
        moe_grouped_gemm=_has_engine(device) and bool(arch.settings.get("num_moe_experts")),
        persist_layer_norm=False,
        **{f"{name}_fusion": False for name in FUSED},
    )
    return make(**settings | more)


def _leave(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _has_engine(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("transformer_engine") is not None


def build(
    hf_config: Any,
    folder: Path | None,
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
    head: Head = "lm",
    labels: int = 1,
    **more: Any,
) -> list[Any]:
    """Build this rank's part of a model: a list with one GPTModel per virtual stage, in order.

    On the last stage, the forward pass of a packed micro-batch (`attention.Pack`) returns the hidden states [1, S, D]
    after the final norm, the same on all tensor-parallel ranks. On other stages, it returns the input of the next
    stage. In the backward pass, the caller must pass the full gradient of the hidden states on every tensor-parallel
    rank, i.e. the sum over all vocabulary shards (`head_weight`).

    folder: HF safetensors, or None to leave weights uninitialized. layout: as in `initialize`. head: `lm` for the
    language model head; `value` or `score` for a linear head with `labels` outputs. more: as in `transformer_config`.

    Raises:
        ValueError: the model is not supported, or the layout is not valid for it.
    """
    require()
    from spmdrl.policy.megatron.layers import Model

    arch = describe(hf_config)
    check_model(layout, arch.settings)
    host, bias = device.type == "cpu", head == "score" and scores_tokens(hf_config)
    # For CPU, build the model on the meta device first. On CPU, Megatron would create each full weight in float32 to
    # slice out this rank's shard.
    with repairs.quiet(), torch.device("meta") if host or device.type == "meta" else nullcontext():
        config = transformer_config(arch, layout, dtype, device, **more)
        models: list[Any] = []
        for stage in range(layout.virtual_stages) if layout.virtual_stages > 1 else [None]:
            model = Model(config, arch, layout, head, stage, _has_engine(device), labels, bias)
            models.append(_with_memory(model, device) if host else model.to(device))
    cpu.dress(p for model in models for p in model.parameters())
    if folder is not None:
        convert.load(models, folder)
    return models


def _with_memory(model: Any, device: torch.device) -> Any:
    """Allocate a meta-device model's parameters and buffers on a device; return the model.

    Buffers are zeroed, and parameters are uninitialized.
    """
    allocated: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is None or not p.is_meta:
                continue
            if id(p) not in allocated:
                allocated[id(p)] = torch.nn.Parameter(torch.empty_like(p, device=device), p.requires_grad)
                # Copy Megatron's parameter attributes, which say, for example, how a parameter is sharded and over
                # which ranks its gradient is reduced.
                for note, value in vars(p).items():
                    setattr(allocated[id(p)], note, value)
            module._parameters[name] = allocated[id(p)]
        for name, b in module._buffers.items():
            if b is not None and b.is_meta:
                module._buffers[name] = torch.zeros_like(b, device=device)
    return model


def head_weight(model: Any) -> torch.Tensor:
    """Return this rank's rows of the output head, [rows, D], without vocabulary padding.

    For `value` and `score` heads, return the full head, [labels, D]. Only the last stage has a head.
    """
    if model.head != "lm":
        return model.output_layer.weight
    weight = model.shared_embedding_or_output_weight() if model.arch.tied else model.output_layer.weight
    return weight[: max(0, model.arch.vocab - model.pg_collection.tp.rank() * len(weight))]
