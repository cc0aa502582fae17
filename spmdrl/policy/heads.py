"""Runs transformers over packed batches (concatenated sequences) and applies a head to tokens in the loss mask.

`PackedLM` computes the logp of each sampled token and a second output, by default the entropy. `PackedScalar` computes
one number per token from the hidden state before the token (critic) or at the token (reward model), or one number per
label for a reward model with several labels.
"""

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from spmdrl.data.batch import Batch
from spmdrl.hub.encode import encode, vision_of
from spmdrl.policy.apart import states_apart
from spmdrl.policy.attention.packing import Packing, over
from spmdrl.policy.contract import HeadFunction, OutputHead, Second, TokenLoss
from spmdrl.policy.forward_plan import ForwardPlan, HeadRows, Noise, noise_of, plan_forward
from spmdrl.policy.mixers import layers, rotary
from spmdrl.policy.vision import positions_of
from spmdrl.spmd.copies import to_device
from spmdrl.spmd.payload import Payload
from spmdrl_kernels import chunked_loss, collision_probability, linear_logprob
from spmdrl_kernels.linear import wide

Form = Literal["tree", "packed", "apart"]
"""How the sequences of a packed batch are run. `tree`: in one forward pass that computes shared tokens once; `packed`:
in one forward pass without sharing; `apart`: in one forward pass per sequence, with transformers' own attention. All
forms give the same results up to rounding; `self_check.py` finds the forms that a model supports."""


