"""Starts vLLM inside a rank's process, undoes its side effects there, and limits it to the ranks that have engines.

vLLM creates its process groups in `parallel_state`. There, ranks are numbered 0 .. n - 1, and all ranks of the default
group are expected to create each group. With split placement the training ranks do not start vLLM, so vLLM is given a
world that consists only of the other ranks.

vLLM builds some models from transformers' modules (its Transformers backend: Olmo2, Olmo3, SmolLM3, Starcoder2) and
patches their classes for `torch.compile`. The trainer's model uses the same classes, and its forward pass would fail
with these patches. This module therefore limits the patches to the engine's model.
"""

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spmdrl.config.schema import Config
from spmdrl.engines.engine import model_vision
from spmdrl.engines.vllm.copies import rank_within_engine
from spmdrl.engines.vllm.cpu import Packed, name_shared_memory
from spmdrl.engines.vllm.images import Images, plain_prompt
from spmdrl.engines.vllm.options import build_llm, set_environment
from spmdrl.hub.build import DTYPES
from spmdrl.spmd.exchange import broadcast_text
from spmdrl.spmd.generators import unchanged_generators
from spmdrl.spmd.mesh import apart_from_default
from spmdrl.spmd.world import World

PROMPTS = (3, 20)
"""Lengths of the warm-up prompts of a new engine, in tokens."""


