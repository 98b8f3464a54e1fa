"""Layouts of text: what a row's fields or a file's lines mean, one entry in one table each; and chats as tokens.

A row of a data set is a text or a chat. Chats come in a few layouts that say the same with other fields; each becomes
messages with `role` and `content`, as chat templates take them. A new one is a reader in `CHATS`, a name in `Format`.

WikiText comes as lines, sentences without their article; title lines ` = Title = ` put these together (Merity 2016).

A chat's tokens have a mask of what the assistant said. Which tokens are the assistant's is not in the token ids. Marker
strings need a list of every model's, and `{% generation %}` blocks, the official way, are missing from most templates.
So the template itself is asked: the text up to an answer is its rendering of the messages before with a generation
prompt, the text after it that of the messages with the answer. Both must be beginnings of the whole chat's rendering,
and that is checked. The whole is tokenised as one text, as in use; the tokenizer's offsets give the spans of tokens.

One exception is known: templates of reasoning models write an (empty) thinking block into the last answer and leave it
out of earlier ones. An earlier answer's rendering is then the same text without its beginning.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

import numpy as np

from qat_lora.data.file_rows import ROW_CHARS, Row, too_long
from qat_lora.data.tokenize import Piece, encode_pieces, slices
from qat_lora.errors import TextError

Format = Literal["auto", "text", "wikitext", "alpaca", "openhermes", "sharegpt", "messages"]
Message = dict[str, str]
Fields = Mapping[str, Any]

# What the layouts call a speaker, and what chat templates call it.
_ASSISTANT = dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "assistant"), "assistant")
ROLES = {"system": "system", "human": "user", "user": "user", **_ASSISTANT, "tool": "tool"}


def _sharegpt(row: Fields, where: str) -> list[Message]:
    """Read `conversations` after a `system_prompt`; answers before the first question, as of cut threads, go."""
    turns = _turns(row, "conversations", "from", "value", where)
    if row.get("system_prompt") and turns and turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": _text(row, "system_prompt", where)})
    first_question = next((i for i, turn in enumerate(turns) if turn["role"] == "user"), len(turns))
    return [turn for i, turn in enumerate(turns) if i >= first_question or turn["role"] == "system"]


def _alpaca(row: Fields, where: str) -> list[Message]:
    """Read `instruction` and, where it is not blank, `input` as the user's turn, `output` as the assistant's."""
    question = _text(row, "instruction", where)
    given = _text(row, "input", where) if row.get("input") else ""
    question = f"{question}\n\n{given}" if given.strip() else question
    return [{"role": "user", "content": question}, {"role": "assistant", "content": _text(row, "output", where)}]


# Every layout of chats: reads messages from a row's fields, and takes its name for the TextError of a bad one.
CHATS: dict[str, Callable[[Fields, str], list[Message]]] = {
    "messages": lambda row, where: _turns(row, "messages", "role", "content", where),
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    # OpenHermes 2.5 has ShareGPT's fields, the first OpenHermes has Alpaca's
    "openhermes": lambda row, where: (_sharegpt if "conversations" in row else _alpaca)(row, where),
}
# Fields by which `auto` knows a layout; it takes the first that fits.
KNOWN_BY = {"messages": {"messages"}, "sharegpt": {"conversations"}, "alpaca": {"instruction", "output"}}
KNOWN_BY["tokens"] = {"token_ids", "prompt_tokens"}


def layout_of(row: Row) -> str:
    """Tell a row's layout by its fields; chats go before `text`, which is then one model's rendering of the chat."""
    present = row.load().keys()
    return next((name for name, fields in KNOWN_BY.items() if fields <= present), "text")


def text_of(row: Row, field: str) -> str:
    """Return a row's text, "" where it is null; TextError if it has no such field, or no text in it."""
    fields = row.load()
    return "" if field in fields and fields[field] is None else _text(fields, field, f"text_field: {row.name}")


def weight_of(row: Row, field: str) -> float:
    """Return a row's weight; TextError if it has no such field, or no number from 0 to 65,504 (float16) in it."""
    weight = row.load().get(field)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= 65504:
        raise TextError(f"weight_field: {row.name}: {field} is {weight!r}; allowed: a number from 0 to 65,504")
    return float(weight)


def tokens_of(row: Row) -> tuple[list[int], int]:
    """Return the token ids of a text that `cache generate` wrote, and how many of them are its prompt's."""
    ids, prompt = row.load()["token_ids"], row.load()["prompt_tokens"]
    if not (isinstance(ids, list) and all(type(i) is int and i >= 0 for i in [*ids, prompt]) and prompt <= len(ids)):
        raise TextError(f"token_ids: {row.name}: are not those of a text and its prompt; write it again")
    return ids, prompt


def _field(row: Fields, field: str, where: str) -> Any:
    if field not in row:
        raise TextError(f"{where}: no field {field!r}; fields there: {', '.join(map(str, row)) or 'none'}")
    return row[field]


def _text(row: Fields, field: str, where: str) -> str:
    text = _field(row, field, where)
    if not isinstance(text, str):
        raise TextError(f"{where}: field {field!r} holds {type(text).__name__}; allowed: text")
    return text


def _turns(row: Fields, field: str, speaker: str, content: str, where: str) -> list[Message]:
    turns = _field(row, field, where)
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise TextError(f"{where}: field {field!r} is not a list of {{{speaker!r}, {content!r}}} turns")
    messages = []
    for turn in turns:
        role = _text(turn, speaker, where)
        if role not in ROLES:
            raise TextError(f"{where}: unknown speaker {role!r}; allowed: {', '.join(ROLES)}")
        messages.append({"role": ROLES[role], "content": _text(turn, content, where)})
    return messages


TITLE = re.compile(r"\s*= ([^=](?:.*[^=])?) =\s*")


def title_of(line: str) -> str | None:
    """Return the title if a line begins an article, else None."""
    return match[1].strip() if (match := TITLE.fullmatch(line)) else None


def starts_with_title(parts: Iterable[str]) -> bool:
    """Tell whether the first line of a text that is not blank is an article's title."""
    return title_of(next((line for part in parts for line in part.split("\n") if line.strip()), "")) is not None


def articles(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Join lines to articles; yield the title of each ("" before the first) and its text, title line included.

    Blank text before the first title is left out. The files mark a blank line by a space and the Hugging Face rows by
    nothing; both come out as "", so that the same corpus gives the same articles from either. TextError: an article of
    more than `ROW_CHARS` characters, as text has that is no WikiText.
    """
    title, body, size = "", list[str](), 0
    for line in lines:
        if (new_title := title_of(line)) is not None:
            if any(body):
                yield title, "\n".join(body) + "\n"
            title, body, size = new_title, [], 0
        content = line.rstrip("\r\n")
        size += len(content) + 1
        if size > ROW_CHARS:
            raise too_long(f"the article {title!r}")
        body.append(content if content.strip() else "")
    if any(body):
        yield title, "\n".join(body) + "\n"


def encode_chat(tokenizer: Any, messages: list[Message], where: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokenise a chat as a fast tokenizer's template writes it; yield token ids and their mask, in pieces.

    The mask is 1 on the tokens that lie wholly in an assistant's answer or in the marker that ends its turn. TextError
    names `where`: the tokenizer has no chat template, or refuses the messages, or an answer cannot be told apart.
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
