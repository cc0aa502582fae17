"""Checks what `tests/engines/family_probe.py` wrote against plain transformers, one sequence at a time.

    python -m tests.engines.family_checks OUT [NAME ...]

This process never builds an engine or a policy of ours, so nothing that they change in a class reaches the reference.
"""

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from spmdrl.session.engine_check import EXACT

CLOSE = 2e-4
"""Largest difference of two log p in float32 that rounding explains."""
CLOSE_ENGINE = EXACT
"""The same of an engine, as the check at start has it: vLLM holds some parameters in 16 bits (the slopes of xIELU)."""
CLOSE_GRADIENT = 2e-3
"""Largest relative difference (L2 over all parameters) of two gradients in float32."""


@dataclass
class Facts:
    """Differences of one run from plain transformers; None: not measured."""

    stage: str = ""
    """Where the run stopped; empty if it ended."""
    error: str = ""
    form: str = ""
    """Form in which sequences run (`policy/heads.py`)."""
    trainer: float | None = None
    """Largest |logp of the trainer - logp of transformers| over versions of the weights."""
    engine: float | None = None
    """The same of the engine."""
    greedy: bool | None = None
    """Every greedy token is one that transformers finds likeliest, but for rounding."""
    gradient: float | None = None
    """Relative difference of the gradient of the summed log p."""
    moved: float | None = None
    """Largest difference of log p before and after the updates: an export that never changes shows here."""
    lines: list[str] = field(default_factory=list)
    """Lines of the start that say how the model runs."""

    def wrong(self) -> list[str]:
        """Name the numbers that differ by more than rounding; an engine that was refused for them is not wrong."""
        bounds = {"trainer": CLOSE, "gradient": CLOSE_GRADIENT} | ({} if self.error else {"engine": CLOSE_ENGINE})
        found = [name for name, bound in bounds.items() if not _within(getattr(self, name), bound)]
        found += ["greedy"] if self.greedy is False and not self.error else []
        return found + (["export"] if self.moved is not None and self.moved < CLOSE else [])


def _within(value: float | None, bound: float) -> bool:
    return value is None or value <= bound


def plain(folder: str) -> Any:
    """Load a folder by transformers alone, with plain attention, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    # A reference of a gradient has to train the padding token's embedding, too.
    model.get_input_embeddings().padding_idx = None
    return model.eval()


def logp_of(model: Any, prompt: list[int], tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log p [n, V] at the places of the tokens, and that of each token [n]."""
    ids = torch.tensor([prompt + tokens])
    logits = model(input_ids=ids, use_cache=False).logits[0].float()
    logp = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return logp, logp.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def reference_logp(folder: str, rows: list[dict[str, Any]]) -> list[float]:
    """Return log p of all sampled tokens of some rows by plain transformers."""
    model = plain(folder)
    with torch.no_grad():
        return [x for row in rows for x in logp_of(model, row["prompt"], row["tokens"])[1].tolist()]


def check(record: dict[str, Any], gradient: Path) -> Facts:
    """Compare one model's record with plain transformers."""
    facts = Facts(record["stage"], record.get("error", ""), record.get("form", ""))
    facts.lines = [line for line in record["lines"] if "self-check" in line]
    before = None
    for round in record["rounds"]:
        model = plain(round["weights"])
        off: dict[str, float] = {"engine": 0.0, "trainer": 0.0}
        greedy, seen = True, []
        with torch.no_grad():
            for row in round["rows"]:
                whole, mine = logp_of(model, row["prompt"], row["tokens"])
                for who in off:
                    off[who] = max(off[who], (torch.tensor(row[who]) - mine).abs().max().item())
                if row["greedy"]:
                    greedy &= bool((whole.max(1).values - mine < CLOSE).all())
                seen.append(logp_of(model, record["rounds"][0]["rows"][0]["prompt"], [5, 9, 4])[1])
        facts.engine, facts.trainer = max(facts.engine or 0.0, off["engine"]), max(facts.trainer or 0.0, off["trainer"])
        facts.greedy = greedy and facts.greedy is not False
        if before is None:
            before = seen[0]
        else:
            facts.moved = (seen[0] - before).abs().max().item()
    if gradient.is_file() and record["rounds"]:
        facts.gradient = gradient_error(record["rounds"][-1], gradient)
    return facts


def gradient_error(round: dict[str, Any], file: Path) -> float:
    """Return the relative difference of the gradient of all rows' summed log p, over all parameters that have one."""
    from safetensors.torch import load_file

    model, found = plain(round["weights"]), load_file(file)
    for row in round["rows"]:
        logp_of(model, row["prompt"], row["tokens"])[1].sum().backward()
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return relative(found, named)


def relative(found: dict[str, torch.Tensor], named: dict[str, torch.Tensor]) -> float:
    """Return the difference of a gradient from the right one `named`, as a share of its length."""
    if missing := {n for n, g in named.items() if g.abs().max() > 0} - set(found):
        raise AssertionError(f"no gradient of {sorted(missing)[:3]}")
    off = sum(((found[n] - g) ** 2).sum().item() for n, g in named.items() if n in found)
    return (off / sum((g**2).sum().item() for g in named.values())) ** 0.5


def checked(out: Path, name: str) -> Facts:
    """Check one model of a folder of records; a model whose process died has only its name."""
    file = out / f"{name}.json"
    if not file.is_file():
        return Facts("process", "the process died: see its log")
    return check(json.loads(file.read_text()), out / f"{name}.gradient.safetensors")


def main() -> None:
    """Print and write the facts of the records of a folder."""
    out = Path(sys.argv[1])
    names = sys.argv[2:] or sorted(file.stem for file in out.glob("*.log"))
    for name in names:
        try:
            facts = checked(out, name)
        except Exception as error:
            facts = Facts("reference", f"{type(error).__name__}: {error}")
        (out / f"{name}.facts").write_text(json.dumps(asdict(facts)))
        numbers = " ".join(
            f"{key} {value:.1e}" if isinstance(value, float) else f"{key} {value}"
            for key, value in asdict(facts).items()
            if key in ("trainer", "engine", "greedy", "gradient", "moved") and value is not None
        )
        verdict = "WRONG " + ",".join(facts.wrong()) if facts.wrong() else "ok"
        print(f"{name:20} {facts.stage:9} {facts.form:7} {verdict:24} {numbers} {facts.error[:160]}", flush=True)


if __name__ == "__main__":
    main()
