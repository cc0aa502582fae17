"""Real vLLM beside a real FSDP2 policy in one process, measured; `test_vllm.py` holds the measurements to the laws.

    python -m tests.engines.probe /tmp/facts tied untied bf16

vLLM gives one engine a process, so each scenario is a process of its own: forked where the imports are done, or on a
GPU, whose context no fork survives, started anew. Training is `spmdrl.train.train` itself; the probe stands where a run
evaluates: after the push, with the engine awake. The device is the run's own choice: a GPU where torch sees one.
"""

import copy
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import _models
from spmdrl.config.schema import Config

TOO_LONG = 400
"""Steps of an engine after which a request that has not ended will never end."""


def replaced(cfg: Config, **sections: dict) -> Config:
    return dataclasses.replace(cfg, **{k: dataclasses.replace(getattr(cfg, k), **v) for k, v in sections.items()})


class Probe:
    """One engine, one policy, one independent transformers model."""

    def __init__(self, cfg: Config, facts: dict):
        from transformers import AutoModelForCausalLM

        from spmdrl.hub.resolve import resolve
        from spmdrl.rl.build import build_run
        from spmdrl.session.session import Session
        from spmdrl.spmd.generators import generator_states
        from spmdrl.spmd.mesh import start
        from spmdrl.tracking.logs import setup_logging
        from spmdrl.tracking.metrics import Timer

        self.cfg, self.facts = cfg, facts
        self.transfer: Any = None
        setup_logging(cfg.run.dir, 0)
        world = start(cfg.parallel, cfg.rollout.tp, cfg.run.device, 60.0)
        # This is not the value that vLLM would write.
        os.environ["LOCAL_WORLD_SIZE"] = "3"

        def generators() -> list:
            states = generator_states(world.device)
            words = [states["python"][1], states["numpy"][1], states["torch"], states.get("cuda", torch.empty(0))]
            return [x.tolist() for x in words]

        torch.manual_seed(1234)
        before = generators()
        self.run = build_run(Session(cfg, world, Timer()))
        facts["rng_untouched"] = generators() == before
        facts["local_world_size"] = os.environ["LOCAL_WORLD_SIZE"]
        self.engine, self.policy = self.run.memory.engine, self.run.models.policy
        facts["engine"], facts["device"] = type(self.engine).__name__, str(world.device)
        self.dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[cfg.model.dtype]
        self.hf = AutoModelForCausalLM.from_pretrained(resolve(cfg.model.path), dtype=self.dtype).eval()
        self.hf.to(world.device)
        facts["tied"] = self.hf.config.tie_word_embeddings
        self.exact: Any = None

    def compute_exactly(self) -> None:
        """Lets `agree` compute the trainer's and transformers' log p in float64, too, from the same weights."""
        from spmdrl.policy.fsdp.policy import FsdpPolicy

        cfg = replaced(self.cfg, model={"dtype": "float64"})
        self.exact = FsdpPolicy(cfg, self.run.world, 0, trainable=False)

    # ── sampling ─────────────────────────────────────────────────────────────

    def request(
        self,
        prompt: list[int],
        sample: int = 0,
        seed: int = 7,
        temperature: float = 1.0,
        new: int = 0,
        position: int = 0,
    ):
        from spmdrl.engines.engine import Request

        return Request(
            (position, sample), prompt, seed, self.policy.version, new or self.cfg.rollout.max_new_tokens, temperature
        )

    def drain(self, requests: list) -> dict:
        """Returns key -> completion of all of these."""
        for request in requests:
            self.engine.submit(request)
        done: dict = {}
        for _ in range(TOO_LONG):
            done |= {c.key: c for c in self.engine.poll()}
            if len(done) == len(requests):
                return done
        raise RuntimeError("the engine does not end its requests")

    def prompts(self, n: int) -> list[list[int]]:
        return [p.tokens for p in self.run.sampler.prompts.prompts[:n]]

    # ── three answers to one question ────────────────────────────────────────

    @torch.no_grad()
    def hf_logp(self, prompt: list[int], tokens: list[int], temperature: float, hf: Any = None) -> torch.Tensor:
        """Log p of each sampled token by a plain forward of transformers on one sequence."""
        ids = torch.tensor([prompt + tokens], device=self.run.world.device)
        logits = (hf or self.hf)(input_ids=ids).logits[0]
        logits = (logits if hf else logits.float()) / (temperature or 1.0)
        logp = torch.log_softmax(logits, -1).cpu()
        return torch.stack([logp[len(prompt) + i - 1, token] for i, token in enumerate(tokens)])

    @torch.no_grad()
    def refresh_hf(self) -> None:
        """Puts exactly the weights that a push sends into the independent model."""
        # All ranks hold the same weights where a probe has several: whole tensors come from a plan of their own.
        from spmdrl.weights.experts import Layout
        from spmdrl.weights.reshard import Reshard, catalogue

        world, pieces = self.run.world, self.policy.pieces()
        entries = catalogue(pieces, world.host_group)
        needs = [(i, entry.box) for i, entry in enumerate(entries)]
        plan = Reshard(entries, pieces, needs, world.host_group, world.device, self.dtype, 1 << 20)
        parameters = dict(self.hf.named_parameters())
        places = Layout(self.hf).places([(name, tuple(p.shape)) for name, p in parameters.items()])
        seen = set()
        for bucket in plan.run(pieces):
            for checkpoint_name, tensor in bucket.items():
                name, index = places[checkpoint_name]
                parameters[name][index].copy_(tensor)
                seen.add(checkpoint_name)
        assert seen == set(places), set(places) - seen
        self.hf.tie_weights()

    @torch.no_grad()
    def agree(self, prompts: list[list[int]], temperature: float = 1.0) -> dict:
        """Returns largest and mean |difference| of engine, transformers and trainer on fresh samples."""
        from spmdrl.data.episode import episode_of
        from spmdrl.data.pack import from_episodes

        self.refresh_hf()
        done = self.drain(
            [self.request(p, position=i, seed=100 + i, temperature=temperature) for i, p in enumerate(prompts)]
        )
        episodes = []
        for (position, sample), c in sorted(done.items()):
            prompt = prompts[position]
            mask = torch.tensor([False] * len(prompt) + [True] * len(c.tokens))
            logp = torch.tensor([0.0] * len(prompt) + c.logp)
            episodes.append(
                episode_of(position, sample, position, torch.tensor(prompt + c.tokens), mask, logp, c.version)
            )
        batch = from_episodes(episodes)
        mask = batch.token["mask"]
        trainer = self.policy.logprobs(batch, temperature)[0].cpu()[mask].float()
        engine = batch.token["rollout_logp"][mask]
        hf = torch.cat([self.hf_logp(prompts[i], done[i, 0].tokens, temperature) for i in range(len(prompts))])
        exact = {}
        if self.exact:
            for (_, mine), (_, theirs) in zip(self.exact.named_weights(), self.local_weights(), strict=True):
                mine.to_local().copy_(theirs)
            trainer_64 = self.exact.logprobs(batch, temperature)[0].cpu()[mask]
            double = copy.deepcopy(self.hf).double()
            hf_64 = torch.cat(
                [self.hf_logp(prompts[i], done[i, 0].tokens, temperature, double) for i in range(len(prompts))]
            )
            exact = {
                "engine_trainer_tokens": (engine - trainer).abs().tolist(),
                "engine_exact_tokens": (engine - trainer_64).abs().tolist(),
                "trainer_exact_tokens": (trainer - trainer_64).abs().tolist(),
                "trainer_hf_exact": (trainer_64 - hf_64).abs().max().item(),
            }
        return exact | {
            "version": self.policy.version,
            "tokens": len(hf),
            "spread": hf.std().item(),
            "engine_hf": (engine - hf).abs().max().item(),
            "engine_trainer": (engine - trainer).abs().max().item(),
            "trainer_hf": (trainer - hf).abs().max().item(),
            "engine_trainer_mean": (engine - trainer).abs().mean().item(),
        }

    def train(self, prompts: list[list[int]]) -> None:
        """Runs the run's own loop; agreement is measured after each push, so after 0, 1, ... updates."""
        from spmdrl.train import train

        rows = self.facts["agreement"] = []
        before = [p.clone() for _, p in self.local_weights()]

        def evaluate(step: int, force: bool = False) -> None:
            rows.append(self.agree(prompts))
            names = ("engine_trainer_mean", "engine_trainer", "engine_hf")
            told = ", ".join(f"{name} {rows[-1][name]:.2e}" for name in names)
            # A line of its own for the report of benchmarks/first_gpu_run.py, also if this process is killed later.
            print(f"\nfigure |dlogp| after {rows[-1]['version']} updates: {told}", flush=True)

        self.run.evaluate = evaluate
        train(self.run)
        packed = getattr(self.engine, "packed", None)
        self.facts["packed"] = len(packed.linears) if packed else 0
        self.facts["moved"] = max(
            (a - b).abs().max().item() for a, (_, b) in zip(before, self.local_weights(), strict=True)
        )

    def local_weights(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, p.to_local()) for name, p in self.policy.named_weights()]

    @torch.no_grad()
    def shake(self, size: float) -> None:
        """Changes the weights by a lot, so that everything cached before is wrong."""
        generator = torch.Generator().manual_seed(5)
        for name, p in self.local_weights():
            # Beneath adapters nothing changes.
            if not self.cfg.lora.rank or "lora_" in name:
                p.mul_(1 + size * torch.randn(p.shape, generator=generator).to(p.device))
        self.policy.version += 1

    def push(self) -> None:
        from spmdrl.config.engines import pushed_parts
        from spmdrl.session.transfer import Transfer

        if self.transfer is None or self.transfer.engine is not self.engine:
            parts = pushed_parts(self.cfg)
            self.transfer = Transfer(self.run.world, self.policy, self.engine, self.dtype, 1 << 20, parts)
        report = self.transfer.push(self.policy.version)
        self.facts |= {"pushed_bytes": report.bytes, "received_bytes": report.received, "deep": report.deep}

    def awake(self) -> None:
        self.engine.wake("weights")
        if self.engine.version != self.policy.version:
            self.push()
        self.engine.wake("kv_cache")


