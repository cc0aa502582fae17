"""Defaults of the demo, which every other run replaces: its learning rates, its length of responses, its evaluation.

The demo is the model that ships here on a built-in task. The model keeps its learning rate and length on any rows, and
the tasks keep their length and evaluation with any model. The values of other runs stand below those of presets, files
and flags, and config.yaml records them.
"""

import json
from pathlib import Path

from spmdrl.config.begun import Begun
from spmdrl.config.fields import flag, get, leaves
from spmdrl.config.given import Entries, Given
from spmdrl.config.presets import PRESETS
from spmdrl.config.schema import OptimizerConfig

ORIGIN = "a run of your own"
DEMO_LR = OptimizerConfig.lr
LR, LORA_FACTOR = 1e-6, 10
"""Learning rate of all weights under reinforcement learning; adapters take about ten times that of all weights
(https://thinkingmachines.ai/blog/lora)."""
NEW_TOKENS = 1024
MANY = 1 << 30
CRITIC_LR = "1e-05"
"""Critics take about ten times the policy's, as in verl's examples (https://github.com/volcengine/verl)."""
SHIPPED = Path(__file__).resolve().parents[1] / "assets" / "tiny" / "config.json"
SHAPE = ("model_type", "hidden_size", "num_hidden_layers", "intermediate_size")


def own_layer(given: Entries, schema: type, begun: Begun) -> tuple[Entries, tuple[str, ...]]:
    """Return the defaults of a run that is not the demo, and a line about them, where it names none itself.

    given: entries of all files and flags; what they name is left to them. begun: of the run folder.
    """
    names, last = leaves(schema), {name: found.values or [] for name, found in given}
    data = last.get("data.train" if "data.train" in names else "data.eval", [])
    built_in = not any(data) or all(spec.startswith("builtin:") for spec in data)
    wanted: dict[str, str] = {}
    if not built_in and "rollout.max_new_tokens" in names and "data.train" in names and "data.eval" not in last:
        wanted |= {"data.eval": ""} | ({} if "eval.every" in last else {"eval.every": "0"})
    path = "".join(last.get("model.path", [])[-1:])
    if not is_shipped(path):
        if not built_in and "rollout.max_new_tokens" in names and "rollout.max_new_tokens" not in last:
            wanted["rollout.max_new_tokens"] = str(min(NEW_TOKENS, context_of(path) // 2))
        if (lr := _learning_rate(last, schema)) and "optimizer.lr" not in last:
            wanted["optimizer.lr"] = lr
        if "critic.lr" in names and "critic.lr" not in last and _has_critic(last):
            wanted["critic.lr"] = CRITIC_LR
    layer = begun.instead_of([(name, Given([value], ORIGIN)) for name, value in wanted.items()])
    shown = [f"{flag(name)} {' '.join(found.values or []) or 'none'}" for name, found in layer]
    whose = f"defaults of {ORIGIN}, of which the demo has others"
    line = f"{f'settings of {begun.path}' if begun.entries else whose}: {', '.join(shown)}"
    return layer, ((line,) if shown else ())


def _has_critic(last: dict[str, list[str]]) -> bool:
    """True where the advantage is one that reads values."""
    preset = PRESETS.get("".join(last.get("algo.preset", [])[-1:]))
    named = last.get("algo.advantage") or ([preset.settings["algo.advantage"]] if preset else [])
    return named[-1:] in (["gae"], ["turn_gae"])


def _learning_rate(last: dict[str, list[str]], schema: type) -> str:
    """Return the learning rate of a run that names none; empty where it is the schema's."""
    if "optimizer.lr" not in leaves(schema):
        return ""
    own = float(get(schema(), "optimizer.lr"))
    full = LR if own == DEMO_LR else own
    adapted = "".join(last.get("lora.rank", [])[-1:]) not in ("", "0")
    lr = full * LORA_FACTOR if adapted else full
    return "" if lr == own else f"{lr:g}"


def context_of(path: str) -> int:
    """Return the longest sequence that a model's config.json names, in tokens; much where there is no such folder."""
    try:
        config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config") or config
        lengths = [config.get(name) for name in ("max_position_embeddings", "n_positions")]
        return min((n for n in lengths if isinstance(n, int) and n > 0), default=MANY)
    except (OSError, ValueError, AttributeError):
        return MANY


def is_shipped(path: str) -> bool:
    """Return True for the model that ships here, and for a folder with a model of its shape, as runs of it leave."""
    if path in ("", "tiny"):
        return True
    try:
        told, own = (json.loads(file.read_text(encoding="utf-8")) for file in (Path(path) / "config.json", SHIPPED))
        return all(told.get(name) == own[name] for name in SHAPE)
    except (OSError, ValueError, AttributeError):
        return False
