"""Makes the tiny policy in `spmdrl/assets/tiny`: a Qwen2 of 0.74M parameters that half knows how to reverse.

    OMP_NUM_THREADS=1 python recipes/tiny_policy/make.py [--out DIR] [--seed N]

A policy from scratch never gets a reward, and one trained on right answers has nothing left to learn. So the warm start
shows `abcde=` followed by the copy `abcde` in 60% of the lines and by the wanted `edcba` in the rest: the policy ends
able to do both, and right in about 0.40 of its samples at temperature 1. Choosing is what reinforcement then teaches.

Prompts of the evaluation split (`builtin:reverse:eval`) are kept out of the warm start. It takes about 80 seconds on
one core.
"""

import argparse
import random
import sys
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # runs from a checkout that is not installed
from spmdrl.data.builtin import builtin_rows  # noqa: E402

LETTERS, LENGTH = "abcdefghij", 5
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
PAD, BOS, EOS, UNK = range(4)
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz+-*=:> "  # more than the task needs: other toy tasks can share it
VOCABULARY = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
WRONG_SHARE = 0.6
LR = 1e-3


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer with one token per character, `<bos>` before the text and no chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    inner = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def make_model() -> Qwen2ForCausalLM:
    """The untrained model. head_dim is 32, the smallest that vLLM takes on a CPU."""
    config = Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return Qwen2ForCausalLM(config)


def encode(words: list[str]) -> torch.Tensor:
    """Token ids `[len(words), 1 + length]` of words of one length, `<bos>` first."""
    return torch.tensor([[BOS] + [VOCABULARY[c] for c in word] for word in words])


@torch.no_grad()
def accuracy(model: Qwen2ForCausalLM, words: list[str], temperature: float, generator: torch.Generator) -> float:
    """Share of `words` whose reply is the word reversed and then the end; temperature 0 is greedy."""
    ids = encode([word + "=" for word in words])
    start = ids.shape[1]
    for _ in range(LENGTH + 1):
        logits = model(input_ids=ids).logits[:, -1].float()
        if temperature == 0:
            token = logits.argmax(-1, keepdim=True)
        else:
            token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        ids = torch.cat([ids, token], 1)
    wanted = torch.tensor([[VOCABULARY[c] for c in word[::-1]] + [EOS] for word in words])
    return (ids[:, start:] == wanted).all(1).float().mean().item()


def warm_start(model: Qwen2ForCausalLM, held_out: list[str], seed: int, steps: int) -> None:
    """Makes `steps` supervised steps of 64 mixed demonstrations, none of them with a word of `held_out`.

    The learning rate falls to zero over the second half: at a constant one the share of right samples swings by 0.1
    from step to step, and where it ends would be luck.
    """
    rng, generator, hidden = random.Random(seed), torch.Generator().manual_seed(seed), set(held_out)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(1, steps + 1):
        lines = []
        while len(lines) < 64:
            word = "".join(rng.choice(LETTERS) for _ in range(LENGTH))
            if word not in hidden:
                lines.append(f"{word}={word if rng.random() < WRONG_SHARE else word[::-1]}")
        ids = torch.cat([encode(lines), torch.full((len(lines), 1), EOS)], 1)
        labels = ids.clone()
        labels[:, : LENGTH + 2] = -100  # `<bos>`, the word and `=` are given
        optimizer.param_groups[0]["lr"] = LR * min(1.0, step / 20, 2 * (1 - step / steps))
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            sampled = accuracy(model, held_out, 1.0, generator)
            print(f"step {step}: loss {loss.item():.3f}, sampled accuracy {sampled:.3f}", flush=True)


def main() -> None:
    """Trains, reports and saves the policy (model.safetensors in float32, tokenizer, generation_config)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "spmdrl" / "assets" / "tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=800, help="steps of the warm start")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    held_out = [row["prompt"].removesuffix("=") for row in builtin_rows("reverse", held_out=True)]
    model = make_model()
    warm_start(model, held_out, args.seed, args.steps)
    generator = torch.Generator().manual_seed(args.seed + 1)
    sampled = accuracy(model, held_out * 8, 1.0, generator)
    greedy = accuracy(model, held_out, 0.0, generator)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size / 1e6:.2f}M parameters; {len(held_out)} held-out words: sampled {sampled:.3f}, greedy {greedy:.3f}")
    if not 0.3 <= sampled <= 0.5:
        raise SystemExit("not saved: sampled accuracy should end near 0.40; try another --seed")
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    model.save_pretrained(args.out)
    (args.out / "model.safetensors").chmod(0o644)
    make_tokenizer().save_pretrained(args.out)
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