def outcome(action) -> str:
    """Returns `Type: message` of the error of an action, or "no error"."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# ── what is measured, one function a fact ────────────────────────────────────


def stale(p: Probe) -> dict:
    """Tries every way in which the engine may lack the trainer's weights."""
    prompt = p.prompts(1)[0]
    p.awake()
    facts = {}
    p.policy.version += 1
    facts["trainer ahead"] = outcome(lambda: p.engine.submit(p.request(prompt)))
    p.policy.version -= 1
    p.engine.sleep(1)
    facts["asleep"] = outcome(lambda: p.engine.submit(p.request(prompt)))
    p.awake()
    facts["after level 1"] = outcome(lambda: p.drain([p.request(prompt)]))
    p.engine.sleep(2)
    p.engine.wake("weights")
    p.engine.wake("kv_cache")
    facts["version after level 2"] = p.engine.version
    facts["after level 2"] = outcome(lambda: p.engine.submit(p.request(prompt)))
    p.awake()
    p.engine.sleep(1)
    p.engine.sleep(2)
    facts["level 2 on top of level 1"] = p.engine.version
    p.awake()
    facts["after a push"] = outcome(lambda: p.drain([p.request(prompt)]))
    return facts


def corrupt(p: Probe) -> dict:
    """Corrupts a push: a bit turns on the way, or a tensor never reaches the engine's memory."""
    prompt = p.prompts(1)[0]
    p.awake()
    load = p.engine.load

    def turned(buckets, version):
        def given():
            for i, bucket in enumerate(buckets):
                if i == 1:
                    name, tensor = list(bucket.items())[-1]
                    bucket[name] = tensor.clone()
                    bucket[name].view(-1).view(torch.uint8)[5] ^= 1
                yield bucket

        load(given(), version)

    facts = {}
    p.engine.load = turned
    p.policy.version += 1
    facts["turned bit"] = outcome(p.push)
    facts["version"] = p.engine.version
    facts["submit"] = outcome(lambda: p.engine.submit(p.request(prompt)))
    p.engine.load = load
    p.push()
    load = p.engine.model.load_weights
    p.engine.model.load_weights = lambda pairs: load((n, t) for n, t in pairs if "layers.1.mlp.down_proj" not in n)
    p.shake(0.05)
    facts["lost tensor"], facts["version after lost tensor"] = outcome(p.push), p.engine.version
    p.engine.model.load_weights = load
    p.push()
    facts["mended"] = outcome(lambda: p.drain([p.request(prompt)]))
    facts["agreement after"] = p.agree(p.prompts(4))
    return facts


