"""Megatron's process groups, and HF models as Megatron's GPTModel.

On a CPU, and on a GPU without TransformerEngine, layers are Megatron's own in plain torch; with TransformerEngine they
are its. Parameters have the same names either way: norms are modules of their own, not fused into what follows.
"""

import logging
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spmdrl.policy.contract import Head
from spmdrl.policy.megatron import cpu, repairs
from spmdrl.policy.megatron.families import Architecture, describe
from spmdrl.policy.megatron.layout import Layout, check_model, check_ranks
from spmdrl.spmd.groups import apart_from_default

log = logging.getLogger("spmdrl")
SEED = 1
"""Of Megatron's random states; nothing that is trained here draws from them."""
TESTED = "0.16."
"""How versions of megatron-core begin that are taken without a warning, from 0.16.1 on."""


def require() -> None:
    """Raises ValueError where megatron-core is not installed; repairs it, and installs what it needs on a CPU."""
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


def initialize(layout: Layout) -> None:
    """Megatron's process groups over the default one, in the order of the training mesh. Collective; for every layout.

    Ranks from the innermost axis outwards: tp, cp, data, pp, and for experts etp, ep, data, pp.

    Raises:
        ValueError: the axes do not fit the number of ranks, or megatron-core is missing.
    """
    require()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    check_ranks(layout, dist.get_world_size())
    for group in parallel_state._global_process_group_list or []:
        if group in dist.distributed_c10d._world.pg_map:
            # Of another layout: each gloo group has a thread that wakes a hundred times a second.
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
    # Split off the default communicator, each group would take all ranks of the job, thousands of times on hundreds of
    # GPUs, and one on the host those that are not in it. Apart, a communicator is made when its ranks first use it.
    with apart_from_default():
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
    """Megatron's config of a model. more: keyword arguments of TransformerConfig that take precedence."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

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
        num_layers_in_last_pipeline_stage=layout.last_stage_layers or None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        # Losses are sums over tokens, divided by global counts already; gradients are summed over ranks.
        calculate_per_token_loss=True,
        # Weights come from files.
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
        use_cpu_initialization=device.type == "cpu",
        # Micro-batches of packed sequences differ in length, except where `attention.make_packs` makes them alike.
        variable_seq_lengths=layout.pp > 1 and layout.virtual_stages == 1,
        moe_token_dispatcher_type="alltoall",
        batch_p2p_comm=device.type != "cpu",
        attention_softmax_in_fp32=True,
        moe_grouped_gemm=_has_engine(device) and bool(arch.settings.get("num_moe_experts")),
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
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
    **more: Any,
) -> list[Any]:
    """This rank's part of a model: one GPTModel for each virtual stage, in order.

    Its forward (see `attention.make_pack`) gives, on the last stage, hidden states [1, S, D] after the last norm, alike
    on every rank of a tensor-parallel group; on others what the next stage takes. The gradient that comes back to them
    must be whole on each rank of the group: what each makes of its part of the vocabulary (`head_weight`) is summed
    by who computes it.

    Args:
        hf_config: of transformers.
        folder: HF safetensors that fill it; None leaves weights as memory was.
        layout: that of `initialize`.
        dtype: of parameters.
        device: of this rank.
        head: `lm`; `value` or `score` for a linear layer to one number in place of the vocabulary.
        more: as in `transformer_config`.

    Raises:
        ValueError: a model without converter, or that the layout does not divide.
    """
    require()
    from megatron.core import parallel_state

    from spmdrl.policy.megatron import convert
    from spmdrl.policy.megatron.layers import Model

    arch = describe(hf_config)
    check_model(layout, arch.settings)
    with repairs.quiet():
        config = transformer_config(arch, layout, dtype, device, **more)
        models: list[Any] = []
        for stage in range(layout.virtual_stages):
            place: dict[str, Any] = dict(ignore_virtual=False, vp_stage=stage) if layout.virtual_stages > 1 else {}
            first = parallel_state.is_pipeline_first_stage(**place)
            last = parallel_state.is_pipeline_last_stage(**place)
            virtual = stage if layout.virtual_stages > 1 else None
            models.append(Model(config, arch, layout, head, first, last, virtual, _has_engine(device)).to(device))
    cpu.dress(p for model in models for p in model.parameters())
    if folder is not None:
        convert.load(models, folder)
    return models


def head_weight(model: Any) -> tuple[torch.Tensor, int]:
    """The rows of the output head that this rank holds, [rows, D] without padding, and the number of the first.

    Of the `value` and `score` heads: all of it, [1, D]. Only on the last stage.
    """
    if model.head != "lm":
        return model.output_layer.weight, 0
    weight = model.shared_embedding_or_output_weight() if model.arch.tied else model.output_layer.weight
    first = model.pg_collection.tp.rank() * len(weight)
    return weight[: max(0, model.arch.vocab - first)], first
