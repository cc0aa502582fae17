"""Shared tokens: the tree of a pack gives the same as the pack, in value and gradient, for every kind of attention.

Samples share their prompt, paths of an episode as much as is equal.
"""

import pytest
import torch

from spmdrl.data.episode import episode_of
from spmdrl.data.microbatch import microbatch_count, microbatches, units_of, work_of
from spmdrl.data.pack import from_episodes
from spmdrl.data.tree import plan_tree, prompt_lengths, shared_tokens
from spmdrl.policy.attention import packed as attention
from spmdrl.policy.attention.varlen import KERNELS
from spmdrl.policy.heads import PackedLM, PackedScalar
from spmdrl.spmd.balance import assign_balanced, assign_groups
from tests.ranks.cases import VOCAB, branching_batch, small_model, synthetic_batch
from tests.unit.packs import run_pack
from tests.unit.varlen_kernels import calls, stand_in


def pack(episodes):
    batch = from_episodes(episodes)
    return batch.token["tokens"], batch.lengths, batch.token["mask"], batch


def ragged(seed: int = 0):
    """Makes groups of 1 to 5 samples, prompts of 1 to 20 tokens, replies of 1 to 12, one without a sampled token."""
    rng = torch.Generator().manual_seed(seed)
    out = []
    for position, samples in enumerate((3, 1, 5, 2)):
        prompt = torch.randint(VOCAB, (int(torch.randint(1, 21, (), generator=rng)),), generator=rng)
        for sample in range(samples):
            reply = torch.randint(VOCAB, (int(torch.randint(1, 13, (), generator=rng)),), generator=rng)
            mask = torch.tensor([False] * len(prompt) + [True] * len(reply))
            if len(reply) > 4:
                mask[len(prompt) + 2] = False
            if position == 2 and sample == 1:
                mask[:] = False
            tokens = torch.cat([prompt, reply])
            out.append(episode_of(position, sample, position, tokens, mask, mask * 0.0, 0))
    return out


def test_a_tree_holds_every_token_at_its_place():
    tokens, lengths, mask, _ = pack(ragged())
    tree = plan_tree(tokens, lengths, mask)
    assert tree is not None
    assert torch.equal(tokens[tree.keep][tree.place], tokens)
    inside = torch.cat([torch.arange(n) for n in lengths.tolist()])
    assert torch.equal(tree.positions[tree.place], inside)
    assert len(tree.keep) == sum(tree.lengths) < len(tokens)
    assert min(tree.lengths) >= 1
    # The sequence without a sampled token has another prompt, and cuts its group in two.
    shared = shared_tokens(tokens, lengths, mask)
    assert shared.source == [0, 0, 0, 3, 4, 5, 6, 6, 6, 9, 9]
    assert [n > 0 for n in shared.tokens] == [source < i for i, source in enumerate(shared.source)]
    assert shared.prompts[5] == lengths[5] - 1 and prompt_lengths(lengths, mask)[5] == lengths[5]


def test_nothing_in_common_is_no_tree():
    alone = [t for t in ragged() if t.sample == 0]
    assert plan_tree(*pack(alone)[:3]) is None


def float64_norm(self, x):
    return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))


FAMILIES = {
    "qwen2": {},
    "one kv head": {"num_key_value_heads": 1},
    "window": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
}


WITHOUT_TREE = dict.fromkeys(KERNELS, "padded")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("trees")
    return {name: small_model(root / name.replace(" ", "_"), 0, **changes) for name, changes in FAMILIES.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["padded", "eager", *KERNELS])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_layout_shared_prompts_change_nothing(folders, family, kind, dtype, monkeypatch):
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    from spmdrl.hub.build import build_model

    if dtype == torch.float64:
        # Theirs goes through float32, where a sum over samples rounds in another order.
        monkeypatch.setattr(Qwen2RMSNorm, "forward", float64_norm)
    weights, limit = torch.Generator().manual_seed(1), 1e-10 if dtype == torch.float64 else 1e-5
    # Another test's file may have left some.
    calls.clear()
    for seed in range(3):
        tokens, lengths, mask, _ = pack(ragged(seed))
        coefficients = torch.randn(2, len(tokens), generator=weights, dtype=torch.float64)
        seen = []
        for share in (False, True):
            hf = build_model(folders[family], dtype, False, attention.register())
            # The stand-in of a GPU's kernel is compared with whole sequences in plain torch.
            model = PackedLM(hf, kind if share else WITHOUT_TREE.get(kind, kind), share=share).train()
            with monkeypatch.context() as patch:
                if kind in KERNELS:
                    stand_in(patch)
                logp, entropy = run_pack(model, tokens, lengths, mask, 0.8)
                assert set(calls) == ({kind} & set(KERNELS) if share else set())
                calls.clear()
            (coefficients[0] * logp + coefficients[1] * entropy).sum().backward()
            seen.append((logp.detach(), entropy.detach(), {n: p.grad for n, p in hf.named_parameters()}))
        assert (seen[0][0] - seen[1][0]).abs().max() < limit and (seen[0][1] - seen[1][1]).abs().max() < limit
        for name, gradient in seen[0][2].items():
            assert (gradient - seen[1][2][name]).abs().max() <= limit * max(1.0, gradient.abs().max().item()), name


