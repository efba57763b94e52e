"""Small tokenizers built in memory: byte-level BPE, sentencepiece with byte fallback, WordPiece,
and BPE that marks the ends of words."""

from __future__ import annotations

from functools import lru_cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
CORPUS = [
    "def add(a, b):\n    return a + b\n",
    "for item in items:\n    print(item)\n",
    "héllo wörld, 日本語 and 😀 twice 😀",
    "class Node:\n    def __init__(self, value):\n        self.value = value\n",
] * 8


@lru_cache
def byte_level(vocab_size: int = 400) -> Tokenizer:
    """Return byte-level BPE; id 0 is the end of text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@lru_cache
def byte_fallback() -> Tokenizer:
    """Return a tokenizer of words with a leading U+2581, bytes as <0xNN>, and a decoder that drops
    the first space."""
    words = ["▁hello", "▁world", "▁", "he", "llo", "lo", "▁a", "b", "c"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab |= {word: 259 + at for at, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


@lru_cache
def word_pieces() -> Tokenizer:
    """Return a tokenizer of whole words and "##" pieces inside a word; all other text is
    unknown."""
    letters = "abcdehlo日本語"
    pieces = ["[UNK]", "hello", "##llo", *letters, *(f"##{letter}" for letter in letters), ".", ","]
    model = models.WordPiece({piece: at for at, piece in enumerate(pieces)}, unk_token="[UNK]")
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["[SEP]"])
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    return tokenizer


@lru_cache
def word_ends() -> Tokenizer:
    """Return BPE of characters, with "</w>" at the end of a word."""
    letters = "abcdehlo日本語é"
    vocab = ["<unk>", *letters, *(f"{letter}</w>" for letter in letters)]
    model = models.BPE(
        {name: at for at, name in enumerate(vocab)},
        [],
        unk_token="<unk>",
        end_of_word_suffix="</w>",
    )
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    return tokenizer


@lru_cache
def printable() -> Tokenizer:
    """Return a tokenizer whose ids are all text: printable ASCII, and pairs of a few letters. Id 0
    is the end of text."""
    table = byte_level().encode  # "Ġ" for the space and "Ċ" for the line end, as in byte level
    characters = [table(chr(code)).tokens[0] for code in (10, *range(32, 127))]
    letters = characters[1:2] + [c for c in characters if c in "abcdefgh"]
    pairs = [(a, b) for a in letters for b in letters]
    names = [END_OF_TEXT, *characters, *(a + b for a, b in pairs)]
    tokenizer = Tokenizer(models.BPE({name: at for at, name in enumerate(names)}, pairs))
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
