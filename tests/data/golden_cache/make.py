"""Writes the golden caches beside this file, byte by byte from docs/cache-format.md, with the standard library only.

It shares no code with qat_lora, so a change of the reader, the writer or the page that breaks caches which people
already have is seen. The committed files must not change within versions 1 and 2 of the format; to make them again:

    python tests/data/golden_cache/make.py

`short`, `packed` and `wide` are the three ways ids are stored; `packed` has two temperatures, shards of unequal
size and an evaluation split. `codes` has values as codes, and drawn tokens; `hidden` has hidden states instead of a
head; `draws` is of version 2: draws alone, weights, and rows compressed one by one; `tail` has draws from the tail with
their entropy. `expected.json` holds what a reader must return, for all entries and for fewer.
"""

import hashlib
import json
import lzma
import math
import random
import struct
import sys
import zlib
from collections import Counter
from pathlib import Path

CACHES = {
    "short": {"vocab_size": 300, "length": 4, "top_k": 3, "temperatures": [1.0], "train": [2], "eval": []},
    "packed": {"vocab_size": 151936, "length": 9, "top_k": 5, "temperatures": [1.0, 2.0], "train": [3, 1], "eval": [1]},
    "wide": {"vocab_size": 300000, "length": 3, "top_k": 4, "temperatures": [0.5, 1.0], "train": [1], "eval": []},
    "codes": {"vocab_size": 151936, "length": 6, "top_k": 5, "temperatures": [1.0], "train": [2], "eval": []}
    | {"value_dtype": "uint8", "tail_draws": 3, "draws": 5},
    "hidden": {"vocab_size": 300, "length": 5, "top_k": 0, "temperatures": [1.0], "train": [2], "eval": []}
    | {"draws": 2, "hidden": 3},
    "draws": {"vocab_size": 151936, "length": 7, "top_k": 0, "temperatures": [1.0], "train": [2, 1], "eval": []}
    | {"draws": 6, "weights": 1, "lzma": 1},
    "tail": {"vocab_size": 300, "length": 5, "top_k": 3, "temperatures": [1.0], "train": [1], "eval": []}
    | {"tail_draws": 4, "tail_entropy": 1},
}
RAW = {"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 20, "lc": 0, "lp": 0, "pb": 0}
FEWER = 2
TYPES = {"U32": "I", "I32": "i", "F32": "f", "F16": "e", "U16": "H", "U8": "B"}


def as_stored(value, code):
    """Round a number to what a file of type `code` gives back."""
    return struct.unpack("<" + code, struct.pack("<" + code, value))[0]


def suffix(temperature):
    return "" if temperature == 1 else f"@{temperature:g}"


def draw_row(draw, setting):
    """Invent one row as the values a reader must return: plain lists, already rounded to the stored types."""
    length, top_k, vocab = setting["length"], setting["top_k"], setting["vocab_size"]
    starts = [1] + [int(draw.random() < 0.3) for _ in range(length - 1)]
    row = {
        "input_ids": [draw.randrange(vocab) for _ in range(length)],
        "loss_mask": [0] + [int(draw.random() < 0.7) for _ in range(length - 1)],
        "doc_starts": starts,
        "document_ids": [sum(starts[: i + 1]) for i in range(length)],
    }
    if top_k:
        row["head_ids"] = [[vocab - 1, *draw.sample(range(vocab - 1), top_k - 1)] for _ in range(length - 1)]
    if setting.get("value_dtype") == "uint8":
        codes = [[0, *sorted(draw.randrange(256) for _ in range(top_k - 2)), 255] for _ in range(length - 1)]
        ranges = [as_stored(20 * draw.random(), "e") for _ in codes]
        row["head_logits"] = [
            [as_stored(width * -as_stored((c / 255) ** 1.5, "f"), "f") for c in of_position]
            for width, of_position in zip(ranges, codes, strict=True)
        ]
    elif top_k:
        row["head_logits"] = [
            [0.0, *sorted((as_stored(-12 * draw.random(), "e") for _ in range(top_k - 1)), reverse=True)]
            for _ in range(length - 1)
        ]
    for name in ("tail_draws", "draws"):
        if name in setting:
            drawn = [[draw.randrange(vocab) for _ in range(setting[name])] for _ in range(length - 1)]
            row[f"{name[:-1]}_ids"] = drawn
    if "lzma" in setting:  # rising, with repeats, the next token among them more often than not
        row["draw_ids"] = [
            sorted(draw.choices([row["input_ids"][at + draw.randrange(2)], *drawn[:3]], k=setting["draws"]))
            for at, drawn in enumerate(row["draw_ids"])
        ]
        row["weights"] = [as_stored(draw.choice([0, 1, 2.5]), "e") for _ in range(length - 1)]
        row["entropy"] = [as_stored(3 * draw.random(), "f")]
    if "tail_entropy" in setting:
        row["tail_entropy"] = [as_stored(draw.random(), "f")]
    if "hidden" in setting:
        states = [[as_stored(draw.gauss(0, 9), "e") for _ in range(setting["hidden"])] for _ in range(length - 1)]
        row["teacher_hidden"] = states
    for temperature in setting["temperatures"] if top_k else []:
        lse, tail = "lse" + suffix(temperature), "log_tail" + suffix(temperature)
        row[lse], row[tail] = [], []
        for values in row["head_logits"]:
            head = sum(math.exp(value / temperature) for value in values)
            outside = draw.choice([1e-30, 1e-3, 0.7])
            row[lse].append(as_stored(math.log(head + outside), "f"))
            row[tail].append(as_stored(math.log(outside) - math.log(head + outside), "f"))
    return row


def with_fewer(row, setting):
    """Return what a reader that serves FEWER entries must return as log_tail."""
    served = {}
    for temperature in setting["temperatures"] if setting["top_k"] else []:
        end = suffix(temperature)
        served["log_tail" + end] = [
            round(math.log(math.exp(tail) + sum(math.exp(value / temperature - lse) for value in values[FEWER:])), 9)
            for values, lse, tail in zip(row["head_logits"], row["lse" + end], row["log_tail" + end], strict=True)
        ]
    return served


def flat(values):
    return [item for value in values for item in flat(value)] if isinstance(values, list) else [values]


def bits_of(values, width):
    """Put small numbers into bytes, lowest bits first."""
    packed = [0] * -(-len(values) * width // 8)
    for i, value in enumerate(values):
        packed[i * width // 8] |= value << i * width % 8
    return packed


def arrays_of(row, setting):
    """Return (name, safetensors type, shape without N, numbers) in file order, row_crc32 left out."""
    length, top_k, vocab = setting["length"], setting["top_k"], setting["vocab_size"]
    positions, head = [length - 1], [length - 1, top_k]
    keys = {"ids": "head_ids", "tail_draws": "tail_draw_ids", "draws": "draw_ids"}
    lists = {name: row[key] for name, key in keys.items() if key in row}
    codes = setting.get("value_dtype") == "uint8"
    yield "input_ids", "I32", [length], row["input_ids"]
    if vocab > 262144:
        for name, ids in lists.items():
            yield name, "I32", [length - 1, len(ids[0])], flat(ids)
    for temperature in setting["temperatures"] if top_k else []:
        for name in ("lse", "log_tail"):
            yield name + suffix(temperature), "F32", positions, row[name + suffix(temperature)]
    if "tail_entropy" in setting:
        yield "tail_entropy", "F32", [1], row["tail_entropy"]
    if top_k and not codes:
        yield "val", "F16", head, flat(row["head_logits"])
    if codes:
        yield "val_range", "F16", positions, [-values[-1] for values in row["head_logits"]]
    if "hidden" in setting:
        yield "hidden", "F16", [length - 1, setting["hidden"]], flat(row["teacher_hidden"])
    if vocab <= 262144:
        for name, ids in lists.items():
            yield f"{name}_lo", "U16", [length - 1, len(ids[0])], [i % 65536 for i in flat(ids)]
    if codes:
        parts = [value / values[-1] for values in row["head_logits"] for value in values]
        yield "val", "U8", head, [round(255 * part ** (1 / 1.5)) for part in parts]
    if 65536 < vocab <= 262144:
        for name, ids in lists.items():
            high = [bits_of([i // 65536 for i in of_position], 2) for of_position in ids]
            yield f"{name}_hi", "U8", [length - 1, -(-len(ids[0]) // 4)], flat(high)
    yield "loss_mask", "U8", [length], row["loss_mask"]
    yield "doc_starts", "U8", [-(-length // 8)], bits_of(row["doc_starts"], 1)


def head_bytes(draw, setting):
    """Invent an output head with bias, scale and softcap; return its file and what a reader must return."""
    vocab, width = setting["vocab_size"], setting["hidden"]
    weight = [[as_stored(draw.gauss(0, 1), "f") for _ in range(width)] for _ in range(vocab)]
    bias = [as_stored(draw.gauss(0, 1), "f") for _ in range(vocab)]
    metadata = {"format": "qat-lora-kd-cache", "version": "1", "logit_scale": "0.25", "softcap": "30.0"}
    ends = [4 * vocab * width, 4 * vocab * (width + 1)]
    header = {
        "__metadata__": metadata,
        "weight": {"dtype": "F32", "shape": [vocab, width], "data_offsets": [0, ends[0]]},
        "bias": {"dtype": "F32", "shape": [vocab], "data_offsets": ends},
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    numbers = flat(weight) + bias
    data = struct.pack("<Q", len(text)) + text + struct.pack(f"<{len(numbers)}f", *numbers)
    ends_of = {"weight_rows": [weight[0], weight[-1]], "bias_ends": [bias[0], bias[-1]]}
    return data, {"logit_scale": 0.25, "softcap": 30.0, **ends_of}


def shard_bytes(rows, setting, fingerprint_hash):
    described = [list(arrays_of(row, setting)) for row in rows]
    blobs = [[struct.pack(f"<{len(n)}{TYPES[t]}", *n) for _, t, _, n in arrays] for arrays in described]
    sums = b"".join(struct.pack("<I", zlib.crc32(b"".join(row))) for row in blobs)
    parts = [("row_crc32", "U32", [], sums)]
    for place, (name, kind, shape, _) in enumerate(described[0]):
        parts.append((name, kind, shape, b"".join(row[place] for row in blobs)))
    header = {"__metadata__": {"format": "qat-lora-kd-cache", "version": "1", "fingerprint": fingerprint_hash}}
    offset = 0
    for name, kind, shape, data in parts:
        offsets = [offset, offset + len(data)]
        header[name] = {"dtype": kind, "shape": [len(rows), *shape], "data_offsets": offsets}
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data for *_, data in parts)


def numbers_as_bytes(numbers):
    """One byte for numbers below 240, two up to 2,287, four beyond; first bytes first, then the others by place."""
    leading, second, words = [], [], []
    for number in numbers:
        if number < 240:
            leading.append(number)
        elif number < 240 + 8 * 256:
            leading.append(240 + (number - 240) // 256)
            second.append((number - 240) % 256)
        else:
            word = number - 240 - 8 * 256
            leading.append(248 + word // 2**24)
            words.append([word % 256, word // 256 % 256, word // 65536 % 256])
    return bytes(leading + second + [word[place] for place in range(3) for word in words])


def compressed_row(row, rank):
    often, repeats, gaps, places, literal = [], [], [], [], [rank[row["input_ids"][0]]]
    for following, drawn in zip(row["input_ids"][1:], row["draw_ids"], strict=True):
        entries = sorted((-count, rank[token]) for token, count in Counter(drawn).items())
        often.append(sum(count < -1 for count, _ in entries))
        repeats += [-count - 2 for count, _ in entries if count < -1]
        for at, (count, place) in enumerate(entries):
            gaps.append(place - entries[at - 1][1] - 1 if at and entries[at - 1][0] == count else place)
        ranks = [place for _, place in entries]
        places.append(ranks.index(rank[following]) + 1 if rank[following] in ranks else 0)
        literal += [] if places[-1] else [rank[following]]
    plain = bytes(often + repeats) + numbers_as_bytes(gaps) + bytes(places) + numbers_as_bytes(literal)
    for key, code in (("entropy", "f"), ("weights", "e")):
        data = struct.pack(f"<{len(row[key])}{code}", *row[key])
        size = struct.calcsize(code)
        plain += b"".join(data[place::size] for place in range(size))
    return plain + bytes(row["loss_mask"] + bits_of(row["doc_starts"], 1))


def compressed_shard_bytes(rows, fingerprint_hash):
    used = Counter(token for row in rows for token in row["input_ids"])
    used.update(token for row in rows for drawn in row["draw_ids"] for token in set(drawn))
    table = sorted(used, key=lambda token: (-used[token], token))
    rank = {token: place for place, token in enumerate(table)}
    plain = [struct.pack(f"<{len(table)}i", *table), *(compressed_row(row, rank) for row in rows)]
    blobs = [lzma.compress(data, lzma.FORMAT_RAW, filters=[RAW]) for data in plain]
    ends = [sum(map(len, blobs[: at + 1])) for at in range(len(blobs))]
    index, size = 4 * len(blobs), ends[-1]
    header = {
        "__metadata__": {"format": "qat-lora-kd-cache", "version": "2", "fingerprint": fingerprint_hash},
        "row_crc32": {"dtype": "U32", "shape": [len(blobs)], "data_offsets": [0, index]},
        "row_ends": {"dtype": "U32", "shape": [len(blobs)], "data_offsets": [index, 2 * index]},
        "rows": {"dtype": "U8", "shape": [size], "data_offsets": [2 * index, 2 * index + size]},
    }
    text = json.dumps(header, separators=(",", ":")).encode().ljust(504)
    sums = struct.pack(f"<{len(blobs)}I", *map(zlib.crc32, blobs))
    return struct.pack("<Q", len(text)) + text + sums + struct.pack(f"<{len(ends)}I", *ends) + b"".join(blobs)


def sealed(record):
    body = json.dumps(record, indent=2)[:-2] + ',\n  "checksum": "'
    return body.encode() + hashlib.sha256(body.encode()).hexdigest().encode() + b'"\n}\n'


def write_cache(folder, setting, seed):
    """Write one cache; return the rows of both splits."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    optional = ("tail_draws", "tail_entropy", "draws", "weights", "lzma")
    names = [f"{name}:{setting[name]}" for name in optional if name in setting]
    version = 2 if "lzma" in setting else 1
    if "hidden" in setting:
        head, _ = head_bytes(random.Random(0), setting)
        (folder / "teacher_head.safetensors").write_bytes(head)
        names.append(f"hidden:{setting['hidden']}:{hashlib.sha256(head).hexdigest()}")
    fingerprint = {
        "tokenizer_sha256": "ab" * 32,
        "vocab_size": setting["vocab_size"],
        "teacher": "golden",
        "teacher_sha256": "cd" * 32,
        "chat_template_sha256": None,
        "dataset": "invented",
        "packing": "none",
        "length": setting["length"],
        "top_k": setting["top_k"],
        "temperatures": setting["temperatures"],
        "value_dtype": setting.get("value_dtype", "float16"),
        "seed": 7,
        "eval_rows": sum(setting["eval"]),
        "builder": "standard library",
        "optional_arrays": names,
    }
    canonical = json.dumps({"version": version, **fingerprint}, sort_keys=True, separators=(",", ":"))
    common = {"format": "qat-lora-kd-cache", "version": version}
    manifest, rows = {**common, "fingerprint": fingerprint, "train": [], "eval": [], "info": {}}, {}
    for split in ("eval", "train"):
        rows[split] = []
        for number, count in enumerate(setting[split]):
            name = f"{split[0].replace('t', 's')}-{number:06d}"
            part = [draw_row(draw, setting) for _ in range(count)]
            digest = hashlib.sha256(canonical.encode()).hexdigest()
            data = shard_bytes(part, setting, digest) if version == 1 else compressed_shard_bytes(part, digest)
            entry = {"shard": name, "rows": count, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            place = {
                "first_row": len(rows[split]),
                "builder": 0,
                "builders": 1,
                "cursor": {"row": len(rows[split]) + count},
            }
            sidecar = sealed({**common, **entry, **place, "fingerprint": fingerprint})
            (folder / f"{name}.safetensors").write_bytes(data)
            (folder / f"{name}.json").write_bytes(sidecar)
            manifest[split].append({**entry, "sidecar_sha256": hashlib.sha256(sidecar).hexdigest()})
            rows[split] += part
    (folder / "manifest.json").write_bytes(sealed(manifest))
    return rows


def main(out):
    expected = {}
    for seed, (name, setting) in enumerate(CACHES.items()):
        rows = write_cache(out / name, setting, seed)
        expected[name] = {
            "temperatures": setting["temperatures"],
            "fewer": FEWER if setting["top_k"] else None,
            **({"head": head_bytes(random.Random(0), setting)[1]} if "hidden" in setting else {}),
            **{split: [{"all": row, "fewer": with_fewer(row, setting)} for row in rows[split]] for split in rows},
        }
    (out / "expected.json").write_text(json.dumps(expected, separators=(",", ":")) + "\n", encoding="ascii")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
