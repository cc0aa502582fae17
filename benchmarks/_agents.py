"""Rollouts for benchmarks/agents.py: an environment with slow tools, timing of the engine, and turns in lockstep."""

import argparse
import json
import statistics
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from benchmarks._models import random_model

SPREAD = 1.0
"""Standard deviation of the logarithm of a tool's seconds."""
SIZES = dict(hidden_size=384, intermediate_size=1152, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2)
QUICK_SIZES = dict(SIZES, hidden_size=96, intermediate_size=128, num_hidden_layers=2)
TEMPLATE = (
    "{%- for m in messages -%}{{ '>' + m['content'] + '<eos>' if m['role'] == 'assistant' else m['content'] }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}>{%- endif -%}"
)
ENVIRONMENT = """
import math
import random
import time


class Tools:
    def __init__(self, median, spread, turns):
        self.median, self.spread, self.turns = median, spread, turns

    def reset(self, row, seed):
        self.seed, self.turn, self.seconds = seed, 0, 0.0
        return "go:"

    def step(self, message):
        self.turn += 1
        if self.turn == self.turns:
            return None, 0.0, True
        began, drawn = time.monotonic(), random.Random(f"{self.seed} {self.turn}").gauss(0, 1)
        time.sleep(self.median * math.exp(self.spread * drawn))
        self.seconds += time.monotonic() - began
        return "ok:", 0.0, False

    def reward(self):
        return {"score": 0.0, "tools": self.seconds}
"""


class Watched:
    """Wrapper of the HF engine that measures the seconds of its steps."""

    def __init__(self, engine):
        self.busy, self.polls = 0.0, 0
        self.own: Counter[tuple[int, int]] = Counter()
        """Seconds of the engine's steps in which an episode had a row, by (position, sample)."""
        self._poll, self._step = engine.poll, engine._step
        engine.poll, engine._step = self.poll, self.step

    def clear(self) -> None:
        """Forget all steps."""
        self.busy, self.polls = 0.0, 0
        self.own.clear()

    def poll(self) -> list:
        """Poll the engine and measure its time."""
        began = time.perf_counter()
        done = self._poll()
        self.busy += time.perf_counter() - began
        self.polls += 1
        return done

    def step(self, group) -> list:
        """Run one step of a group of rows and measure its time."""
        rows = [group.requests[row].key[:2] for row in group.live]
        began = time.perf_counter()
        done = self._step(group)
        took = time.perf_counter() - began
        self.own.update(dict.fromkeys(rows, took))
        return done


class Barrier:
    """Wrapper of an environment in which all episodes wait for each other in every turn."""

    remote = True

    def __init__(self, inner, episodes: int, serial: bool):
        """Wrap the environment `inner`. episodes: their number. serial: True if tools run one after another."""
        self.inner, self.live, self.serial = inner, episodes, serial
        self.turn_tokens, self.most_open = inner.turn_tokens, 0
        self.opening = self.owed = 0
        self.responses: list[tuple] = []
        self.waiting: list[tuple] = []
        self.seen: list[tuple] = []

    def open(self, plan, group, episode) -> None:
        """Begin an episode."""
        self.opening += 1
        self.inner.open(plan, group, episode)

    def answer(self, *response) -> None:
        """Store a response until all episodes have responded."""
        self.responses.append(response)
        if len(self.responses) == self.live:
            self.waiting, self.responses = self.responses, []

    def poll(self, wait: float = 0.0) -> list:
        """Return the answers to all episodes together after all of them have arrived."""
        if self.opening:
            there = self.inner.poll(wait)
            self.opening -= len(there)
            return there
        while self.waiting and not (self.serial and self.owed):
            self.inner.answer(*self.waiting.pop(0))
            self.owed += 1
        if self.owed:
            there = self.inner.poll(wait)
            self.owed -= len(there)
            self.seen += there
        if self.owed or self.waiting:
            return []
        seen, self.seen = self.seen, []
        self.live -= sum(bool(each.over) for _, each in seen)
        return seen

    def leave(self, episodes, keep: bool) -> None:
        """Release episodes."""
        self.inner.leave(episodes, keep)

    def take_counts(self) -> dict[str, float]:
        """Return the environment's counts."""
        return self.inner.take_counts()


