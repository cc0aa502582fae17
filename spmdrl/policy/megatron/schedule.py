"""Runs micro-batches through Megatron's pipeline and broadcasts the last stage's results to all stages.

Shapes: S packed tokens on this rank, T tokens in the whole packed batch.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from spmdrl.data.batch import Batch
from spmdrl.health.status import tick
from spmdrl.policy.attention.ulysses import total
from spmdrl.policy.contract import Objective, OutputHead, Second, Shared
from spmdrl.policy.forward_plan import HeadRows, check_ids, for_losses
from spmdrl.policy.heads import at_rows, sampled, stand_in
from spmdrl.policy.megatron.attention import Pack, make_packs, pack_on_device
from spmdrl.policy.megatron.convert import unwrapped
from spmdrl.policy.megatron.layout import Layout
from spmdrl.policy.megatron.model import head_weight
from spmdrl.policy.megatron.routing import plan
from spmdrl.tracking.metrics import Metrics

Numbers = tuple[torch.Tensor, torch.Tensor]
"""The head's two outputs per token of a micro-batch: two tensors [T], or [T, L] for a head with L > 1 outputs."""


class Pipeline:
    """Runs micro-batches through this rank's model chunks with Megatron's schedules (1F1B or interleaved)."""

    def __init__(
        self,
        models: list[Any],
        layout: Layout,
        softcap: float | None,
        divisor: float,
        device: torch.device,
        replay: bool = False,
        labels: int = 1,
    ):
        """models: the result of `model.build`, possibly wrapped for training. softcap: cap on logits, or None for no
        cap. divisor: divisor of the logits, without the temperature. replay: True to route tokens to the experts in
        `token["experts"]`. labels: number of outputs per token of a `score` head.
        """
        from megatron.core import parallel_state

        self.models, self.layout, self.device, self.replay = models, layout, device, replay
        self.settings, self.vocabulary = unwrapped(models[0]).arch.settings, unwrapped(models[0]).arch.vocab
        self.balance = 0.0
        self.shape = (labels,) if labels > 1 else ()
        self.softcap, self.divisor = softcap, divisor
        self.excluded: tuple[int, ...] = ()
        """Token ids that have probability 0."""
        self.head = unwrapped(models[0]).head
        state: Any = parallel_state
        self.tp_group = state.get_tensor_model_parallel_group() if layout.tp > 1 else None
        rows = -(-self.vocabulary // layout.tp)
        self.rows = [max(0, min(rows, self.vocabulary - rank * rows)) for rank in range(layout.tp)]
        """Number of tokens in each rank's vocabulary shard (`model.head_weight`)."""
        self.cp_group = state.get_context_parallel_group() if layout.cp > 1 else None
        self.cp_rank = parallel_state.get_context_parallel_rank()
        self.part = (layout.tp, parallel_state.get_tensor_model_parallel_rank()) if layout.sp else (1, 0)
        self.pp_group = state.get_pipeline_model_parallel_group()

    def forward(self, micros: list[Batch], temperature: float, second: Second) -> list[Numbers]:
        """Return the head outputs of all micro-batches on every stage, without gradient. Collective."""
        with torch.no_grad():
            return self._everywhere(micros, self._run(micros, temperature, second, None))

    def forward_backward(
        self, micros: list[Batch], objective: Objective, shared: Shared, balance: float = 0.0
    ) -> Metrics:
        """Accumulate the gradient of the summed losses in the gradient buffers; return statistics on every stage.

        balance: weight of the per-token load-balancing loss (`Routing.weight`). Collective.
        """
        metrics, self.balance = Metrics(), balance
        mine = self._run(
            micros, objective.temperature, objective.second, partial(self._loss, objective, shared, metrics)
        )
        numbers = self._everywhere(micros, mine)
        if not self.last:
            # Stages without the head also compute the statistics, from the outputs that the last stage sent.
            with torch.no_grad():
                for micro, (first_T, second_T) in zip(micros, numbers, strict=True):
                    self._loss(objective, shared, metrics, micro, first_T, second_T)
        return metrics

    @property
    def last(self) -> bool:
        """True if this rank is on the last pipeline stage, which has the head."""
        return self.pp_group.rank() == self.pp_group.size() - 1

    def _loss(
        self, objective: Objective, shared: Shared, metrics: Metrics, micro: Batch, first_T, second_T
    ) -> torch.Tensor:
        if not len(micro):
            # The products are empty, so the loss is 0. They keep the graph, because other ranks wait for this backward.
            first_T, second_T = (x.sum() * x.new_zeros(0) for x in (first_T, second_T))
        result = objective.loss(for_losses(micro, self.device), first_T, second_T, shared)
        metrics.merge(result.stats)
        return result.loss

    def _run(self, micros: list[Batch], temperature: float, second: Second, to_loss: Callable | None) -> list[Numbers]:
        """Run the schedule once; return the head outputs on the last stage and an empty list on other stages.

        to_loss: function that maps a micro-batch and its outputs to the loss, or None to only run forward passes.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        if not micros:
            return []
        runs = [micro if len(micro) else stand_in() for micro in micros]
        for run in runs:
            check_ids(run.token["tokens"], self.vocabulary)
        planned = make_packs(runs, self.layout, self.cp_rank, before=self.head != "score")
        packs = [self._on_device(*each) for each in zip(micros, runs, planned, strict=True)]
        inputs = list(zip(micros, runs, packs, strict=True))
        iterators = [iter(inputs) for _ in self.models]

        def step(iterator, model):
            micro, run, pack = next(iterator)
            tick()
            states = model(pack.tokens, pack.positions, None, packed_seq_params=pack.params)
            return states, partial(finish, micro, run, pack, model)

        def finish(micro: Batch, run: Batch, pack: Pack, model: Any, states: torch.Tensor):
            numbers = self._numbers(unwrapped(model), states[0], run.n_tokens, pack.head, temperature, second)
            value = to_loss(micro, *numbers) if to_loss else numbers[0].sum()
            # The second element is the token count that Megatron would divide the loss by. It is 0 to disable this
            # division, because the loss is already normalised.
            return value, torch.zeros([], dtype=torch.int, device=self.device), [x.detach() for x in numbers]

        longest = max(pack.tokens.shape[1] for pack in packs)
        numbers = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if len(self.models) > 1 else iterators[0],
            model=self.models,
            num_microbatches=len(micros),
            seq_length=longest * self.layout.cp,
            micro_batch_size=1,
            forward_only=to_loss is None,
        )
        for model in self.models:
            # Release the input of the last micro-batch, which the model would otherwise keep until the next pass.
            unwrapped(model).set_input_tensor([None])
        return numbers

    def _on_device(self, micro: Batch, run: Batch, pack: Pack) -> Pack:
        """Return a packed batch on the device, with the routing information for this pass."""
        if self.settings.get("num_moe_experts"):
            prescribed, real = None, len(micro) > 0
            if self.replay and real:
                prescribed = run.token["experts"].unflatten(1, (-1, self.settings["moe_router_topk"]))
            rows = pack.rows.chunk(self.part[0])[self.part[1]]
            routing = plan(rows, run.lengths, real, self.balance, prescribed)
            pack = replace(pack, params=replace(pack.params, routing=routing))
        return pack_on_device(pack, self.device)

    def _numbers(
        self, model: Any, states_SD: torch.Tensor, tokens: int, head: HeadRows, temperature: float, second: Second
    ) -> Numbers:
        """Return the head outputs [T], 0 outside the loss mask, the same on all tp and cp ranks. Collective.

        tokens: number of tokens, T.
        """
        rows, states = head.rows, states_SD[head.states]
        weight = head_weight(model)
        if self.head == "lm":
            output = OutputHead(weight, temperature * self.divisor, self.softcap, self.excluded)
            first, other = sampled(states, output, head.targets, second, self.tp_group, self.rows)
        else:
            value = nn.functional.linear(states, weight, model.output_layer.bias)
            first = (value[:, 0] if value.shape[1] == 1 else value).to(torch.float32)
            other = first.detach() * 0
        parts = [at_rows(rows, x, tokens) for x in (first, other)]
        first_T, other_T = parts if self.cp_group is None else total(self.cp_group, *parts)
        return first_T, other_T

    def _everywhere(self, micros: list[Batch], mine: list) -> list[Numbers]:
        """Broadcast the last stage's outputs to all stages and return them. Collective over pp."""
        lengths = [micro.n_tokens if len(micro) else 2 for micro in micros]
        if self.pp_group.size() > 1 and micros:
            flat = torch.zeros(2, sum(lengths), *self.shape, device=self.device)
            if self.last:
                flat = torch.cat([torch.stack(list(numbers)) for numbers in mine], 1).float()
            dist.broadcast(flat, dist.get_process_group_ranks(self.pp_group)[-1], group=self.pp_group)
            mine = [tuple(part) for part in flat.split(lengths, 1)]
        return [tuple(x) for x in mine]
