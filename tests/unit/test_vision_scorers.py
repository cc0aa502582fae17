"""Critics and reward models that read images: scores are hidden states of transformers times the weight of the head."""

import pytest
import torch
from safetensors.torch import load_file

from spmdrl.hub.build import build_model, empty_model
from spmdrl.hub.expand import positions
from spmdrl.hub.images import forward_inputs
from spmdrl.policy.attention import packed
from spmdrl.policy.attention.packed import own_attention, use_attention
from spmdrl.policy.heads import PackedScalar
from spmdrl.weights.folder import Tensors
from spmdrl.weights.sources import Sources
from tests.unit.vision_models import FAMILIES, config, saved, tiny
from tests.unit.vision_packs import batch_of, facts


@torch.no_grad()
def states_alone(family: str, batch) -> list[torch.Tensor]:
    """Returns the hidden states of each sequence, alone in the language model of transformers."""
    hf, (vision, _), lengths, out = tiny(family, torch.float64), facts(family), batch.lengths.tolist(), []
    for ids, images in zip(batch.token["tokens"].split(lengths), batch.images, strict=True):
        place = positions(ids, images, vision)
        place = place[:, None] if vision.mrope else place[None]
        given = forward_inputs(images, vision)
        out.append(hf.model(input_ids=ids[None], position_ids=place, use_cache=False, **given).last_hidden_state[0])
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_layout_scores_in_a_pack_and_a_tree_are_those_of_the_hidden_states_alone(family, tmp_path):
    folder, batch = saved(family, tmp_path / "model"), batch_of(family)
    states = states_alone(family, batch)
    for head, labels, after in (("value", 1, False), ("score", 3, True), ("steps", 2, True)):
        hf = critic(folder) if head == "value" else saved_again(folder, tmp_path / head, head, labels)
        suffix = "ForTokenClassification" if head == "steps" else "ForSequenceClassification"
        assert type(hf).__name__ == type(tiny(family)).__name__.replace("ForConditionalGeneration", suffix)
        with torch.no_grad():
            numbers = [hf.score(x) for x in states]
        if not after:
            # The value of a token is read before it.
            numbers = [torch.nn.functional.pad(x[:-1], (0, 0, 1, 0)) for x in numbers]
        want = torch.cat(numbers) * batch.token["mask"][:, None]
        packed.register()
        model = PackedScalar(hf, after=after)
        for form in ("packed", "tree", "apart"):
            use_attention(hf, own_attention(hf) if form == "apart" else packed.NAME)
            model.form = form
            plan = model.plan(
                *(batch.token["tokens"], batch.lengths, batch.token["mask"]),
                images=batch.images,
                mark_T=batch.token["image"],
            )
            with torch.no_grad():
                got = model(plan, 1.0)[0].reshape(-1, labels)
            most = 1e-5 if family == "qwen3_5" and form == "tree" else 1e-12
            assert (got - want).abs().max() <= most * want.abs().max(), (head, form)
            assert got[batch.token["mask"]].std() > 1e-2


def critic(folder):
    """Returns a critic that starts from a language model, with random weights in the head."""
    hf = build_model(folder, "float64", head="value")
    assert not hf.score.weight.any(), "a critic starts at 0"
    torch.nn.init.normal_(hf.score.weight, generator=torch.Generator().manual_seed(1))
    return hf


def saved_again(source, folder, head: str, labels: int):
    """Saves a classifier as transformers does, and loads it again. Its head has random weights."""
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    kind = AutoModelForTokenClassification if head == "steps" else AutoModelForSequenceClassification
    made = kind.from_pretrained(source, num_labels=labels, dtype=torch.float64)
    torch.nn.init.normal_(made.score.weight, generator=torch.Generator().manual_seed(labels))
    made.save_pretrained(folder)
    found = build_model(folder, "float64", head="score", labels=labels)
    for (name, x), (other, y) in zip(made.named_parameters(), found.named_parameters(), strict=True):
        assert name == other and torch.equal(x, y), name
    assert found.config.architectures == [type(made).__name__] and "lm_head.weight" not in found.state_dict()
    with pytest.raises(ValueError, match=f"names {type(made).__name__}, a reward model, and a language model would"):
        build_model(folder, "float64")
    return found


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_a_critic_starts_from_a_folder_with_published_names(family, tmp_path):
    folder = saved(family, tmp_path / "model")
    assert any(name.startswith(("visual.", "model.layers.")) for name in load_file(folder / "model.safetensors"))
    want = dict(tiny(family).named_parameters())
    for name, x in build_model(folder, "float32", head="value").named_parameters():
        assert name == "score.weight" or torch.equal(x, want[name]), name
    empty = empty_model(folder, "float32", head="value")
    shapes = {name: tuple(p.shape) for name, p in empty.named_parameters()}
    sources = Sources(empty, shapes, Tensors(folder))
    assert [name for name in shapes if name not in sources] == ["score.weight"]


def test_a_language_model_is_no_reward_model(tmp_path):
    folder = saved("smolvlm", tmp_path / "model")
    with pytest.raises(ValueError, match=r"missing or misshapen score\.weight"):
        build_model(folder, "float32", head="score")
    assert config("smolvlm").num_labels == 2, "labels of other models stay as they are"
