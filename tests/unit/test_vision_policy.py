"""Vision-language models over packed batches: a pack and a tree give each sequence what it gets alone (law 2)."""

import dataclasses

import pytest
import torch

from spmdrl.data.batch import Batch
from spmdrl.data.distribute import distribute
from spmdrl.hub.expand import positions
from spmdrl.hub.images import forward_inputs
from spmdrl.policy.attention import packed
from spmdrl.policy.attention.packed import own_attention, use_attention
from spmdrl.policy.heads import Form, PackedLM
from spmdrl.policy.vision import check_images
from spmdrl.spmd.peers import Peers
from tests.unit.vision_models import FAMILIES, tiny
from tests.unit.vision_packs import ROWS, batch_of, facts

EXACT = {"qwen3_5": 1e-5}
"""The recurrent layers of Qwen3.5 compute in float32, so their tree rounds otherwise."""


def model_of(family: str, form: Form = "packed") -> PackedLM:
    hf = tiny(family, torch.float64)
    packed.register()
    use_attention(hf, own_attention(hf) if form == "apart" else packed.NAME)
    model = PackedLM(hf)
    model.form = form
    return model


def logp(model: PackedLM, batch: Batch, looks: bool = False) -> torch.Tensor:
    plan = model.plan(
        batch.token["tokens"],
        batch.lengths,
        batch.token["mask"],
        images=batch.images,
        mark_T=batch.token["image"],
        begins_B=batch.begins if batch.branches else None,
    )
    return model(plan, 1.0, looks=looks)[0]


@torch.no_grad()
def alone_in(hf, vision, batch: Batch) -> torch.Tensor:
    """Log p of the sampled tokens, each sequence alone in plain transformers."""
    return numbers_alone_in(hf, vision, batch)[0]


def numbers_alone_in(hf, vision, batch: Batch, excluded: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    """Log p of the sampled tokens and entropies, each sequence alone in plain transformers, with masked logits."""
    out, lengths = [], batch.lengths.tolist()
    rows = zip(
        *(batch.token[name].split(lengths) for name in ("tokens", "mask")),
        batch.images or [],
        strict=True,
    )
    for ids, mask, row in rows:
        place = positions(ids, row, vision)
        place = place[:, None] if vision.mrope else place[None]
        given = forward_inputs(row, vision)
        logits = hf(input_ids=ids[None], position_ids=place, use_cache=False, **given).logits[0]
        found = logits[:-1].index_fill(1, torch.tensor(excluded, dtype=torch.int64), -torch.inf).log_softmax(-1)
        entropy = -(found.exp() * found.masked_fill(found == -torch.inf, 0)).sum(-1)
        # Placeholders in prompts are outside of the mask.
        found = found.gather(1, ids[1:, None])[:, 0].masked_fill(~mask[1:], 0)
        out.append(torch.nn.functional.pad(torch.stack([found, entropy]), (1, 0)))
    logp, entropy = torch.cat(out, 1) * batch.token["mask"]
    return logp, entropy


def gradients(model: PackedLM, batch: Batch, looks: bool = False) -> dict[str, torch.Tensor]:
    model.zero_grad()
    got = logp(model, batch, looks)
    (got * torch.linspace(-1, 1, len(got), dtype=got.dtype)).sum().backward()
    return {name: p.grad.clone() for name, p in model.hf.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_layout_a_pack_and_a_tree_give_what_each_sequence_gets_alone(family):
    batch = batch_of(family)
    want, found = alone_in(tiny(family, torch.float64), facts(family)[0], batch), {}
    for form in ("packed", "tree", "apart"):
        model = model_of(family, form)
        with torch.no_grad():
            got = logp(model, batch)
        assert (got - want).abs().max() <= (EXACT.get(family, 1e-12) if form == "tree" else 1e-12), form
        found[form] = gradients(model, batch)
    # Norms go through float32, so gradients do too.
    most = max(x.abs().max() for x in found["apart"].values())
    for form in ("packed", "tree"):
        assert found[form].keys() == found["apart"].keys() == {name for name, _ in model.hf.named_parameters()}
        assert max((found[form][n] - x).abs().max() for n, x in found["apart"].items()) <= 1e-5 * most, form


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "idefics3"])
def test_layout_paths_of_an_episode_that_show_different_images_give_what_each_gets_alone(family):
    # The second path shows the first path's images, then other ones; its text continues from other positions.
    rows = [(["a ", " b ", " c"], (0, 1), 4), (["a ", " b ", " c"], (0, 2), 4), (["a ", " b ", " d"], (0, 2), 3)]
    batch = batch_of(family, rows)
    batch.seq |= {"path": torch.arange(3), "paths": torch.full((3,), 3), "position": torch.zeros(3, dtype=torch.int64)}
    model = model_of(family, "tree")
    with torch.no_grad():
        got = logp(model, batch)
    assert (got - alone_in(tiny(family, torch.float64), facts(family)[0], batch)).abs().max() <= 1e-12
    plan = model.plan(
        *(batch.token["tokens"], batch.lengths, batch.token["mask"], batch.begins),
        images=batch.images,
        mark_T=batch.token["image"],
    )
    assert len(plan.seen.features_n) == sum(image.tokens for image in facts(family)[1]) < len(plan.ids_S)