def limits(p: Probe) -> dict:
    """Sends requests of the engine's longest sequence and of one token more."""
    p.awake()
    longest = p.engine.longest
    # The prompt is one letter again and again, and sampling is hot: it does not end at once.
    begin, letter = p.prompts(1)[0][:2]
    prompt = [begin] + [letter] * (longest - 4)
    over = p.request(prompt, new=4)
    facts: dict = {"longest": longest, "one more": outcome(lambda: p.engine.submit(over))}
    # Had any of it been queued, it would come back here.
    facts["aborted"] = [c.key for c in p.engine.abort([over.key])]
    done = p.drain([p.request(prompt, sample=i, seed=70 + i, new=3, temperature=2.0) for i in range(16)])
    facts["whole"] = max((len(c.tokens), c.finish) for c in done.values())
    return facts


def interrupted(p: Probe) -> dict:
    """Stops a push between two buckets; the next one repairs it."""
    prompt = p.prompts(1)[0]
    p.awake()
    load, facts = p.engine.load, {}

    def half(buckets, version):
        def given():
            for i, bucket in enumerate(buckets):
                if i == 1:
                    raise ConnectionError("the other node is gone")
                yield bucket

        load(given(), version)

    p.shake(0.02)
    p.engine.load = half
    facts["push"], facts["version"] = outcome(p.push), p.engine.version
    p.engine.load = load
    facts["refuses"] = outcome(lambda: p.engine.submit(p.request(prompt)))
    p.policy.version -= 1
    facts["refuses the old one"] = outcome(lambda: p.engine.submit(p.request(prompt)))
    p.policy.version += 1
    p.push()
    facts["mended"] = p.agree(p.prompts(4))
    return facts


