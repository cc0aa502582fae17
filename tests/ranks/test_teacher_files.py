"""A teacher's likeliest tokens in files teach what the teacher does, on any layout; bad files are refused by name."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spmdrl.config.sft import SFTConfig
from spmdrl.hub.resolve import resolve
from spmdrl.session.session import Session
from spmdrl.sft import train
from spmdrl.supervised.sft import build_sft
from spmdrl.supervised.teacher import weights_digest
from spmdrl.tracking.metrics import Timer
from tests.ranks import given
from tests.ranks.cases import small_model
from tests.ranks.demo import metrics, untimed
from tests.ranks.harness import RankError, run_ranks
from tests.ranks.test_sft import first_rows, rows


def settings(folder: str, data: str, sections: dict) -> SFTConfig:
    """Settings of a job of four steps in float64."""
    base = given.small(folder, data, rows=12, template="chatml")
    more = dict(
        run={"steps": 4},
        model={"dtype": "float64"},
        optimizer={"lr": 1e-3},
        # Qwen2's norms go through float32, where shared prompts round otherwise: see test_shared_prompts.
        policy={"max_tokens_per_microbatch": 512, "share_prompts": False},
        eval={"every": 2},
    )
    return given.with_sections(SFTConfig(), base, more, sections)


def trained(world, folder: str, data: str, sections: dict, stop_after: int = 0) -> dict[str, torch.Tensor]:
    return given.trained(given.opened(world, settings(folder, data, sections), build_sft, stop_after), train)


def written(world, folder: str, data: str, sections: dict) -> None:
    Path(folder).mkdir(exist_ok=True)
    build_sft(Session(settings(folder, data, sections), world, Timer())).close()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Rows, a teacher of another width with a padded vocabulary, and its 8 likeliest tokens as two ranks wrote them."""
    home = tmp_path_factory.mktemp("made")
    data = home / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows(48)))
    teacher = small_model(home / "teacher", seed=5, hidden_size=48, vocab_size=64)
    told = {"teacher": {"path": teacher, "top_k": 8, "temperature": 2.0, "write": str(home / "files")}}
    run_ranks(written, 2, str(home / "run"), str(data), told)
    return str(data), teacher, str(home / "files")


def alike(got: dict, want: dict, rtol: float = 1e-10, atol: float = 1e-12) -> None:
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("divergence", [{"top_k": 8}, {"top_k": 5, "beta": 0.5}])
def test_layout_files_teach_what_the_teacher_teaches(divergence, made, tmp_path):
    """Written by two ranks. The five likeliest tokens are among the eight that were written."""
    data, teacher, files = made
    told = divergence | {"temperature": 2.0}
    (want,) = run_ranks(trained, 1, str(tmp_path / "live"), data, {"teacher": told | {"path": teacher}})
    more = {"teacher": told | {"read": files}, "checkpoint": {"at_end": False, "every": 2}}
    if divergence.get("beta"):
        # Written for other settings, under which the rows have the same tokens.
        more["data"] = {"train": (data,), "chat_template": "chatml", "rows_per_step": 12, "max_tokens": 300}
    (got,) = run_ranks(trained, 1, str(tmp_path / "files"), data, more)
    alike(got, want)
    live, stored = (untimed(metrics(tmp_path / name)) for name in ("live", "files"))
    for left, right in zip(live, stored, strict=True):
        assert left.keys() == right.keys()
        for name in left:
            assert left[name] == pytest.approx(right[name], rel=1e-9, abs=1e-12), name
    assert live[0]["divergence/mean"] > live[-1]["divergence/mean"] > 0 and "eval/nll" in live[0]
    if divergence["top_k"] < 8:
        return
    for other in run_ranks(trained, 2, str(tmp_path / "two"), data, more | {"parallel": {"sp": 2}}):
        alike(other, want, rtol=1e-7, atol=1e-9)
    run_ranks(trained, 1, str(tmp_path / "cut"), data, more, 3)
    (cut,) = run_ranks(trained, 1, str(tmp_path / "cut"), data, more)
    assert all(torch.equal(cut[name], value) for name, value in got.items())