def test_layout_shared_prompts_change_no_value(folders):
    from spmdrl.hub.build import build_model

    hf = build_model(folders["qwen2"], torch.float64, False, attention.register(), "value")
    torch.nn.init.normal_(hf.score.weight, generator=torch.Generator().manual_seed(0))
    tokens, lengths, mask, _ = pack(ragged())
    with torch.no_grad():
        one, other = (run_pack(PackedScalar(hf, share=s), tokens, lengths, mask, 1.0)[0] for s in (False, True))
    assert one.abs().max() > 0.1 and (one - other).abs().max() < 1e-10


# ── episodes that branch ─────────────────────────────────────────────────────


def test_a_trie_holds_every_token_of_every_path_once():
    *columns, batch = pack(branching_batch(6, 3))
    tree = plan_tree(*columns, batch.begins)
    tokens, lengths, mask = columns
    assert tree is not None and torch.equal(tokens[tree.keep][tree.place], tokens)
    inside = torch.cat([torch.arange(n) for n in lengths.tolist()])
    assert torch.equal(tree.positions[tree.place], inside)
    assert tree.parents[: tree.parents.count(-1)] == [-1] * 6 and min(tree.lengths) >= 1
    # As many rows as there are prefixes of paths in each episode, and a prompt of 16 tokens once for three samples.
    rows = [tuple(row.tolist()) for row in tokens.split(lengths.tolist())]
    found = {(int(e), row[:end]) for e, row in zip(batch.episode, rows, strict=True) for end in range(1, len(row) + 1)}
    assert len(tree.keep) == len(found) - 6 * 2 * 16 and len(tree.keep) * 2 < len(tokens)
    # On its way to the root a node meets the tokens before it, whole.
    starts = torch.cumsum(torch.tensor([0, *tree.lengths]), 0).tolist()
    for i, end in enumerate(torch.cumsum(lengths, 0).tolist()):
        row = int(tree.place[end - 1])
        node = next(n for n in range(len(tree.lengths)) if starts[n] <= row < starts[n + 1])
        seen = list(range(starts[node], row + 1))
        while tree.parents[node] >= 0:
            node = tree.parents[node]
            seen = [*range(starts[node], starts[node + 1]), *seen]
        assert tokens[tree.keep[seen]].tolist() == tokens[end - int(lengths[i]) : end].tolist()