def sleep_memory(p: Probe) -> dict:
    """Measures the bytes that the KV cache really gives back, and what the engine reports after."""
    from spmdrl.session.meter import Meter

    meter, prompts = Meter(p.run.world.device), p.prompts(8)

    def greedy() -> list[list[int]]:
        done = p.drain([p.request(prompt, position=i, temperature=0.0) for i, prompt in enumerate(prompts)])
        return [done[i, 0].tokens for i in range(len(prompts))]

    p.engine.sleep(1)
    p.awake()  # every page of the cache has been touched now
    before, awake = greedy(), (meter.lap()[0], p.engine.bytes_by_owner()["KV cache"])
    p.engine.sleep(1)
    asleep = meter.lap()[0], p.engine.bytes_by_owner()["KV cache"]
    began = time.perf_counter()
    p.awake()
    seconds = time.perf_counter() - began
    return {
        "taken_mib": [awake[0] / 2**20, asleep[0] / 2**20, meter.lap()[0] / 2**20],
        "wake_s": seconds,
        "kv_bytes": [awake[1], asleep[1], p.engine.bytes_by_owner()["KV cache"]],
        "same": before == greedy(),
        "greedy": before,
    }


def memory(p: Probe) -> dict:
    """Measures both levels in a run's phases, and on a CPU a wake of half a GiB where a quarter is free."""
    import resource

    memory, prompt = p.run.memory, p.prompts(1)[0]
    facts: dict = {"held": []}

    def cycle(level: int) -> None:
        memory.cfg = replaced(p.cfg, rollout={"sleep_level": level})
        with memory.training_phase():
            held = p.engine.bytes_by_owner()
            facts["held"].append([level, held["engine weights"], held["KV cache"], p.engine.version])
            places = {row.owner: row.place for row in memory.table()}
            facts["held"][-1] += [places["engine weights"], places["KV cache"]]

    with memory.rollout_phase():
        before = p.drain([p.request(prompt, temperature=0.0)])[0, 0].tokens
        facts["awake"] = list(p.engine.bytes_by_owner().values())
    for level in (1, 2):
        cycle(level)
        with memory.rollout_phase():
            facts[f"same after {level}"] = p.drain([p.request(prompt, temperature=0.0)])[0, 0].tokens == before
    if p.run.world.device.type != "cpu":
        return facts
    cycle(1)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20), hard))
    facts["no room"] = outcome(lambda: memory.rollout_phase().__enter__())
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    facts["refuses"] = outcome(lambda: p.engine.submit(p.request(prompt)))
    with memory.rollout_phase():
        facts["with room"] = p.drain([p.request(prompt, temperature=0.0)])[0, 0].tokens == before
    return facts


