"""Changes SGLang's scheduler processes: where weights come from, and how memory is freed on a CPU."""

import json
import mmap
import re
from functools import lru_cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
import xxhash
from draws import install_sampler
from layout import install_copies, install_experts, install_naps

# Loaded by path, because other files in its folder have the names of packages.
_spec = spec_from_file_location("needs", Path(__file__).parents[2] / "needs.py")
assert _spec and _spec.loader
_needs = module_from_spec(_spec)
_spec.loader.exec_module(_needs)
watched_load, unfilled = _needs.watched_load, _needs.unfilled


def read(file: str, entries: list[dict]) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of one bucket, as views of the memory that the rank filled."""
    with open(file, "r+b") as f:
        memory = mmap.mmap(f.fileno(), 0)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    return [
        (e["name"], flat[e["at"] : e["at"] + e["bytes"]].view(getattr(torch, e["dtype"])).view(e["shape"]))
        for e in entries
    ]


def hash_of(tensor: torch.Tensor) -> int:
    """Return the 64-bit xxh3 of a tensor's bytes."""
    return xxhash.xxh3_64_intdigest(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


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
    """Compare hashes of tensors on all processes of the engine; return the same error on all, empty if none.

    parts: name, the part that this process reads, and the sender's hash of it. Collective over `group`.
    """
    wrong = next((name for name, tensor, sent in parts if hash_of(tensor) != sent), "")
    names = (bytes(map(int, name)).decode() for name in of_all([float(b) for b in wrong.encode()], group))
    first = next((name for name in names if name), "")
    return f"{first} arrived with other bytes than were sent" if first else ""


def word_sum(model: torch.nn.Module, uncounted: frozenset[str]) -> int:
    """Twin of `spmd.checksum.word_sum` over all parameters except the uncounted ones."""
    total = 0
    for name, p in model.named_parameters():
        if name in uncounted:
            continue
        flat = p.detach().contiguous().reshape(-1).view(torch.uint8)
        for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
            if flat.numel() % dtype.itemsize == 0:
                total += int(flat.view(dtype).sum(dtype=torch.int64))
                break
    return total % (1 << 64)


def storages(tensors) -> list[torch.UntypedStorage]:
    """Return the storages of tensors, each once."""
    return list({s.data_ptr() or id(s): s for s in (t.untyped_storage() for t in tensors)}.values())


class Held:
    """The memory of one scheduler process, with a way to free it on a CPU, which SGLang itself has only for CUDA."""

    def __init__(self, runner: Any):
        buffers = [value for name, value in vars(runner.token_to_kv_pool).items() if re.fullmatch("k?v?_buffer", name)]
        self.runner, self.uncounted = runner, frozenset()
        self.parts = {
            "weights": storages(runner.model.parameters()),
            "kv_cache": storages(tensor for layers in buffers for tensor in layers or ()),
        }
        self.sizes = {name: [s.nbytes() for s in part] for name, part in self.parts.items()}

    def resize(self, name: str, there: bool) -> None:
        """Free or allocate the storages of `name`; aliases stay valid, but the contents are lost."""
        for storage, size in zip(self.parts[name], self.sizes[name], strict=True):
            storage.resize_(size if there else 0)

    def facts(self) -> list[float]:
        """Return this process's bytes of weights and of KV cache."""
        return [sum(self.sizes["weights"]), sum(self.sizes["kv_cache"])]

    def words(self) -> list[float]:
        """Return the word sum in two halves, which floats represent exactly."""
        words = word_sum(self.runner.model, self.uncounted)
        return [words >> 32, words & 0xFFFFFFFF]

    def needs(self, request: dict) -> list[float]:
        """Find the parts that this process reads of tensors (name, shape, type), and the weights that none fills.

        request: the tensors, and their kinds in the model's folder. Returns the length and the bytes of a text with the
        name of an unfilled weight per line; `exact`; then for each part: index of the tensor, counted, number of
        dimensions, box.
        """
        tensors = [(name, tuple(shape), getattr(torch, dtype)) for name, shape, dtype in request["tensors"]]
        found = watched_load(self.runner.model.load_weights, tensors)
        named = self.runner.model.named_parameters()
        self.uncounted = frozenset(n for n, p in named if p.untyped_storage().data_ptr() in found.uncounted)
        text = "\n".join(unfilled(self.runner.model, found, request["kinds"])).encode()
        rows: list[float] = [len(text), *text, found.exact]
        for (index, box), counted in zip(found.boxes, found.counted, strict=True):
            rows += [index, counted, len(box), *(x for pair in box for x in pair)]
        return rows


def install_weights(expected: dict[str, Any]) -> None:
    """Make SGLang read weights from the rank's memory instead of a pickle, and check all weights that arrive.

    expected: hashes and group of the next broadcast bucket; emptied when it has arrived.
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

    Its random numbers would stay in the padding of weights and in constants, which no push writes.
    """
    from sglang.srt.model_loader import loader

    def initialize_dummy_weights(model, *_, **__):
        for parameter in model.parameters():
            parameter.data.zero_()

    loader.initialize_dummy_weights = initialize_dummy_weights


def install_memory(on_cpu: bool, expected: dict[str, Any]) -> None:
    """Answer the rank's queries about memory and weights, and free memory on a CPU.

    expected: filled for `install_weights` by the query `expect`.
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
        # Each process's numbers, preceded by their count.
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


def run_scheduler(server_args, port_args, *rest) -> None:
    """Run SGLang's scheduler process with these changes installed."""
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

    # The run sends its own stop tokens with every request.
    ModelConfig._get_hf_eos_token_id = lambda self: None
    run_scheduler_process(server_args, port_args, *rest)
