"""Dropout, LayerDrop and router jitter of a config are off in every model: a loss compares logp of several passes."""

from dataclasses import dataclass

import pytest
import torch

from spmdrl.config.schema import OptimizerConfig
from spmdrl.data.distribute import assign_updates
from spmdrl.data.pack import from_episodes
from spmdrl.policy.contract import LossResult, Objective, Shared
from spmdrl.policy.fsdp.policy import FsdpPolicy
from spmdrl.tracking.metrics import Metrics
from tests.ranks.cases import VOCAB, build_policy, config, gradients_of, synthetic_batch
from tests.ranks.harness import run_ranks

SMALL = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=128)
SMALL |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
FAMILIES = {
    "OPT": dict(
        ffn_dim=48, word_embed_proj_dim=32, dropout=0.5, attention_dropout=0.5, activation_dropout=0.5, layerdrop=0.5
    ),
    "GPT2": dict(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5, summary_first_dropout=0.5),
    "Mixtral": dict(
        intermediate_size=48,
        num_key_value_heads=2,
        num_local_experts=4,
        router_jitter_noise=0.5,
        attention_dropout=0.5,
    ),
}
CLASSIFIERS = {"OPT": "OPTForSequenceClassification", "GPT2": "GPT2ForSequenceClassification"}


def save(folder, family: str, scalar: bool):
    import transformers

    kind = {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM")
    kind = f"{family}ForSequenceClassification" if scalar else kind
    more = {"num_labels": 1} if scalar else {}
    made = getattr(transformers, f"{family}Config")(**SMALL | FAMILIES[family] | more, initializer_range=0.15)
    torch.manual_seed(0)
    model = getattr(transformers, kind)(made)
    model.save_pretrained(folder)
    return str(folder)


@dataclass
class Sum(Objective):
    """Objective that sums the head's first number over sampled tokens."""

    seen: torch.Tensor
    """[T]: that number of every token."""
    columns, temperature = frozenset(), 1.0

    def prepare(self, share, index):
        return Shared()

    def loss(self, micro, first_T, second_T, shared):
        self.seen[micro.token["place"]] = first_T.detach()
        return LossResult(first_T[micro.token["mask"]].sum(), Metrics())


def passes(world, folders: dict) -> dict:
    """Returns for (family, head, recomputing) a trained model's numbers of two passes and an update, with gradient."""
    out = {}
    episodes = synthetic_batch(2, 2)
    for family, head in folders:
        for again in (False, True):
            path, scope = folders[family, head], "full" if again else "none"
            cfg = config(
                model={"path": path},
                policy={"activation_checkpointing": scope, "chunked_loss": False, "max_tokens_per_microbatch": 64},
            )
            own = OptimizerConfig(lr=1e-3, clip_grad_norm=0.0)
            model = build_policy(cfg, world) if head == "lm" else FsdpPolicy(cfg, world, 9, True, path, "value", own)
            batch = assign_updates(from_episodes(episodes), 1, 2, [0, 1])
            batch.token["place"] = torch.arange(batch.n_tokens)
            seen = torch.zeros(batch.n_tokens)

            first, second = (model.logprobs(batch, 1.0)[0] for _ in range(2))
            grads = gradients_of(model, lambda m=model, b=batch, s=seen: m.update(b, Sum(s)))
            out[family, head, again] = first, second, seen, grads[0], batch.token["mask"]
    return out


def plain(path: str, head: str):
    """Values of the sampled tokens in the order of the batch, and the gradient of their sum, by Hugging Face."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    model = kind.from_pretrained(path, attn_implementation="eager").eval()
    model.get_input_embeddings().padding_idx = None
    values = []
    for t in synthetic_batch(2, 2):
        if head == "lm":
            log_p = torch.log_softmax(model(input_ids=t.tokens[None]).logits[0, :-1], -1)
            values.append(log_p.gather(1, t.tokens[1:, None])[:, 0][t.mask[1:]])
        else:
            states = model.base_model(input_ids=t.tokens[None]).last_hidden_state[0, :-1]
            values.append(model.score(states)[:, 0][t.mask[1:]])
    torch.cat(values).sum().backward()
    return torch.cat(values).detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    root = tmp_path_factory.mktemp("dropout")
    heads = [(family, "lm") for family in FAMILIES] + [(family, "value") for family in CLASSIFIERS]
    folders = {(f, h): save(root / f"{f}_{h}", f, h == "value") for f, h in heads}
    return folders, run_ranks(passes, 1, folders)[0]


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    "family, head", [*((f, "lm") for f in FAMILIES), *((f, "value") for f in CLASSIFIERS)], ids=str
)
def test_parity_dropout_is_off_in_every_pass(family, head, again, found):
    folders, results = found
    first, second, update, gradient, mask = results[family, head, again]
    want, want_gradient = plain(folders[family, head], head)
    assert want.abs().max() > 0.3
    assert torch.equal(first, second)
    torch.testing.assert_close(first[mask], want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(update, first, rtol=1e-6, atol=1e-6)
    # A bias of keys has the gradient 0, so by rounding alone: measured by the largest of all.
    largest = max(grad.abs().max().item() for grad in want_gradient.values())
    for name, grad in want_gradient.items():
        torch.testing.assert_close(gradient[name], grad, rtol=1e-4, atol=1e-5 * largest, msg=name)