def abort(p: Probe) -> dict:
    """Cuts two of four off after three tokens; the others end, the blocks come back."""
    p.awake()
    prompts = p.prompts(4)
    # Two seeds whose response does not end by itself within three tokens.
    tried = p.drain([p.request(prompts[i % 2], position=i, seed=50 + i, new=3) for i in range(16)])
    going = [next(50 + j for j in range(i, 16, 2) if tried[j, 0].finish == "length") for i in range(2)]
    seeds = [*going, 52, 53]
    requests = [p.request(prompts[i], position=i, seed=seeds[i], new=3 if i < 2 else 5) for i in range(4)]
    whole = p.drain(requests)
    for request in requests[:2]:
        request.max_new_tokens = 60
    done: dict = {}
    for request in requests:
        p.engine.submit(request)
    while min(len(p.engine.partial[f"{i}.0."][1]) for i in range(2)) < 3:
        done |= {c.key: c for c in p.engine.poll()}
    cut = {c.key: c for c in p.engine.abort([(0, 0), (1, 0), (9, 9)])}
    for _ in range(20):
        done |= {c.key: c for c in p.engine.poll()}
    return {
        "cut": [[c.finish, c.tokens, c.logp] for _, c in sorted(cut.items())],
        "whole": [[whole[i, 0].finish, whole[i, 0].tokens, whole[i, 0].logp] for i in range(2)],
        "others": sorted(done),
        "unfinished": p.engine.engine.has_unfinished_requests(),
        "partial": len(p.engine.partial),
        "again": outcome(lambda: p.drain(requests[2:])),
    }


def neighbours(p: Probe) -> dict:
    """Compares a sample with a seed, alone and among 31 others: the tokens are the same."""
    p.awake()
    prompts = p.prompts(32)
    asked = [p.request(prompt, position=i, seed=1000 + i) for i, prompt in enumerate(prompts)]
    crowd = p.drain(asked)
    same, worst = 0, 0.0
    for i in range(0, 32, 4):
        alone = p.drain([asked[i]])[i, 0]
        same += alone.tokens == crowd[i, 0].tokens
        if alone.tokens == crowd[i, 0].tokens:
            worst = max(worst, *(abs(a - b) for a, b in zip(alone.logp, crowd[i, 0].logp, strict=True)))
    other = p.drain([p.request(prompts[0], seed=s, sample=s) for s in range(16)])
    return {"same": same, "of": 8, "logp": worst, "different": len({tuple(c.tokens) for c in other.values()})}


def prefix_cache(p: Probe) -> dict:
    """Samples prompts longer than a KV block before and after a push: with the reset, and without it."""
    p.awake()
    prompts = p.prompts(3)
    facts = {"prompt_tokens": [len(x) for x in prompts]}
    p.agree(prompts)  # fills the cache
    p.shake(0.3)
    p.push()
    facts["with reset"] = p.agree(prompts)
    reset, p.engine.llm.reset_prefix_cache = p.engine.llm.reset_prefix_cache, lambda: True
    p.shake(0.3)
    p.push()
    facts["without reset"] = p.agree(prompts)
    p.engine.llm.reset_prefix_cache = reset
    p.shake(0.3)
    p.push()
    facts["with reset again"] = p.agree(prompts)
    return facts


def rollout(**changes) -> dict:
    return {"engine": "vllm", "prompts_per_step": 8, "samples_per_prompt": 4, **changes}


def tied(cfg: Config, facts: dict) -> None:
    """Runs the model that ships here: 5 real updates, then every refusal, sleep, abort and seed."""
    p = Probe(replaced(cfg, rollout=rollout(kv_cache_gib=0.5), optimizer={"lr": 3e-4}), facts)
    p.train(p.prompts(16))
    for part in (stale, limits, corrupt, interrupted, sleep_memory, memory, abort, neighbours):
        facts[part.__name__] = part(p)


def untied(cfg: Config, facts: dict) -> None:
    """Runs a random model with a long context and its own output head."""
    folder = Path(cfg.run.dir)
    p = Probe(
        replaced(
            cfg,
            model={"path": str(random_qwen2(folder / "model"))},
            optimizer={"lr": 1e-3},
            reward={"function": str(counting_reward(folder / "reward.py"))},
            rollout=rollout(max_prompt_tokens=400, max_new_tokens=16),
            data={"train": str(long_prompts(folder / "long.jsonl"))},
        ),
        facts,
    )
    p.train(p.prompts(4))
    facts["prefix_cache"] = prefix_cache(p)


