"""Any HF transformer under FSDP2 or HSDP: packed forward, global denominators, master weights in float32.

One class is every model of a run: the policy, its reference, a critic, a reward model; they differ in their head and in
whether they train.

Law 2 in one sentence: a micro-batch's loss is a sum divided by counts of the whole update, gradients are summed (not
averaged) over ranks, so neither the packing nor the number of ranks enters the result.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from spmdrl.config.engines import Part
from spmdrl.config.schema import Config, OptimizerConfig
from spmdrl.data.batch import Batch
from spmdrl.health.status import alive
from spmdrl.hub.build import DTYPES, build_model, decoder_layers
from spmdrl.hub.lora import attach, is_adapter, plain_name, without_adapters
from spmdrl.hub.resolve import resolve
from spmdrl.hub.routing import Routers
from spmdrl.policy.attention import packed
from spmdrl.policy.attention.ulysses import check_model
from spmdrl.policy.contract import Head, Objective, Shared, TokenLoss, Write
from spmdrl.policy.fsdp import lora
from spmdrl.policy.fsdp.liger import use_liger
from spmdrl.policy.heads import PackedLM, PackedScalar, Second
from spmdrl.policy.learner import Learner
from spmdrl.policy.optimizer import fill_state, make_optimizer, restore_settings, settings_of
from spmdrl.policy.safe_pickle import vet
from spmdrl.spmd.exchange import all_reduce
from spmdrl.spmd.gloo import DirectAllGather, DirectReduceScatter
from spmdrl.spmd.storage import Parked, moves, storage_bytes
from spmdrl.spmd.world import World
from spmdrl.tracking.metrics import Metrics
from spmdrl.weights.experts import Layout
from spmdrl.weights.reshard import Piece
from spmdrl.weights.safetensors import (
    MASTERS,
    has_masters,
    on_first,
    on_host,
    prediction_heads,
    read_into,
    save_model,
    tree_on_host,
)
from spmdrl.weights.shards import pieces_of
from spmdrl_kernels.host import use_host_linear

GATHERED_WHOLE = {"cpu": 512 << 20, "cuda": 64 << 20}
"""Bytes of a model in its compute type up to which it is one group: a gather for each layer costs more time than it
saves memory. On a CPU nothing is computed while a gather runs."""


def shard(model: PackedLM | PackedScalar, world: World, compute: torch.dtype, reshard: bool, direct: bool) -> None:
    """fully_shard each decoder layer, then the rest, over `world.shard_mesh`; a small model as a whole.

    direct: on gloo, use direct sends (`spmd/gloo.py`) instead of its ring.
    """
    # What trains, where that is not all of it, is in the master type.
    mesh, master = world.shard_mesh, max(model.parameters(), key=lambda p: p.requires_grad).dtype
    mixed = (
        MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=master) if compute != master else MixedPrecisionPolicy()
    )
    layers = decoder_layers(model.hf)
    if sum(p.numel() for p in model.parameters()) * compute.itemsize <= GATHERED_WHOLE[world.device.type]:
        layers = []
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=mixed, reshard_after_forward=reshard)
    # The root is also given the columns of a loss (old_logp, advantages, ...), which keep their type.
    fully_shard(model, mesh=mesh, mp_policy=replace(mixed, cast_forward_inputs=False), reshard_after_forward=False)
    module: Any
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            # Gradients are sums: denominators are global and already in the loss.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if direct and world.device.type == "cpu" and world.size > 1:
                module.set_custom_all_gather(DirectAllGather())
                module.set_custom_reduce_scatter(DirectReduceScatter())


def recompute(hf: Any) -> None:
    """Make the backward of each decoder layer run its forward again, instead of keeping its activations.

    transformers' own switch works in training mode only, which would switch dropout on as well.
    """
    for layer in decoder_layers(hf):
        # No state of random generators is kept: in eval mode nothing draws.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


class FsdpPolicy(Learner):
    """The Policy contract (`policy/contract.py`) on FSDP2."""

    def __init__(
        self,
        cfg: Config,
        world: World,
        total_updates: int,
        trainable: bool = True,
        path: str = "",
        head: Head = "lm",
        optimizer: OptimizerConfig | None = None,
        routing_replay: bool = False,
        adapt: bool = False,
    ):
        """Build and shard one model. Collective.

        Args:
            cfg: the run's settings.
            world: ranks and their axes.
            total_updates: optimizer steps that will be due in the run, for the schedule.
            trainable: False for a frozen model, which is kept in the compute type and has no optimizer.
            path: as `--model.path`; empty takes that one.
            head: `lm`, `value` (a critic; a head that the folder lacks starts at 0) or `score` (a reward model).
            optimizer: None takes `cfg.optimizer`.
            routing_replay: send tokens to the experts that `token["experts"]` names (`hub/routing.py`).
            adapt: train the adapters that `cfg.lora` describes, where its rank is not 0, and nothing else (`lora.py`).

        Raises:
            ValueError: a model that cannot train here; the message names the path.
        """
        super().__init__(cfg, world, total_updates, optimizer)
        path = path or cfg.model.path
        self.head = head
        self.folder = resolve(path, cfg.model.trust_remote_code)
        check_model(self.folder, cfg.model.trust_remote_code, world.sp_size)
        self.compute = DTYPES[cfg.model.dtype]
        self.master = torch.float64 if self.compute == torch.float64 else torch.float32
        adapt = adapt and cfg.lora.rank > 0
        kept = self.master if trainable and not adapt else self.compute
        hf = build_model(self.folder, kept, cfg.model.trust_remote_code, packed.register(), head)
        if head == "lm" and getattr(hf.get_output_embeddings(), "bias", None) is not None:
            raise ValueError(f"{path}: an output head with a bias is not supported")
        keep = cfg.policy.mtp == "keep" and trainable and head == "lm" and path == cfg.model.path
        self.kept = prediction_heads(self.folder, hf.config) if keep else None
        if cfg.policy.liger:
            use_liger(hf, world.device)
        self.routers = Routers(hf) if routing_replay else None
        self.layout, self.hf_config = Layout(hf), hf.config
        # PEFT's settings of the adapters; None without any.
        self.adapters: Any = None
        if adapt:
            self.adapters = attach(hf, cfg.lora, cfg.run.seed, self.master)
        use_host_linear(hf)
        if cfg.policy.activation_checkpointing and trainable:
            recompute(hf)
        kind, sp = cfg.policy.attention, world.sp_group
        # Any: fully_shard adds methods, and the parameters become DTensors.
        share = cfg.policy.share_prompts and head != "score"
        self.model: Any = (
            PackedLM(hf, kind, sp, share) if head == "lm" else PackedScalar(hf, kind, head == "score", sp, share)
        )
        self.share = share
        # Also where it trains: the loss compares its logp with the engine's and with that of the passes before, so
        # nothing in it may be random (dropout, LayerDrop, a router's jitter).
        self.model.eval()
        for name, p in self.model.named_parameters():
            p.requires_grad_(trainable and (not adapt or is_adapter(name)))
        # The lockstep recorder wants to see collectives, which direct sends are not.
        shard(self.model, world, self.compute, cfg.policy.reshard_after_forward, not cfg.run.lockstep_debug)
        self.model.to(world.device)
        # Routing biases and the like: every rank holds them whole.
        kept = self.model.hf.state_dict().keys()
        self.buffers: list[tuple[str, Any]] = [(n, b) for n, b in self.model.hf.named_buffers() if n in kept]
        self.optimizer: Any = make_optimizer(self.model.parameters(), self.settings) if trainable else None
        # As they are when sharded: while the root is gathered, the model shows plain tensors in their place.
        self.shards: list[Any] = list(self.model.parameters())
        self.gathering: list[Any] = [module for module in self.model.modules() if hasattr(module, "reshard")]
        self.away: list[Parked] = []
        self.parameters_away = False

    # ── forward ──────────────────────────────────────────────────────────────

    def _forward(
        self, batch: Batch, temperature: float, second: Second = "entropy", token_loss: TokenLoss | None = None
    ) -> tuple[torch.Tensor, ...]:
        """What the head gives; a rank with nothing to do runs a stand-in so that its shards still travel."""
        assert not self.away, "offloaded: memory.training_phase brings it back"
        alive()
        device, real = self.world.device, len(batch) > 0
        tokens_T = batch.token["tokens"] if real else torch.zeros(2, dtype=torch.int64)
        lengths_B = batch.lengths if real else torch.tensor([2])
        mask_T = batch.token["mask"] if real else torch.tensor([False, True])
        more: dict[str, Any] = {} if token_loss is None else {"token_loss": token_loss}
        if self.routers and real:
            more["experts_TLK"] = batch.token["experts"].unflatten(1, (-1, self.routers.experts.top_k))
        # One line for both: ranks that run it together stand at the same place for the lockstep recorder.
        found = self.model(tokens_T.to(device), lengths_B, mask_T.to(device), temperature, second, **more)
        # Zero times the sum keeps the graph, and with it FSDP's backward.
        return found if real else tuple(x.sum() * x.new_zeros(0) for x in found)

    def numbers(self, micros: list[Batch], temperature: float, second: Second) -> Iterator[tuple]:
        """See `Learner`."""
        return (self._forward(micro, temperature, second) for micro in micros)

    @contextmanager
    def base(self) -> Iterator[None]:
        """In here the model runs as the frozen one that its adapters started from, experts free to be chosen."""
        routers, self.routers = self.routers, None
        try:
            with without_adapters(self.model):
                yield
        finally:
            self.routers = routers

    # ── update ───────────────────────────────────────────────────────────────

    def gradient(self, micros: list[Batch], objective: Objective, shared: Shared) -> Metrics:
        """See `Learner`. Communicated once, after the last micro-batch."""
        metrics = Metrics()
        for i, micro in enumerate(micros):
            last = i == len(micros) - 1
            self.model.set_requires_gradient_sync(last)
            self.model.set_is_last_backward(last)
            token_loss = objective.token_loss(micro, shared, self.world.device) if len(micro) else None
            first_T, second_T, *chunked = self._forward(micro, objective.temperature, token_loss=token_loss)
            # What was taken in chunks has its gradient; the whole is for the log then.
            with torch.set_grad_enabled(not chunked):
                result = objective.loss(micro, first_T, second_T, shared)
            (chunked or [result.loss])[0].backward()
            metrics.merge(result.stats)
        return metrics

    def gradient_norm(self) -> float:
        """See `Learner`; in float64."""
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for p in self.model.parameters():
            if p.grad is not None:
                total += torch.linalg.vector_norm(p.grad.to_local(), dtype=torch.float64) ** 2
        return math.sqrt(all_reduce(total, "sum", self.world.shard_group).item())

    def step(self, lr: float, norm: float) -> None:
        """See `Learner`."""
        largest = self.settings.clip_grad_norm
        if largest and norm > largest:
            for p in self.model.parameters():
                if p.grad is not None:
                    p.grad.mul_(largest / (norm + 1e-6))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def zero_grad(self) -> None:
        """See `Learner`."""
        self.optimizer.zero_grad(set_to_none=True)

    # ── weights, memory, checkpoints ─────────────────────────────────────────

    def named_weights(self) -> list[tuple[str, DTensor]]:
        """HF name and shard of every parameter; tied ones once. Adapters have the names of PEFT's files."""
        assert not self.parameters_away, "offloaded: memory.training_phase brings it back"
        self._reshard()
        return [(plain_name(name.removeprefix("hf.")), p) for name, p in self.model.named_parameters()]

    def _parts(self) -> tuple[list[tuple[str, DTensor]], list[tuple[str, DTensor]]]:
        """`named_weights` in two: the model's own, and its adapters."""
        named = self.named_weights()
        return [x for x in named if not is_adapter(x[0])], [x for x in named if is_adapter(x[0])]

    @torch.no_grad()
    def take_over(self, other: Any) -> None:
        """See the contract."""
        for (name, into), (source, p) in zip(self.named_weights(), other.named_weights(), strict=True):
            if name != source or into.shape != p.shape:
                raise ValueError(
                    f"{name} {tuple(into.shape)} cannot take over {source} {tuple(p.shape)}: --reference.refresh-every "
                    "needs a reference of the policy's own architecture"
                )
            into.to_local().copy_(p.to_local())

    def pieces(self, part: Part = "model") -> list[Piece]:
        """See the contract."""
        base, adapters = self._parts()
        buffers = pieces_of(self.buffers, self.layout, exact=True)
        scale = self.adapters.lora_alpha / self.adapters.r if self.adapters else 1.0
        if part == "adapter":
            return lora.adapter_pieces(adapters, scale, self.layout)
        if part == "base" or not adapters:
            return pieces_of(base, self.layout) + buffers
        return lora.merged_pieces(base, adapters, scale, self.layout, self.world) + buffers

    def _held(self) -> dict[str, list[torch.Tensor | None]]:
        states = self.optimizer.state.values() if self.optimizer else []
        return {
            "parameters": list(self.shards),
            "gradients": [p.grad for p in self.shards],
            "optimizer": [x for state in states for x in state.values() if torch.is_tensor(x)],
        }

    def bytes_by_owner(self) -> dict[str, int]:
        """See the contract. On a CPU the device is the host."""
        return {kind: storage_bytes(tensors, self.world.device.type) for kind, tensors in self._held().items()}

    def _reshard(self) -> None:
        """Back to shards: a forward that no backward followed leaves the root gathered, as plain parameters."""
        for module in self.gathering:
            module.reshard()

    def offload(self, place: Literal["host", "disk"], parameters: bool = True) -> None:
        """See the contract. On a CPU `host` moves nothing."""
        if not moves(place, self.world.device):
            return
        self._reshard()
        for kind, leaving in self._held().items():
            if parameters or kind != "parameters":
                parked = Parked(leaving, "gone" if kind == "gradients" else place, self.world.device)
                if parked.bytes:
                    self.away.append(parked)
                    self.parameters_away |= kind == "parameters"

    def onload(self) -> None:
        """See the contract."""
        while self.away:
            self.away[-1].bring_back()
            self.away.pop()
        self.parameters_away = False

    def saving(self, copy: bool = False) -> Write:
        """See the contract."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        # What asks other groups of this world is asked here; what is returned may run while they are in use.
        pieces, fixed = self.pieces(), self.fixed
        if self.adapters:
            adapter, settings, base = lora.file_pieces(self._parts()[1]), self.adapters, self._base_facts()
        else:
            adapter, settings, base = None, None, {}
        state: dict[str, Any] = {}
        if self.optimizer:
            fill_state(self.optimizer)
            state["optimizer"] = get_optimizer_state_dict(self.model, self.optimizer)
            if self.compute != self.master and not self.adapters:
                state[MASTERS] = {name: p.detach() for name, p in self._parts()[0]}
        if copy:
            pieces, state = on_host(pieces, self.compute), tree_on_host(state)
            adapter = on_host(adapter, self.master) if adapter is not None else None

        def write(folder: Path, world: World) -> None:
            save_model(folder / "model", pieces, world, self.compute, fixed, self.kept)
            if adapter is not None:
                tensors = {}
                for bucket in on_first(adapter, world, self.master):
                    tensors |= bucket
                if world.is_first:
                    lora.write_adapter(folder / "adapter", settings, tensors, base)
            if state:
                where, group = str(folder / "state" / "optimizer"), world.training_group
                dcp.save(state, checkpoint_id=where, process_group=group)

        return write

    def save(self, folder: Path) -> None:
        """See the contract."""
        self.saving()(folder, self.world)

    def _base_facts(self) -> dict:
        """Which weights the adapters belong to. Collective."""
        total = all_reduce(lora.element_sum(self._parts()[0]), "sum", self.world.shard_group)
        return {"path": str(self.cfg.model.path), "sum": int(total)}

    def load(self, folder: Path) -> None:
        """See the contract."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

        base, adapters = self._parts()
        state, where = {}, folder / "state" / "optimizer"
        saved = vet(where) if self.optimizer else {}
        if self.adapters:
            lora.read_adapter(adapters, folder / "adapter", self.adapters)
            lora.check_base(folder / "adapter", self._base_facts())
            base = []
        elif (folder / "adapter").exists():
            raise ValueError(f"{folder} holds adapters: resume with its --lora.rank, or choose another --run.dir")
        elif has_masters(saved, base, where):
            state[MASTERS] = {name: p.detach() for name, p in base}
            base = []
        # Of a model that trains, what is narrower than its masters was made of them.
        read_into(base + self.buffers, folder / "model", self.layout, torch.float32 if self.optimizer else None)
        if self.optimizer is None:
            return
        settings = settings_of(self.optimizer)
        fill_state(self.optimizer)
        state["optimizer"] = get_optimizer_state_dict(self.model, self.optimizer)
        dcp.load(state, checkpoint_id=str(where), process_group=self.world.training_group)
        set_optimizer_state_dict(self.model, self.optimizer, optim_state_dict=state["optimizer"])
        restore_settings(self.optimizer, settings)
