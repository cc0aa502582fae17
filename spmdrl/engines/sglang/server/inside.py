"""Patches how SGLang's scheduler processes load weights, free memory on CPU, run experts and share attention.

Shapes: T tokens, D hidden size, K experts per token.
"""

import json
import mmap
import re
from functools import lru_cache
from typing import Any

import torch
from draws import install_sampler, shared

checksum, loader = shared("spmd/checksum.py"), shared("engines/needs.py")
NAP_MS = 5
"""Polling interval of idle schedulers, in milliseconds."""


def read(file: str, entries: list[dict]) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of one bucket as views of the shared memory that the rank has filled."""
    with open(file, "r+b") as f:
        memory = mmap.mmap(f.fileno(), 0)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    return [
        (e["name"], flat[e["at"] : e["at"] + e["bytes"]].view(getattr(torch, e["dtype"])).view(e["shape"]))
        for e in entries
    ]


def of_all(mine: list[float], group) -> list[list[float]]:
    """Gather a list of numbers from every process of the engine. Collective over `group`."""
    ranks = torch.distributed.get_world_size(group)
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    torch.distributed.all_gather(counts, torch.tensor([len(mine)]), group=group)
    most = max(int(n) for n in counts)
    padded = torch.tensor(mine + [0.0] * (most - len(mine)), dtype=torch.float64)
    gathered = [torch.zeros_like(padded) for _ in range(ranks)]
    torch.distributed.all_gather(gathered, padded, group=group)
    return [x[: int(n)].tolist() for x, n in zip(gathered, counts, strict=True)]


def all_sound(parts: list[tuple[str, torch.Tensor, int]], group) -> str:
    """Verify tensor hashes on all processes. Every process returns the same error message, or "" if all hashes match.

    parts: (name, slice that this process reads, the sender's hash of the slice). Collective over `group`.
    """
    wrong = next((name for name, tensor, sent in parts if int(checksum.digest(tensor.cpu())) != sent), "")
    names = (bytes(map(int, name)).decode() for name in of_all([float(b) for b in wrong.encode()], group))
    first = next((name for name in names if name), "")
    return f"{first} arrived with other bytes than were sent" if first else ""


def storages(tensors) -> list[torch.UntypedStorage]:
    """Return the distinct storages of tensors."""
    return list({s.data_ptr() or id(s): s for s in (t.untyped_storage() for t in tensors)}.values())


class Held:
    """The memory of one scheduler process, which can be freed even on CPU. SGLang itself can free it only on CUDA."""

    def __init__(self, runner: Any):
        buffers = [value for name, value in vars(runner.token_to_kv_pool).items() if re.fullmatch("k?v?_buffer", name)]
        self.runner, self.uncounted = runner, frozenset()
        self.parts = {
            "weights": storages(runner.model.parameters()),
            "kv_cache": storages(tensor for layers in buffers for tensor in layers or ()),
        }
        self.sizes = {name: [s.nbytes() for s in part] for name, part in self.parts.items()}

    def resize(self, name: str, there: bool) -> None:
        """Free or allocate the storages of `name`, which is `weights` or `kv_cache`.

        Tensors that use these storages stay valid but lose their values.

        there: True to allocate, False to free.
        """
        for storage, size in zip(self.parts[name], self.sizes[name], strict=True):
            storage.resize_(size if there else 0)

    def facts(self) -> list[float]:
        """Return the sizes of this process's weights and KV cache, in bytes."""
        return [sum(self.sizes["weights"]), sum(self.sizes["kv_cache"])]

    def words(self) -> list[float]:
        """Return the checksum of the weights as two 32-bit halves, which floats represent exactly."""
        words = checksum.word_sum(p for n, p in self.runner.model.named_parameters() if n not in self.uncounted)
        return [words >> 32, words & 0xFFFFFFFF]

    def needs(self, request: dict) -> list[float]:
        """Find the tensor slices that this process reads, and the weights that no tensor fills.

        request: name, shape and dtype of each tensor, and the kinds of tensors in the model folder.

        Returns a flat list. The names of the unfilled weights are joined into one text, one name per line. The list
        starts with the length of this text in bytes, the bytes themselves, and `Needs.exact`. Each slice then adds the
        index of its tensor, `counted`, the number of dimensions, and the box.
        """
        tensors = [(name, tuple(shape), getattr(torch, dtype)) for name, shape, dtype in request["tensors"]]
        found = loader.watched_load(self.runner.model.load_weights, tensors)
        named = self.runner.model.named_parameters()
        self.uncounted = frozenset(n for n, p in named if p.untyped_storage().data_ptr() in found.uncounted)
        text = "\n".join(loader.unfilled(self.runner.model, found, request["kinds"])).encode()
        rows: list[float] = [len(text), *text, found.exact]
        for (index, box), counted in zip(found.boxes, found.counted, strict=True):
            rows += [index, counted, len(box), *(x for pair in box for x in pair)]
        return rows


def install_weights(expected: dict[str, Any]) -> None:
    """Make SGLang read weights from the rank's memory instead of a pickle, and verify the hashes of all weights.

    expected: hashes and process group of the next broadcast bucket. Both are removed once the bucket has arrived.
    """
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Manager
    from sglang.srt.managers.tp_worker import BaseTpWorker
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.runtime_context import get_parallel

    update = Manager.update_weights_from_tensor

    def deserialize_own_rank(self, payloads):
        order = json.loads(payloads[get_parallel().tp_rank])
        return read(order["file"], order["entries"]) if order["entries"] else []

    def update_weights_from_tensor(self, request):
        order = json.loads(request.serialized_named_tensors[get_parallel().tp_rank])
        named = dict(read(order["file"], order["entries"])) if order["entries"] else {}
        parts = [
            (e["name"], named[e["name"]][tuple(slice(*bounds) for bounds in box)], sent)
            for e in order["entries"]
            for box, sent in e["parts"]
        ]
        wrong = all_sound(parts, self.tp_cpu_group)
        if wrong:
            return UpdateWeightsFromTensorReqOutput(success=False, message=wrong)
        return update(self, request)

    receive = WeightUpdater.receive_weights_from_distributed

    def receive_weights_from_distributed(self, **what):
        named = receive(self, **what)
        hashes = expected.pop("hashes")
        wrong = all_sound([(*n, h) for n, h in zip(named, hashes, strict=True)], expected.pop("group"))
        if wrong:
            raise RuntimeError(wrong)
        return named

    BaseTpWorker.deserialize_own_rank = deserialize_own_rank
    Manager.update_weights_from_tensor = update_weights_from_tensor
    WeightUpdater.receive_weights_from_distributed = receive_weights_from_distributed


def install_zeros() -> None:
    """Make SGLang's dummy loader fill parameters with zeros and leave buffers unchanged.

    By default, the loader writes random numbers, which would remain in padding and constants that the trainer never
    sends.
    """
    from sglang.srt import model_loader

    def initialize_dummy_weights(model, *_, **__):
        for parameter in model.parameters():
            parameter.data.zero_()

    model_loader.loader.initialize_dummy_weights = initialize_dummy_weights


def install_memory(on_cpu: bool, expected: dict[str, Any]) -> None:
    """Make SGLang answer the rank's queries about memory and weights, and free memory on CPU.

    Queries are sent as weight names in SGLang's `get_weights_by_name` command.

    expected: dict that the `expect` query fills for `install_weights`.
    """
    from sglang.srt.managers.io_struct import GetWeightsByNameReqOutput
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Manager

    held = lru_cache(maxsize=1)(Held)
    release, resume = Manager.release_memory_occupation, Manager.resume_memory_occupation

    def get_weights_by_name(self, request):
        query, _, rest = request.name.partition(" ")
        mine = held(self.tp_worker.model_runner)
        if query == "expect":
            expected.update(hashes=json.loads(rest), group=self.tp_cpu_group)
            return GetWeightsByNameReqOutput(parameter=[])
        answer = {"facts": mine.facts, "words": mine.words, "needs": lambda: mine.needs(json.loads(rest))}[query]()
        # Each process's numbers are preceded by their count, so that the rank can separate them.
        value = [x for numbers in of_all(answer, self.tp_cpu_group) for x in (float(len(numbers)), *numbers)]
        return GetWeightsByNameReqOutput(parameter=value)

    def release_memory_occupation(self, request):
        out = release(self, request)
        for name in request.tags:
            held(self.tp_worker.model_runner).resize(name, there=False)
        return out

    def resume_memory_occupation(self, request):
        for name in request.tags:
            held(self.tp_worker.model_runner).resize(name, there=True)
        return resume(self, request)

    Manager.get_weights_by_name = get_weights_by_name
    if on_cpu:
        Manager.release_memory_occupation = release_memory_occupation
        Manager.resume_memory_occupation = resume_memory_occupation


def install_experts() -> None:
    """Make the CPU forward pass of experts skip id -1, which SGLang uses for experts of other processes.

    The patched forward pass also handles empty batches of data-parallel attention replicas.
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
            # Each pair of a token and a local expert becomes a row. Replacing -1 with another id would not work,
            # because SGLang counts an expert only once per row.
            ids, weights = ids_TK[token, place, None], weights_TK[token, place, None]
            pairs = topk_output._replace(topk_ids=ids, topk_weights=weights)
            out_TD.index_add_(0, token, native(layer, x_TD[token], pairs, config))
        return out_TD

    fused_moe_native.moe_forward_native = moe_forward_native


def install_copies() -> None:
    """Add two collectives and a fill value to SGLang on CPU, because data-parallel attention needs them.

    SGLang implements these collectives only for NCCL. Ranks contribute different lengths (`sizes`), padded to the
    longest.
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
    # SGLang's attention backend for CPUs lacks this method, which data-parallel attention calls.
    backend: Any = TorchNativeAttnBackend
    backend.get_cpu_graph_seq_len_fill_value = lambda self: 1


def install_naps() -> None:
    """Make idle schedulers poll for work every few milliseconds, under data-parallel attention.

    All schedulers run every step together, but a message wakes only one of them. Without this patch, the other
    schedulers could sleep for a second.
    """
    from sglang.srt.managers.scheduler_components.idle_sleeper import IdleSleeper

    IdleSleeper.maybe_sleep = lambda self: self.poller.poll(NAP_MS)


def run_scheduler(server_args, port_args, *rest) -> None:
    """Run SGLang's scheduler process with the patches of this module."""
    install_sampler()
    expected: dict[str, Any] = {}
    install_weights(expected)
    install_zeros()
    install_memory(server_args.device == "cpu", expected)
    if server_args.device == "cpu":
        install_experts()
        install_copies()
    if server_args.attn_dp_size > 1:
        install_naps()
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.scheduler import run_scheduler_process

    # Every request carries the run's stop tokens, so the model's are not used.
    ModelConfig._get_hf_eos_token_id = lambda self: None
    run_scheduler_process(server_args, port_args, *rest)
