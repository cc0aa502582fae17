"""The HF engine: samples with plain transformers forward passes, for tests, small models and machines without vLLM.

Rows of equal prompt length run as one left-aligned group without padding. Each token is drawn by inverse transform
sampling from one uniform number that depends only on the request's seed and the token's position. Up to rounding, a
sample therefore does not depend on the other rows of its batch.

The engine starts without weights and reads none from the model folder. The trainer sends all weights before the first
sample.

A vision model never samples the placeholders of images: their logits are -inf, and log p is of the remaining tokens.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from spmdrl.config.schema import Config
from spmdrl.engines.engine import (
    Completion,
    Finish,
    Key,
    Likeliest,
    Owner,
    Request,
    ScoreRequest,
    check_placeholders,
    check_request,
    check_version,
    longest_sequence,
    model_vision,
)
from spmdrl.engines.hf.decode import Decoder, Group, cached_tensors
from spmdrl.engines.hf.sample import sample
from spmdrl.engines.hf.start import start
from spmdrl.engines.needs import Needs
from spmdrl.health.status import tick
from spmdrl.hub.build import DTYPES
from spmdrl.hub.lora import plain_name
from spmdrl.hub.routing import Routers
from spmdrl.spmd.checksum import word_sum
from spmdrl.spmd.storage import Parked, Place, moves, storage_bytes
from spmdrl.spmd.world import World
from spmdrl.weights.experts import Layout
from spmdrl.weights.reshard import Entry, inside, size
from spmdrl_kernels.divergence import log_probabilities, outside

READ_ROWS = 256
"""Maximum number of positions whose log-probabilities are computed at once, to limit peak memory."""


class HFEngine:
    """An engine that samples with transformers models. Implements the `Engine` contract of `engines/engine.py`."""

    def __init__(self, cfg: Config, world: World, stop_tokens: set[int]):
        self.world = world
        self.capacity, self.longest = cfg.rollout.max_sequences, longest_sequence(cfg)
        self.deterministic = cfg.rollout.deterministic
        self.stop = torch.tensor(sorted(stop_tokens), device=world.device)
        self.dtype = DTYPES[cfg.model.dtype]
        self.model, self.group, self.boxes, self.quantized = start(cfg, world)
        self.vision = model_vision(cfg)
        self.never = torch.tensor(self.vision.never if self.vision else (), dtype=torch.int64, device=world.device)
        """Tokens that are never sampled: the placeholders of images."""
        self.decoder = Decoder(self.model, self.group, self.vision)
        self.routers = Routers(self.model, recording=True) if cfg.rollout.routing_replay else None
        self.parked: Parked | None = None
        # The softmax is computed in float32 or float64, as in the trainer's head.
        self.upcast = torch.float64 if self.dtype == torch.float64 else torch.float32
        # A checkpoint contains the parameters (tied parameters only once) and persistent buffers such as routing
        # biases.
        scales = {f"{name.removesuffix('weight')}scale" for name in self.quantized}
        kept = self.model.state_dict().keys()
        buffers = {n: b for n, b in self.model.named_buffers() if n in kept}
        self.tensors = {plain_name(n): p for n, p in self.model.named_parameters() if n not in scales} | buffers
        self.places = Layout(self.model).places((name, tuple(x.shape)) for name, x in self.tensors.items())
        """Checkpoint name -> name in `tensors` and index into that tensor."""
        self.lacking = set(self.places)
        """Names of checkpoint tensors that the trainer has not sent since the memory was allocated."""
        self.counted: list[torch.Tensor] = []
        self.odd: set[int] = set()
        self.version: int | None = None
        self.waiting: list[Request] = []
        self.groups: list[Group] = []

    def submit(self, request: Request) -> None:
        """Implements `Engine.submit`."""
        check_request(request, self.version, self.longest, self.vision)
        self.waiting.append(request)

    @torch.inference_mode()
    def poll(self) -> list[Completion]:
        """Implements `Engine.poll`. One step samples one token for each row of the oldest group."""
        if not self.groups and self.waiting:
            self._start()
        if not self.groups:
            return []
        group = self.groups[0]
        done = self._step(group)
        if not group.live:
            self.groups.remove(group)
        return done

    def _start(self) -> None:
        length = len(self.waiting[0].prompt)
        # Rounding can depend on the other rows of a batch, so a deterministic engine runs each row alone.
        together = 1 if self.deterministic else self.capacity
        alike = [r for r in self.waiting if len(r.prompt) == length][:together]
        taken = {r.key for r in alike}
        self.waiting = [r for r in self.waiting if r.key not in taken]
        self.groups.append(Group(alike, self.world.device, self.vision))

    def _step(self, group: Group) -> list[Completion]:
        logits = self.decoder.logits(group)
        if self.routers:
            taken = self.routers.take().flatten(1)
            for row, experts in zip(group.live, taken.split(group.inputs.shape[1]), strict=True):
                # Without a cache, a later step processes the earlier tokens again, so only the last token is recorded.
                group.experts[row].append(experts[-1:] if group.began else experts)
        position = torch.full_like(group.seeds, len(group.tokens[group.live[0]]))
        tokens, logp = sample(self._allowed(logits.to(self.upcast)), group, position)
        if self.group is not None:
            # All ranks use the first rank's draw, because logits may be rounded differently on each rank.
            both = torch.stack([tokens.double(), logp.double()])
            dist.broadcast(both, group=self.group, group_src=0)
            tokens, logp = both[0].long(), both[1].to(logp.dtype)
        stopped = torch.isin(tokens, self.stop).tolist()
        done, keep = [], []
        for i, (row, token, lp) in enumerate(zip(group.live, tokens.tolist(), logp.tolist(), strict=True)):
            request = group.requests[row]
            group.tokens[row].append(token)
            group.logp[row].append(lp)
            full = len(group.tokens[row]) >= request.max_new_tokens
            if stopped[i] or full:
                done.append(self._completion(group, row, "stop" if stopped[i] else "length"))
            else:
                keep.append(i)
        self.decoder.extend(group, tokens)
        if len(keep) < len(group.live):
            self.decoder.keep(group, keep)
        return done

    def _allowed(self, logits_CV: torch.Tensor) -> torch.Tensor:
        """Return the logits with -inf at tokens that are never sampled."""
        return logits_CV.index_fill(1, self.never, -torch.inf) if len(self.never) else logits_CV

    def _completion(self, group: Group, row: int, finish: Finish) -> Completion:
        experts = torch.cat(group.experts[row]) if group.experts[row] else None
        return Completion(group.requests[row].key, group.tokens[row], group.logp[row], finish, self.version, experts)

    def abort(self, keys: Iterable[Key]) -> list[Completion]:
        """Implements `Engine.abort`."""
        keys = set(keys)
        out = [Completion(r.key, [], [], "abort", self.version) for r in self.waiting if r.key in keys]
        self.waiting = [r for r in self.waiting if r.key not in keys]
        for group in list(self.groups):
            cut = [i for i, row in enumerate(group.live) if group.requests[row].key in keys]
            if not cut:
                continue
            out += [self._completion(group, group.live[i], "abort") for i in cut]
            keep = [i for i in range(len(group.live)) if i not in cut]
            if not group.began:
                rest = [group.requests[group.live[i]] for i in keep]
                self.waiting = rest + self.waiting
                self.groups.remove(group)
                continue
            self.decoder.keep(group, keep)
            if not group.live:
                self.groups.remove(group)
        return out

    @torch.inference_mode()
    def likeliest(self, requests: list[ScoreRequest], k: int, temperature: float, version: int) -> list[Likeliest]:
        """Implements `ReadingEngine.likeliest`. Sequences are processed one by one, and have no images."""
        check_version(version, self.version)
        out = []
        for each in requests:
            tick()
            check_placeholders("a sequence to score", each.tokens, (), self.vision)
            inputs = torch.tensor([each.tokens[:-1]], device=self.world.device)
            logits_nV = self.model(input_ids=inputs, use_cache=False, logits_to_keep=each.count).logits[0]
            parts = []
            for logits_CV in logits_nV.split(READ_ROWS):
                logp_CV, _ = log_probabilities(self._allowed(logits_CV), temperature, None, self.upcast)
                logp_Ck, ids_Ck = logp_CV.topk(k, 1)
                parts.append((ids_Ck.cpu(), logp_Ck.cpu(), outside(logp_CV, ids_Ck)[1].cpu()))
            ids_nk, logp_nk, rest_n = (torch.cat(column) for column in zip(*parts, strict=True))
            out.append((ids_nk, logp_nk, rest_n))
        return out

    def needs(self, entries: list[Entry]) -> Needs:
        """Implements `Engine.needs`."""
        tensors = self.tensors
        boxes = [(i, self.boxes.get(self.places[entry.name][0], entry.box)) for i, entry in enumerate(entries)]
        # A tensor slice has a checksum only if it consists of complete 8-byte words. A cast changes the checksum.
        held = [tensors[self.places[entries[i].name][0]] for i, _ in boxes]
        counted = [
            x.dtype == (entries[i].dtype or self.dtype) and (x.numel() == size(box) or size(box) * x.itemsize % 8 == 0)
            for x, (i, box) in zip(held, boxes, strict=True)
        ]
        # The trainer may send the model in several parts. `needs` is called once for each part, so `odd` collects the
        # tensors without a checksum over all calls.
        self.odd |= {id(x) for x, yes in zip(held, counted, strict=True) if not yes}
        self.counted = [x for x in tensors.values() if id(x) not in self.odd]
        return Needs(boxes, [id(x) not in self.odd for x in held])

    @torch.no_grad()
    def load(self, buckets: Iterable[dict[str, torch.Tensor]], version: int) -> None:
        """Implements `Engine.load`.

        Raises:
            ValueError: the trainer did not send some of the weights. The engine then has no version.
        """
        self.version = None
        self.wake("weights")
        for bucket in buckets:
            self.lacking -= bucket.keys()
            for name, tensor in bucket.items():
                parameter, index = self.places[name]
                part = inside(tensor, self.boxes[parameter]) if parameter in self.boxes else tensor
                if parameter in self.quantized:
                    self.quantized[parameter].take(part)
                else:
                    self.tensors[parameter][index].copy_(part)
        if self.lacking:
            raise ValueError(
                f"--rollout.engine hf: the trainer pushes no tensor for {len(self.lacking)} of the engine's weights "
                f"({', '.join(sorted(self.lacking)[:3])}), and the engine reads none from the folder: take another "
                "--policy.backend or another engine"
            )
        self.version = version
        self.decoder.check(self.model.config.get_text_config().vocab_size, self.world.device, self.dtype)

    def reset_prefix_cache(self) -> None:
        """No-op, because no prefix is cached."""

    def sleep(self, level: int) -> None:
        """Implements `Engine.sleep`. Each group has its own KV cache, which is freed with the group."""
        self.groups, self.waiting = [], []
        place: Place = "gone" if level == 2 else "host"
        if level == 2:
            self.version = None
            self.lacking = set(self.places)
            if self.parked:
                self.parked.forget()
        if level and not self.parked and moves(place, self.world.device):
            self.parked = Parked(self.model.parameters(), place, self.world.device)

    def wake(self, what: Owner) -> None:
        """Implements `Engine.wake`."""
        if what == "weights" and self.parked:
            self.parked.bring_back()
            self.parked = None

    def bytes_by_owner(self) -> dict[str, int]:
        """Implements `Engine.bytes_by_owner`."""
        device = self.world.device.type
        # Without a cache, the features of images stand in its place.
        held = [x for group in self.groups for x in (group.cache, group.features) if x is not None]
        cached = [x for each in held for x in cached_tensors(each)]
        return {
            "engine weights": storage_bytes(self.model.parameters(), device),
            "KV cache": storage_bytes(cached, device),
        }

    def held_words(self) -> int | None:
        """Implements `Engine.held_words`."""
        return None if self.parked else word_sum(self.counted)

    def close(self) -> None:
        """Implements `Engine.close`."""
        self.sleep(2)
