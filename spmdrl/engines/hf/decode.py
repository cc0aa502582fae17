"""Decodes rows of equal length, with transformers' KV cache if it works for the model and without a cache otherwise.

Some transformers models compute different probabilities with their cache than without it, and the caches of other
models cannot drop finished rows. `Decoder.check` therefore compares decoding with and without a cache once the first
weights are loaded. The check also rejects a model if later tokens change the probabilities of earlier tokens by more
than rounding and near ties between experts can explain.

The first pass over a group gets the features of its images, each computed once however many rows show it. Families with
positions along time, row and column get explicit positions in every pass of such a group, because the models of
transformers would keep the distance between positions and tokens of only one group at a time.

A row is one sequence of the batch. Shapes: B rows, t tokens of a row that a pass processes, V vocabulary size.
"""

import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from spmdrl.engines.engine import Request
from spmdrl.health.causes import of_the_machine
from spmdrl.hub.encode import arguments, features_of, in_order
from spmdrl.hub.expand import positions
from spmdrl.hub.vision import Vision
from spmdrl.spmd.copies import to_device

log = logging.getLogger("spmdrl")

WAYS = ("batch_select_indices", "reorder_cache")
"""Methods of transformers caches that keep only the given rows. Recurrent-state caches have only the second method."""
CLOSE = {torch.float32: 1e-4, torch.float64: 1e-4}
"""Maximum accepted mean |dlogp| between decoding with the cache and one forward pass without it, by weight dtype."""
ROUNDED = 0.1
"""The same bound for all other dtypes. Their rounding can change which experts a few tokens are routed to."""
FAILED = 1e30
"""Difference recorded for a decoding method whose forward pass raises an error."""
TIMES = 2
"""A cache is also accepted if its difference is at most this many times the difference without a cache."""
LENGTHS, MORE = (3, 12), 4
"""Prompt lengths in `Decoder.check`, and the number of tokens decoded after each prompt."""


class Group:
    """Rows of equal length that are decoded together."""

    def __init__(self, requests: list[Request], device: torch.device, vision: Vision | None = None):
        """Create a group. vision: facts of a model that reads images, else None."""
        self.requests = requests
        self.live = list(range(len(requests)))
        """Indices of the unfinished requests. Row i of the cache belongs to request live[i]."""
        self.tokens: list[list[int]] = [[] for _ in requests]
        self.logp: list[list[float]] = [[] for _ in requests]
        self.inputs = torch.tensor([r.prompt for r in requests], device=device)
        """Tokens of the live rows that the model has not processed yet, or all their tokens if there is no cache."""
        self.seeds = torch.tensor([r.seed for r in requests], device=device)
        self.temperature = torch.tensor([r.temperature for r in requests], device=device)
        self.top_p = torch.tensor([r.top_p for r in requests], device=device)
        self.cache: Any = None
        self.experts: list[list[torch.Tensor]] = [[] for _ in requests]
        """The expert ids that each request's tokens were routed to, as one int16 [tokens, W] tensor per step. The lists
        stay empty if routing is not recorded."""
        self.seen = in_order([image for r in requests for image in r.images])
        """The distinct images of all requests, and the feature of each of their placeholders."""
        self.seen_by = self.seen.features_n.split([sum(image.tokens for image in r.images) for r in requests])
        """The part of `seen.features_n` that belongs to each request."""
        self.features: Any = None
        """Features of the images (`features_of`), from the first pass until no later pass needs them."""
        self.positions: torch.Tensor | None = None
        """Positions of `inputs`, int64 [3, B, t], or None if they are as for text."""
        if self.seen.images and vision is not None and vision.mrope:
            rows = [positions(torch.tensor(r.prompt), r.images, vision) for r in requests]
            self.positions = torch.stack(rows, 1).to(device)

    @property
    def began(self) -> bool:
        """True once a token has been sampled."""
        return bool(self.tokens[0])


