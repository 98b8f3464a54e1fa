"""Presets: bits per weight by hand, rules that decide layer by layer, and the way through config.json."""

import json

import pytest

from qat_lora.errors import ConfigError
from qat_lora.quant.presets import PRESETS, Preset, preset
from qat_lora.quant.spec import QuantSpec

ROWS, COLUMNS = 96, 704  # 704 = 5 * 128 + 64 = 11 * 64
MLP_LAYER, ATTENTION_LAYER = "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj"


def lut_bits(bits, rank):
    return (bits * ROWS * COLUMNS + 16 * (ROWS * rank + rank * COLUMNS) + 16 * 2**bits) / (ROWS * COLUMNS)


BY_HAND = {  # bits per weight of an MLP and of an attention layer of 96 x 704
    "w2g64": (2.25, 2.25),
    "w3g128": (3 + 16 * 6 / 704, 3 + 16 * 6 / 704),
    "w4g128": (4 + 16 * 6 / 704, 4 + 16 * 6 / 704),
    "w4g64a": (4 + 20 / 64, 4 + 20 / 64),
    "nf4g64": (4.25 + 256 / (96 * 704), 4.25 + 256 / (96 * 704)),
    "apple2": (2 + 16 / (96 * 704), 2 + 16 / (96 * 704)),
    "q4_r32": (lut_bits(4, 32), lut_bits(4, 32)),
    "q4a4": (lut_bits(4, 4), lut_bits(4, 4)),
    "q2a2": (lut_bits(2, 32), lut_bits(2, 32)),
    "q2a4": (lut_bits(2, 32), lut_bits(4, 8)),
    "q2_0": (2.25, 2.25),
    "q2g128": (2 + 16 * 6 / 704, 2 + 16 * 6 / 704),
    "q3g64": (3.25, 3.25),
    "q4_0": (4.5, 4.5),
    "q8_0": (8.5, 8.5),
    "q2_k": (2.625, 2.625),  # 84 bytes for 256, as `block_q2_K`
    "q3_k": (3.4375, 3.4375),  # 110
    "q4_k": (4.5, 4.5),  # 144
    "q6_k": (6.5625, 6.5625),  # 210
}


def test_every_preset_is_counted_by_hand():
    assert set(BY_HAND) == set(PRESETS)
    for name, expected in BY_HAND.items():
        for layer, bits in zip((MLP_LAYER, ATTENTION_LAYER), expected, strict=True):
            spec = preset(name).spec_for(layer)
            assert spec is not None
            columns = 768 if spec.step_bits else COLUMNS
            assert spec.stored_bits(ROWS, columns) / (ROWS * columns) == pytest.approx(bits, rel=1e-12), name


def test_an_unknown_preset_is_refused_with_the_list():
    with pytest.raises(ConfigError) as refused:
        preset("w5g128")
    assert all(name in str(refused.value) for name in PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_json(name):
    kept = preset(name, keep=(r"layers\.0\.",))
    again = Preset.from_dict(json.loads(json.dumps(kept.to_dict())))
    assert again == kept
    assert again.spec_for(MLP_LAYER) is None
    assert again.spec_for(MLP_LAYER.replace("0", "1")) == preset(name).spec_for(MLP_LAYER)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"name": "x"},
        {"name": "x", "rules": [[".", {"bits": 2}]]},
        {"name": "x", "rules": [[".", {"bits": 2, "code": "half", "sharing": "tensor", "colour": "red"}]]},
        {"name": "x", "rules": [[".", {"bits": 99, "code": "half", "sharing": "tensor"}]]},
        {"name": "x", "rules": [["(", None]]},
        {"name": "x", "rules": 3},
    ],
)
def test_a_foreign_mapping_is_refused(data):
    with pytest.raises(ConfigError, match="not a preset of qat-lora"):
        Preset.from_dict(data)


def test_a_keep_pattern_must_be_a_regular_expression():
    with pytest.raises(ConfigError, match="keep: .* is not a regular expression"):
        preset("w2g64", keep=("(",))


def test_the_first_rule_that_is_found_decides():
    q2a4 = preset("q2a4")
    mlp, attention = q2a4.spec_for(MLP_LAYER), q2a4.spec_for(ATTENTION_LAYER)
    assert (mlp.bits, mlp.rank, attention.bits, attention.rank) == (2, 32, 4, 8)
    assert q2a4.spec_for("lm_head") is None


def test_overrides_come_before_the_preset_and_after_what_is_kept():
    chosen = preset("w2g64", keep=(r"layers\.1\.",), override=(r"layers\.(0|27)\.=w4g128", r"down_proj=w3g128"))
    bits = {
        "model.layers.0.mlp.down_proj": 4,  # the first override that is found
        "model.layers.27.self_attn.q_proj": 4,
        "model.layers.2.mlp.down_proj": 3,
        "model.layers.2.mlp.up_proj": 2,
    }
    assert {name: chosen.spec_for(name).bits for name in bits} == bits
    assert chosen.spec_for("model.layers.1.mlp.down_proj") is None
    assert chosen.lm_head is None
    with_head = preset("w2g64", override=("a=b=w4g128",), lm_head="nf4g64")
    assert with_head.rules[0][0] == "a=b" and with_head.lm_head.table == "normal"
    for kept in (chosen, with_head):
        assert Preset.from_dict(json.loads(json.dumps(kept.to_dict()))) == kept


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("w4g128", "is not PATTERN=PRESET"),
        ("=w4g128", "is not PATTERN=PRESET"),
        ("mlp=w9", "'w9' is unknown; allowed: w2g64"),
        ("(=w4g128", "is not a regular expression"),
        ("mlp=q2a4", "a rule each for MLP and attention; allowed: w2g64"),
    ],
)
def test_an_override_that_means_nothing_is_refused(word, reason):
    with pytest.raises(ConfigError, match=f"override: .*{reason}"):
        preset("w2g64", override=(word,))
    with pytest.raises(ConfigError, match="quantize_head: "):
        preset("w2g64", lm_head="w9")


def test_configs_written_before_tables_and_heads_still_load():
    old = {
        "name": "x",
        "rules": [[".", {"bits": 4, "code": "lut", "sharing": "channel", "group_size": None, "rank": None}]],
    }
    assert Preset.from_dict(old) == Preset("x", ((".", QuantSpec(bits=4, code="lut", sharing="channel")),))


def test_presets_with_kmeans_tables_still_load():
    """Nothing makes such tables any more, but a stored table is a table."""
    spec = {"bits": 2, "code": "lut", "sharing": "channel", "group_size": None, "rank": None, "table": "kmeans"}
    loaded = Preset.from_dict({"name": "x", "rules": [[".", spec]], "head": spec})
    assert loaded == Preset("x", ((".", QuantSpec(bits=2, code="lut", sharing="channel")),), loaded.rules[0][1])
    with pytest.raises(ConfigError, match="table: 'kmeans' is unknown; allowed: even, normal"):
        QuantSpec(**spec)
