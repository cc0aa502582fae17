"""Changes SGLang's scheduler processes for experts that are spread over them, and for copies of the attention.

T tokens, D hidden, K experts of a token.
"""

from typing import Any

import torch

NAP_MS = 5


def install_experts() -> None:
    """Make the forward of experts on a CPU skip the id -1, SGLang's mark for an expert of another process.

    A copy of the attention without tokens computes nothing.
    """
    from sglang.srt.layers.moe import fused_moe_native

    native = fused_moe_native.moe_forward_native

    def moe_forward_native(layer, x_TD, topk_output, config):
        ids_TK, weights_TK = topk_output.topk_ids, topk_output.topk_weights
        token, place = (ids_TK >= 0).nonzero(as_tuple=True)
        if len(token) == ids_TK.numel() > 0:
            return native(layer, x_TD, topk_output, config)
        out_TD = torch.zeros_like(x_TD)
        if len(token):
            # One row for each pair of a token and a local expert, because SGLang counts an expert once per row.
            ids, weights = ids_TK[token, place, None], weights_TK[token, place, None]
            pairs = topk_output._replace(topk_ids=ids, topk_weights=weights)
            out_TD.index_add_(0, token, native(layer, x_TD[token], pairs, config))
        return out_TD

    fused_moe_native.moe_forward_native = moe_forward_native


def install_copies() -> None:
    """Add the two collectives and the fill value that copies of the attention need to SGLang on a CPU.

    SGLang's own collectives are NCCL's. Parts have different lengths (`sizes`) and are padded to the longest.
    """
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    def all_gatherv(self, input_, sizes=None, output=None):
        if not isinstance(input_, torch.Tensor):
            return [all_gatherv(self, x, sizes) for x in input_]
        counts = sizes or [len(input_)] * self.world_size
        padded = input_.new_zeros(max(counts), *input_.shape[1:])
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in counts]
        torch.distributed.all_gather(parts, padded, group=self.device_group)
        whole = torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])
        return whole if output is None else output.copy_(whole)

    def reduce_scatterv(self, input_, output=None, sizes=None):
        counts = sizes or [len(input_) // self.world_size] * self.world_size
        total = input_.clone()
        torch.distributed.all_reduce(total, group=self.device_group)
        part = total.split(counts)[self.rank_in_group]
        return part.clone() if output is None else output.copy_(part)

    GroupCoordinator.all_gatherv = all_gatherv
    GroupCoordinator.reduce_scatterv = reduce_scatterv
    # SGLang's backend for CPUs has no such method.
    backend: Any = TorchNativeAttnBackend
    backend.get_cpu_graph_seq_len_fill_value = lambda self: 1


def install_naps() -> None:
    """Make idle schedulers of copies of the attention poll for work every few milliseconds.

    They take every step together, but a message wakes only one of them; the others would sleep for up to a second.
    """
    from sglang.srt.managers.scheduler_components.idle_sleeper import IdleSleeper

    IdleSleeper.maybe_sleep = lambda self: self.poller.poll(NAP_MS)
