"""Makes reward models as such are published: small random classifiers in float64, with a byte-level tokenizer."""

from pathlib import Path
from typing import Any

import torch
import yaml

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] | trim + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TEXT = ["one plus two\n\nis three.\n\nso it is 3", "abc cba\n\n\n\nthe answer is cab", "first, then.\n\nreverse abcde"]


def bpe(template: str = "", words: int = 300) -> Any:
    """A byte-level tokenizer trained on a few lines; its tokens take white space and separators in with letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    special = ["<pad>", "<bos>", "<eos>", "<|user|>", "<|assistant|>", "<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=words,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXT * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    tokenizer.chat_template = template or None
    return tokenizer


def classifier(folder: Path, tokenizer: Any, names: list[str] | int, kind: str = "Sequence", seed: int = 0) -> str:
    """A random Qwen2 classifier of `Sequence` or `Token`; names: of its labels, or how many without names."""
    import transformers

    count = names if isinstance(names, int) else len(names)
    named = {} if isinstance(names, int) else {"id2label": dict(enumerate(names))}
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.15,
        pad_token_id=tokenizer.pad_token_id,
        num_labels=count,
        **named,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"Qwen2For{kind}Classification")(config).double()
        for parameter in model.score.parameters():
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def written(file: Path, **settings: Any) -> str:
    """The file of a reward model."""
    file.write_text(yaml.safe_dump(settings))
    return str(file)


@torch.no_grad()
def said(folder: str, tokens: list[int]) -> torch.Tensor:
    """Logits of plain transformers: of each token [T, L] by a classifier of tokens, else of the sequence [L]."""
    import transformers

    kind = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float64).eval()
    return model(input_ids=torch.tensor([tokens])).logits[0]
