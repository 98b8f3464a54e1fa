"""Tokenising in pieces: the ids of the whole text, for every kind of tokenizer and text; or a refusal."""

import itertools

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from qat_lora.text import pieces
from qat_lora.text.pieces import encode_pieces, slices

GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = GPT4.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CJK = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
CORPUS = [
    "the house of the river and the water in the stone light was 1998.\n\n  It don't; I'll (go) to == 12345 \t tabs\n",
    "    def f(x):\n        return x + 1\r\n\n\n# aaaa aaaaaaaa bbbb abababab ======== -------- \n",
    "a" * 40 + " " * 24,
    "日本語の文章。中文没有空格的文字，很长。 über naïve e\u0301 Ünïcödé \U0001f600\U0001f468\u200d\U0001f469\n",
    "한국어 \u1100\u1161 \u0301\u0316\n",
] * 4


def byte_split(pattern, normalizer=None, **bpe):
    steps = [pre_tokenizers.Split(Regex(p), "isolated") for p in ([pattern] if isinstance(pattern, str) else pattern)]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return trained(models.BPE(**bpe), pre_tokenizers.Sequence(steps), normalizer, byte_level=True)


def trained(model, pre_tokenizer=None, normalizer=None, byte_level=False, trainer=trainers.BpeTrainer, **settings):
    tokenizer = Tokenizer(model)
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer:
        tokenizer.normalizer = normalizer
    if byte_level:
        settings["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(CORPUS, trainer(vocab_size=460, show_progress=False, **settings))
    return tokenizer


def llama2(normalizer):
    """Merges over whole texts, spaces as ▁ and bytes for what is unknown."""
    model = models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    known = ["<unk>", *(f"<0x{i:02X}>" for i in range(256))]
    alphabet = sorted(set("".join(CORPUS)) - set("한국어\U0001f600"))
    return trained(model, None, normalizer, special_tokens=known, limit_alphabet=60, initial_alphabet=alphabet[:60])


MAKE = {
    "gpt2": lambda: trained(models.BPE(), pre_tokenizers.ByteLevel(add_prefix_space=False), byte_level=True),
    "a prefix": lambda: trained(models.BPE(), pre_tokenizers.ByteLevel(add_prefix_space=True), byte_level=True),
    "qwen2": lambda: byte_split(QWEN, normalizers.NFC()),
    "llama3": lambda: byte_split(GPT4, ignore_merges=True),
    "o200k": lambda: byte_split(O200K),
    "deepseek": lambda: byte_split([r"\p{N}{1,3}", CJK, GPT4]),
    "any merges": lambda: byte_split([]),
    "llama2": lambda: llama2(normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])),
    "gemma": lambda: llama2(normalizers.Replace(" ", "▁")),
    "metaspace": lambda: trained(models.BPE(unk_token="?"), pre_tokenizers.Metaspace(), special_tokens=["?"]),
    "unigram": lambda: trained(
        models.Unigram(),
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
        normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]),
        trainer=trainers.UnigramTrainer,
        unk_token="<unk>",
        special_tokens=["<unk>"],
    ),
    "bert": lambda: trained(
        models.WordPiece(unk_token="[UNK]"),
        pre_tokenizers.BertPreTokenizer(),
        normalizers.BertNormalizer(),
        trainer=trainers.WordPieceTrainer,
        special_tokens=["[UNK]"],
    ),
}
MADE = {}


def make(kind):
    if kind not in MADE:
        tokenizer = MAKE[kind]()
        tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
        tokenizer.add_tokens([AddedToken("<mask>", lstrip=True), AddedToken("<x> ", rstrip=True), AddedToken("==>")])
        MADE[kind] = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    return MADE[kind]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    for name, value in (("WINDOW_CHARS", 300), ("OVERLAP_CHARS", 100), ("MARGIN_CHARS", 16), ("STARTS", 48)):
        monkeypatch.setattr(pieces, name, value)


def whole(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def in_pieces(tokenizer, text):
    found = encode_pieces(tokenizer, slices(text), "t")
    return list(itertools.chain.from_iterable(piece.ids.tolist() for piece in found))


def naive(tokenizer, text):
    """Cut every so many characters: what must fail."""
    return [i for at in range(0, len(text), 300) for i in whole(tokenizer, text[at : at + 300])]
