"""Heads of packed models against plain Hugging Face: critics, reward models, collision probabilities."""

import pytest
import torch

from spmdrl.hub.build import build_model
from spmdrl.hub.folder import TINY
from spmdrl.hub.tokenizer import check_same_tokens, load_tokenizer
from spmdrl.policy.attention import packed as attention
from spmdrl.policy.heads import PackedLM, PackedScalar
from spmdrl_kernels import collision_probability
from tests.unit.packs import run_pack

LENGTHS = torch.tensor([7, 4, 9])
TOKENS = torch.randint(3, 20, (20,), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([i not in (0, 7, 11) for i in range(20)])
STARTS = (0, 7, 11, 20)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """Makes a reward model as such are published: a sequence classifier with one label."""
    from transformers import AutoModelForSequenceClassification

    folder = tmp_path_factory.mktemp("classifier")
    model = AutoModelForSequenceClassification.from_pretrained(TINY, num_labels=1, dtype=torch.float64)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(folder)
    load_tokenizer(TINY).save_pretrained(folder)
    return folder, model.eval()


def hidden_of(model, i: int) -> torch.Tensor:
    tokens = TOKENS[STARTS[i] : STARTS[i + 1]]
    return model.base_model(input_ids=tokens[None]).last_hidden_state[0]


@torch.no_grad()
def test_a_reward_model_is_read_as_hugging_face_reads_it(classifier):
    folder, plain = classifier
    head = PackedScalar(build_model(folder, torch.float64, False, attention.register(), "score"), after=True)
    got, zeros = run_pack(head, TOKENS, LENGTHS, MASK, 1.0)
    assert not zeros.any() and not got[~MASK].any()
    for i in range(3):
        tokens = TOKENS[STARTS[i] : STARTS[i + 1]]
        want = (hidden_of(plain, i) @ plain.score.weight.T)[:, 0]
        torch.testing.assert_close(got[STARTS[i] + 1 : STARTS[i + 1]], want[1:], rtol=1e-6, atol=1e-6)
        plain.config.pad_token_id = None  # HF then reads the last token
        torch.testing.assert_close(
            got[STARTS[i + 1] - 1], plain(input_ids=tokens[None]).logits[0, 0], rtol=1e-6, atol=1e-6
        )


@torch.no_grad()
def test_a_value_is_of_the_state_before_the_token(classifier):
    folder, plain = classifier
    head = PackedScalar(build_model(folder, torch.float64, False, attention.register(), "value"))
    got, _ = run_pack(head, TOKENS, LENGTHS, MASK, 1.0)
    for i in range(3):
        want = (hidden_of(plain, i) @ plain.score.weight.T)[:, 0]
        torch.testing.assert_close(got[STARTS[i] + 1 : STARTS[i + 1]], want[:-1], rtol=1e-6, atol=1e-6)


def test_a_critic_that_starts_as_a_language_model_says_0_and_a_reward_model_must_have_its_head():
    before = torch.get_rng_state()
    model = build_model(TINY, torch.float32, False, attention.register(), "value")
    assert torch.equal(torch.get_rng_state(), before)
    assert not run_pack(PackedScalar(model), TOKENS, LENGTHS, MASK, 1.0)[0].any() and model.score.weight.shape[0] == 1
    with pytest.raises(ValueError, match=r"score\.weight"):
        build_model(TINY, torch.float32, False, attention.register(), "score")


@torch.no_grad()
def test_collision_is_the_sum_of_squared_probabilities():
    hf = build_model(TINY, torch.float64, False, attention.register())
    logp, collision = run_pack(PackedLM(hf), TOKENS, LENGTHS, MASK, 0.7, "collision")
    assert torch.equal(logp, run_pack(PackedLM(hf), TOKENS, LENGTHS, MASK, 0.7)[0])
    plain = build_model(TINY, torch.float64, False, "sdpa")
    for i in range(3):
        p = torch.softmax(hidden_of(plain, i) @ plain.lm_head.weight.T / 0.7, -1)
        torch.testing.assert_close(
            collision[STARTS[i] + 1 : STARTS[i + 1]], p.square().sum(-1)[:-1], rtol=1e-6, atol=1e-9
        )


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_kernel_collision_any_chunk(softcap):
    rng = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(11, 6, generator=rng).double(), torch.randn(101, 6, generator=rng).double()
    logits = hidden @ weight.T
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    want = torch.softmax(logits / 1.3, -1).square().sum(-1)
    for chunk in (None, 1, 4, 11):
        got = collision_probability(hidden, weight, 1.3, softcap=softcap, chunk_tokens=chunk)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
    assert len(collision_probability(hidden[:0], weight)) == 0
    huge = collision_probability(hidden * 1e4, weight)
    torch.testing.assert_close(huge, torch.ones_like(huge))


def test_models_that_read_other_tokens_are_refused(classifier, tmp_path):
    check_same_tokens(str(classifier[0]), "tiny", "--reward.model")
    tokenizer = load_tokenizer(TINY)
    tokenizer.save_pretrained(tmp_path)
    build_model(TINY, torch.float32).save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    text = file.read_text()
    vocab = tokenizer.get_vocab()
    a, b = (next(t for t, n in vocab.items() if n == number) for number in (5, 6))
    file.write_text(text.replace(f'"{a}": 5', f'"{a}": 6').replace(f'"{b}": 6', f'"{b}": 5'))
    with pytest.raises(ValueError, match=r"--reference.path .* 2 of .* tokens"):
        check_same_tokens(str(tmp_path), "tiny", "--reference.path")
