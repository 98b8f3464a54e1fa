"""Chats to tokens, with a mask of what the assistant said.

Which tokens are the assistant's is not in the token ids. Marker strings need a list of every model's, and
`{% generation %}` blocks, the official way, are missing from most templates. So the template itself is asked: the text
up to an answer is its rendering of the messages before with a generation prompt, the text after it that of the messages
with the answer. Both must be beginnings of the whole chat's rendering, and that is checked. The whole is tokenised as
one text, so the ids are those that the model meets in use, and the tokenizer's offsets carry the spans over to tokens.

One exception is known: templates of reasoning models write an (empty) thinking block into the last answer and leave it
out of earlier ones. An earlier answer's rendering is then the same text without its beginning.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from qat_lora.data.layouts import Message
from qat_lora.data.tokenize import Piece, encode_pieces, slices
from qat_lora.errors import TextError


def encode_chat(tokenizer: Any, messages: list[Message], where: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokenise a chat as a fast tokenizer's template writes it; yield token ids and their mask, in pieces.

    The mask is 1 on the tokens that lie wholly in an assistant's answer or in the marker that ends its turn. TextError
    names `where`: the tokenizer has no chat template, or it refuses the messages, or an answer cannot be told from the
    rest.
    """
    if not getattr(tokenizer, "chat_template", None):
        remedy = "take the tokenizer of an instruction-tuned model, or plain text with --format text --text-field FIELD"
        raise TextError(f"{where}: is a chat, and the tokenizer has no chat template; {remedy}")
    render = partial(render_chat, tokenizer, where)
    whole = render(messages)
    spans = np.array([(0, 0), *answer_spans(whole, messages, render, where)], np.int64)
    return ((piece.ids, _within(piece, spans)) for piece in encode_pieces(tokenizer, slices(whole), where, spans=True))


def render_chat(tokenizer: Any, where: str, messages: list[Message], prompt: bool = False, **switches: Any) -> str:
    """Return a chat as its template, by `switches`, writes it, up to the next answer if `prompt`; else TextError."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **switches)
    except Exception as error:  # a template is a program of the model's author and may raise anything
        raise TextError(f"{where}: the chat template refuses these messages: {error}") from None


def _within(piece: Piece, spans: np.ndarray) -> np.ndarray:
    """Return a mask, uint8 [N], of the tokens that lie in one of some spans [S, 2], which are in order."""
    begin, stop = piece.spans.T
    start, end = spans[np.searchsorted(spans[:, 0], begin, side="right") - 1].T
    return ((start < stop) & (stop <= end)).astype(np.uint8)


def answer_spans(whole: str, messages: list[Message], render: Callable[..., str], where: str) -> list[tuple[int, int]]:
    """Return the character spans [start, end) of the answers, turn ends included; TextError if they cannot be told."""
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
        # What the template wrote behind the content; "" if it wrote the content otherwise than given.
        content = message["content"].strip()
        turn_end = "" if content not in answer else answer.rpartition(content)[2] if content else answer
        # Where the template shortens earlier answers, the text here is `answer` without its beginning.
        cut = next((n for n in range(len(answer)) if whole.startswith(answer[n:], len(before))), len(answer))
        if cut and (not turn_end.strip() or len(answer) - cut < len(turn_end)):
            raise _not_a_beginning(where, i)
        answer = answer[cut:]
        # White space after an end-of-turn marker comes from the template: the model stops at the marker.
        spans.append((len(before), len(before) + len(answer.rstrip() if turn_end.strip() else answer)))
    return spans


def _not_a_beginning(where: str, i: int) -> TextError:
    what = f"writes the messages up to number {i + 1} otherwise than at the beginning of the whole chat"
    remedy = "use single-turn chats or another template"
    return TextError(f"{where}: the chat template {what}, so what the assistant says cannot be told; {remedy}")