def bf16(cfg: Config, facts: dict) -> None:
    """Runs the same with bfloat16 compute over float32 masters."""
    p = Probe(replaced(cfg, model={"dtype": "bfloat16"}, run={"steps": 3}, rollout=rollout()), facts)
    p.train(p.prompts(16))


def experts(cfg: Config, facts: dict) -> None:
    """Runs a mixture of experts, which the CPU build would pack into a layout of its own."""
    folder = Path(cfg.run.dir)
    model = random_model(
        folder / "model",
        "Qwen3Moe",
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
    )
    p = Probe(
        replaced(
            cfg,
            model={"path": str(model)},
            run={"steps": 3},
            optimizer={"lr": 1e-3},
            reward={"function": str(counting_reward(folder / "reward.py"))},
            rollout=rollout(max_new_tokens=16),
        ),
        facts,
    )
    p.train(p.prompts(8))
    p.shake(0.3)
    p.awake()
    facts["shaken"] = p.agree(p.prompts(8))


def family(name: str, cfg: Config, facts: dict, **changes) -> None:
    """Runs a random model of a family: its class before and after an engine was built, an update, a large change."""
    from transformers import AutoModelForCausalLM

    folder = Path(cfg.run.dir)
    model = random_model(folder / "model", name, head_dim=32, **changes)

    def computed() -> list:
        """Returns a loss of transformers' class, its squared gradient, and the class's own names and bases."""
        torch.manual_seed(0)
        hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        ids = torch.arange(3, 30)[None]
        loss = hf(input_ids=ids, labels=ids).loss
        loss.backward()
        squares = sum(p.grad.square().sum().item() for p in hf.parameters())
        cls = type(hf.base_model)
        names = sorted(name for name in vars(cls) if not name.endswith("cached_value"))
        return [loss.item(), squares, names, [base.__name__ for base in cls.__bases__]]

    before = computed()
    p = Probe(
        replaced(
            cfg,
            model={"path": str(model)},
            run={"steps": 2},
            optimizer={"lr": 1e-3},
            reward={"function": str(counting_reward(folder / "reward.py"))},
            rollout=rollout(max_new_tokens=16),
        ),
        facts,
    )
    p.train(p.prompts(8))
    p.shake(0.3)
    p.awake()
    facts["shaken"] = p.agree(p.prompts(8))
    facts["class"] = [before, computed()]


def olmo2(cfg: Config, facts: dict) -> None:
    """Runs a family that vLLM builds from transformers' own modules."""
    family("Olmo2", cfg, facts)


def smollm3(cfg: Config, facts: dict) -> None:
    """Runs another one."""
    family("SmolLM3", cfg, facts)


def falcon_h1(cfg: Config, facts: dict) -> None:
    """Runs a family with states beside its keys and values."""
    mamba = dict(d_ssm=128, d_state=16, d_conv=4, expand=2, n_heads=4, d_head=32, n_groups=1)
    family("FalconH1", cfg, facts, **{f"mamba_{name}": value for name, value in mamba.items()})


def lora(cfg: Config, facts: dict, push: str = "adapter") -> None:
    """Runs adapters of a rank that vLLM has to pad, on some of the layers that it fuses, pushed by themselves."""
    folder = Path(cfg.run.dir)
    p = Probe(
        replaced(
            cfg,
            model={"path": str(random_qwen2(folder / "model"))},
            run={"steps": 4},
            lora={
                "rank": 6,
                "alpha": 10,
                "targets": ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"),
                "push": push,
            },
            optimizer={"lr": 2e-2},
            reward={"function": str(counting_reward(folder / "reward.py"))},
            rollout=rollout(max_prompt_tokens=400, max_new_tokens=16),
            data={"train": str(long_prompts(folder / "long.jsonl"))},
        ),
        facts,
    )
    p.train(p.prompts(4))
    p.awake()
    pushed = p.run.memory.last_push
    named = p.local_weights()
    adapters = sum(x.numel() * 4 for name, x in named if "lora_" in name)
    facts["bytes"] = {"adapters": adapters, "all": sum(x.numel() * 4 for _, x in named), "pushed": pushed.bytes}
    facts["deep"] = pushed.deep
    if push == "merged":
        return
    facts["prefix_cache"] = prefix_cache(p)
    facts["stale"] = stale(p)
    facts["after_stale"] = p.agree(p.prompts(4))
    facts["corrupt_adapter"] = corrupt_adapter(p)


