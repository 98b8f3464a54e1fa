import json
import math
import struct

import numpy as np
import pytest
from safetensors.numpy import load_file

from qat_lora.cache.format import layout as fmt
from qat_lora.cache.format.codec import pack_ids, unpack_ids
from qat_lora.cache.format.records import Sidecar, parse, render
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.errors import CacheDamaged, CacheError, ConfigError

SIZES = [(31, 1, 2), (31, 5, 17), (31, 31, 2), (70_000, 5, 5), (70_000, 1, 2), (300_000, 5, 2)]


@pytest.mark.parametrize(("vocab", "top_k", "length"), SIZES)
def test_roundtrip_at_odd_sizes(tmp_path, fingerprint, random_rows, write_cache, vocab, top_k, length):
    fp = fingerprint(vocab_size=vocab, top_k=top_k, length=length, temperatures=(0.5, 1.0, 2.0))
    rows = random_rows(fp, 5)
    write_cache(tmp_path / "c", fp, rows)
    batch = KDCacheDataset(tmp_path / "c", temperatures=(0.5, 1.0, 2.0)).rows([4, 0, 3, 1, 2])
    order = [4, 0, 3, 1, 2]
    for name in ("input_ids", "head_ids", "lse", "log_tail", "lse@0.5", "log_tail@0.5", "lse@2", "log_tail@2"):
        np.testing.assert_array_equal(batch[name], rows[name][order], err_msg=name)
    rounded = rows["head_logits"][order].astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(batch["head_logits"], rounded)
    np.testing.assert_array_equal(batch["target_mask"], rows["loss_mask"][order][:, 1:] == 1)
    expected = [[sum(row[: i + 1]) for i in range(length)] for row in rows["doc_starts"][order].tolist()]
    np.testing.assert_array_equal(batch["document_ids"], expected)
    types = {name: str(array.dtype) for name, array in batch.items()}
    assert types["target_mask"] == "bool"
    assert {types[name] for name in ("input_ids", "document_ids", "head_ids")} == {"int32"}
    assert {kind for name, kind in types.items() if name.startswith(("head_logits", "lse", "log_"))} == {"float32"}


