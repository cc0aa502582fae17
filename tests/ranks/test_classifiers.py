"""Reward models that a file describes: scores as of plain transformers, over ranks, backends and placements alike."""

import json
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from spmdrl.config.schema import ParallelConfig
from spmdrl.data.episode import episode_of
from spmdrl.data.prompts import Prompt, PromptSet
from spmdrl.hub.resolve import resolve
from spmdrl.hub.tokenizer import load_tokenizer
from spmdrl.policy.models import build_models
from spmdrl.rl.compose import compose
from spmdrl.rl.reading import reading_of
from spmdrl.rl.score import score
from spmdrl.spmd.exchange import all_gather_rows
from spmdrl.spmd.mesh import world_from_group
from spmdrl.spmd.seeds import generator_for
from tests.ranks.cases import config, group_of, packed
from tests.ranks.demo import metrics, train_demo, untimed
from tests.ranks.harness import RankError, run_ranks
from tests.ranks.test_placement import same, split, split_demo
from tests.unit.reward_folders import TEMPLATE, bpe, classifier, said, written

NAMES = ["helpful", "short", "right"]
WEIGHTS = {"short": -0.5, "helpful": 2.0}
ANSWERS = ["one plus two\n\nis three.", "\n\nabc\n\n\n\ncab\n\nso 3", "x", "reverse 日本🙂\n\nfirst, then.\n\n"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A policy with a chat template, and reward models with its tokens and with their own."""
    from transformers import Qwen2ForCausalLM

    root = tmp_path_factory.mktemp("models")
    ours = bpe(TEMPLATE, 300)
    theirs = bpe(TEMPLATE.replace("'|>'", "'|> '").replace("assistant|>'", "assistant|> '"), 280)
    made = {"three": classifier(root / "three", ours, NAMES), "steps": classifier(root / "steps", ours, 2, "Token")}
    made |= {"other": classifier(root / "other", theirs, NAMES, seed=1)}
    made |= {"other steps": classifier(root / "other_steps", theirs, 2, "Token", seed=2)}
    Qwen2ForCausalLM.from_pretrained(made["three"], dtype=torch.float64).save_pretrained(root / "policy")
    ours.save_pretrained(root / "policy")
    return made | {"policy": str(root / "policy")}


def asked() -> PromptSet:
    """Chats and plain text, with indices that are not places."""
    chat = [Prompt(7 + i, [], None, "", {}, "", [{"role": "user", "content": f"say {i}"}], "", True) for i in range(3)]
    return PromptSet([*chat, Prompt(21, [], None, "", {}, "", "plain: ", "it ", False)], 0, "")


def episodes(folder: str):
    tokenizer, out = load_tokenizer(Path(folder)), []
    for position, prompt in enumerate(asked().prompts):
        text = f"prompt {prompt.index}: "
        for sample in range(3):
            said_here = ANSWERS[(position + sample) % len(ANSWERS)]
            reply = [*tokenizer(said_here).input_ids, tokenizer.eos_token_id]
            before = tokenizer(text).input_ids
            mask = torch.tensor([False] * len(before) + [True] * len(reply))
            reward = generator_for(3, position, sample).random()
            tokens, zeros = torch.tensor(before + reply), torch.zeros(len(mask))
            out.append(episode_of(prompt.index, sample, position, tokens, mask, zeros, reward=reward))
    return out


def scored(world, folders: dict, file: str, backend: str, axes: dict):
    """Returns of each sample position, sample, reward, parts and steps; the process rewards of tokens; the metrics."""
    if axes:
        world = world_from_group(ParallelConfig(**axes), 1, torch.device("cpu"), world.rank, timedelta(seconds=60))
    # Megatron's optimizer has no float64.
    dtype = "float64" if backend == "fsdp" else "float32"
    sections = {"model": {"path": folders["policy"], "dtype": dtype}, "reward": {"model": file, "model_coef": 0.5}}
    more = {"backend": backend} | ({"max_tokens_per_microbatch": 64} if not axes else {})
    cfg = config(**sections, parallel=axes, policy=more, algo={"advantage": "grpo"})
    algo = compose(cfg)
    models = build_models(cfg, world, algo.needs)
    models.reading = reading_of(cfg, models.labels, load_tokenizer(resolve(folders["policy"])), asked())
    batch = packed(cfg, world, episodes(folders["policy"]))
    stats = score(batch, models, algo, cfg, world.data_peers)
    names = ["position", "sample", "reward", *sorted(n for n in batch.seq if n.startswith("part/"))]
    columns = [batch.seq[n].double() for n in [*names, *(["steps"] if "steps" in batch.seq else [])]]
    rows = torch.cat(all_gather_rows(torch.stack(columns, 1), group_of(world)))
    process = []
    if "process" in batch.token:
        place = torch.arange(batch.n_tokens) - batch.cu_seqlens[batch.seq_index]
        columns = [batch.per_token(batch.seq[n]).double() for n in ("position", "sample")]
        columns += [place.double(), batch.token["process"]]
        told = torch.stack(columns, 1)[batch.token["ends"] != 0]
        process = sorted(map(tuple, torch.cat(all_gather_rows(told, group_of(world))).tolist()))
        algo.advantages(batch, world.data_peers)
    values = stats.reduce(lambda x, op: x) if world.size == 1 else {}
    return sorted(map(tuple, rows.tolist())), process, values


def by_hand(folders: dict, model: str, own: bool):
    """Yields each episode, its text, the tokens that the model reads by plain transformers, and those before it."""
    tokenizer, prompts = load_tokenizer(Path(folders[model])), {p.index: p for p in asked().prompts}
    for e in episodes(folders["policy"]):
        text = ANSWERS[(e.position + e.sample) % len(ANSWERS)]
        if not own:
            yield e, text, e.tokens.tolist(), tokenizer(f"prompt {e.prompt}: ").input_ids
            continue
        prompt = prompts[e.prompt]
        if prompt.chat:
            turns = [*prompt.content, {"role": "assistant", "content": text}]
            rendered = tokenizer.apply_chat_template(turns, tokenize=False)
            assert rendered == f"<|user|> say {e.prompt - 7}<|end|><|assistant|> {text.strip()}<|end|>"
            made = tokenizer.apply_chat_template(turns, return_dict=False)
            yield e, text, made, tokenizer(f"<|user|> say {e.prompt - 7}<|end|><|assistant|>").input_ids
        else:
            yield e, text, tokenizer(f"plain: it {text}").input_ids, []


LAYOUTS = [
    (1, "fsdp", {}),
    (2, "fsdp", {}),
    (2, "fsdp", {"sp": 2}),
    (2, "megatron", {"tp": 2}),
    (2, "megatron", {"pp": 2}),
]


def close(rows, want, backend: str) -> None:
    within = 1e-6 if backend == "fsdp" else 1e-5
    torch.testing.assert_close(torch.tensor(rows), torch.tensor(want), rtol=within, atol=within)


@pytest.mark.parametrize("model", ["three", "other"])
def test_parity_scores_of_labels_are_those_of_hugging_face(model, folders, tmp_path):
    file, want = written(tmp_path / "rm.yaml", path=folders[model], weights=WEIGHTS), []
    for e, _, tokens, _ in by_hand(folders, model, model == "other"):
        score_L = said(folders[model], tokens)
        if model == "three":
            # transformers would pass over an end token that is padding; the last sampled one is read.
            assert tokens[-1] == 2
        helpful, short, right = score_L.tolist()
        reward = e.reward + 0.5 * (2 * helpful - 0.5 * short)
        want.append((float(e.position), float(e.sample), reward, helpful, right, short))
    for n, backend, axes in LAYOUTS:
        for rows, process, values in run_ranks(scored, n, folders, file, backend, axes):
            close(rows, sorted(want), backend)
            assert not process
            if values:
                mean = sum(row[3] for row in want) / len(want)
                assert values["reward/model/helpful"] == pytest.approx(mean, rel=1e-6)


def last_of(tokenizer, tokens: list[int], begin: int, end: str) -> int:
    """The first token with which the text from token `begin` on, without what stands around it, begins with `end`."""
    for i in range(begin, len(tokens)):
        if tokenizer.decode(tokens[begin : i + 1]).lstrip().startswith(end):
            return i
    raise AssertionError(end)


STEPS = {
    ANSWERS[0]: ["one plus two\n\n", "one plus two\n\nis three."],
    ANSWERS[1]: ["abc\n\n\n\n", "abc\n\n\n\ncab\n\n", "abc\n\n\n\ncab\n\nso 3"],
    ANSWERS[2]: ["x"],
    ANSWERS[3]: ["reverse 日本🙂\n\n", "reverse 日本🙂\n\nfirst, then.\n\n"],
}
"""Texts up to the end of each step, without white space before."""


@pytest.mark.parametrize("model", ["steps", "other steps"])
def test_parity_scores_of_steps_are_those_of_hugging_face(model, folders, tmp_path):
    file = written(tmp_path / "rm.yaml", path=folders[model], steps="\n\n", reduce="product")
    theirs, ours = load_tokenizer(Path(folders[model])), load_tokenizer(Path(folders["policy"]))
    rows, tokens_of = [], []
    for e, text, tokens, before in by_hand(folders, model, model == "other steps"):
        right_T = torch.softmax(said(folders[model], tokens), 1)[:, 1]
        found, mine, begin = [], e.tokens.tolist(), len(ours(f"prompt {e.prompt}: ").input_ids)
        for i, end in enumerate(STEPS[text]):
            shown = end
            if model == "other steps" and e.prompt == 21:
                shown = f"plain: it {'' if not text.startswith(chr(10)) else chr(10) * 2}{end}"
            elif model == "other steps" and text.rstrip() != text:
                shown = end if i < len(STEPS[text]) - 1 else end.rstrip()
            at = last_of(theirs, tokens, len(before), shown)
            found.append(right_T[at].item())
            last = i == len(STEPS[text]) - 1
            # The end token is of the last step.
            sampled = len(mine) - 1 if last else last_of(ours, mine, begin, end)
            tokens_of.append((float(e.position), float(e.sample), float(sampled), found[-1]))
        product, mean = torch.tensor(found).prod().item(), sum(found) / len(found)
        rows.append((float(e.position), float(e.sample), e.reward + 0.5 * product, mean, float(len(found))))
    for n, backend, axes in LAYOUTS[:2] + LAYOUTS[-1:]:
        for got, process, _ in run_ranks(scored, n, folders, file, backend, axes):
            close(got, sorted(rows), backend)
            close(process, sorted(tokens_of), backend)


def test_what_is_too_long_is_named(folders, tmp_path):
    config_json = Path(folders["three"]) / "config.json"
    short = tmp_path / "short"
    short.mkdir()
    for file in Path(folders["three"]).iterdir():
        (short / file.name).write_bytes(file.read_bytes())
    told = json.loads(config_json.read_text()) | {"max_position_embeddings": 16}
    (short / "config.json").write_text(json.dumps(told))
    file = written(tmp_path / "rm.yaml", path=str(short), weights=WEIGHTS)
    with pytest.raises(
        RankError, match=r"prompt \d+, sample \d has \d+ tokens for a model that reads 16 .*: lower --rollout.max-new"
    ):
        run_ranks(scored, 1, folders, file, "fsdp", {})


def demo_files(folder: Path) -> dict[str, dict]:
    """Sections of demos whose policy is `tiny`, which reads letters: names and own tokens; steps of letters."""
    letters = load_tokenizer(resolve("tiny"))
    names = classifier(folder / "names", bpe(), NAMES)
    steps = classifier(folder / "steps", letters, 1)
    named = written(folder / "names.yaml", path=names, weights=WEIGHTS)
    process = written(folder / "steps.yaml", path=steps, steps="a", reduce="mean")
    parts = {"advantage": "gdpo", "part_weights": ("helpful=1", "score=0.5")}
    reward = {"function": letters_right(folder), "model_coef": 0.1}
    return {
        "names": {"reward": reward | {"model": named}, "algo": parts},
        "steps": {"reward": reward | {"model": process}, "algo": {"advantage": "grpo_process"}},
    }


def letters_right(folder: Path) -> str:
    """The file of a reward that gives a part: how many letters a response has."""
    file = folder / "letters.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    right = float(solution_str == str(ground_truth))\n"
        "    return {'score': right, 'letters': float(len(solution_str))}\n"
    )
    return str(file)


@pytest.mark.parametrize("which", ["names", "steps"])
def test_layout_a_run_learns_alike_where_other_ranks_score(which, tmp_path):
    sections = demo_files(tmp_path)[which] | {"run": {"steps": 2}, "eval": {"every": 1, "prompts": 4}}
    run_ranks(train_demo, 1, str(tmp_path / "one"), sections)
    got = run_ranks(split_demo, 4, str(tmp_path / "run"), split(1, 1), sections)
    assert "RemotePolicy" in got[2]["models"].values()
    one, other = (untimed(metrics(tmp_path / name)) for name in ("one", "run"))
    for a, b in zip(one, other, strict=True):
        same(a, b, a.keys() - {"microbatches"}, 1e-5)
    first = one[0]
    samples = [json.loads(line) for line in (tmp_path / "one" / "samples.jsonl").read_text().splitlines()]
    assert first["grad_norm"] > 0 and samples
    if which == "names":
        assert {f"reward/part/{name}" for name in NAMES} | {f"eval/model/{name}" for name in NAMES} <= first.keys()
        want = 2 * first["reward/model/helpful"] - 0.5 * first["reward/model/short"]
        assert first["reward/model"] == pytest.approx(want, abs=1e-5)
        for row in samples:
            assert row["model"] == pytest.approx(2 * row["model/helpful"] - 0.5 * row["model/short"], abs=1e-5)
    else:
        for row in samples:
            # A step is a piece that holds more than the letter that ends it.
            pieces = [piece for piece in row["completion"].split("a") if piece.strip()]
            assert row["model/steps"] == max(1, len(pieces)), row
    there = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    told = {(row["step"], row["index"], row["sample"]): row for row in samples}
    met = [(told[key], row) for row in there if (key := (row["step"], row["index"], row["sample"])) in told]
    assert met and all(row["model"] for row, _ in met)
    for a, b in met:
        assert a == pytest.approx(b, abs=1e-5) and a["part/letters"] == len(a["completion"])