def model_of(llm: Any) -> Any:
    """Return the model object inside vLLM's LLM."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.model


def rehearse(llm: Any, cfg: Config) -> None:
    """Test a new engine, with whatever weights it has, by sampling two tokens from short prompts, and from an image if
    the model reads images.

    Does nothing if the engine has data-parallel replicas. Collective over the engine.

    Raises:
        RuntimeError: vLLM fails. Some kernels reject a model or a dtype only when they run.
    """
    from vllm import SamplingParams

    if cfg.rollout.dp > 1:
        return
    engine = llm.llm_engine
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=2, ignore_eos=True, logprobs=0, detokenize=False)
    longest = engine.model_config.max_model_len - 2
    try:
        for length in sorted({min(n, longest) for n in PROMPTS if longest > 0}):
            engine.add_request(f"trial {length}", {"prompt_token_ids": [0] * length}, params)
        if vision := model_vision(cfg):
            ids, image = plain_prompt(1, vision)
            if len(ids) < longest:
                inputs = Images(vision, DTYPES[cfg.model.dtype]).prompt([0, *ids, 0], [image])
                engine.add_request("trial image", inputs, params)
        while engine.has_unfinished_requests():
            engine.step()
        llm.reset_prefix_cache()
        engine.reset_encoder_cache()
    except Exception as error:
        raise RuntimeError(
            f"--rollout.engine vllm: vLLM cannot run {cfg.model.path} in {cfg.model.dtype} on this device: "
            f"{type(error).__name__}: {str(error).rstrip('.')}. Take --rollout.engine hf, or another --model.dtype"
        ) from error


def start_llm(cfg: Config, world: World, routed: bool) -> tuple[Any, Packed | None]:
    """Start vLLM's LLM for this rank. Collective over the sampling ranks.

    Returns the LLM and, on CPU, its packed weights.

    routed: as in `build_llm`.
    """
    on_cpu = world.device.type == "cpu"
    set_environment(world.device, cfg.model.dtype)
    if cfg.rollout.deterministic or (cfg.run.deterministic and not on_cpu):
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    local_world = os.environ.get("LOCAL_WORLD_SIZE")  # vLLM changes this variable.
    shared = []
    if on_cpu and cfg.rollout.tp > 1:
        shared = name_shared_memory(broadcast_text(secrets.token_hex(8), world.rollout_group))
    # vLLM seeds all random generators of the process.
    with unchanged_generators(world.device), world_of(world.roles.samplers), rank_within_engine(cfg, world):
        packed = Packed() if on_cpu else None
        with restored_classes() as own_classes:
            llm = build_llm(cfg, on_cpu, routed)
            own_classes(model_of(llm))
        rehearse(llm, cfg)
        if packed:
            # `rehearse` packed weights that the trainer's first weights will replace.
            packed.clear()
    for name in set(shared):
        # All ranks of the group have mapped the memory. Once unlinked, the OS frees it when the last process exits.
        Path(f"/dev/shm/{name}_{world.engine_tp_rank % cfg.rollout.tp}").unlink(missing_ok=True)
    if local_world is not None:
        os.environ["LOCAL_WORLD_SIZE"] = local_world
    return llm, packed


class Overridden:
    """A proxy for a module that overrides some of its attributes."""

    def __init__(self, module: Any, **replaced: Any):
        self._module = module
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextmanager
def world_of(ranks: tuple[int, ...]) -> Iterator[None]:
    """Make vLLM, if built inside this context, see a world that consists only of `ranks`. Collective over `ranks`.

    The 2n - 1 groups that vLLM creates for n ranks do not split the run's NCCL communicator.

    ranks: the ranks that have an engine, in ascending order.
    """
    if len(ranks) == dist.get_world_size():
        with apart_from_default():
            yield
        return
    from vllm.distributed import parallel_state

    def new_group(members=None, **options):
        chosen = list(ranks) if members is None else [ranks[i] for i in members]
        with apart_from_default():
            return dist.new_group(chosen, use_local_synchronization=True, **options)

    patched = Overridden(
        dist,
        get_world_size=lambda group=None: dist.get_world_size(group) if group else len(ranks),
        get_rank=lambda group=None: dist.get_rank(group) if group else ranks.index(dist.get_rank()),
        new_group=new_group,
    )
    parallel_state.torch = Overridden(torch, distributed=patched)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        parallel_state.torch = torch  # type: ignore[attr-defined]
    # After startup, vLLM's sends and receives need the global ranks of the run.
    for reference in parallel_state._groups.values():
        group = reference()
        if group is not None:
            group.rank, group.ranks = dist.get_rank(), [ranks[i] for i in group.ranks]
            group.group_ranks = [[ranks[i] for i in members] for members in group.group_ranks]


@dataclass
class _Changed:
    """The state of a class before vLLM changed it."""

    cls: type
    bases: tuple[type, ...]
    names: dict[str, Any]

    def restore(self) -> type:
        """Restore the class, and return a subclass that has vLLM's changes."""
        added = tuple(base for base in self.cls.__bases__ if base not in self.bases)
        changed = {name: x for name, x in vars(self.cls).items() if self.names.get(name) is not x}
        for name in ("__dict__", "__weakref__", "__bases__"):
            changed.pop(name, None)
        for name in changed:
            if name in self.names:
                setattr(self.cls, name, self.names[name])
            else:
                delattr(self.cls, name)
        self.cls.__bases__ = self.bases
        # vLLM locates the class's source by its name and module.
        return type(self.cls.__name__, (self.cls, *added), {**changed, "__module__": self.cls.__module__})


@contextmanager
def restored_classes() -> Iterator[Callable[[torch.nn.Module], None]]:
    """Record the classes outside vLLM that vLLM modifies inside this context, and restore them on exit.

    Yields a function to call, inside the context, with the model that vLLM built. Modules of that model whose class was
    modified get a subclass that has vLLM's changes.
    """
    from vllm.compilation import decorators

    change, found, built = decorators._support_torch_compile, [], []

    def recorded(cls: type, *args: Any, **kwargs: Any) -> type:
        if not cls.__module__.startswith("vllm.") and cls not in [each.cls for each in found]:
            found.append(_Changed(cls, cls.__bases__, dict(vars(cls))))
        return change(cls, *args, **kwargs)

    decorators._support_torch_compile = recorded
    try:
        yield built.append
    finally:
        decorators._support_torch_compile = change
        own = {each.cls: each.restore() for each in found}
        for module in (module for model in built for module in model.modules()):
            if type(module) in own:
                module.__class__ = own[type(module)]