def test_an_image_is_encoded_once_for_all_sequences_that_show_it():
    model, batch, seen = model_of("qwen3_vl", "tree"), batch_of("qwen3_vl"), []
    merger = model.hf.get_submodule("model.visual.merger")
    merger.register_forward_hook(lambda module, given, out: seen.append(len(out)))
    logp(model, batch)
    assert seen == [sum(image.tokens for image in facts("qwen3_vl")[1])]


@pytest.mark.parametrize("family", ["qwen3_vl", "idefics3"])
def test_images_reach_the_tokens_after_them_and_no_others(family):
    model, (_, images) = model_of(family, "tree"), facts(family)
    batch = batch_of(family)
    with torch.no_grad():
        before = logp(model, batch).split(batch.lengths.tolist())
        # A gray image instead of one, and the same two images in another order.
        gray = dataclasses.replace(images[0], name="gray", pixels=torch.full_like(images[0].pixels, 0.1))
        zeroed = logp(model, batch_of(family, images=[gray, *images[1:]])).split(batch.lengths.tolist())
        swapped = batch_of(family, [*ROWS[:2], (ROWS[2][0], (0, 1), 4), (ROWS[3][0], (0, 1), 2), *ROWS[4:]])
        after = logp(model, swapped).split(batch.lengths.tolist())
        # Groups in another order, with their images.
        order = torch.tensor([6, 4, 5, 2, 3, 0, 1])
        moved = logp(model, batch.select(order)).split(batch.lengths[order].tolist())
    for i, (_, numbers, length) in enumerate(ROWS):
        changes = (before[i] - zeroed[i])[-length:].abs().min()
        assert changes > 1e-6 if 0 in numbers else changes == 0, i
        assert ((before[i] - after[i])[-length:].abs().min() > 1e-6) == (len(numbers) == 2)
        assert (moved[order.tolist().index(i)] - before[i]).abs().max() <= 1e-12


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_the_tower_runs_without_images_and_changes_nothing(family):
    model = model_of(family)
    text = batch_of(family).select(torch.tensor([4, 5]))
    assert torch.equal(logp(model, text), logp(model, text, looks=True))
    without, with_tower = gradients(model, text), gradients(model, text, looks=True)
    tower = with_tower.keys() - without.keys()
    assert all(torch.equal(x, with_tower[n]) for n, x in without.items())
    assert with_tower.keys() == {n for n, _ in model.hf.named_parameters()}
    assert tower and all(not with_tower[n].any() for n in tower)


def test_a_batch_that_the_model_cannot_read_is_refused():
    batch, (vision, _) = batch_of("qwen3_vl"), facts("qwen3_vl")
    check_images(batch, vision)
    with pytest.raises(ValueError, match="this model does not read images"):
        check_images(batch, None)
    token = batch.token | {"tokens": torch.where(batch.token["mask"], vision.image, batch.token["tokens"])}
    with pytest.raises(ValueError, match="24 tokens are placeholders of images .* belong to no image"):
        check_images(Batch(batch.lengths, token, batch.seq, batch.images), vision)
    with pytest.raises(ValueError, match="--sft.neftune"):
        check_images(batch.like(noise=batch.token["mask"]), vision)
    moved = distribute(batch, torch.zeros(1, 1, dtype=torch.int64), Peers(None, torch.device("cpu")))
    assert moved.images == batch.images