def _by_hand(path, name, row, position):
    """Read one position as another language would: JSON, offsets, bits."""
    raw = path.read_bytes()
    size = struct.unpack_from("<Q", raw)[0]
    header = json.loads(raw[8 : 8 + size])

    def at(array, *index):
        entry = header[array]
        flat = 0
        for i, n in zip(index, entry["shape"], strict=True):
            flat = flat * n + i
        code, width = {"F32": ("<f", 4), "F16": ("<e", 2), "U16": ("<H", 2), "U8": ("<B", 1), "I32": ("<i", 4)}[
            entry["dtype"]
        ]
        return struct.unpack_from(code, raw, 8 + size + entry["data_offsets"][0] + flat * width)[0]

    if name == "ids":
        top_k = header["val"]["shape"][2]
        low = [at("ids_lo", row, position, i) for i in range(top_k)]
        high = [at("ids_hi", row, position, i // 4) >> (2 * (i % 4)) & 3 for i in range(top_k)]
        return [a + 65536 * b for a, b in zip(low, high, strict=True)]
    if name == "val":
        return [at("val", row, position, i) for i in range(header["val"]["shape"][2])]
    if name == "doc_starts":
        return at("doc_starts", row, position // 8) >> (position % 8) & 1
    return at(name, row, position)


def test_bytes_decoded_by_hand(tmp_path, fingerprint, random_rows, write_cache):
    fp = fingerprint(vocab_size=70_000, top_k=6, length=11)
    rows = random_rows(fp, 2)
    write_cache(tmp_path / "c", fp, rows)
    shard = tmp_path / "c" / "s-000000.safetensors"
    for row in range(2):
        for p in range(10):
            assert _by_hand(shard, "ids", row, p) == rows["head_ids"][row, p].tolist()
            assert _by_hand(shard, "val", row, p) == pytest.approx(rows["head_logits"][row, p], rel=1e-3, abs=1e-3)
            assert _by_hand(shard, "lse", row, p) == rows["lse"][row, p]
            assert _by_hand(shard, "log_tail", row, p) == rows["log_tail"][row, p]
            assert _by_hand(shard, "doc_starts", row, p) == rows["doc_starts"][row, p]
            assert _by_hand(shard, "loss_mask", row, p) == rows["loss_mask"][row, p]
    theirs = load_file(shard)  # a standard tool reads it
    assert [theirs[spec.name].shape[1:] for spec in fp.arrays] == [spec.row_shape for spec in fp.arrays]


def test_ids_at_the_edges_of_each_packing():
    for vocab in (2, 65_536, 65_537, 262_144, 262_145, 1_000_000):
        edges = [i for i in (0, 1, 65_535, 65_536, 131_072, 196_608, 262_143, 262_144, vocab - 1) if i < vocab]
        ids = np.array([[edges]], np.int32)
        packed = pack_ids(ids, vocab)
        for k in range(1, len(edges) + 1):
            np.testing.assert_array_equal(unpack_ids(packed, k), ids[..., :k])
        with pytest.raises(CacheError, match="vocab_size"):
            pack_ids(ids + 1, vocab)
        assert sorted(packed) == (
            ["ids"] if vocab > 262_144 else ["ids_hi", "ids_lo"] if vocab > 65_536 else ["ids_lo"]
        )


def test_bytes_per_token_meet_the_target():
    def figure(top_k, value_dtype="float16"):
        return fmt.row_bytes(fmt.array_table(fmt.Contents(1024, top_k, 151_936, value_dtype=value_dtype))) / 1024

    assert figure(64) <= 290  # 384 in int32 + fp16, for the candidates alone
    assert figure(128) <= 560
    assert figure(64, "uint8") <= 224 <= 226  # the aim leaves 2 bytes for sidecars and headers


def test_values_below_fp16_stay_finite_and_minus_infinity_too(tmp_path, fingerprint, random_rows, write_cache):
    fp = fingerprint(top_k=3)
    rows = random_rows(fp, 2)
    rows["head_logits"][0, 0] = [0, -1e5, -np.inf]
    write_cache(tmp_path / "c", fp, rows)
    assert KDCacheDataset(tmp_path / "c").rows([0])["head_logits"][0, 0].tolist() == [0, -65504, -65504]


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_k_slice_moves_the_dropped_mass_to_the_tail(tmp_path, fingerprint, random_rows, write_cache, temperature):
    fp = fingerprint(top_k=9, temperatures=(1.0, 2.0))
    rows = random_rows(fp, 3)
    rows["log_tail"][0, 0] = -80.0  # 1e-35: must survive beside the dropped entries
    rows["log_tail"][0, 1] = -np.inf
    write_cache(tmp_path / "c", fp, rows)
    suffix = "" if temperature == 1 else "@2"
    full = KDCacheDataset(tmp_path / "c", temperatures=(temperature,)).rows(range(3))
    for k in (1, 4, 8, 9):
        part = KDCacheDataset(tmp_path / "c", k=k, temperatures=(temperature,)).rows(range(3))
        np.testing.assert_array_equal(part["head_ids"], full["head_ids"][..., :k])
        np.testing.assert_array_equal(part["head_logits"], full["head_logits"][..., :k])
        np.testing.assert_array_equal(part["lse" + suffix], full["lse" + suffix])
        for row in range(3):
            for p in range(fp.length - 1):
                lse = float(full["lse" + suffix][row, p])
                dropped = [math.exp(float(v) / temperature - lse) for v in full["head_logits"][row, p, k:]]
                mass = math.fsum([*dropped, math.exp(float(full["log_tail" + suffix][row, p]))])
                expected = math.log(mass) if mass else -math.inf
                assert float(part["log_tail" + suffix][row, p]) == pytest.approx(expected, rel=2e-7, abs=1e-7)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"length": 1}, "length"),
        ({"top_k": 32}, "top_k"),
        ({"top_k": 0}, "top_k"),
        ({"value_dtype": "uint4"}, "value_dtype"),
        ({"optional_arrays": ("tail",)}, "optional_arrays"),
        ({"optional_arrays": ("draws:0",)}, "optional_arrays"),
        ({"optional_arrays": ("draws:4", "tail_draws:4")}, "optional_arrays"),
        ({"optional_arrays": ("draws:4", "draws:4")}, "optional_arrays"),
        ({"optional_arrays": ("tail_draws:4", "tail_entropy:2")}, "optional_arrays"),
        ({"optional_arrays": ("tail_entropy:1",)}, "tail_entropy"),
        ({"optional_arrays": ("hidden:4",)}, "optional_arrays"),
        ({"optional_arrays": ("hidden:4:../etc",)}, "optional_arrays"),
        ({"top_k": 0, "optional_arrays": ("draws:4",)}, "top_k"),
        ({"top_k": 0, "optional_arrays": ("tail_draws:4", "hidden:4:" + "0" * 64)}, "tail_draws"),
        ({"temperatures": (2.0,)}, "temperatures"),
        ({"temperatures": (2.0, 1.0)}, "temperatures"),
        ({"temperatures": (1.0, math.nan)}, "temperatures"),
        ({"temperatures": (-1.0, 1.0)}, "temperatures"),
    ],
)
def test_settings_that_cannot_be_stored(fingerprint, changes, field):
    with pytest.raises(ConfigError, match=field):
        fingerprint(**changes)