def test_files_of_another_hand_teach_what_they_say(made, tmp_path):
    """The page's format, written with plain transformers: all tokens but one, unordered, without `rest`."""
    from transformers import AutoModelForCausalLM

    data, teacher, _ = made
    told = {"top_k": 46, "beta": 0.5, "temperature": 2.0}
    (want,) = run_ranks(trained, 1, str(tmp_path / "live"), data, {"teacher": told | {"path": teacher}})
    # All rows of the source in one step.
    every = {"data": {"train": (data,), "rows_per_step": 48, "chat_template": "chatml", "max_tokens": 512}}
    (sequences,) = run_ranks(first_rows, 1, str(tmp_path / "rows"), data, {"model": {"path": "tiny"}} | every)
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64).eval()
    folder, files = tmp_path / "files", {}
    folder.mkdir()
    for number, part in enumerate((sequences[:20], sequences[20:])):
        ids, logp = [], []
        for tokens, mask in part:
            with torch.no_grad():
                logits = model(tokens[None]).logits[0, :-1, :47]
            found = torch.log_softmax(logits / 2.0, -1)[mask[1:]].topk(46)
            shuffled = torch.randperm(46, generator=torch.Generator().manual_seed(number))
            ids.append(found.indices[:, shuffled].int())
            logp.append(found.values[:, shuffled])
        tensors = {
            "tokens": torch.cat([tokens for tokens, _ in part]).int(),
            "lengths": torch.tensor([len(tokens) for tokens, _ in part]),
            "mask": torch.cat([mask for _, mask in part]),
            "ids": torch.cat(ids),
            "logp": torch.cat(logp),
        }
        save_file(tensors, folder / f"part-{number}.safetensors")
        files[f"part-{number}.safetensors"] = len(part)
    (folder / "manifest.json").write_text(json.dumps({"files": files, "temperature": 2.0}))
    (got,) = run_ranks(trained, 1, str(tmp_path / "got"), data, {"teacher": told | {"read": str(folder)}})
    # The one token that is left has the rest, 1 less the others' sum, with its rounding.
    alike(got, want, rtol=1e-6, atol=1e-9)


def test_written_numbers_are_those_of_transformers_and_are_written_once(made, tmp_path):
    from transformers import AutoModelForCausalLM

    data, teacher, files = made
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64).eval()
    names = json.loads((Path(files) / "manifest.json").read_text())["files"]
    assert len(names) == 2 and sum(names.values()) == 48
    for name in names:
        held = load_file(Path(files) / name)
        lengths, first = held["lengths"].tolist(), 0
        for tokens, mask in zip(held["tokens"].split(lengths), held["mask"].split(lengths), strict=True):
            with torch.no_grad():
                logits = model(tokens[None].long()).logits[0, :-1, :47]
            want = torch.log_softmax(logits / 2.0, -1)[mask[1:]].topk(8)
            part = slice(first, first + int(mask.sum()))
            assert torch.equal(held["ids"][part], want.indices.int())
            torch.testing.assert_close(held["logp"][part], want.values, rtol=1e-9, atol=1e-11)
            torch.testing.assert_close(held["rest"][part], (1 - want.values.exp().sum(1)).log(), rtol=1e-9, atol=1e-11)
            first = part.stop
    told = {"path": teacher, "top_k": 8, "temperature": 2.0, "write": files}
    before = (Path(files) / "manifest.json").stat().st_mtime_ns
    run_ranks(written, 1, str(tmp_path / "again"), data, {"teacher": told})
    assert (Path(files) / "manifest.json").stat().st_mtime_ns == before
    with pytest.raises(RankError, match=r"it was written with other values of top_k: use another folder, or delete"):
        run_ranks(written, 1, str(tmp_path / "other"), data, {"teacher": told | {"top_k": 4}})


def test_a_writing_that_was_cut_off_begins_again_and_a_row_that_changes_later_is_noticed(made, tmp_path):
    data, teacher, files = made
    told, half, source = {"top_k": 8, "temperature": 2.0}, tmp_path / "half", tmp_path / "train.jsonl"
    shutil.copytree(files, half)
    (half / "manifest.json").unlink()
    shutil.copy(data, source)
    writes = {"teacher": told | {"path": teacher, "write": str(half)}}
    run_ranks(written, 1, str(tmp_path / "again"), str(source), writes)
    # One rank wrote; the second file is left from two.
    assert json.loads((half / "manifest.json").read_text())["files"] == {"0_0.safetensors": 48}
    more = {"teacher": told | {"read": str(half)}, "run": {"steps": 1, "dir": str(tmp_path / "same")}}
    run_ranks(trained, 1, str(tmp_path / "same"), str(source), more)
    source.write_text(source.read_text().replace("reverse abc", "reverse abd"))
    more["run"]["dir"] = str(tmp_path / "other")
    with pytest.raises(RankError, match="a row of --data.train has changed since the folder was written"):
        run_ranks(trained, 1, str(tmp_path / "other"), str(source), more)