def lora_merged(cfg: Config, facts: dict) -> None:
    """Runs the same adapters, added into the weights that are pushed."""
    lora(cfg, facts, "merged")


def corrupt_adapter(p: Probe) -> dict:
    """Corrupts adapters: a bit turns, an adapter stays behind, a weight beneath changes unseen."""
    facts, load = {}, p.engine.load

    def tampered(change):
        def loading(buckets, version):
            load((change(dict(bucket)) for bucket in buckets), version)

        return loading

    def turned(bucket):
        name = next(iter(bucket))
        bucket[name] = bucket[name].clone()
        bucket[name].view(-1).view(torch.uint8)[5] ^= 1
        return bucket

    for how, change in {"turned bit": turned, "lost": lambda b: dict(list(b.items())[2:])}.items():
        p.engine.load = tampered(change)
        p.shake(0.3)
        facts[how], facts[f"version after {how}"] = outcome(p.push), p.engine.version
        p.engine.load = load
        p.push()
    with torch.no_grad():
        weight = next(x for name, x in p.engine.model.named_parameters() if "o_proj.base_layer.weight" in name)
        weight.view(-1)[7] += 1
    p.shake(0.3)
    facts["beneath"] = outcome(p.push)
    p.push()
    return facts | {"mended": p.agree(p.prompts(4))}


def counting_reward(path: Path) -> Path:
    """Writes a reward file whose reward random tokens get now and then."""
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return solution_str.count('a') / 8\n"
    )
    return path


def random_qwen2(folder: Path) -> Path:
    """Makes a Qwen2: 2 layers, head_dim 32, 1,024 positions, untied, initialised so widely that tokens differ in p."""
    return random_model(folder, "Qwen2")


def random_model(folder: Path, family: str, **changes) -> Path:
    """A small random model of a family of transformers."""
    values = dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=0.2,
        pad_token_id=0,
    )
    return _models.random_model(folder, family, 3, **values | changes)


def long_prompts(path: Path) -> Path:
    """Makes prompts of letters: 140 to 380 tokens, of which whole blocks of 128 are cached."""
    rows = [
        {"prompt": "".join("abcdefghij"[(i * i + i * k + k) % 10] for i in range(140 + 30 * k)), "answer": "a"}
        for k in range(1, 9)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


SCENARIOS = {
    "tied": tied,
    "untied": untied,
    "bf16": bf16,
    "experts": experts,
    "olmo2": olmo2,
    "smollm3": smollm3,
    "falcon_h1": falcon_h1,
    "lora": lora,
    "lora_merged": lora_merged,
}


def preload() -> None:
    """Imports what every scenario on a CPU needs, once."""
    from spmdrl.engines.vllm.options import set_environment

    set_environment(torch.device("cpu"), "float32")
    for name in (
        "transformers.models.qwen2.modeling_qwen2",
        "vllm.entrypoints.llm",
        "vllm.model_executor.models.qwen2",
        "vllm.v1.worker.cpu_model_runner",
        "spmdrl.session.open",
    ):
        importlib.import_module(name)


def measure(scenario: str, folder: Path) -> None:
    """Runs one scenario in its own process; facts go to `folder`.json, a traceback if it fails."""
    facts: dict = {}
    folder.mkdir(parents=True)
    cfg = replaced(
        Config(),
        run={"dir": str(folder), "steps": 6},
        rollout={"enforce_eager": True},
        eval={"every": 0},
        checkpoint={"at_end": False},
        tracking={"trackers": ("jsonl",), "console": "plain"},
    )
    try:
        SCENARIOS[scenario](cfg, facts)
    except BaseException:
        facts["failed"] = traceback.format_exc()
    folder.with_suffix(".json").write_text(json.dumps(facts))


def main() -> None:
    root, names = Path(sys.argv[1]), sys.argv[2:]
    if torch.cuda.device_count():
        for name in names[1:]:
            subprocess.run([sys.executable, "-m", "tests.engines.probe", str(root), name], check=False)
        return measure(names[0], root / names[0])
    preload()
    fork_each(measure, root, names)


def fork_each(measure: Callable[[str, Path], None], root: Path, names: list[str]) -> None:
    """Runs each scenario in a process of its own, forked from this one, which has imported what they need."""
    for name in names:
        child = os.fork()
        if child == 0:
            measure(name, root / name)
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