class Packed(nn.Module):
    """A HF model that runs over packed batches; subclasses apply a head to the tokens in the loss mask.

    The HF model is stored in `hf`, so parameter names are the HF names with the prefix `hf.`.
    """

    hf: Any
    before = True
    """True if the head reads the hidden state that predicts a token instead of the one at the token."""

    def __init__(
        self, hf: nn.Module, attention: str = "auto", group: dist.ProcessGroup | None = None, share: bool = False
    ):
        """attention: value of `--policy.attention`. group: ranks that split a pack. share: run shared prompts once."""
        super().__init__()
        self.hf, self.attention, self.group = hf, attention, group
        self.form: Form = "tree" if share else "packed"
        self.vocabulary: int = self.hf.get_input_embeddings().weight.shape[0]
        self.vision = vision_of(self.hf)
        layers.install(hf)
        self.moving = rotary.install(hf)

    def plan(
        self,
        tokens_T: torch.Tensor,
        lengths_B: torch.Tensor,
        mask_T: torch.Tensor,
        begins_B: torch.Tensor | None = None,
        experts_TLK: torch.Tensor | None = None,
        before: bool | None = None,
        images: list[tuple[Payload, ...]] | None = None,
        mark_T: torch.Tensor | None = None,
    ) -> ForwardPlan:
        """Plan a forward pass in this module's form. Arguments as in `plan_forward`; before=None uses `self.before`."""
        assert self.form != "apart" or experts_TLK is None, "self_check.py refuses routing replay in this form"
        before = self.before if before is None else before
        pack = tokens_T, lengths_B, mask_T, before, None if self.form == "apart" else self.group
        seen: tuple[Any, ...] = ()
        if images is not None and any(images):
            assert self.vision is not None, "`vision.check_images` refuses images"
            seen = images, mark_T, positions_of(tokens_T, lengths_B, images, self.vision)
        return plan_forward(*pack, self.shares(lengths_B), begins_B, experts_TLK, *seen)

    def shares(self, lengths_B: torch.Tensor) -> bool:
        """Return True if shared tokens are computed once in a packed batch with these sequence lengths."""
        return self.form == "tree" and rotary.alike(self.moving, lengths_B.tolist())

    def run(
        self, plan: ForwardPlan, noise: Noise | None = None, forwards: int = 0, looks: bool = False
    ) -> tuple[torch.Tensor, HeadRows]:
        """Run a packed batch; return hidden states [n, D] for this rank's tokens in the loss mask, and their rows.

        noise: embedding noise, on the device; not supported with shared prompts or images. forwards: number of forward
        passes in the form `apart`, at least B. looks: run the vision tower even without images. Both must be the same
        on all ranks that shard the weights, because each pass through a module all-gathers its weights.
        """
        looks = looks or plan.images is not None
        assert noise is None or not looks, "noise excludes images"
        device = next(self.hf.parameters()).device
        part, (ids, positions, experts, head) = (
            plan.part,
            to_device((plan.ids_S[None], plan.positions_S[None], plan.experts_SLK, plan.head), device),
        )
        if self.form == "apart":
            states = states_apart(self.hf, self.vision, ids[0], positions[0], plan, noise, forwards, looks)
            return states.index_select(0, head.states), head
        packing = Packing(plan.lengths, plan.parents, device, self.attention, part, experts, plan.layouts)
        given: dict[str, Any] = {"input_ids": ids}
        if noise is not None:
            assert packing.roots == len(plan.lengths), "noise excludes shared prompts"
            embedded = self.hf.get_input_embeddings()(ids)
            given = {"inputs_embeds": embedded + noise_of(noise, part, embedded)}
        if looks:
            assert self.vision is not None
            given |= encode(self.hf, self.vision, plan.seen, device)
        if positions.dim() == 3:
            positions = positions.permute(2, 0, 1)
        with over(packing):
            states = self.hf.base_model(
                **given, position_ids=positions, use_cache=False, packing=packing
            ).last_hidden_state[0]
        return states.index_select(0, head.states), head

    def states(self, plan: ForwardPlan) -> torch.Tensor:
        """Return the hidden states [T, D] that the head receives, zeros where the mask is False; used by `probe.py`."""
        states, head = self.run(plan)
        return plan.part.total(at_rows(head.rows, states, plan.tokens))[0]

    def plain(self, ids_n: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [1, n, D] of one sequence from the plain HF forward pass; used by `probe.py`."""
        return self.hf.base_model(input_ids=ids_n[None], use_cache=False).last_hidden_state

    def off(self, ids_n: torch.Tensor) -> torch.Tensor:
        """Return relative differences, float64 [m], between the outputs of this head and the HF head on one sequence.

        Each element is the difference between the two heads' outputs for a token, divided by the spread of the outputs.
        """
        states, logits = self.plain(ids_n)[0], self.hf(input_ids=ids_n[None], use_cache=False).logits
        return self._distance(states, logits[0] if logits.dim() == 3 else logits, ids_n)

    def _distance(self, states_nD: torch.Tensor, logits_mV: torch.Tensor, ids_n: torch.Tensor) -> torch.Tensor:
        """Return the result of `off`. logits_mV: HF logits of all tokens, or of the last token only."""
        raise NotImplementedError


def stand_in() -> Batch:
    """Return a dummy batch with zero loss, for a rank without sequences that must still join collectives."""
    token = {"tokens": torch.zeros(2, dtype=torch.int64), "mask": torch.tensor([False, True])}
    return Batch(torch.tensor([2]), token)


def at_rows(rows: torch.Tensor, values: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return a tensor [T, ...] with `values` [n, ...] at the indices `rows` and zeros elsewhere."""
    return values.new_zeros(tokens, *values.shape[1:]).index_copy(0, rows, values)


def sampled(
    states_nD: torch.Tensor,
    head: OutputHead,
    targets_n: torch.Tensor,
    second: Second,
    group: dist.ProcessGroup | None = None,
    group_rows: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logp and `second` (`contract.Second`) of the sampled tokens, [n] each.

    head: as in `HeadFunction`. group, group_rows: ranks that shard the vocabulary, and the number of vocabulary entries
    on each rank.
    """
    more: dict[str, Any] = {"softcap": head.softcap, "excluded": head.excluded}
    more |= {"group": group, "group_rows": group_rows}
    wants: dict[str, Any] = {"entropy": second == "entropy", "top": second == "top"}
    logp, other = linear_logprob(states_nD, head.weight_VD, targets_n, head.divisor, **wants, **more)
    if second == "collision":
        other = collision_probability(states_nD, head.weight_VD, head.divisor, **more)
    assert other is not None
    return logp, other


def softcap_of(config: Any) -> float | None:
    """Return the logit softcap of a model config (as in Gemma 2), or None if there is none."""
    return getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)


def divisor_of(config: Any) -> float:
    """Return the divisor that a model applies to its logits.

    This is the config's divisor (Granite) over its multiplier (Cohere, Falcon-H1, HyperCLOVA X), each 1 if missing.
    """
    scaling = getattr(config, "logits_scaling", None) or 1.0
    if config.model_type == "hyperclovax":
        scaling = 1 / scaling
    return scaling / (
        (getattr(config, "logit_scale", None) or 1.0) * (getattr(config, "lm_head_multiplier", None) or 1.0)
    )


class PackedLM(Packed):
    """A HF causal LM that returns logp and `second` of the sampled tokens without materialising the logits [T, V]."""

    excluded: tuple[int, ...] = ()
    """Token ids that have probability 0."""

    def __init__(self, hf: nn.Module, *args: Any, **kwargs: Any):
        """Build the module; arguments as in `Packed`."""
        super().__init__(hf, *args, **kwargs)
        config = self.hf.config.get_text_config()
        self.softcap, self.logit_divisor = softcap_of(config), divisor_of(config)
        self.vocabulary = min(self.vocabulary, self.hf.get_output_embeddings().weight.shape[0])

    def output_head(self, weight_VD: torch.Tensor, temperature: float = 1.0) -> OutputHead:
        """Return the output head with a (gathered) weight."""
        return OutputHead(weight_VD, temperature * self.logit_divisor, self.softcap, self.excluded)

    def forward(
        self,
        plan: ForwardPlan,
        temperature: float,
        second: Second = "entropy",
        token_loss: TokenLoss | HeadFunction | None = None,
        **more: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Return logp and `second` [T] (float32, or float64 for float64 models), 0 where the plan's mask is False.

        plan: its mask must be False on the first token of each sequence. token_loss: if given, the loss of this rank's
        tokens is returned as a third result, a scalar with gradient, and the first two have no gradient. With a
        `HeadFunction`, the results are its outputs, followed by its loss if it returns one. more: other arguments of
        `run`.
        """
        # The head only sees the hidden states that predict tokens in the loss mask.
        states, needed = self.run(plan, **more)
        tokens, part, rows, targets = plan.tokens, plan.part, needed.rows, needed.targets
        head = self.output_head(self.hf.get_output_embeddings().weight, temperature)
        # Mamba models keep the residual stream in float32, so the states must be cast to the dtype of the head.
        states = states.to(head.weight_VD.dtype)
        if callable(token_loss):
            loss, outputs = token_loss(states, head, rows)
            # The outputs are summed over ranks one by one, because they differ in dtype and width.
            numbers = tuple(part.total(at_rows(rows, number, tokens))[0] for number in outputs)
            return numbers if loss is None else (*numbers, loss)
        if token_loss is None:
            numbers = sampled(states, head, targets, second)
            return part.total(*(at_rows(rows, x, tokens) for x in numbers))
        function, columns = token_loss
        mine, top = {name: column[rows] for name, column in columns.items()}, second == "top"
        loss, outputs = chunked_loss(
            *(states, head.weight_VD, targets, function, mine, head.divisor),
            **{"entropy": not top, "top": top, "softcap": head.softcap, "excluded": head.excluded},
        )
        numbers = outputs["logp"], outputs["top" if top else "entropy"]
        return *part.total(*(at_rows(rows, x, tokens) for x in numbers)), loss

    def _distance(self, states_nD: torch.Tensor, logits_mV: torch.Tensor, ids_n: torch.Tensor) -> torch.Tensor:
        """Implements `Packed._distance`: differences in logp, divided by the standard deviation of the logits."""
        theirs_nV, targets = logits_mV[:-1].double(), ids_n[1:]
        weight = self.hf.get_output_embeddings().weight
        states = states_nD[:-1].to(weight.dtype)
        ours = linear_logprob(states, weight, targets, self.logit_divisor, softcap=self.softcap)[0]
        theirs = theirs_nV.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        return (ours - theirs).abs() / theirs_nV.std(-1)


class PackedScalar(Packed):
    """A critic or reward model: a HF sequence or token classifier, applied at every token in the loss mask.

    The head is a linear layer named `score`, as in published reward models.
    """

    def __init__(self, hf: nn.Module, *args: Any, after: bool = False, **kwargs: Any):
        """after: use the hidden state at a token (reward model) instead of the one before it (critic)."""
        super().__init__(hf, *args, **kwargs)
        self.before = not after

    def forward(
        self,
        plan: ForwardPlan,
        temperature: float,
        second: Second = "entropy",
        **more: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the head's output per token, [T] (float32, or float64 for float64 models), and zeros [T].

        Outputs outside the mask are 0. With L > 1 labels, both results are [T, L]. temperature and second are ignored.
        more: other arguments of `run`.
        """
        states, head = self.run(plan, **more)
        value = self.hf.score(states)
        value = value[:, 0] if value.shape[1] == 1 else value
        (value_T,) = plan.part.total(at_rows(head.rows, value.to(wide(value)), plan.tokens))
        return value_T, value_T.detach() * 0

    def _distance(self, states_nD: torch.Tensor, logits_mV: torch.Tensor, ids_n: torch.Tensor) -> torch.Tensor:
        """Implements `Packed._distance`; a HF sequence classifier only has outputs for the last token."""
        ours = self.hf.score(states_nD)
        return (ours[-len(logits_mV) :] - logits_mV).abs().amax(1).double() / (ours.abs().max() + 1e-6)