class Rollouts:
    """Timed rollouts on the engine of a run."""

    def __init__(self, run, args: argparse.Namespace):
        import torch

        self.run, self.sampler, self.args = run, run.sampler, args
        self.agents = self.sampler.environment
        # Stop tokens must not end responses, neither in the engine nor in the parser of its responses.
        self.sampler.engine.stop, self.agents.ends = torch.zeros(0, dtype=torch.int64), set()
        self.watched, self.names = Watched(self.sampler.engine), 0

    def plan(self, step: int, episodes: int):
        """Return the plan of a rollout with `episodes` prompts and one sample each; `step` seeds all random numbers."""
        plan = self.sampler.plan(step, 0, episodes, self.sampler.engine.version)
        return replace(plan, samples=1, key=(step, step))

    def time(self, plan, environment=None) -> dict:
        """Run a rollout; return the seconds of the rollout, the engine, the tools, and the slowest episode."""
        from spmdrl.tracking.metrics import Timer

        self.names += 1
        plan = replace(plan, name=f"benchmark/{self.names}")
        self.watched.clear()
        began = time.perf_counter()
        self.sampler.environment = environment or self.agents
        done = self.sampler.rollout(plan, Timer())
        wall = time.perf_counter() - began
        assert len(done.episodes) == len(plan.prompts)
        for e in done.episodes:
            made = [len(each) for each in e.segments if each.sampled]
            assert e.finish == "stop" and made == [self.args.tokens] * self.args.turns, (e.finish, made)
        tools = {(e.position, e.sample): e.parts["tools"] for e in done.episodes}
        own = {key: tools[key] + self.watched.own[key] for key in tools}
        slowest = max(own, key=lambda key: own[key])
        return {
            "wall_s": wall,
            "engine_s": self.watched.busy,
            "busy": self.watched.busy / wall,
            "polls": self.watched.polls,
            "tools_s": sum(tools.values()),
            "slowest": slowest[0],
            "slowest_s": own[slowest],
            "slowest_tools_s": tools[slowest],
        }

    def sides(self, rounds: int) -> dict[str, list[dict]]:
        """Run the program and lockstep with parallel tools in turns, then lockstep with sequential tools once."""
        out: dict[str, list[dict]] = {"own": [], "side by side": [], "one after another": []}
        count = self.args.episodes
        self.time(self.plan(0, min(8, count)))
        for i in range(rounds):
            plan = self.plan(1 + i, count)
            out["own"].append(self.time(plan))
            out["side by side"].append(self.time(plan, Barrier(self.agents, count, False)))
        out["one after another"].append(self.time(self.plan(1, count), Barrier(self.agents, count, True)))
        return out

    def alone(self, rounds: int) -> list[dict]:
        """Run a few episodes concurrently, and then the slowest of them alone."""
        rows = []
        for i in range(rounds):
            plan = self.plan(100 + i, self.args.few)
            row = self.time(plan)
            place = row["slowest"]
            single = self.time(replace(plan, prompts=[plan.prompts[place]], first_position=place))
            rows.append(row | {"alone_s": single["wall_s"], "ratio": row["wall_s"] / row["slowest_s"]})
        return rows


def compared(sides: dict[str, list[dict]], one_s: float, args: argparse.Namespace) -> dict[str, float]:
    """Return the figures of all sides. one_s: seconds in which the engine samples a single episode that runs alone."""
    own, beside, serial = sides["own"], sides["side by side"], sides["one after another"]
    pairs = list(zip(own, beside, strict=True))
    mean_tools = statistics.mean(row["tools_s"] for row in own) / args.episodes
    return {
        "wall_s": statistics.median(row["wall_s"] for row in own),
        "engine_s": statistics.median(row["engine_s"] for row in own),
        "busy": statistics.median(row["busy"] for row in own),
        "tool_share": mean_tools / (mean_tools + one_s),
        "lockstep_waits": statistics.median(1 - row["busy"] for row in beside),
        "against_side_by_side": statistics.median(b["wall_s"] / a["wall_s"] for a, b in pairs),
        "bound_of_that": statistics.median(b["wall_s"] / max(b["engine_s"], a["slowest_s"]) for a, b in pairs),
        "against_one_after_another": serial[0]["wall_s"] / own[0]["wall_s"],
    }


def flags(folder: Path, args: argparse.Namespace) -> list[str]:
    """Write the model, the rows and the environment of a run into a folder; return the run's flags."""
    sizes = QUICK_SIZES if args.quick else SIZES
    random_model(folder / "model", "Qwen2", 0, **sizes, max_position_embeddings=256)
    (folder / "tools.py").write_text(ENVIRONMENT)
    (folder / "template.jinja").write_text(TEMPLATE)
    rows = [json.dumps({"prompt": "go:", "answer": str(i)}) for i in range(args.episodes)]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    settings = {"median": args.median, "spread": SPREAD, "turns": args.turns}
    lines = [f"environment: {folder / 'tools.py'}:Tools", f"settings: {json.dumps(settings)}"]
    lines += [f"turn_tokens: {args.tokens}", "workers: 2"]
    (folder / "environment.yaml").write_text("\n".join(lines) + "\n")
    named = {
        "env": folder / "environment.yaml",
        "model.path": folder / "model",
        "data.train": folder / "rows.jsonl",
        "data.prompt-column": "prompt",
        "data.answer-column": "answer",
        "data.chat-template": folder / "template.jinja",
        "reward.function": "environment",
        "rollout.engine": "hf",
        "rollout.max-sequences": args.sequences,
        "rollout.max-prompt-tokens": 16,
        "rollout.max-new-tokens": 200,
        "run.dir": folder / "run",
        "run.device": "cpu",
        "eval.every": 0,
        "checkpoint.at-end": "false",
        "tracking.trackers": "jsonl",
        "tracking.console": "plain",
    }
    return [word for name, value in named.items() for word in (f"--{name}", str(value))]
