"""Values of a critic, and log p with tokens divided over two ranks, of tiny models; each on ranks of its own.

These run where no engine does, beside `tests/engines/family_probe.py`, which writes the sequences that they read.
"""

from pathlib import Path
from typing import Any

import torch

from tests.ranks.cases import config
from tests.ranks.harness import RankError, run_ranks


def batch_of(rows: list[dict[str, Any]]) -> Any:
    """Build the batch of a record's rows."""
    from spmdrl.data.episode import episode_of
    from spmdrl.data.pack import from_episodes

    episodes = []
    for i, row in enumerate(rows):
        prompt, tokens = row["prompt"], row["tokens"]
        mask = torch.tensor([False] * len(prompt) + [True] * len(tokens))
        logp = torch.tensor([0.0] * len(prompt) + row["trainer"])
        episodes.append(episode_of(i, 0, i, torch.tensor(prompt + tokens), mask, logp, 0))
    return from_episodes(episodes)


def divided(world: Any, folder: str, rows: list[dict[str, Any]]) -> list[float]:
    """Return log p of all sampled tokens, by ranks that divide the tokens of a pack."""
    from spmdrl.policy.fsdp.policy import FsdpPolicy
    from spmdrl.policy.self_check import choose_form

    policy = FsdpPolicy(config(model={"path": folder}, parallel={"sp": world.sp_size}), world, 1)
    choose_form(policy, "policy", f"--model.path {folder}", lambda line: None)
    batch = batch_of(rows)
    return policy.logprobs(batch, 1.0)[0][batch.token["mask"]].tolist()


def valued(world: Any, folder: str, rows: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Return the values of all sampled tokens by a critic with random weights in its head, and these weights."""
    from spmdrl.policy.fsdp.policy import FsdpPolicy
    from spmdrl.policy.self_check import choose_form

    policy = FsdpPolicy(config(model={"path": folder}), world, 1, head="value")
    choose_form(policy, "critic", f"--model.path {folder}", lambda line: None)
    weight = policy.model.hf.score.weight
    with torch.no_grad():
        weight.to_local().copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    batch = batch_of(rows)
    return policy.values(batch)[batch.token["mask"]].tolist(), weight.to_local().flatten().tolist()


def ulysses_error(folder: str, rows: list[dict[str, Any]], reference: list[float]) -> float | str:
    """Return the largest difference of log p on two ranks from the reference, or why it is refused."""
    try:
        found = run_ranks(divided, 2, folder, rows, sp=2)[0]
    except RankError as error:
        return reason(error)
    return max(abs(a - b) for a, b in zip(found, reference, strict=True))


def critic_error(folder: str, rows: list[dict[str, Any]]) -> float | str:
    """Return the largest difference of a critic's values from transformers' states times its head, or the refusal."""
    from transformers import AutoModel

    try:
        [(found, weight)] = run_ranks(valued, 1, folder, rows)
    except RankError as error:
        return reason(error)
    # By the folder's own class, of which a classifier is the same transformer.
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    head, seen = torch.tensor(weight), []
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row["prompt"] + row["tokens"]])
            states = model(input_ids=ids, use_cache=False).last_hidden_state[0]
            # A value is read before its token.
            seen.append(states[len(row["prompt"]) - 1 : -1] @ head)
    return (torch.tensor(found) - torch.cat(seen)).abs().max().item()


def reason(error: RankError) -> str:
    """Return the first line of a rank's error, without the rank."""
    line = next(line for line in str(error).splitlines() if line)
    return line.partition(": ")[2].replace(str(Path.cwd()), "")
