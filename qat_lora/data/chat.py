"""Chats: data sets' layouts to messages, messages to tokens with a mask of what the assistant said.

Which tokens are the assistant's is not in the token ids. Searching for marker strings needs a list of every
model's markers, and `{% generation %}` blocks, the official way, are missing from most published templates
(Qwen3's too). So the template itself is asked: the text up to an answer is the template's rendering of the
messages before it with a generation prompt, the text after it the rendering of the messages with it. Both must be
beginnings of the whole conversation's rendering, and that is checked. The whole is then tokenised as one text, so the
ids are those that the model meets in use, and the tokenizer's character offsets carry the spans over to tokens.

One exception to "must be a beginning" is known and handled: templates of reasoning models write an (empty)
thinking block into the last answer and leave it out of earlier ones. An earlier answer's rendering is then the
same text without its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from qat_lora.data.tokenize import Piece, encode_pieces, slices
from qat_lora.errors import TextError

Message = dict[str, str]

ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "tool": "tool",
}
"""What the layouts call a speaker, and what chat templates call it."""


def messages_of(row: Mapping[str, Any], layout: str, where: str) -> list[Message]:
    """Turn a data set's row into messages.

    * `alpaca`: `instruction` and, where it is not blank, `input` are the user's turn, `output` the assistant's.
    * `sharegpt`, `openhermes`: `conversations`, a list of `from`/`value`; a `system_prompt` beside it comes first.
      Answers before the first question are left out, as is usual with this layout: ShareGPT has many cut threads.
      Rows of the first OpenHermes, which has alpaca's fields, are read as alpaca.
    * `messages`: a list of `role`/`content`.

    Raises:
        TextError: a missing field (with the fields there are), an unknown speaker, a content that is not text.
    """
    if layout == "openhermes" and "conversations" not in row:
        layout = "alpaca"
    if layout == "alpaca":
        instruction, given, output = (
            _text(row, "instruction", where),
            _text(row, "input", where) if row.get("input") else "",
            _text(row, "output", where),
        )
        question = f"{instruction}\n\n{given}" if given.strip() else instruction
        return [{"role": "user", "content": question}, {"role": "assistant", "content": output}]
    if layout == "messages":
        return _turns(row, "messages", "role", "content", where)
    turns = _turns(row, "conversations", "from", "value", where)
    if row.get("system_prompt") and turns and turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": _text(row, "system_prompt", where)})
    first_question = next((i for i, turn in enumerate(turns) if turn["role"] == "user"), len(turns))
    return [turn for i, turn in enumerate(turns) if i >= first_question or turn["role"] == "system"]


def _text(row: Mapping[str, Any], field: str, where: str) -> str:
    if field not in row:
        raise TextError(f"{where}: no field {field!r}; fields there: {', '.join(map(str, row)) or 'none'}")
    if not isinstance(row[field], str):
        raise TextError(f"{where}: field {field!r} holds {type(row[field]).__name__}; allowed: text")
    return row[field]


def _turns(row: Mapping[str, Any], field: str, speaker: str, content: str, where: str) -> list[Message]:
    if field not in row:
        raise TextError(f"{where}: no field {field!r}; fields there: {', '.join(map(str, row)) or 'none'}")
    turns = row[field]
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise TextError(f"{where}: field {field!r} is not a list of {{{speaker!r}, {content!r}}} turns")
    messages = []
    for turn in turns:
        role = _text(turn, speaker, where)
        if role not in ROLES:
            raise TextError(f"{where}: unknown speaker {role!r}; allowed: {', '.join(ROLES)}")
        messages.append({"role": ROLES[role], "content": _text(turn, content, where)})
    return messages


def encode_chat(
    tokenizer: Any, messages: list[Message], where: str = "chat"
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokenise a chat as its template writes it.

    Args:
        tokenizer: a transformers fast tokenizer with a chat template.
        messages: turns with `role` and `content`.
        where: names the chat in errors.

    Returns:
        In pieces, token ids and a mask of the same length: 1 on the tokens that lie wholly in an assistant's answer
        or in the marker that ends its turn, 0 on everything else. Nothing is put before or after what the template
        writes.

    Raises:
        TextError: the tokenizer has no chat template, the template refuses the messages, or an answer cannot be
            told from the rest.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise TextError(
            f"{where}: is a chat, and the tokenizer has no chat template; take the tokenizer of an "
            "instruction-tuned model, or plain text with --format text --text-field FIELD"
        )

    def render(messages: list[Message], prompt: bool = False) -> str:
        try:
            return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        except Exception as error:  # a template is a program of the model's author and may raise anything
            raise TextError(f"{where}: the chat template refuses these messages: {error}") from None

    whole = render(messages)
    spans = np.array([(0, 0), *answer_spans(whole, messages, render, where)], np.int64)
    return ((piece.ids, _within(piece, spans)) for piece in encode_pieces(tokenizer, slices(whole), where, spans=True))


def _within(piece: Piece, spans: np.ndarray) -> np.ndarray:
    """Return a mask, uint8 [N], of the tokens that lie in one of some spans [S, 2], which are in order."""
    begin, stop = piece.spans.T
    start, end = spans[np.searchsorted(spans[:, 0], begin, side="right") - 1].T
    return ((start < stop) & (stop <= end)).astype(np.uint8)


def answer_spans(whole: str, messages: list[Message], render: Callable[..., str], where: str) -> list[tuple[int, int]]:
    """Return the character spans [start, end) of the assistant's answers in a rendered chat, turn ends included.

    Raises:
        TextError: the template writes the beginning of a chat otherwise than the whole.
    """
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if i == 0:
            raise TextError(f"{where}: the first message is the assistant's; a chat begins with a question")
        before = render(messages[:i], prompt=True)
        if not whole.startswith(before):
            raise _not_a_beginning(where, i)
        answer = render(messages[: i + 1]).removeprefix(before)
        turn_end = _after(answer, message["content"].strip())
        # Where the template shortens earlier answers, the text here is `answer` without its beginning.
        cut = next((n for n in range(len(answer)) if whole.startswith(answer[n:], len(before))), len(answer))
        if cut and (not turn_end.strip() or len(answer) - cut < len(turn_end)):
            raise _not_a_beginning(where, i)
        answer = answer[cut:]
        # White space after an end-of-turn marker comes from the template: the model stops at the marker.
        spans.append((len(before), len(before) + len(answer.rstrip() if turn_end.strip() else answer)))
    return spans


def _after(answer: str, content: str) -> str:
    """Return what the template wrote behind the content; "" if it wrote the content otherwise than given."""
    if not content:
        return answer
    at = answer.rfind(content)
    return "" if at < 0 else answer[at + len(content) :]


def _not_a_beginning(where: str, i: int) -> TextError:
    return TextError(
        f"{where}: the chat template writes the messages up to number {i + 1} otherwise than at the beginning of "
        "the whole chat, so the assistant's tokens cannot be told from the prompt; use single-turn chats or "
        "another template"
    )