def refused(world, folder: str, data: str, cases: list) -> list[str]:
    """Opens jobs that are refused; returns why."""
    out = []
    for sections in cases:
        with pytest.raises(ValueError) as error:
            given.opened(world, settings(folder, data, sections), build_sft)
        out.append(str(error.value))
    return out


def damaged(files: str, folder: Path, change) -> str:
    """A copy of the files in which `change` has been at one, its tensors or its path."""
    shutil.copytree(files, folder)
    path = folder / "0_0.safetensors"
    tensors = load_file(path)
    if (kept := change(path, tensors)) is not None:
        save_file(kept, path)
    return str(folder)


def other_tokenizer(folder: Path) -> str:
    """The policy that ships here with two tokens swapped."""
    shutil.copytree(resolve("tiny"), folder)
    told = json.loads((folder / "tokenizer.json").read_text())
    vocab = told["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (folder / "tokenizer.json").write_text(json.dumps(told))
    return str(folder)


def test_files_that_do_not_fit_are_refused_with_the_reason(made, tmp_path):
    data, _, files = made
    told = {"top_k": 8, "temperature": 2.0, "read": files}
    more = Path(data).read_text() + json.dumps({"messages": rows(60)[-1]["messages"]}) + "\n"
    (tmp_path / "more.jsonl").write_text(more)
    source = {"chat_template": "chatml", "rows_per_step": 12, "max_tokens": 512}
    empty = tmp_path / "empty"
    empty.mkdir()

    def copy(name: str, change) -> dict:
        return told | {"read": damaged(files, tmp_path / name, change)}

    def reread(name: str, change) -> dict:
        """As of another hand: without settings, so that all numbers are read before."""
        found = copy(name, change)
        manifest = Path(found["read"]) / "manifest.json"
        held = json.loads(manifest.read_text())
        manifest.write_text(json.dumps({"files": held["files"], "temperature": 2.0}))
        return found

    hot = copy("hot", lambda path, _: None)
    (Path(hot["read"]) / "manifest.json").write_text(json.dumps({"files": {"0_0.safetensors": 24}, "temperature": "2"}))
    bare = copy("bare", lambda path, _: None)
    (Path(bare["read"]) / "manifest.json").write_text(json.dumps({"files": {"../0_0.safetensors": 24}}))
    cases: list[tuple[dict, str]] = [
        ({"teacher": told | {"top_k": 9}}, "--teacher.top-k 9: "),
        ({"teacher": told | {"temperature": 1.0}}, "was written at 2; use that temperature, or write"),
        ({"teacher": told | {"path": "tiny"}}, "--teacher.path tiny: "),
        (
            {"teacher": told, "model": {"path": other_tokenizer(tmp_path / "swapped"), "dtype": "float64"}},
            "it was written for another tokenizer",
        ),
        (
            {"teacher": told, "data": source | {"train": (data,), "max_tokens": 90}},
            "It was written with --data.max-tokens: 512, here 90: use the same",
        ),
        (
            {"teacher": told, "data": source | {"train": (str(tmp_path / "more.jsonl"),)}},
            "in 1 of the 49 usable rows of --data.train. ",
        ),
        ({"teacher": told | {"read": str(empty)}}, "it lacks manifest.json, the file that is written last"),
        ({"teacher": copy("gone", lambda path, _: path.unlink())}, "files that are missing: 1 of 2 (0_0.safetensors)"),
        (
            {"teacher": copy("cut", lambda path, _: path.write_bytes(path.read_bytes()[:-9]) and None)},
            "0_0.safetensors is not a complete file of numbers",
        ),
        (
            {"teacher": copy("short", lambda path, x: x | {"logp": x["logp"][:-1].clone()})},
            "rows, but the mask is True at ",
        ),
        (
            {"teacher": copy("odd", lambda path, x: x | {name: x[name][:, :4].clone() for name in ("ids", "logp")})},
            "the rows of ids are ",
        ),
        (
            {"teacher": reread("twice", lambda path, x: x | {"ids": torch.zeros_like(x["ids"])})},
            "ids has a token twice",
        ),
        ({"teacher": reread("far", lambda path, x: x | {"ids": x["ids"] + 40})}, "both models share go from 0 to 46"),
        (
            {"teacher": reread("high", lambda path, x: x | {"logp": x["logp"] + 3})},
            "probabilities that sum to at most 1",
        ),
        ({"teacher": reread("nan", lambda path, x: x | {"rest": x["rest"] * torch.nan})}, "rest is not the log of the"),
        ({"teacher": reread("double", lambda path, x: x | {"rest": x["rest"] * 0})}, "rest is not the log of the"),
        ({"teacher": hot}, "its manifest.json has temperature '2'; write a number"),
        ({"teacher": bare}, 'has no valid "files": {name: sequences}'),
        (
            {"teacher": reread("less", lambda path, x: without_first(x))},
            "in 1 of the 48 usable rows of --data.train. ",
        ),
    ]
    (found,) = run_ranks(refused, 1, str(tmp_path / "run"), data, [sections for sections, _ in cases])
    for why, (_, said) in zip(found, cases, strict=True):
        assert said in why, why
    assert f"{tmp_path}/more.jsonl:49: its tokens are in none of the files" in found[5]
    assert "of " + data + ":" in found[11] and "it lacks numbers for 1 of its " in found[-1] and "trained" in found[-1]


def test_likeliest_tokens_with_all_of_the_probability_leave_none(made, tmp_path):
    """As a top-k sampler's numbers may be: the log of the rest is minus infinity."""
    data, _, files = made

    def change(path, x):
        return x | {"logp": x["logp"].log_softmax(1), "rest": torch.full_like(x["rest"], -torch.inf)}

    told = {"top_k": 8, "temperature": 2.0, "beta": 0.5, "read": damaged(files, tmp_path / "full", change)}
    run_ranks(trained, 1, str(tmp_path / "run"), data, {"teacher": told, "run": {"steps": 1}})
    (row,) = metrics(tmp_path / "run")
    assert 0 < row["divergence/mean"] < 5 and 0 < row["grad_norm"] < 1e3


def test_rows_that_a_teacher_cannot_read_are_counted_and_named(made, tmp_path):
    data, teacher, _ = made
    told = {"path": teacher, "top_k": 8, "write": str(tmp_path / "files")}
    odd = tmp_path / "odd.jsonl"
    odd.write_text('{"question": 1}\n' * 3)
    with pytest.raises(RankError, match=r"3 of 3 rows were refused, and --data.max-refused allows(?s:.)*odd.jsonl:1: "):
        run_ranks(written, 1, str(tmp_path / "none"), str(odd), {"teacher": told, "data": {"train": (str(odd),)}})
    assert not (tmp_path / "files" / "manifest.json").exists()
    odd.write_text(odd.read_text() + Path(data).read_text())
    more = {"train": (str(odd),), "chat_template": "chatml", "max_tokens": 512, "max_refused": 0.05}
    with pytest.raises(RankError, match="3 of 51 rows were refused, and --data.max-refused allows a share of 0.05 "):
        run_ranks(written, 2, str(tmp_path / "some"), str(odd), {"teacher": told, "data": more})
    more["max_refused"] = 0.1
    run_ranks(written, 2, str(tmp_path / "some"), str(odd), {"teacher": told, "data": more})
    assert sum(json.loads((tmp_path / "files" / "manifest.json").read_text())["files"].values()) == 48


def test_a_digest_of_weights_sees_each_tensor(tmp_path):
    """Such as those into which adapters of two layers were merged."""
    folder = Path(small_model(tmp_path / "model", seed=5))
    first = weights_digest(folder)
    held = load_file(folder / "model.safetensors")
    for name in ("model.layers.1.self_attn.v_proj.weight", "model.norm.weight"):
        changed = {key: x.clone() for key, x in held.items()}
        changed[name] += 1e-3
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        assert weights_digest(folder) != first, name
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    assert weights_digest(folder) == first
    (folder / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="model.safetensors is not a safetensors file"):
        weights_digest(folder)


def without_first(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a file without the numbers of the first trained token."""
    mask = tensors["mask"].clone()
    mask[int(mask.nonzero()[0])] = False
    return tensors | {"mask": mask} | {name: tensors[name][1:].clone() for name in ("ids", "logp", "rest")}
