"""Packing against an oracle that lays all tokens side by side, and resuming at every row."""

import json
import logging
import random
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from qat_lora.data import tokenize as pieces
from qat_lora.data.framing import describe_packing
from qat_lora.data.packing import (
    Encoder,
    answers_only,
    draw_rows,
    empty_row,
    every_token,
    make_encoder,
    pack_rows,
    share,
    take_eval,
)
from qat_lora.data.sources import Document, TextConfig, open_documents
from qat_lora.errors import ConfigError, TextError


def byte_tokenizer(bos=None, eos=None, adds=None, template=None):
    """One token a byte; ids of special tokens from 256 on; `adds`: what it puts around a text, "<s> $A"."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    added = [token for token in (adds or "").split() if token != "$A"]
    special = [token for token in dict.fromkeys([bos, eos, *added]) if token]
    bpe.add_special_tokens([AddedToken(token, special=True) for token in special])
    if adds:
        known = [(token, bpe.token_to_id(token)) for token in special]
        bpe.post_processor = processors.TemplateProcessing(single=adds, special_tokens=known)
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=bos, eos_token=eos, model_max_length=8)
    made.chat_template = template
    return made


PIECE = 5  # tokens


@Encoder
def numbered(document):
    """Encode "5 7 9!" as tokens 5, 7, 9; a token followed by ! is a prompt's."""
    words = (document.text or "").split()
    ids, mask = [int(word.rstrip("!")) for word in words], [int(not word.endswith("!")) for word in words]
    return [(ids[at : at + PIECE], mask[at : at + PIECE]) for at in range(0, len(ids), PIECE)]


def joined(pieces):
    """Ids and mask of all pieces."""
    pieces = list(pieces)
    return [int(i) for ids, _ in pieces for i in ids], [int(m) for _, mask in pieces for m in mask]


def make_documents(sizes, seed=0):
    """Documents whose tokens are 1, 2, 3 ... over all of them, some of them prompt tokens."""
    draw, token, documents = random.Random(seed), 0, []
    for i, size in enumerate(sizes):
        words = [f"{token + j + 1}{'!' * (draw.random() < 0.3)}" for j in range(size)]
        token += size
        documents.append(Document(" ".join(words), None, f"d{i}"))
    return documents


def oracle(documents, length):
    """Rows as lists of (token, mask, start), one token at a time."""
    flat = []
    for document in documents:
        for i, (token, count) in enumerate(zip(*joined(numbered(document)), strict=True)):
            flat.append((token, 0 if i == 0 else count, i == 0))
    rows = []
    for begin in range(0, len(flat), length):
        row = flat[begin : begin + length]
        if len(row) < length:
            row = row + [(0, 0, i == 0) for i in range(length - len(row))]
        rows.append([(row[0][0], 0, True), *row[1:]])
    return rows


def plain(row):
    assert (row.input_ids.dtype, row.loss_mask.dtype, row.doc_starts.dtype) == (np.int32, np.uint8, np.bool_)
    return [tuple(x) for x in zip(row.input_ids.tolist(), row.loss_mask.tolist(), row.doc_starts.tolist(), strict=True)]


SIZES = [[17, 0, 3, 1, 1, 40, 0, 0, 5, 12, 2, 0], [14], [1] * 30, [0, 0, 7, 7, 7], [100], [6, 8, 0]]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("length", [2, 3, 7, 13, 64])
def test_rows_are_the_oracles_and_every_row_can_be_resumed_at(sizes, length):
    documents = make_documents(sizes)
    rows = list(pack_rows(documents, numbered, length))
    assert [plain(row) for row in rows] == oracle(documents, length)
    for i, row in enumerate(rows):
        cursor = json.loads(json.dumps(row.cursor))
        assert cursor.keys() == {"document", "token"}
        rest = list(pack_rows(documents[cursor["document"] :], numbered, length, cursor))
        assert [(plain(a), a.cursor) for a in rest] == [(plain(b), b.cursor) for b in rows[i + 1 :]]


def test_a_resume_that_forgot_the_offset_is_caught_by_the_same_comparison():
    documents = make_documents(SIZES[0])
    rows = list(pack_rows(documents, numbered, 7))
    assert rows[0].cursor["token"] > 0
    naive = pack_rows(documents[rows[0].cursor["document"] :], numbered, 7)
    assert [plain(row) for row in naive] != [plain(row) for row in rows[1:]]