def _sealed(text):
    import hashlib

    body = text.rstrip().removesuffix("}").rstrip() + ',\n "checksum": "'
    return (body + hashlib.sha256(body.encode()).hexdigest() + '"\n}\n').encode()


def test_records_are_closed(fingerprint):
    record = Sidecar(
        shard="s-000000", first_row=0, rows=1, bytes=9, sha256="", cursor=[1, None], fingerprint=fingerprint()
    )
    text = render(record)
    assert parse(Sidecar, text, "x") == record
    tree = json.loads(text)
    del tree["checksum"]
    assert parse(Sidecar, _sealed(json.dumps(tree)), "x") == record  # the seal of another program

    def refused(changed, reason):
        with pytest.raises(CacheError, match=reason):
            parse(Sidecar, _sealed(changed if isinstance(changed, str) else json.dumps(changed)), "here")

    refused({**tree, "extra": 1}, "here.*extra")
    refused({k: v for k, v in tree.items() if k != "rows"}, "rows")
    refused({**tree, "rows": "1"}, "rows")
    refused({**tree, "rows": -1}, "rows")
    refused({**tree, "rows": True}, "rows")
    refused({**tree, "version": 2}, "version")
    refused({**tree, "format": "other"}, "format")
    refused(json.dumps(tree).replace('"rows": 1', '"rows": 1, "rows": 1'), "twice")
    refused(json.dumps(tree).replace('"rows": 1', '"rows": NaN'), "NaN")
    refused({**tree, "fingerprint": {**tree["fingerprint"], "top_k": 99}}, "top_k")
    refused(json.dumps(tree).replace("[1, null]", "[" * 100_000 + "]" * 100_000), "here")
    for broken in (b"", b"{}", text[:-1], text[1:], text + b" ", '{\n "ü"}'.encode()):
        with pytest.raises(CacheDamaged, match="here"):
            parse(Sidecar, broken, "here")


def test_names():
    assert fmt.shard_name("train", 123) == "s-000123"
    assert fmt.shard_number("eval", "e-000007") == 7 and fmt.shard_number("train", "e-000007") is None
    for bad in ("s-1", "s-0000001", "../s-000001", "s-000001\n", "/s-000001", "t-000001", "s-00000١", ""):
        assert fmt.shard_number("train", bad) is fmt.shard_number("eval", bad) is None
