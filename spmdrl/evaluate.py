"""Accuracy and pass@k of a model on a prompt set, during training or on its own.

python -m spmdrl.evaluate --config configs/gsm8k_grpo.yaml --model.path runs/gsm8k/checkpoints/latest/model
"""

import math

import torch

from spmdrl.config.load import load_or_exit
from spmdrl.config.schema import Config
from spmdrl.environment import prepare


def evaluation_round(cfg: Config, prompts: list, version: int, name: str):
    """The round that evaluates: prompts in order, draws keyed by the seed alone, so two evaluations are comparable."""
    from spmdrl.collect import Round

    return Round(
        f"eval/{version}/{name}",
        prompts,
        cfg.eval.samples,
        (cfg.run.seed, 0x45564C),
        version,
        cfg.rollout.max_new_tokens,
        cfg.eval.temperature,
        1.0,
        cfg.rollout.assignment,
    )


def score_round(round_, engine, grader, tokenizer, world) -> torch.Tensor:
    """float64 [n, 2] of this rank: (position, score) of every sample it graded. Collective over an engine's ranks."""
    from spmdrl.collect import collect
    from spmdrl.tracking.metrics import Timer

    done = collect(round_, engine, grader, tokenizer, world, Timer())
    return torch.tensor([[t.position, t.reward] for t in done], dtype=torch.float64).reshape(-1, 2)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of P(at least one of k samples is right) from n samples (https://arxiv.org/abs/2107.03374)."""
    if n - correct < k:
        return 1.0
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def accuracy(scores_n2: torch.Tensor, round_, group, device) -> dict[str, float]:
    """`eval/accuracy` (share of samples with score >= 1), `eval/score`, and pass@k over all ranks. Collective."""
    from spmdrl.spmd.exchange import all_gather_rows

    rows = torch.cat([part.cpu() for part in all_gather_rows(scores_n2.to(device), group)])
    right = (rows[:, 1] >= 1.0).double()
    prompts, samples = len(round_.prompts), round_.samples
    per_prompt = torch.zeros(prompts, dtype=torch.float64).index_add_(0, rows[:, 0].long(), right)
    out = {"eval/accuracy": right.mean().item(), "eval/score": rows[:, 1].mean().item()}
    k = 2
    while k <= samples:
        out[f"eval/pass@{k}"] = sum(pass_at_k(samples, int(c), k) for c in per_prompt.tolist()) / prompts
        k *= 2
    return out


def main(argv: list[str] | None = None) -> None:
    """Evaluate `--model.path` on `--data.eval` and print one JSON object."""
    import dataclasses

    loaded = load_or_exit(argv, "python -m spmdrl.evaluate")
    cfg = loaded.config
    # The run folder of an evaluation is its own; nothing is trained, so nothing is saved.
    cfg = dataclasses.replace(
        cfg,
        eval=dataclasses.replace(cfg.eval, every=1),
        run=dataclasses.replace(cfg.run, name=f"{cfg.run.name}-eval", dir=""),
    )
    prepare()
    from spmdrl.run import open_run

    with open_run(dataclasses.replace(loaded, config=cfg)) as run:
        if run is not None:
            with run.memory.rollout_phase():
                run.evaluate(0)
            if run.world.is_first:
                import json

                print(json.dumps({"model": cfg.model.path, "data": cfg.data.eval} | run.eval_metrics), flush=True)


if __name__ == "__main__":
    main()