@pytest.mark.parametrize("kind", ["padded", "eager", *KERNELS])
@pytest.mark.parametrize("family", FAMILIES)
def test_layout_branches_change_nothing(folders, family, kind, monkeypatch):
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    from spmdrl.hub.build import build_model

    monkeypatch.setattr(Qwen2RMSNorm, "forward", float64_norm)
    calls.clear()
    tokens, lengths, mask, batch = pack(branching_batch(4, 3))
    coefficients = torch.randn(2, len(tokens), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    seen = []
    for share in (False, True):
        hf = build_model(folders[family], torch.float64, False, attention.register())
        model = PackedLM(hf, kind if share else WITHOUT_TREE.get(kind, kind), share=share).train()
        with monkeypatch.context() as patch:
            if kind in KERNELS:
                stand_in(patch)
            logp, entropy = run_pack(model, tokens, lengths, mask, 0.8, begins=batch.begins)
            assert set(calls) == ({kind} & set(KERNELS) if share else set())
            calls.clear()
        (coefficients[0] * logp + coefficients[1] * entropy).sum().backward()
        seen.append((logp.detach(), entropy.detach(), {n: p.grad for n, p in hf.named_parameters()}))
    assert (seen[0][0] - seen[1][0]).abs().max() < 1e-10 and (seen[0][1] - seen[1][1]).abs().max() < 1e-10
    for name, gradient in seen[0][2].items():
        assert (gradient - seen[1][2][name]).abs().max() <= 1e-10 * max(1.0, gradient.abs().max().item()), name


def test_layout_branches_change_no_value(folders):
    from spmdrl.hub.build import build_model

    hf = build_model(folders["qwen2"], torch.float64, False, attention.register(), "value")
    torch.nn.init.normal_(hf.score.weight, generator=torch.Generator().manual_seed(0))
    tokens, lengths, mask, batch = pack(branching_batch(4, 3))
    seen = []
    for share in (False, True):
        hf.zero_grad()
        value = run_pack(PackedScalar(hf, share=share), tokens, lengths, mask, 1.0, begins=batch.begins)[0]
        (value * torch.linspace(-1, 1, len(value))).sum().backward()
        seen.append((value.detach(), hf.score.weight.grad.clone()))
    assert seen[0][0].abs().max() > 0.1
    assert all((a - b).abs().max() < 1e-10 for a, b in zip(*seen, strict=True))


def test_paths_share_only_what_went_to_the_same_experts():
    tokens, lengths, mask, batch = pack(branching_batch(1, 2))
    experts = torch.zeros(len(tokens), 1, 2, dtype=torch.int16)
    alike = shared_tokens(tokens, lengths, mask, batch.begins, experts)
    assert alike == shared_tokens(tokens, lengths, mask, batch.begins) and alike.tokens[2] == 16
    experts[batch.cu_seqlens[2] + 5] = 1
    assert shared_tokens(tokens, lengths, mask, batch.begins, experts).tokens[2] == 5


def test_micro_batches_keep_an_episode_together():
    *_, batch = pack(branching_batch(4, 3))
    for share, budget in ((False, 150), (True, 80)):
        units = units_of(batch, budget, share)
        assert sorted(i for u in units for i in u.members) == list(range(len(batch)))
        home = {i: number for number, u in enumerate(units) for i in u.members}
        for episode in range(12):
            assert len({home[i] for i in torch.nonzero(batch.episode == episode).flatten().tolist()}) == 1
        work, common = work_of(batch, share)
        for unit in units:
            part = batch.select(torch.tensor(unit.members))
            tree = plan_tree(part.token["tokens"], part.lengths, part.token["mask"], part.begins) if share else None
            assert unit.tokens == (len(tree.keep) if tree else part.n_tokens) <= budget
        alone = units_of(batch, 1, share)
        per_episode = torch.zeros(12, dtype=torch.int64).index_add_(0, batch.episode, work)
        assert [u.tokens for u in alone] == per_episode.tolist()
        assert common[batch.firsts].tolist() == [16 * share] * 12 and int(common.sum()) == 16 * 12 * share
    with pytest.raises(ValueError, match="an episode that branches counts with all its paths"):
        microbatch_count(torch.tensor([u.tokens for u in units_of(batch, 60, False)]), 60)


def test_the_tree_runs_fewer_tokens(folders):
    from spmdrl.hub.build import build_model

    hf = build_model(folders["qwen2"], torch.float32, False, attention.register())
    tokens, lengths, mask, batch = pack(synthetic_batch(2, 8))
    seen = []
    hook = hf.base_model.embed_tokens.register_forward_hook(lambda m, x, y: seen.append(x[0].numel()))
    for share in (False, True):
        run_pack(PackedLM(hf, share=share), tokens, lengths, mask, 1.0)
    hook.remove()
    assert seen == [batch.n_tokens, batch.n_tokens - 2 * 7 * 16]  # a prompt of 16 tokens runs once for 8 samples


def test_micro_batches_keep_a_prompt_together_and_count_it_once():
    *_, batch = pack(synthetic_batch(4, 6))
    units = units_of(batch, 120, share=True)
    assert all(u.tokens <= 120 for u in units) and sorted(i for u in units for i in u.members) == list(range(24))
    assert len(units) < 24
    for unit in units:
        assert len({int(batch.seq["position"][i]) for i in unit.members}) == 1
        own = sum(int(batch.lengths[i]) - 16 for i in unit.members)
        assert unit.tokens == 16 + own
    count = microbatch_count(torch.tensor([u.tokens for u in units]), 120)
    assert count < microbatch_count(batch.lengths, 120)
    got = microbatches(batch, count, 120, units)
    pairs = [(int(p), int(s)) for m in got for p, s in zip(m.seq["position"], m.seq["sample"], strict=True)]
    assert sorted(pairs) == [(p, s) for p in range(4) for s in range(6)] and len(got) == count
    # A budget that does not hold a group cuts it.
    cut = units_of(batch, 40, share=True)
    assert len(cut) > 4 and any(len(u.members) > 1 for u in cut) and all(u.tokens <= 40 for u in cut)


def test_balance_keeps_groups_together_where_that_is_less_work():
    # Long prompts, four groups, two ranks: whole groups. One group alone: its samples are divided.
    costs, common = torch.full((16,), 100), torch.full((16,), 90)
    group, share = torch.arange(4).repeat_interleave(4), torch.zeros(16, dtype=torch.int64)
    ranks = assign_groups(costs, share, group, common, 2)
    assert all(len(set(ranks[group == g].tolist())) == 1 for g in range(4)) and ranks.bincount().tolist() == [8, 8]
    # Two ranks of a single group with short prompts: each takes half.
    costs, common = torch.full((4,), 100), torch.full((4,), 5)
    group, share = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    assert assign_groups(costs, share, group, common, 2).bincount().tolist() == [2, 2]
    # With nothing in common it is the plain assignment's balance.
    costs = torch.tensor([9, 7, 6, 5, 4, 3])
    zero = torch.zeros(6, dtype=torch.int64)
    ranks = assign_groups(costs, zero, torch.arange(6), zero, 2)
    plain = assign_balanced(costs, zero, 2)
    assert sorted(torch.zeros(2, dtype=torch.int64).index_add_(0, ranks, costs).tolist()) == sorted(
        torch.zeros(2, dtype=torch.int64).index_add_(0, plain, costs).tolist()
    )
