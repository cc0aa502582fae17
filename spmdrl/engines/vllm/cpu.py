"""Adapts vLLM's CPU build so that weights can be loaded in place and several jobs can share a machine."""

from typing import Any

import torch
from torch.nn.functional import pad

from spmdrl.engines.engine import kv_bytes_per_token
from spmdrl_kernels.host import host_linear

CPU_KV_BYTES = 256 << 20
"""Maximum KV cache size on CPU, in bytes, unless the settings specify one."""
CPU_BLOCK = 32
"""Number of tokens per KV block: the minimum that the kernels accept. Samples of a prompt share only complete blocks,
and vLLM's default of 128 is longer than many prompts."""
MOST_PACKED = 4 << 30
"""Maximum total size of packed linear layers, in bytes. Layers beyond this limit are not packed."""


class Packed:
    """Copies of weights in the layout of the CPU build's kernels, created on first use and dropped when weights change.

    vLLM itself packs weights once at startup and drops the plain weights of linear layers, so weights loaded later
    would be lost or read in the wrong layout. Keeping packed copies next to the plain weights makes matmuls with 16 to
    32 rows 1.5 times (bfloat16) to 2.4 times (float32) as fast.
    """

    def __init__(self):
        """Disable vLLM's own packing. Must be called before vLLM builds a model."""
        self.linears: dict[tuple[int, torch.Size], Any] = {}
        self.experts: dict[int, torch.Tensor] = {}
        self.widened: set[torch.dtype] = set()
        """Dtypes that oneDNN cannot multiply on this CPU (bfloat16 without AVX-512), so that float32 is used
        instead."""
        self.bytes = 0
        self._keep_plain_linears()
        self._keep_plain_experts()

    def clear(self) -> None:
        """Drop the packed copies. Call this when the weights change or are freed."""
        self.linears.clear()
        self.experts.clear()
        self.bytes = 0

    def linear(self, x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
        """Compute `F.linear` with a weight whose address and values do not change until `clear`."""
        from vllm import _custom_ops as ops

        key = weight_NK.data_ptr(), weight_NK.shape
        handler = self.linears.get(key)
        if handler is None:
            size = weight_NK.nbytes * (2 if weight_NK.dtype in self.widened else 1)
            if not ops._supports_onednn or self.bytes + size > MOST_PACKED:
                return host_linear(x, weight_NK, bias_N)
            handler = self.linears[key] = self._handler(weight_NK)
            self.bytes += size
        if weight_NK.dtype in self.widened:
            bias_N = None if bias_N is None else bias_N.float()
            return ops.onednn_mm(handler, x.float(), bias_N).to(x.dtype)
        return ops.onednn_mm(handler, x, bias_N)

    def _handler(self, weight_NK: torch.Tensor) -> Any:
        from vllm import _custom_ops as ops

        if weight_NK.dtype not in self.widened:
            try:
                return ops.create_onednn_mm(weight_NK.t(), 32)
            except RuntimeError:
                if weight_NK.dtype == torch.float32:
                    raise
                self.widened.add(weight_NK.dtype)
        return ops.create_onednn_mm(weight_NK.float().t(), 32)

    def _keep_plain_linears(self) -> None:
        import vllm.model_executor.layers.utils as layer_utils

        def dispatch(layer, remove_weight):
            layer.cpu_linear = self.linear

        layer_utils.dispatch_cpu_unquantized_gemm = dispatch

    def _keep_plain_experts(self) -> None:
        from vllm._custom_ops import cpu_prepack_moe_weight
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

        run, packed = CPUUnquantizedExperts.apply, self.experts

        def pack(experts, weight: torch.Tensor, parts: int, dim: int) -> torch.Tensor:
            """Pack projections that are concatenated along `dim`, each padded to the width required by the kernel."""
            size = experts._padded_intermediate_size(experts.moe_config) - weight.shape[dim] // parts
            if size:
                weight = torch.cat([pad(w, (0, 0) * (2 - dim) + (0, size)) for w in weight.chunk(parts, dim)], dim)
            return cpu_prepack_moe_weight(weight, experts.isa)

        def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, *args, **kwargs):
            if id(w1) not in packed:
                packed[id(w1)], packed[id(w2)] = pack(self, w1, 2, 1), pack(self, w2, 1, 2)
            absent = None
            if (places := kwargs.get("expert_map")) is not None:
                topk_weights, topk_ids, absent = local_experts(topk_weights, topk_ids, places)
            inputs = packed[id(w1)], packed[id(w2)], topk_weights, topk_ids, *args
            run(self, output, hidden_states, *inputs, **kwargs)
            if absent is not None and kwargs.get("apply_router_weight_on_input"):
                # vLLM has already scaled the input by the router weights, so the kernel ignores the weights that were
                # set to 0 here.
                output.masked_fill_(absent.all(1, keepdim=True), 0)

        CPUUnquantizedExperts.process_weights_after_loading = lambda self, layer: None
        CPUUnquantizedExperts.apply = apply


def local_experts(
    weights_TK: torch.Tensor, ids_TK: torch.Tensor, places_E: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Map global expert ids to ids on this rank. Experts of other ranks get weight 0.

    The CPU build's kernel reads memory at every id, so experts of other ranks get id 0.

    places_E: local id of each expert on this rank, or -1.

    Returns weights, ids, and a mask that is True for experts of other ranks.
    """
    here_TK = places_E[ids_TK.long()]
    absent_TK = here_TK < 0
    return weights_TK.masked_fill(absent_TK, 0), here_TK.clamp(min=0).to(ids_TK.dtype), absent_TK


def name_shared_memory(token: str) -> list[str]:
    """Make vLLM's CPU build give unique names to the shared memory of TP groups.

    vLLM derives the name from its rendezvous address, which is the same for every job on the machine under an external
    launcher. A second job, or one started after a killed job, would find the name in use and fail to start.

    Returns a list. When vLLM creates a name, the name is appended to this list.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    original, made = _CPUSHMDistributed.make_group_name, []

    def named(communicator) -> str:
        made.append(f"spmdrl-{token}-{original(communicator).strip('/-')}")
        return made[-1]

    _CPUSHMDistributed.make_group_name = staticmethod(named)
    return made


def cpu_kv_bytes(config, sequences: int, longest: int, dtype: str, tp: int) -> int:
    """Return the KV cache size for `sequences` sequences of `longest` tokens, in bytes, at most CPU_KV_BYTES.

    The cache is no larger than needed, because it is zeroed at every wake-up.
    """
    blocks = sequences * -(-longest // CPU_BLOCK) + 8
    return min(CPU_KV_BYTES, blocks * CPU_BLOCK * kv_bytes_per_token(config, dtype, tp))