def test_rows_do_not_share_memory():
    rows = list(pack_rows(make_documents([30]), numbered, 5))
    rows[0].input_ids[:] = -1
    assert rows[1].input_ids.tolist() == [6, 7, 8, 9, 10]


def test_documents_are_taken_only_as_rows_need_them():
    taken = []

    def documents():
        for document in make_documents([5] * 10):
            taken.append(document.name)
            yield document

    next(pack_rows(documents(), numbered, 7))
    assert taken == ["d0", "d1"]


def test_padding_is_a_document_of_its_own():
    [row] = pack_rows(make_documents([3]), numbered, 6)
    assert row.input_ids.tolist() == [1, 2, 3, 0, 0, 0]
    assert row.doc_starts.tolist() == [True, False, False, True, False, False]
    assert row.loss_mask[3:].tolist() == [0, 0, 0]
    assert row.cursor == {"document": 1, "token": 0}


@pytest.mark.parametrize("length", [1, 0, -3])
def test_a_length_without_predictions_is_refused_at_once(length):
    with pytest.raises(ConfigError, match=f"length: {length} tokens .* allowed: 2 or more"):
        next(pack_rows([], numbered, length))


def test_a_text_that_changed_under_the_cursor_is_refused():
    cursor = {"document": 4, "token": 5}
    with pytest.raises(TextError, match=r"token 5 of document 4: that document \(d0\) has 5 tokens"):
        list(pack_rows(make_documents([5, 9]), numbered, 4, cursor))
    with pytest.raises(TextError, match="the text ends before that document"):
        list(pack_rows([], numbered, 4, cursor))


@pytest.mark.parametrize("eval_rows", [1, 2, 5])
def test_evaluation_takes_whole_documents(eval_rows):
    documents = make_documents([17, 0, 3, 1, 40, 5, 12, 30, 30])
    rows, rest = take_eval(lambda start: documents[start:], numbered, 7, eval_rows)
    assert [plain(row) for row in rows] == oracle(documents, 7)[:eval_rows]
    kept = {token for row in rows for token in row.input_ids.tolist()}
    used = [i for i, document in enumerate(documents) if kept & set(joined(numbered(document))[0])]
    assert rest == max(used) + 1
    trained = {token for document in documents[rest:] for token in joined(numbered(document))[0]}
    assert trained and not kept & trained


def test_no_evaluation_rows_leave_everything():
    assert take_eval(lambda start: iter(()), numbered, 7, 0) == ([], 0)


@pytest.mark.parametrize("sizes", [[10], [7, 7], [7, 7, 0, 0], []])
def test_evaluation_must_leave_something_to_train_on(sizes):
    documents = make_documents(sizes)
    with pytest.raises(TextError, match="eval_rows: 2 rows of 7 tokens .* nothing left to train on"):
        take_eval(lambda start: documents[start:], numbered, 7, 2)


@pytest.mark.parametrize("first", [0, 1, 5])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_shares_divide_the_documents(first, parts):
    documents = make_documents([1] * 11)
    shares = [share(lambda start: documents[start:], first, part, parts) for part in range(parts)]
    for part, open_share in enumerate(shares):
        expected = [d for j, d in enumerate(documents) if j >= first and j % parts == part]
        for start in range(len(expected) + 1):
            assert list(open_share(start)) == expected[start:]


# Begin and end tokens of texts


