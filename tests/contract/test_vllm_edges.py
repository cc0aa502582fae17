"""What vLLM needs around our calls, and what our calls restore: contexts, order and failures, not only names.

The reloading of quantized layers is vLLM's own code of the installed CPU build; wheels are read from their sources.
"""

import ast
import random
from contextlib import nullcontext
from types import SimpleNamespace

import numpy
import pytest
import torch

from benchmarks.pack_vllm import VLLM as PACKED
from spmdrl.engines.vllm import start
from spmdrl.engines.vllm.lora import refill, rename_mapper
from spmdrl.engines.vllm.options import quantizing, set_environment
from spmdrl.spmd.generators import generator_states
from tests.contract.lookup import Tree, members, parameters
from tests.contract.sources import UnreachableError, locked, sources
from tests.contract.test_engine_options import options
from tests.ranks.cases import config

pytest.importorskip("vllm", reason="vLLM is not installed")
RUNNER = "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
WORKER = "vllm.v1.worker.gpu_worker.Worker"


@pytest.fixture(params=["pinned", "packed"])
def tree(request) -> Tree:
    """Sources of the pinned version, and of the one that `benchmarks/pack_vllm.py` packs."""
    try:
        return Tree(sources("vllm", locked("gpu.txt")["vllm"] if request.param == "pinned" else PACKED))
    except UnreachableError as error:
        pytest.skip(str(error))


def calls(tree: Tree, name: str) -> list[str]:
    """Dotted names that a function calls, in the order of its lines."""
    found = tree.find(name)
    assert found and found.node, name
    nodes = [node for node in ast.walk(found.node) if isinstance(node, ast.Call)]
    return [ast.unparse(node.func) for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset))]


class Layer(torch.nn.Module):
    """A layer whose weight is doubled when it is complete, as a stand-in for quantization."""

    def __init__(self, seen: list):
        from vllm.config import get_current_vllm_config
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

        class Doubled(QuantizeMethodBase):
            def create_weights(self, layer, *args, **kwargs): ...
            def apply(self, layer, *args, **kwargs): ...
            def process_weights_after_loading(self, layer):
                seen.append(get_current_vllm_config())
                layer.weight.data.mul_(2)

        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False)
        self.weight.weight_loader = load_row
        self.quant_method = Doubled()


def load_row(param, tensor, row):  # vLLM replaces the argument of this name
    param.data[row].copy_(tensor)