class Decoder:
    """Runs a model on the rows of a group, one token per call."""

    def __init__(self, model: Any, ranks: dist.ProcessGroup | None, vision: Vision | None = None):
        self.model, self.ranks, self.vision = model, ranks, vision
        self.way: str | None = WAYS[0]
        """Cache method that drops finished rows, or None for no cache: each step then processes the full sequences."""
        self.checked = False

    def logits(self, group: Group) -> torch.Tensor:
        """Run the model on the group's inputs and return the next-token logits, [B, V]."""
        out, group.cache = self._forward(group.inputs, group.cache, **self._sight(group))
        return out

    def _sight(self, group: Group) -> dict[str, Any]:
        """Return the arguments of the model's forward that hold positions, and features of the live rows' images."""
        given = {} if group.positions is None else {"position_ids": group.positions}
        if not group.seen.images or (self.way and group.began):
            return given
        assert self.vision is not None, "`check_placeholders` refuses images"
        if group.features is None:
            group.features = features_of(self.model, self.vision, group.seen.images, group.inputs.device)
        features_n = torch.cat([group.seen_by[row] for row in group.live])
        if len(features_n):
            given |= arguments(group.features, to_device(features_n, group.inputs.device), self.vision)
        return given

    def extend(self, group: Group, tokens_B: torch.Tensor) -> None:
        """Set the next input token of each live row. Without a cache, the token is appended to the row."""
        column = tokens_B[:, None]
        group.inputs = column if self.way else torch.cat([group.inputs, column], 1)
        if self.way:
            group.features = None
        if group.positions is not None:
            # The tokens behind an image continue after its largest position along any axis.
            following_B = group.positions.amax((0, 2)) + 1
            following = following_B[None, :, None].expand(3, -1, 1)
            group.positions = following if self.way else torch.cat([group.positions, following], 2)

    def keep(self, group: Group, rows: list[int]) -> None:
        """Keep only the given live rows. Call this after `extend`."""
        index = torch.tensor(rows, dtype=torch.int64, device=group.inputs.device)
        group.live = [group.live[i] for i in rows]
        group.inputs = group.inputs[index]
        group.positions = None if group.positions is None else group.positions[:, index]
        group.seeds, group.temperature, group.top_p = group.seeds[index], group.temperature[index], group.top_p[index]
        if rows and self.way and group.cache is not None:
            getattr(group.cache, self.way)(index)

    def _forward(self, inputs: torch.Tensor, cache: Any, **sight: Any) -> tuple[torch.Tensor, Any]:
        given = {"input_ids": inputs, "logits_to_keep": 1} | sight
        if not self.way:
            return self.model(**given, use_cache=False).logits[:, -1], None
        # The model creates the type of cache that it needs.
        out = self.model(**given, past_key_values=cache, use_cache=True)
        return out.logits[:, -1], out.past_key_values

    @torch.inference_mode()
    def check(self, vocabulary: int, device: torch.device, dtype: torch.dtype) -> None:
        """Choose `way` by testing the model, once. Collective over the ranks that share the model.

        The test decodes two rows and drops one of them early. It then compares the remaining row's log-probabilities
        with those of a forward pass over the whole row without a cache.

        Raises:
            ValueError: a token's probabilities depend on later tokens, so that samples would be incorrect, or the model
                fails to compute the next token of a sequence.
        """
        if self.checked:
            return
        name, close = type(self.model).__name__, CLOSE.get(dtype, ROUNDED)
        rows = [
            torch.tensor([[(5 + 7 * i + 31 * row) % vocabulary for i in range(n + MORE)] for row in (1, 2)])
            for n in LENGTHS
        ]
        rows = [row.to(device) for row in rows]
        plain, changed = zip(*(self._plain(row, vocabulary) for row in rows), strict=True)
        if (largest := self._largest(max(changed), device)) > close:
            raise ValueError(
                f"--rollout.engine hf: {name} of transformers gives a token other probabilities when other tokens "
                f"follow (logp changes by {largest:.1g} on average), so samples of this model cannot be scored: "
                "take a model of another family"
            )
        found: dict[str | None, float] = {}
        reasons = []
        for self.way in (*WAYS, None):
            try:
                apart = max(self._apart(row, logp) for row, logp in zip(rows, plain, strict=True))
                reasons.append(f"logp changes by {apart:.1g} on average")
            except Exception as error:  # The model's own code may raise any exception.
                if of_the_machine(error):
                    raise
                apart = float("inf")
                reasons.append(f"{type(error).__name__}: {error}")
            found[self.way] = self._largest(apart, device)
            if self.way and found[self.way] <= close:
                break
        else:
            if found[None] >= FAILED:
                raise ValueError(
                    f"--rollout.engine hf: the forward of transformers' {name} fails when it decodes a sequence "
                    f"({reasons[-1]}): take --rollout.engine vllm or a model of another family"
                )
            # Rounding alone can exceed `close`. The difference without a cache shows how large the rounding is.
            self.way = next((way for way in WAYS if found[way] <= TIMES * found[None]), None)
        self.checked = True
        if not self.way:
            log.warning(
                f"--rollout.engine hf: {name} cannot decode with the cache of transformers ({reasons[-2]}), so every "
                "token is computed from its whole sequence. That is exact but slow; --rollout.engine vllm may support "
                "the family"
            )

    def _plain(self, rows: torch.Tensor, vocabulary: int) -> tuple[torch.Tensor, float]:
        """Return the second row's logp without a cache, [n, V], and how much its last tokens affect earlier logp.

        The effect is the mean |dlogp| at the earlier positions when the last tokens are replaced. The row and a copy
        with different last tokens run in one forward pass, so their rounding is the same.
        """
        pair = rows[1:].repeat(2, 1)
        pair[1, -MORE:] = (pair[1, -MORE:] + 1) % vocabulary
        logp, other = self.model(input_ids=pair, use_cache=False).logits.double().log_softmax(-1)
        # Positions with NaN are skipped: NaNs from later tokens pass through the attention mask, because NaN times 0 is
        # NaN.
        before = [distance(other[at], logp[at]) for at in range(rows.shape[1] - MORE) if not other[at].isnan().any()]
        return logp, sum(before) / max(len(before), 1)

    def _apart(self, rows: torch.Tensor, logp_nV: torch.Tensor) -> float:
        """Decode using `way`, and return the mean |dlogp| of the second row's tokens, weighted by probability.

        logp_nV: the row's log-probabilities from a forward pass without a cache.
        """
        length, differences, cache = rows.shape[1] - MORE, [], None
        inputs = rows[:, :length]
        for at in range(length, rows.shape[1]):
            logits, cache = self._forward(inputs, cache)
            inputs = rows[:, at : at + 1] if self.way else rows[:, : at + 1]
            if at == length:
                if self.way:
                    getattr(cache, self.way)(torch.tensor([1], device=rows.device))
                rows, inputs = rows[1:], inputs[1:]
            differences.append(distance(logits[-1].double().log_softmax(-1), logp_nV[at - 1]))
        return sum(differences) / len(differences)

    def _largest(self, apart: float, device: torch.device) -> float:
        """Return the maximum difference over all ranks, so that they all make the same decision."""
        if self.ranks is None:
            return apart
        value = torch.tensor(min(apart, FAILED), device=device)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.ranks)
        return value.item()


def distance(got_V: torch.Tensor, want_V: torch.Tensor) -> float:
    """Return the mean |dlogp| over the vocabulary, weighted by the probabilities of `want_V`.

    If `want_V` contains NaN, the distance is 0, and the first training step raises an error instead.
    """
    if want_V.isnan().any():
        return 0.0
    apart_V = want_V.exp() * (got_V - want_V).abs()
    return torch.where(want_V.isfinite(), apart_V, 0.0).sum().nan_to_num(float("inf")).item()


def cached_tensors(cache: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a transformers cache: keys, values and states."""
    for held in [cache, *getattr(cache, "layers", [])]:
        for value in vars(held).values():
            values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
            yield from (x for x in values if isinstance(x, torch.Tensor))
