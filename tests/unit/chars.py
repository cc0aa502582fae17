"""A small tokenizer for tests."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors


def char_tokenizer(chat_template: str | None = None, appends_eos: bool = False):
    """Tokenizer with one token per character and `<bos>` in front; the ChatML marks are special tokens."""
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]
    vocab = special + ["\n"] + [chr(i) for i in range(32, 127)]
    t = Tokenizer(models.WordLevel({c: i for i, c in enumerate(vocab)}, unk_token="<pad>"))
    t.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    t.decoder = decoders.Fuse()
    single = "<bos> $A <eos>" if appends_eos else "<bos> $A"
    t.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<bos>", 1), ("<eos>", 2)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=t,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        additional_special_tokens=special[3:],
    )
    made.chat_template = chat_template
    return made