IM = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
EOT = "{{ bos_token }}{% for m in messages %}{{ m.content }}<|eot_id|>{% endfor %}"
TURNS = "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.content }}<end_of_turn>{% endfor %}"
FAMILIES = {  # bos, eos, what the tokenizer adds, chat template; what a text becomes
    "GPT-2": ("<|endoftext|>", "<|endoftext|>", None, None, "ab<|endoftext|>"),
    "SmolLM2-Instruct": ("<|im_start|>", "<|im_end|>", None, IM, "ab"),
    "Qwen3": (None, "<|im_end|>", None, IM, "ab"),
    "Qwen3-Base": (None, "<|endoftext|>", None, IM, "ab<|endoftext|>"),
    "Llama 3": (
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|begin_of_text|> $A",
        None,
        "<|begin_of_text|>ab<|end_of_text|>",
    ),
    "Llama 3 Instruct": ("<|begin_of_text|>", "<|eot_id|>", "<|begin_of_text|> $A", EOT, "<|begin_of_text|>ab"),
    "Gemma 3": ("<bos>", "<eos>", "<bos> $A", TURNS, "<bos>ab<eos>"),
    "Mistral Instruct": ("<s>", "</s>", "<s> $A", "{{ m }}{{ eos_token }}", "<s>ab"),
    "an end by itself": ("<s>", "</s>", "<s> $A </s>", "{{ m }}{{ eos_token }}", "<s>ab</s>"),
    "its own end": ("<s>", "</s>", "$A <s>", None, "ab<s>"),
    "an unknown end": ("<s>", "<stop>", None, None, "ab"),
    "none": (None, None, None, None, "ab"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_gets_what_its_tokenizer_adds_and_an_end_that_ends_texts(family):
    *given, expected = FAMILIES[family]
    tokenizer = byte_tokenizer(*given)
    encode = make_encoder(tokenizer)
    ids, mask = joined(encode(Document("ab", None, "x")))
    assert tokenizer.decode(ids) == expected
    before = len(tokenizer(expected.partition("ab")[0], add_special_tokens=False)["input_ids"])
    assert mask == [0] * before + [1] * (len(ids) - before)
    assert encode.prefix == tuple(ids[:before])
    told = f"rows and texts begin with {ids[0] if before else 'nothing'}, texts end with "
    told += f"{ids[-1] if len(ids) - before == 3 else 'nothing'}; attention and positions restart at each"
    assert describe_packing(tokenizer) == told


def test_a_tokenizer_that_hides_what_it_adds_is_refused():
    stranger = lambda text, add_special_tokens, **_: {"input_ids": [5, 6] if add_special_tokens else [7]}  # noqa: E731
    with pytest.raises(TextError, match=r"tokenizer: turns the letter a into the ids \[5, 6\] .* cannot be told"):
        make_encoder(stranger)


# Begin tokens of rows


def begun(documents, encode, length):
    """The oracle's rows as (ids, mask, starts), one token at a time, with begin tokens where a document goes on."""
    rows, row = [], []
    for document in documents:
        tokens = list(zip(*joined(encode(document)), strict=True))
        before = list(encode.prefix) if [t for t, _ in tokens][: len(encode.prefix)] == list(encode.prefix) else []
        for i, (token, counts) in enumerate(tokens):
            if not row:
                row = [(known, 0, at == 0) for at, known in enumerate(before[:i])]
            starts = not row or i == 0
            row.append((token, 0 if starts else counts, starts))
            if len(row) == length:
                rows.append(row)
                row = []
    if row:
        rows.append(row + [(0, 0, at == 0) for at in range(length - len(row))])
    return rows


@pytest.mark.parametrize("adds", [None, "<s> $A", "<s> <t> $A", "<s> <t> <u> $A </s>"])
@pytest.mark.parametrize("length", [4, 5, 7, 19])
def test_every_row_begins_as_the_tokenizer_begins_texts_and_no_token_is_lost_or_doubled(adds, length):
    tokenizer = byte_tokenizer("<s>", "</s>", adds)
    encode = make_encoder(tokenizer)
    texts = ["the river of light", "a", "", "bc", "is 1998 metres long, they say", "x" * 11]
    documents = [Document(text, None, text) for text in texts]
    rows = list(pack_rows(documents, encode, length))
    assert [plain(row) for row in rows] == begun(documents, encode, length)
    prefix, special = list(encode.prefix), set(tokenizer.all_special_ids) | set(encode.prefix)
    real = np.concatenate([row.input_ids for row in rows])
    real = real[: len(real) - sum(int(i == 0) for i in rows[-1].input_ids)]
    assert tokenizer.decode([i for i in real if i not in special]) == "".join(texts)
    for i, row in enumerate(rows):
        if prefix:
            assert row.input_ids[: len(prefix)].tolist() == prefix and not row.loss_mask[: len(prefix)].any()
        rest = list(pack_rows(documents[row.cursor["document"] :], encode, length, row.cursor))
        assert [(plain(a), a.cursor) for a in rest] == [(plain(b), b.cursor) for b in rows[i + 1 :]]
    if prefix:  # then every token of the text is predicted, once
        counted = [t for row in rows for t, m in zip(row.input_ids, row.loss_mask, strict=True) if m]
        assert tokenizer.decode([i for i in counted if i not in special]) == "".join(texts)


def test_rows_that_go_on_begin_anew_by_hand():
    encode = make_encoder(byte_tokenizer("<s>", "</s>", "<s> $A"))
    rows = list(pack_rows([Document("abcdefg", None, "x"), Document("hi", None, "y")], encode, 5))
    begin, end = 256, 257
    a, b, c, d, e, f, g, h, i = byte_tokenizer()("abcdefghi")["input_ids"]
    assert [row.input_ids.tolist() for row in rows] == [
        [begin, a, b, c, d],
        [begin, e, f, g, end],
        [begin, h, i, end, 0],
    ]
    assert [row.loss_mask.tolist() for row in rows] == [[0, 1, 1, 1, 1], [0, 1, 1, 1, 1], [0, 1, 1, 1, 0]]
    assert [row.cursor for row in rows] == [
        {"document": 0, "token": 5},
        {"document": 1, "token": 0},
        {"document": 2, "token": 0},
    ]


def test_a_row_has_room_for_a_token_behind_the_begin_tokens():
    encode = make_encoder(byte_tokenizer("<s>", None, "<s> <t> $A"))
    with pytest.raises(ConfigError, match="length: 2 tokens .* allowed: 3 or more"):
        next(pack_rows([], encode, 2))
    assert len(list(pack_rows([Document("abc", None, "x")], encode, 3))) == 3


@pytest.mark.parametrize("begins", [False, True])
def test_a_chat_goes_on_as_its_template_begins_it(begins):
    template = (
        "{% for m in messages %}{{ m.role[0] }}>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}a>{% endif %}"
    )
    tokenizer = byte_tokenizer("<s>", "</s>", "<s> $A", "{{ bos_token }}" * begins + template)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "because of that"}]
    encode = make_encoder(tokenizer)
    documents = [Document(None, chat, "chat")]
    rows = list(pack_rows(documents, encode, 7))
    assert [plain(row) for row in rows] == begun(documents, encode, 7)
    assert all((row.input_ids[0] == tokenizer.bos_token_id) == begins for row in rows) and len(rows) > 2
    assert joined(encode(documents[0]))[0].count(tokenizer.bos_token_id) == begins


def test_a_model_s_text_goes_on_as_it_began():
    encode = make_encoder(byte_tokenizer("<s>", "</s>", "<s> $A"))
    letters = byte_tokenizer()("abcdefgh")["input_ids"]
    for ids, begins in (([256, *letters], True), (letters, False)):
        text = ("<s>" if begins else "") + "abcdefgh"
        document = Document(text, None, "written", (ids, 3))
        rows = list(pack_rows([document], encode, 4))
        assert [plain(row) for row in rows] == begun([document], encode, 4)
        assert all((row.input_ids[0] == 256) == begins for row in rows)


def test_wrapped_encoders_begin_rows_alike():
    encode = make_encoder(byte_tokenizer("<s>", "</s>", "<s> $A"))
    documents = [Document("abcdefghijk", None, "x")]
    for wrap in (every_token, answers_only):
        assert wrap(encode).prefix == (256,)
    rows = list(pack_rows(documents, every_token(encode), 4))
    assert [row.input_ids[0] for row in rows] == [256] * len(rows)
    assert [row.loss_mask[0] for row in rows] == [0] * len(rows)


# Encoding


def test_blank_documents_are_no_tokens():
    encode = make_encoder(byte_tokenizer("<s>", "</s>"))
    for document in (
        Document("", None, ""),
        Document(" \n", None, ""),
        Document(None, None, ""),
        Document(None, [], ""),
    ):
        assert joined(encode(document)) == ([], [])


def test_long_texts_are_no_news(caplog):
    tokenizer = byte_tokenizer("<s>", "</s>")
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        tokenizer("a text longer than eight tokens")
        assert "longer than the specified maximum" in caplog.text  # the control: it does warn
        tokenizer.deprecation_warnings.clear()
        caplog.clear()
        joined(make_encoder(tokenizer)(Document("a text longer than eight tokens", None, "x")))
        assert not caplog.text
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)


def test_a_chat_is_packed_with_its_mask_and_named_in_errors():
    tokenizer = byte_tokenizer("<s>", "</s>")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    document = Document(None, messages, "chats.jsonl:3")
    with pytest.raises(TextError, match=r"chats\.jsonl:3: is a chat, and the tokenizer has no chat template"):
        make_encoder(tokenizer)(document)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}a>{% endif %}"
    )
    rows = list(pack_rows([document] * 3, make_encoder(tokenizer), 8))
    counted = [int(t) for row in rows for t, m in zip(row.input_ids, row.loss_mask, strict=True) if m]
    # u>hi</s>a>yo</s> is 10 tokens, so the first o begins the second row and has nothing to be predicted from
    assert tokenizer.decode(counted) == "y</s>" + "yo</s>" + "yo</s>"


class Small(Document):
    """A document in parts of 40 characters."""

    def parts(self):
        return (self.text[at : at + 40] for at in range(0, len(self.text), 40))


@pytest.fixture
def small_windows(monkeypatch):
    for name, value in (("WINDOW_CHARS", 120), ("OVERLAP_CHARS", 40), ("MARGIN_CHARS", 8)):
        monkeypatch.setattr(pieces, name, value)


@pytest.mark.parametrize("adds", [None, "<s> $A"])
def test_a_document_in_pieces_packs_and_resumes_like_the_whole(small_windows, adds):
    text = "".join(f"Line {i} of the document, {'very ' * (i % 5)}long — \u00fc\n" for i in range(24))
    encode = make_encoder(byte_tokenizer("<s>", "</s>", adds))
    begin = [256] if adds else []
    documents = [Document(name, None, name) for name in ("before", "", "after")]
    documents[1:1] = [Small(text, None, "long")]
    assert len(list(encode(documents[1]))) > 6
    whole = [*begin, *byte_tokenizer()(text)["input_ids"], 257]
    assert joined(encode(documents[1])) == (whole, [0] * len(begin) + [1] * (len(whole) - len(begin)))
    rows = list(pack_rows(documents, encode, 19))
    assert [plain(row) for row in rows] == begun(documents, encode, 19)
    assert sum(int(row.doc_starts[1:].sum()) for row in rows) <= 3  # a piece begins no document
    for i, row in enumerate(rows):
        rest = list(pack_rows(documents[row.cursor["document"] :], encode, 19, row.cursor))
        assert [(plain(a), a.cursor) for a in rest] == [(plain(b), b.cursor) for b in rows[i + 1 :]]
    with pytest.raises(TextError, match=rf"document 0: that document \(long\) has {len(whole)} tokens"):
        list(pack_rows(documents[1:], encode, 19, {"document": 0, "token": len(whole)}))


def test_a_long_chat_keeps_its_mask_in_pieces(small_windows):
    tokenizer = byte_tokenizer("<s>", "</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}a>{% endif %}"
    )
    turns = [("user", "what? " * 30), ("assistant", "because. " * 50), ("user", "oh"), ("assistant", "yes " * 60)]
    chat = Document(None, [{"role": role, "content": content} for role, content in turns], "c")
    found = list(make_encoder(tokenizer)(chat))
    assert len(found) > 3
    ids, mask = joined(found)
    assert tokenizer.decode(ids) == "".join(f"{role[0]}>{content}</s>" for role, content in turns)
    counted = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert counted == "because. " * 50 + "</s>" + "yes " * 60 + "</s>"


def test_lone_surrogates_stop_no_build(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}\n{"text": "c\\u0000d"}\n')
    tokenizer = byte_tokenizer("<s>", "</s>")
    with pytest.raises((TypeError, UnicodeError)):
        tokenizer("a\ud800b")  # the control
    documents = open_documents(TextConfig(dataset=str(tmp_path)))
    texts = [tokenizer.decode(joined(make_encoder(tokenizer)(document))[0][:-1]) for document in documents]
    assert texts == ["a\ufffdb", "c\0d"]


