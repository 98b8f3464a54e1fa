"""Chats: layouts, and masks checked by decoding what they select."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from qat_lora.data.layouts import encode_chat
from qat_lora.errors import TextError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3's: the last answer gets an empty thinking block, earlier answers have none.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Without special tokens: the newline is what ends a turn.
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# Writes the number of turns at the top, so nothing is a beginning of anything.
COUNTING = "{{ messages | length }} turns\n" + CHATML
# Shortens earlier answers at their end.
FORGETFUL = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content if loop.last else m.content[:2] }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
REFUSING = "{{ raise_exception('roles must alternate') }}"


@pytest.fixture(scope="module")
def tokenizer():
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator(["hello there, what is two and two? it is four.\n\nthank you, assistant user"] * 9, trainer)
    bpe.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>")


def chat(*contents, system=None):
    roles = ["user", "assistant"] * len(contents)
    turns = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return ([{"role": "system", "content": system}] if system else []) + turns


def encoded(tokenizer, messages):
    """Ids and mask of all pieces."""
    pieces = list(encode_chat(tokenizer, messages, "chat"))
    return [i for ids, _ in pieces for i in ids.tolist()], [m for _, mask in pieces for m in mask.tolist()]


def counted(tokenizer, ids, mask):
    """Decode the runs of tokens that the mask selects."""
    runs, run = [], []
    for token, count in [*zip(ids, mask, strict=True), (0, 0)]:
        if count:
            run.append(token)
        elif run:
            runs.append(tokenizer.decode(run, skip_special_tokens=False))
            run = []
    return runs


CHATS = [
    chat("hello", "hello there"),
    chat("what is two and two?", "it is four.", "thank you", "you"),
    chat("a", "a", "a", "a", "a", "a"),
    chat("hello", "\n\n  two\n\nand two \u00fc\u20ac\U0001f600", "  ", "\u65e5\u672c", system="it is"),
    chat("say assistant", "assistant\nuser", "thank you"),
]


@pytest.mark.parametrize("messages", CHATS)
def test_chatml_counts_answers_and_their_end_and_nothing_else(tokenizer, messages):
    tokenizer.chat_template = CHATML
    ids, mask = encoded(tokenizer, messages)
    assert ids == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    answers = [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
    assert counted(tokenizer, ids, mask) == answers


@pytest.mark.parametrize("messages", CHATS)
def test_a_template_that_drops_earlier_thinking(tokenizer, messages):
    tokenizer.chat_template = THINKING
    ids, mask = encoded(tokenizer, messages)
    answers = [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
    if messages[-1]["role"] == "assistant":
        answers[-1] = "<think>\n\n</think>\n\n" + answers[-1]
    assert counted(tokenizer, ids, mask) == answers


def test_a_template_without_special_tokens_ends_turns_by_its_newline(tokenizer):
    tokenizer.chat_template = PLAIN
    ids, mask = encoded(tokenizer, chat("hello", "it is four.", "thank you", "you"))
    assert counted(tokenizer, ids, mask) == [" it is four.\n", " you\n"]


def test_a_chat_without_answers_counts_nothing(tokenizer):
    tokenizer.chat_template = CHATML
    ids, mask = encoded(tokenizer, chat("hello", system="it is"))
    assert ids and not any(mask)


def test_an_empty_answer_counts_its_end(tokenizer):
    tokenizer.chat_template = CHATML
    ids, mask = encoded(tokenizer, chat("hello", "", "thank you", ""))
    assert counted(tokenizer, ids, mask) == ["<|im_end|>", "<|im_end|>"]


@pytest.mark.parametrize("template", [COUNTING, FORGETFUL])
def test_a_template_that_rewrites_the_beginning_is_refused(tokenizer, template):
    tokenizer.chat_template = template
    with pytest.raises(TextError, match=r"row 7: the chat template writes the messages up to number \d otherwise"):
        encode_chat(tokenizer, chat("hello", "there it is", "thank you", "you"), "row 7")


def test_what_the_template_refuses_is_said(tokenizer):
    tokenizer.chat_template = REFUSING
    with pytest.raises(TextError, match="row 7: the chat template refuses these messages: roles must alternate"):
        encode_chat(tokenizer, chat("hello", "there"), "row 7")


def test_a_tokenizer_without_template_is_refused_with_the_fix(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(TextError, match="no chat template; .*--format text"):
        encode_chat(tokenizer, chat("hello", "there"), "chat")


def test_an_answer_without_question_is_refused(tokenizer):
    tokenizer.chat_template = CHATML
    with pytest.raises(TextError, match="the first message is the assistant's"):
        encode_chat(tokenizer, [{"role": "assistant", "content": "hello"}], "chat")
