"""The sides that `mfu.py` compares: policies of this project, and transformers with FSDP2."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

BEFORE = {"gather": "layers", "liger": "off", "chunked_loss": False}
"""Settings of the policy from which the rows of LADDER start."""
WHOLE = BEFORE | {"gather": "whole", "chunked_loss": True}
LADDER: dict[str, dict[str, Any]] = {
    "layers": BEFORE,
    "once": BEFORE | {"gather": "once"},
    "whole": BEFORE | {"gather": "whole"},
    "chunks": WHOLE,
    "liger": WHOLE | {"liger": "on"},
    "wide": WHOLE | {"liger": "on", "max_tokens_per_microbatch": 16384},
    "compiled": WHOLE | {"compile_layers": True},
}
"""Side -> settings of the FSDP policy. Each adds one change to the side above it, except that `compiled` changes
`chunks`. `layers` gathers each layer twice in a micro-batch; `chunks` computes the loss with the head, in three
products instead of four; `wide` has twice as many tokens in a micro-batch."""


class Ours:
    """A policy of this project over packed micro-batches."""

    def __init__(self, name: str, folder: str, dtype: str, world: Any, budget: int, recompute: bool):
        """name: a key of LADDER, or `fsdp` or `megatron` for the backend with its default settings."""
        from transformers.models.qwen2 import modeling_qwen2

        from spmdrl.config.schema import Config
        from spmdrl.policy.models import backend

        cfg, kind = Config(), "fsdp" if name in LADDER else name
        self.cfg = dataclasses.replace(
            cfg,
            model=dataclasses.replace(cfg.model, path=folder, dtype=dtype),
            policy=dataclasses.replace(
                cfg.policy,
                backend=kind,
                share_prompts=False,
                max_tokens_per_microbatch=budget,
                activation_checkpointing="full" if recompute else "none",
                **LADDER.get(name, {}),
            ),
        )
        if kind == "megatron":
            from spmdrl.policy.megatron.model import initialize
            from spmdrl.policy.megatron.policy import layout_of

            initialize(layout_of(self.cfg))
        before = dict(vars(modeling_qwen2))
        self.policy = backend(kind)(self.cfg, world, 1)
        # Liger replaces functions of transformers in the whole process, so they are restored for the other sides.
        self.module = modeling_qwen2
        self.replaced = {n: x for n, x in vars(modeling_qwen2).items() if n in before and before[n] is not x}
        for n in self.replaced:
            setattr(modeling_qwen2, n, before[n])

    def as_built(self) -> AbstractContextManager:
        """Return a context in which transformers has the functions with which this side was built."""
        return patch.multiple(self.module, **self.replaced) if self.replaced else nullcontext()

    def prepare(self, tokens: list[torch.Tensor]) -> Callable[[], float]:
        """Return a function that runs a step and returns its loss, the mean of -log p of all but the first tokens."""
        from spmdrl.data.batch import Batch
        from spmdrl.policy.contract import LossResult, Objective, Shared
        from spmdrl.tracking.metrics import Metrics

        lengths = torch.tensor([len(x) for x in tokens])
        order = torch.arange(len(tokens))
        batch = Batch(lengths, {"tokens": torch.cat(tokens)}, {"position": order, "sample": order})
        mask = torch.ones(batch.n_tokens, dtype=torch.bool)
        mask[batch.cu_seqlens[:-1].long()] = False
        batch.token["mask"] = mask
        micros, count, losses = self.policy.microbatches(batch), int(mask.sum()), []
        chunked = self.cfg.policy.chunked_loss

        class Likelihood(Objective):
            columns, temperature = frozenset(), 1.0

            def loss(self, micro, first_T, second_T, shared):
                value = -first_T.sum() / count
                losses.append(value.detach())
                return LossResult(value, Metrics())

            def token_loss(self, micro, shared):
                return (lambda logp, entropy, columns: (-logp / count, {}), {}) if chunked else None

        objective = Likelihood()

        def step() -> float:
            losses.clear()
            with self.as_built():
                self.policy.gradient(micros, objective, Shared())
            total = torch.stack(losses).sum().item()
            self.policy.zero_grad()
            return total

        return step


class Plain:
    """transformers with FSDP2. Rows are padded to the longest of a micro-batch, which is filled to a token budget."""

    def __init__(self, folder: str, dtype: str, world: Any, budget: int, recompute: bool):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from transformers import AutoModelForCausalLM

        self.budget, self.device = budget, world.device
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(world.device).train()
        if recompute:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        kind = getattr(torch, dtype)
        mixed = MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32)
        for module in [*self.model.model.layers, self.model]:
            fully_shard(module, mesh=world.shard_mesh, mp_policy=mixed)

    def prepare(self, tokens: list[torch.Tensor]) -> Callable[[], float]:
        """Return a step with the same loss as `Ours.prepare`."""
        rows = max(1, self.budget // max(map(len, tokens)))
        micros = [tokens[i : i + rows] for i in range(0, len(tokens), rows)]
        count = sum(len(x) - 1 for x in tokens)

        def step() -> float:
            total = torch.zeros((), device=self.device)
            for i, micro in enumerate(micros):
                self.model.set_requires_gradient_sync(i == len(micros) - 1)
                padded = torch.nn.utils.rnn.pad_sequence(micro, batch_first=True).to(self.device)
                seen = torch.nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in micro], batch_first=True)
                seen = seen.to(self.device)
                # Without padding no mask is needed, and the causal kernel is faster without one.
                even = len({len(x) for x in micro}) == 1
                logits = self.model(padded, attention_mask=None if even else seen, use_cache=False).logits
                labels = padded.masked_fill(seen == 0, -100)[:, 1:]
                value = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels.flatten(), reduction="sum") / count
                del logits
                value.backward()
                total += value.detach()
            self.model.zero_grad(set_to_none=True)
            return total.item()

        return step
