"""Tiny tokenizers, written as the files of a Hugging Face tokenizer."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = ["The capital of France is Paris.", "Hello world! How are you?", "<answer>42</answer>", "你好 🙂 é"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_level_tokenizer(
    corpus: Iterable[str] = CORPUS, vocab_size: int = 400, special_tokens: Sequence[str] = ()
) -> Tokenizer:
    """Return a byte-level BPE tokenizer, as GPT-2, Llama 3, Qwen and SmolLM have it, trained on `corpus`.

    Args:
        corpus: Texts whose frequent pairs of bytes become tokens.
        vocab_size: The number of tokens, the 256 bytes and the special tokens included.
        special_tokens: Tokens that get the first ids.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def sentencepiece_tokenizer(corpus: Iterable[str], scheme: str = "legacy") -> Tokenizer:
    """A BPE over ▁ with bytes for the rest, as Llama 2, Mistral and Gemma; `legacy` writes ▁ before each part."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    if scheme == "legacy":
        parts = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(parts)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", *bytes_], show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def write_tokenizer(directory: Path) -> Path:
    """Write a tokenizer with the end `<|end|>` (id 0) and a chat template to `directory`, and return the directory."""
    byte_level_tokenizer(CORPUS * 4, special_tokens=["<|end|>"]).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def write_wordpiece_tokenizer(directory: Path) -> Path:
    """Write a tokenizer as BERT's, which makes one token of a word of over 100 characters, and return `directory`."""
    special, words = ["[UNK]", "[CLS]", "[SEP]"], ["a", "x", "##x", "!"]
    tokenizer = Tokenizer(models.WordPiece({one: at for at, one in enumerate([*special, *words])}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory
