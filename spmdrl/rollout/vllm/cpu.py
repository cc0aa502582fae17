"""What vLLM's CPU build needs to have its weights loaded in place, and to share a machine with other jobs."""

from typing import Any

import torch
from torch.nn.functional import pad

from spmdrl.rollout.engine import kv_bytes_per_token
from spmdrl_kernels.host import host_linear

CPU_KV_BYTES = 256 << 20
"""Most that an engine on a CPU takes for its KV cache unless told otherwise."""
CPU_BLOCK = 32
"""Tokens in one KV block, the fewest that its kernels take. Whole blocks alone are shared by the samples of a prompt,
and vLLM's 128 are longer than many prompts."""
MOST_PACKED = 4 << 30
"""Bytes of linear layers that are held twice; what is beyond multiplies from plain weights."""


class Packed:
    """Copies of weights in the layouts of the CPU build's kernels, made at first use and dropped at every load.

    The build itself packs weights once at start, and drops the plain ones of linear layers; what is loaded over them
    later is lost, or read in the wrong layout. Beside the plain ones, packed ones make a product of 16 to 32 rows 1.5
    times (bfloat16) to 2.4 times (float32) as fast.
    """

    def __init__(self):
        """Take vLLM's own packing out, before it builds a model."""
        self.linears: dict[tuple[int, torch.Size], Any] = {}
        self.experts: dict[int, torch.Tensor] = {}
        self.widened: set[torch.dtype] = set()
        """Types that oneDNN cannot multiply on this CPU (bfloat16 without AVX-512): float32 does it."""
        self.bytes = 0
        self._keep_plain_linears()
        self._keep_plain_experts()

    def clear(self) -> None:
        """The weights change, or go."""
        self.linears.clear()
        self.experts.clear()
        self.bytes = 0

    def linear(self, x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
        """`F.linear` of a weight that stays where it is until `clear`."""
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
            """parts: projections that lie end to end along `dim`, each padded to the width that the kernel wants."""
            size = experts._padded_intermediate_size(experts.moe_config) - weight.shape[dim] // parts
            if size:
                weight = torch.cat([pad(w, (0, 0) * (2 - dim) + (0, size)) for w in weight.chunk(parts, dim)], dim)
            return cpu_prepack_moe_weight(weight, experts.isa)

        def apply(self, output, hidden_states, w1, w2, *args, **kwargs):
            if id(w1) not in packed:
                packed[id(w1)], packed[id(w2)] = pack(self, w1, 2, 1), pack(self, w2, 1, 2)
            return run(self, output, hidden_states, packed[id(w1)], packed[id(w2)], *args, **kwargs)

        CPUUnquantizedExperts.process_weights_after_loading = lambda self, layer: None
        CPUUnquantizedExperts.apply = apply


def name_shared_memory(token: str) -> list[str]:
    """Give the shared memory of a CPU build's TP group a name of this run's own; returns the names as they are made.

    vLLM names it after its rendezvous, which under an external launcher is the same for every job on the machine: a
    second job, or one after a job that was killed, finds the name taken and cannot start.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    original, made = _CPUSHMDistributed.make_group_name, []

    def named(communicator) -> str:
        made.append(f"spmdrl-{token}-{original(communicator).strip('/-')}")
        return made[-1]

    _CPUSHMDistributed.make_group_name = staticmethod(named)
    return made


def cpu_kv_bytes(config, sequences: int, longest: int, dtype: str, tp: int) -> int:
    """Bytes of KV cache that hold `sequences` sequences of `longest` tokens in whole blocks, at most CPU_KV_BYTES.

    What is not allocated is not cleared at every wake.
    """
    blocks = sequences * -(-longest // CPU_BLOCK) + 8
    return min(CPU_KV_BYTES, blocks * CPU_BLOCK * kv_bytes_per_token(config, dtype, tp))