@pytest.mark.parametrize(
    ("megabytes", "rows"),
    [
        (8, 64),
        pytest.param(24, None, marks=pytest.mark.slow),
        pytest.param(200, None, marks=[pytest.mark.slow, pytest.mark.timeout(3000)]),
        pytest.param(1000, 64, marks=pytest.mark.slow),
    ],
)
def test_memory_does_not_follow_the_document(tmp_path, megabytes, rows):
    line = "The river of light is 1998 metres long, and nobody has measured it since; so they say.\n"
    with (tmp_path / "a.txt").open("w") as file:
        for _ in range(megabytes):
            file.write((line if megabytes < 1000 else line.replace("\n", " ")) * (1_000_000 // len(line)))
    byte_tokenizer("<s>", "</s>").save_pretrained(tmp_path / "tokenizer")
    program = [sys.executable, "-c", GROWTH, str(tmp_path), str(rows)]
    found = subprocess.run(program, check=True, capture_output=True, text=True).stdout
    assert int(found) < 500  # MB for any document, two windows' encodings; 2,017 when the document was encoded whole


GROWTH = """
import itertools, sys, torch
from transformers import PreTrainedTokenizerFast
from qat_lora.data.packing import make_encoder, pack_rows
from qat_lora.data.sources import TextConfig, open_documents
from qat_lora.runtime.host.machine import peak_memory_bytes

def peak():
    return peak_memory_bytes(torch.device("cpu")) // 2**20

folder, rows = sys.argv[1], None if sys.argv[2] == "None" else int(sys.argv[2])
encode = make_encoder(PreTrainedTokenizerFast.from_pretrained(folder + "/tokenizer"))
before = peak()
for row in itertools.islice(pack_rows(open_documents(TextConfig(dataset=folder + "/a.txt")), encode, 128), rows):
    pass
print(peak() - before)
"""


def test_real_files_resume_at_every_row_across_open_documents(tmp_path):
    for i, size in enumerate([50, 0, 3, 200, 1, 90]):
        (tmp_path / f"f{i}.txt").write_text("".join(chr(97 + (j * 7 + i) % 26) for j in range(size)))
    config, encode = TextConfig(dataset=str(tmp_path)), make_encoder(byte_tokenizer("<s>", "</s>"))
    rows = list(pack_rows(open_documents(config), encode, 19))
    assert len(rows) == -(-(50 + 3 + 200 + 1 + 90 + 5) // 19)
    for i, row in enumerate(rows):
        rest = pack_rows(open_documents(config, row.cursor["document"]), encode, 19, row.cursor)
        assert [plain(r) for r in rest] == [plain(r) for r in rows[i + 1 :]]


def row_of(number, counts=True):
    row = empty_row(2)
    row.input_ids[:], row.loss_mask[1] = number, counts
    return row


def drawn(rows, count, read, seed):
    kept, seen = draw_rows(rows, count, read, seed)
    return [int(row.input_ids[0]) for row in kept], seen


def test_rows_are_drawn_from_all_that_is_read_each_as_likely():
    """The first rows, as `islice` takes them, would be there every time and the others never."""
    times = np.bincount(np.concatenate([drawn(map(row_of, range(40)), 10, 40, seed)[0] for seed in range(2000)]))
    assert times.sum() == 20_000 and len(times) == 40
    deviations = (times - 500) / np.sqrt(2000 * 0.25 * 0.75)
    assert np.abs(deviations).max() < 4.5 and 15 < (deviations**2).sum() < 80


def test_draws_repeat_end_and_leave_out_rows_without_a_target():
    endless = map(row_of, iter(int, 1))
    assert drawn(endless, 3, 100, 0)[1] == 100
    assert drawn(map(row_of, range(99)), 5, 99, 7) == drawn(map(row_of, range(99)), 5, 99, 7)
    assert drawn(map(row_of, range(99)), 5, 99, 7) != drawn(map(row_of, range(99)), 5, 99, 8)
    assert drawn(map(row_of, range(4)), 9, 99, 0) == ([0, 1, 2, 3], 4)
    kept, seen = drawn((row_of(i, i % 2) for i in range(20)), 20, 15, 0)
    assert (kept, seen) == ([1, 3, 5, 7, 9, 11, 13], 15)