def test_stale_quantized_layers_are_whole_again_after_a_push_that_failed():
    from vllm.config import VllmConfig, get_current_vllm_config_or_none
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    seen: list = []
    model = torch.nn.Sequential(Layer(seen), Layer(seen))
    record_metadata_for_reloading(model)
    runner = SimpleNamespace(model=model, vllm_config=VllmConfig(), model_config=SimpleNamespace(dtype=torch.float32))
    held = list(model.parameters())

    def push(rows: int) -> None:
        with quantizing(runner, "fp8"):
            for i in range(2 * rows):
                weight = model[i // rows].weight
                weight.weight_loader(weight, torch.full((3,), float(i)), row=i % rows)
            if rows < 2:
                raise ConnectionError("the sender is gone")

    for _ in range(2):
        with pytest.raises(ConnectionError):
            push(1)
        assert all(a is b for a, b in zip(model.parameters(), held, strict=True))
        assert all(p.device.type == "cpu" and p.weight_loader is load_row for p in model.parameters())
    push(2)
    assert [p[:, 0].tolist() for p in held] == [[0, 2], [4, 6]]
    assert seen and all(config is runner.vllm_config for config in seen)
    assert get_current_vllm_config_or_none() is None


def test_error_of_a_load_is_reported_also_if_layers_cannot_be_finalized(monkeypatch):
    from vllm.config import VllmConfig
    from vllm.model_executor.model_loader import reload

    def fails(*args) -> None:
        raise RuntimeError("a layer is on the meta device")

    monkeypatch.setattr(reload, "initialize_layerwise_reload", lambda model: None)
    monkeypatch.setattr(reload, "finalize_layerwise_reload", fails)
    runner = SimpleNamespace(model=None, vllm_config=VllmConfig(), model_config=None)
    with pytest.raises(ConnectionError, match="the sender is gone") as caught, quantizing(runner, "fp8"):
        raise ConnectionError("the sender is gone")
    assert caught.value.__notes__ == ["vLLM could not finalize its layers either: a layer is on the meta device"]
    with pytest.raises(RuntimeError, match="meta device"), quantizing(runner, "fp8"):
        pass


def test_wheel_reloads_in_our_order_and_inside_its_config(tree):
    inner = (
        "vllm.model_executor.model_loader.reload.inplace.reload_weights"
        if tree.find("vllm.model_executor.model_loader.reload.inplace")
        else "vllm.v1.worker.gpu_model_runner.GPUModelRunner.reload_weights"
    )
    order = [name.split(".")[-1] for name in calls(tree, inner)]
    steps = ["initialize_layerwise_reload", "load_weights", "finalize_layerwise_reload"]
    assert [name for name in order if name in steps] == steps
    worker = calls(tree, f"{WORKER}.reload_weights")
    assert worker[-1] == "self.model_runner.reload_weights"
    assert worker[:-1] == ([] if str(tree.root).endswith(PACKED) else ["set_current_vllm_config"])


def test_start_seeds_generators_that_we_restore_and_no_other(tree):
    seeded = {"random.seed", "np.random.seed", "torch.manual_seed", "current_platform.manual_seed_all"}
    # The rest computes a seed.
    computed = {"np.random.SeedSequence", "ss.generate_state", "int"}
    assert seeded <= set(calls(tree, "vllm.utils.torch_utils.set_random_seed")) <= seeded | computed


@pytest.mark.parametrize("fails", [False, True])
def test_start_restores_all_generators_also_if_it_fails(monkeypatch, fails):
    def build(*args):
        for seed in (random.seed, numpy.random.seed, torch.manual_seed):
            seed(0)
        if fails:
            raise RuntimeError("no memory")

    for name in ("world_of", "rank_within_engine", "restored_classes"):
        monkeypatch.setattr(start, name, lambda *args: nullcontext(lambda model: None))
    for name in ("Packed", "model_of", "rehearse"):
        monkeypatch.setattr(start, name, lambda *args: None)
    monkeypatch.setattr(start, "build_llm", build)
    world = SimpleNamespace(device=torch.device("cpu"), roles=SimpleNamespace(samplers=(0,)))
    before = generator_states(world.device)
    with pytest.raises(RuntimeError) if fails else nullcontext():
        start.start_llm(config(), world, False)  # type: ignore[arg-type]
    after = generator_states(world.device)
    assert repr(after["python"]) == repr(before["python"]) and torch.equal(after["torch"], before["torch"])
    assert torch.equal(after["numpy"][1], before["numpy"][1]) and after["numpy"][2:] == before["numpy"][2:]


def test_all_reduce_of_flashinfer_is_off_on_a_gpu(monkeypatch, tree):
    fused = {"pass_config": {"fuse_allreduce_rms": False}}
    assert options(monkeypatch, rollout={"tp": 2})["compilation_config"] == fused
    assert "compilation_config" not in options(monkeypatch)
    config_of_passes = tree.find("vllm.config.compilation.PassConfig")
    assert config_of_passes and "fuse_allreduce_rms" in members(config_of_passes)
    communicator = tree.find("vllm.distributed.device_communicators.cuda_communicator.CudaCommunicator.__init__")
    assert communicator and communicator.node
    assert "envs.VLLM_ALLREDUCE_USE_FLASHINFER" in ast.unparse(communicator.node)


def test_sampler_of_flashinfer_is_not_imported_on_a_gpu(tree):
    supported = tree.find("vllm.v1.sample.ops.topk_topp_sampler.flashinfer_sampler_supported")
    assert supported and supported.node
    source = ast.unparse(supported.node)
    assert source.index("envs.VLLM_USE_FLASHINFER_SAMPLER") < source.index("import FlashInferBackend")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_environment_sends_warnings_to_the_log_file_and_yields_to_the_user(monkeypatch, device):
    import os

    monkeypatch.setattr(os, "environ", {"VLLM_NO_USAGE_STATS": "0"})
    set_environment(torch.device(device), "float32")
    assert os.environ["VLLM_CONFIGURE_LOGGING"] == "0" and os.environ["VLLM_NO_USAGE_STATS"] == "0"
    for name in ("VLLM_ALLREDUCE_USE_FLASHINFER", "VLLM_USE_FLASHINFER_SAMPLER"):
        assert os.environ.get(name) == ("0" if device == "cuda" else None)
    assert os.environ.get("TRITON_F32_DEFAULT") == ("ieee" if device == "cuda" else None)
    monkeypatch.setattr(os, "environ", {"VLLM_LOGGING_LEVEL": "INFO"})
    set_environment(torch.device(device), "bfloat16")
    assert "TRITON_F32_DEFAULT" not in os.environ
    assert os.environ["VLLM_LOGGING_LEVEL"] == "INFO" and "VLLM_CONFIGURE_LOGGING" not in os.environ


def test_names_of_adapters_are_mapped_without_stacking_in_either_version():
    older = SimpleNamespace(get_unstacked_mapper=lambda: "unstacked")
    newer = SimpleNamespace(get_unstacked_mapper=lambda: "unstacked", get_rename_mapper=lambda: "renames")
    assert [rename_mapper(mapper) for mapper in (None, older, newer)] == [None, "unstacked", "renames"]


def test_stale_tables_of_adapters_are_written_again_after_a_deep_sleep():
    model = torch.nn.Sequential(torch.nn.Module(), torch.nn.Module(), torch.nn.Module())
    places, active = torch.full((4,), -7), torch.full((2,), 9)
    vars(model[0]).update(sharded_to_full_mapping=[0, 2, 1, 3], sharded_to_full_mapping_gpu=places)
    vars(model[1]).update(sharded_to_full_mapping=None, sharded_to_full_mapping_gpu=None)
    vars(model[2]).update(adapter_enabled=active)
    refill(model)
    assert places.tolist() == [0, 2, 1, 3] and active.tolist() == [0, 0]


def test_wake_leaves_the_second_runner_no_pointers_into_memory_that_was_freed(tree):
    """The pinned version keeps block tables outside the freed pool; the packed one computes the pointers again."""
    initialize = tree.find(f"{RUNNER}.initialize_kv_cache")
    assert initialize and (takes := parameters(initialize))
    if "kv_cache_allocation_context" not in takes.names:
        woken = calls(tree, f"{WORKER}.wake_up")
        again = "self.model_runner.post_kv_cache_wake_up"
        assert woken.index("self._get_sleep_mode_backend().resume") < woken.index(again)
        assert calls(tree, f"{RUNNER}.post_kv_cache_wake_up") == ["self.block_tables.init_block_table_layout_tensors"]
        # Sleep is called by the tag of the cache alone, as `wake("kv_cache")` does.
        woken_by = tree.find(f"{WORKER}.wake_up")
        assert woken_by and woken_by.node and "'kv_cache' in tags" in ast.unparse(woken_by.node)
