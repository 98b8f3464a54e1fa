"""Tokenising in pieces: the ids of the whole text, for every kind of tokenizer and text; or a refusal."""

import random
import unicodedata

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from qat_lora.data import tokenize as pieces
from qat_lora.data.tokenize import encode_pieces, slices
from qat_lora.errors import TextError

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
    return [i for piece in encode_pieces(tokenizer, slices(text), "t") for i in piece.ids.tolist()]


def naive(tokenizer, text):
    """Cut every so many characters: what must fail."""
    return [i for at in range(0, len(text), 300) for i in whole(tokenizer, text[at : at + 300])]


WORDS = """the of house water river 1998 12 1 don't I'll x y ( ) , . ; - _ == = ==> <|endoftext|> <mask> A AAAA Aa 's '
a aaaaaaa aaaaaaaa ... über naïve 日本語 中文没有空格的文字 한국어 ﬁ ｶﾞ"""
SPACES = [" ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", " \n ", "<x> ", "\u3000", "\u00a0", " the", " of"]
MARKS = ["\u1100\u1161", "e\u0301", "\u0301\u0316", "\u0316", "\u200d", "\U0001f468\u200d\U0001f469", "\0", "\ufffd"]
FLAG = "\U0001f1e9\U0001f1ea"
ATOMS = [*WORDS.split(), *SPACES, *MARKS, FLAG]
ATOM = st.sampled_from(ATOMS)
PASSAGE = st.one_of(
    st.lists(ATOM, min_size=20, max_size=80).map("".join),
    st.lists(ATOM, min_size=20, max_size=80).map(" ".join),
    st.tuples(ATOM, st.integers(20, 200)).map(lambda run: run[0] * run[1]),
    st.tuples(ATOM, ATOM, st.integers(0, 99)).map(lambda t: "".join(random.Random(t[2]).choices(t[:2], k=60))),
)


@settings(
    max_examples=25, derandomize=True, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(st.lists(PASSAGE, min_size=3, max_size=8).map("".join).filter(lambda text: len(text) > 700))
def test_the_ids_are_those_of_the_whole_text_or_it_is_refused(text):
    for kind in MAKE:
        tokenizer = make(kind)
        try:
            found = in_pieces(tokenizer, text)
        except TextError as error:
            assert "cannot be tokenised in pieces" in str(error)
            REFUSED.append(kind)
        else:
            DONE.append(kind)
            assert found == whole(tokenizer, text), kind
        NAIVE_WRONG.append(naive(tokenizer, text) != whole(tokenizer, text))


DONE, REFUSED, NAIVE_WRONG = [], [], []


def test_few_texts_are_refused_and_a_naive_splitter_fails_most():
    if not DONE:
        test_the_ids_are_those_of_the_whole_text_or_it_is_refused()
    assert len(REFUSED) < 0.05 * len(DONE) and set(DONE) == set(MAKE)
    assert sum(NAIVE_WRONG) > 0.5 * len(NAIVE_WRONG)


LINES = "".join(
    f"The river {i} is {i * i} metres long;\n  it's \t{'very ' * (i % 7)}old — über 日本語!\r\n" for i in range(60)
)


@pytest.mark.parametrize("kind", MAKE)
def test_ordinary_lines_are_never_refused(kind):
    assert in_pieces(make(kind), LINES) == whole(make(kind), LINES)


@pytest.mark.parametrize("kind", sorted(set(MAKE) - {"bert", "unigram", "metaspace"}))
@pytest.mark.parametrize("letter", ["a", "=", "ab", "中", "\U0001f600", "aA"])
def test_one_word_without_end_is_cut_where_merges_fall_into_step(kind, letter):
    text = f"begin {letter * 2000} end"
    assert in_pieces(make(kind), text) == whole(make(kind), text)


@pytest.mark.parametrize(
    ("kind", "run"), [("bert", "a"), ("unigram", "a"), ("qwen2", " \n"), ("qwen2", "\u0316\u0301")]
)
def test_what_cannot_be_cut_is_refused_with_its_place(kind, run):
    with pytest.raises(TextError, match=r"^t: cannot be tokenised in pieces: around character \d+ .*; divide the text"):
        in_pieces(make(kind), f"begin {run * 5000} end")
    text = f"{LINES} {run * 400} end"  # within the largest window it is found
    assert in_pieces(make(kind), text) == whole(make(kind), text)


def test_nothing_is_joined_across_a_character_that_begins_anew():
    befores = ("a", "\u1100", "\uac00", "\u304b", "\u0301", "\u0316")
    joins = {"\u0301", "\u1161", "\u11a8", "\uff9e", "\u314f"}  # of which normal forms do join some
    for character in [*map(chr, range(0x20, 0x3400)), *map(chr, range(0xF900, 0x10000))]:
        if pieces._begins_anew(character):
            for form in ("NFC", "NFKC"):
                alone = unicodedata.normalize(form, character)
                for before in befores:
                    both = unicodedata.normalize(form, before + character)
                    assert both == unicodedata.normalize(form, before) + alone, hex(ord(character))
    assert not any(map(pieces._begins_anew, joins)) and all(map(pieces._begins_anew, "a \n\u4e2d\u304b\uac00"))


@pytest.mark.parametrize("kind", ["qwen2", "llama2", "unigram"])
def test_spans_say_where_each_token_is(kind):
    tokenizer = make(kind)
    found = list(encode_pieces(tokenizer, slices(LINES), "t", spans=True))
    expected = tokenizer(LINES, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    assert np.concatenate([piece.spans for piece in found]).tolist() == [list(span) for span in expected]


def test_parts_of_any_size_give_the_same(monkeypatch):
    expected = whole(make("llama3"), LINES)
    for size in (1, 7, 299):
        parts = (LINES[at : at + size] for at in range(0, len(LINES), size))
        assert [i for p in encode_pieces(make("llama3"), parts, "t") for i in p.ids.tolist()] == expected
    assert list(encode_pieces(make("llama3"), [], "t"))[0].ids.tolist() == []


def test_text_is_taken_only_as_tokens_are():
    taken = []
    parts = (taken.append(part) or part for part in slices(LINES * 5))
    next(encode_pieces(make("qwen2"), parts, "t"))
    assert len(taken) <= 3


class Changed:
    """A tokenizer of somebody's own, which adds a token to whatever it is given."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, text, **settings):
        encoded = self.tokenizer(text, **settings)
        encoded["input_ids"] = [7, *encoded["input_ids"]]
        return encoded


def test_a_tokenizer_that_changes_its_ids_afterwards_is_not_cut():
    assert list(encode_pieces(Changed(make("qwen2")), ["short"], "t"))[0].ids[0] == 7
    with pytest.raises(TextError, match="cannot be tokenised in pieces"):
        list(encode_pieces(Changed(make("qwen2")), slices(LINES), "t"))
