"""Creates Megatron's process groups, and builds HF models as Megatron's GPTModel.

On a GPU, layers are those of TransformerEngine if it is installed. In all other cases they are Megatron's layers in
plain torch. Parameters have the same names in both cases, because norms are always separate modules and not fused into
the next layer.
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
"""Seed of Megatron's random states. Megatron requires one, but training draws no random numbers from them."""
FUSED = ("bias_dropout", "bias_activation", "masked_softmax", "gradient_accumulation", "apply_rope")
"""Prefixes of the settings of Megatron's fused operations, all of which are disabled."""
TESTED = "0.16."
"""Beginning of the versions of megatron-core that cause no warning; 0.16.0 is an exception and causes one."""


def require() -> None:
    """Install the patches of `repairs.py`, and on a CPU also those of `cpu.py`.

    Raises:
        ValueError: megatron-core is missing.
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
    """Create Megatron's process groups over the ranks of `group`. Collective over these ranks.

    Ranks that differ only in tp are adjacent; the further axes are, from the inside outwards, cp, data, pp. Experts
    have the axes etp, ep, data, pp. A second call replaces the groups by those of another layout. group: as in
    `ranks.over`.

    Raises:
        ValueError: the axes do not fit the number of ranks, or megatron-core is missing.
    """
    require()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    place = ranks.over(group)
    check_ranks(layout, len(place))
    for old in parallel_state._global_process_group_list or []:
        if old in dist.distributed_c10d._world.pg_map:
            # Groups of an earlier layout are destroyed, because the thread of each gloo group wakes up a hundred times
            # a second.
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
    """Return Megatron's config of a model. more: keyword arguments of TransformerConfig that override the others."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    # With two stages, the number of layers of the last stage determines that of the first. Megatron must get only one
    # of these numbers: with both, it would divide by the number of stages between first and last, which is 0.
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
        # With this setting Megatron sums gradients over ranks. Losses are already divided by global counts.
        calculate_per_token_loss=True,
        # Weights need no initialization, because they are read from files.
        **dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method"), _leave),
        use_cpu_initialization=kind_of(device) == "cpu",
        # Micro-batches differ in length. Only with virtual stages does `attention.make_packs` pad them to one length.
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
    """Build this rank's part of a model: a list with one GPTModel for each of its virtual stages, in order.

    On the last stage, the model's forward on a packed micro-batch (`attention.Pack`) returns the hidden states [1, S,
    D] after the last norm, the same on every rank of a tensor-parallel group. On other stages it returns the input of
    the next stage. For the backward, the caller must pass the complete gradient of the hidden states on each rank of
    the group. This is the sum over the ranks' parts of the vocabulary (`head_weight`).

    folder: HF safetensors; None leaves weights uninitialized. layout: as in `initialize`. head: `lm` for the language
    model's head; `value` or `score` for a linear layer to `labels` numbers. more: as in `transformer_config`.

    Raises:
        ValueError: the model has no converter, or the layout cannot divide it.
    """
    require()
    from spmdrl.policy.megatron.layers import Model

    arch = describe(hf_config)
    check_model(layout, arch.settings)
    host, bias = device.type == "cpu", head == "score" and scores_tokens(hf_config)
    # For a CPU, the model is built on the meta device first. If Megatron built it on the CPU, it would create each
    # complete weight in float32 to cut out this rank's part.
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
    """Allocate a model's parameters and buffers, which are on the meta device, on a device; return the model.

    Buffers start at 0, and parameters are uninitialized.
    """
    allocated: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is None or not p.is_meta:
                continue
            if id(p) not in allocated:
                allocated[id(p)] = torch.nn.Parameter(torch.empty_like(p, device=device), p.requires_grad)
                # Megatron's attributes of the parameter must be copied: they say, for example, how it is divided and
                # over which ranks its gradient is summed.
                for note, value in vars(p).items():
                    setattr(allocated[id(p)], note, value)
            module._parameters[name] = allocated[id(p)]
        for name, b in module._buffers.items():
            if b is not None and b.is_meta:
                module._buffers[name] = torch.zeros_like(b, device=device)
    return model


def head_weight(model: Any) -> torch.Tensor:
    """Return this rank's rows of the output head, [rows, D], without padding of the vocabulary.

    For the `value` and `score` heads, return the complete head, [labels, D]. Only the last stage has a head.
    """
    if model.head != "lm":
        return model.output_layer.weight
    weight = model.shared_embedding_or_output_weight() if model.arch.tied else model.output_layer.weight
    return weight[: max(0, model.arch.vocab - model.pg_collection.tp.rank() * len(weight))]
