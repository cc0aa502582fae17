"""One run of RL on one tiny model, written down so that a process that never saw the run can check it.

    python -m tests.engines.family_probe OUT '{"engine": "hf"}' NAME=FOLDER ...

Each model is a process of its own, forked where torch and the engine are imported. It runs two steps of `spmdrl.train`
and writes OUT/NAME.json: where it stopped and why, the lines of the start, and for each version of the weights the
folder that a checkpoint would hold, with sampled and greedy tokens and the log p that the engine and the trainer gave
them. OUT/NAME.gradient.safetensors holds the gradient of the summed log p of all sampled tokens for the last version.
"""

import json
import logging
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

PROMPTS = (3, 7, 5)
"""Tokens of the prompts, unlike so that rows end apart."""
NEW = 9
LIMIT = 150
"""Seconds for one model."""


def settings(folder: str, out: Path, changes: dict[str, Any]) -> Any:
    """Return the settings of a run of two steps, whose second step samples from weights that an update changed."""
    from spmdrl.config.schema import Config
    from tests.engines.probe import replaced

    cfg = replaced(
        Config(),
        run={"dir": str(out), "steps": 2, "device": "cpu", "timeout": 60.0},
        model={"path": folder},
        optimizer={"lr": 1e-2},
        rollout={
            "engine": changes.pop("engine"),
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "max_prompt_tokens": 24,
            "max_new_tokens": NEW,
        },
        reward={"function": str(out / "reward.py")},
        eval={"every": 1},
        checkpoint={"at_end": False},
        tracking={"trackers": ("jsonl",)},
    )
    return replaced(cfg, **changes)


class Lines(logging.Handler):
    """Keeps the lines that a run writes to its log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line."""
        self.lines.append(record.getMessage())


def measure(run: Any, folder: Path, record: dict[str, Any]) -> None:
    """Sample and score with the weights of this version, and keep them as a checkpoint would."""
    from spmdrl.data.episode import episode_of
    from spmdrl.data.pack import from_episodes
    from spmdrl.engines.engine import Request

    policy, engine = run.models.policy, run.memory.engine
    policy.save(folder)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 47, (n,), generator=generator).tolist() for n in PROMPTS]
    # Samples of unlike lengths: rows of a batch then end apart.
    asked = [(i, k, 0.0 if k == 2 else 1.0, NEW - 2 * i - k) for i in range(len(prompts)) for k in range(3)]
    for i, k, temperature, new in asked:
        engine.submit(Request((i, k), prompts[i], 11 * i + k, policy.version, new, temperature))
    done: dict = {}
    for _ in range(200):
        done |= {c.key: c for c in engine.poll()}
        if len(done) == len(asked):
            break
    episodes = []
    for i, k, _, _ in asked:
        made = done[i, k]
        tokens = torch.tensor(prompts[i] + made.tokens)
        mask = torch.tensor([False] * len(prompts[i]) + [True] * len(made.tokens))
        logp = torch.tensor([0.0] * len(prompts[i]) + made.logp)
        episodes.append(episode_of(i, k, i, tokens, mask, logp, made.version))
    batch = from_episodes(episodes)
    mask = batch.token["mask"]
    trainer = policy.logprobs(batch, 1.0)[0].cpu()[mask].split([len(done[i, k].tokens) for i, k, _, _ in asked])
    record["rounds"].append(
        {
            "weights": str(folder / "model"),
            "rows": [
                {
                    "prompt": prompts[i],
                    "tokens": done[i, k].tokens,
                    "engine": done[i, k].logp,
                    "trainer": own.tolist(),
                    "greedy": temperature == 0,
                }
                for (i, k, temperature, _), own in zip(asked, trainer, strict=True)
            ],
        }
    )
    run.batch_of_probe = batch


def gradient(run: Any, file: Path) -> None:
    """Write the gradient of the summed log p of the measured tokens."""
    from safetensors.torch import save_file

    policy = run.models.policy
    policy.zero_grad()
    (ran,) = policy._passes([run.batch_of_probe])
    policy._forward(run.batch_of_probe, ran, 1.0)[0].sum().backward()
    named = {n: p.grad.to_local().clone() for n, p in policy.named_weights() if p.grad is not None}
    policy.zero_grad()
    save_file(named, file)


def probe(name: str, folder: str, out: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Run one model; a stage that fails ends it, and its error is kept under the stage's name."""
    from benchmarks._models import REWARD
    from spmdrl.rl.build import build_run
    from spmdrl.session.session import Session
    from spmdrl.spmd.mesh import start
    from spmdrl.tracking.logs import setup_logging
    from spmdrl.tracking.metrics import Timer
    from spmdrl.train import train

    home = out / name
    home.mkdir(parents=True, exist_ok=True)
    (home / "reward.py").write_text(REWARD)
    lines, record = Lines(), {"rounds": [], "stage": "settings"}
    logging.getLogger("spmdrl").addHandler(lines)
    try:
        cfg = settings(folder, home, dict(changes))
        setup_logging(home, 0)
        world = start(cfg.parallel, cfg.rollout.tp, "cpu", 60.0)
        record["stage"] = "start"
        run = build_run(Session(cfg, world, Timer()))
        record["stage"], record["form"] = "training", run.models.policy.form
        run.evaluate = lambda step, force=False: measure(run, home / f"weights_{len(record['rounds'])}", record)
        train(run)
        if not cfg.lora.rank:
            record["stage"] = "gradient"
            gradient(run, out / f"{name}.gradient.safetensors")
        record["stage"] = ""
    except BaseException as error:
        record["error"] = f"{type(error).__name__}: {error}"
        record["traceback"] = traceback.format_exc()
    record["lines"] = lines.lines
    return record


def preload(engine: str) -> None:
    """Import what every model needs, once."""
    from spmdrl.session.environ import prepare

    prepare()
    import transformers  # noqa: F401

    import spmdrl.rl.build  # noqa: F401
    import spmdrl.train  # noqa: F401
    from spmdrl.policy.fsdp import policy  # noqa: F401

    if engine == "vllm":
        import spmdrl.engines.vllm.engine  # noqa: F401


def main() -> None:
    """Probe the models that the command line names, one process after the other."""
    out, changes = Path(sys.argv[1]), json.loads(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    preload(changes["engine"])
    for word in sys.argv[3:]:
        name, _, folder = word.partition("=")
        child = os.fork()
        if child == 0:
            signal.alarm(LIMIT)
            sink = os.open(out / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(sink, 1), os.dup2(sink, 2)
            record = probe(name, folder, out, changes)
            (out / f"{name}.json").write_text(json.dumps(record))
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
