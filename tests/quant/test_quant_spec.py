"""What a spec counts, and refusals that name what is allowed."""

import pytest

from qat_lora.errors import ConfigError
from qat_lora.quant.spec import QuantSpec


@pytest.mark.parametrize(("columns", "groups"), [(704, 6), (128, 1), (1, 1), (129, 2), (256, 2)])
def test_a_short_last_group_has_a_scale_of_its_own(columns, groups):
    spec = QuantSpec(bits=4, code="integer", sharing="group", group_size=128)
    assert spec.scale_count(7, columns) == 7 * groups


def test_counts_of_the_other_sharings():
    assert QuantSpec(bits=2, code="half", sharing="tensor").scale_count(5, 9) == 1
    assert QuantSpec(bits=2, code="half", sharing="channel").scale_count(5, 9) == 5
    assert QuantSpec(bits=2, code="half", sharing="lowrank", group_size=4, rank=3).scale_count(5, 9) == 3 * 14


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("bits", {"bits": 1}),
        ("bits", {"bits": 9}),
        ("bits", {"bits": 2.5}),
        ("bits", {"bits": "4"}),
        ("code", {"code": "nf4"}),
        ("sharing", {"sharing": "block"}),
        ("group_size", {"group_size": None}),
        ("group_size", {"group_size": 0}),
        ("group_size", {"sharing": "channel"}),
        ("group_size", {"sharing": "lowrank", "rank": 4, "group_size": None}),
        ("rank", {"rank": 4}),
        ("rank", {"sharing": "lowrank"}),
        ("rank", {"sharing": "lowrank", "rank": 0}),
        ("table", {"table": "normal"}),
        ("table", {"code": "lut", "table": "nf4"}),
        ("sharing", {"code": "asymmetric", "sharing": "lowrank", "rank": 4}),
        ("signed", {"signed": 1}),
        ("signed", {"signed": True, "code": "half"}),
        ("signed", {"signed": True, "sharing": "channel", "group_size": None}),
        ("step_bits", {"step_bits": 4.0}),
        ("step_bits", {"step_bits": 9}),
        ("step_bits", {"step_bits": 6, "group_size": 24}),
        ("step_bits", {"step_bits": 6, "code": "half"}),
        ("step_bits", {"code": "minimum"}),
    ],
)
def test_a_spec_that_means_nothing_is_refused_by_field(field, change):
    sound = {"bits": 4, "code": "integer", "sharing": "group", "group_size": 128}
    QuantSpec(**sound)
    with pytest.raises(ConfigError, match=f"^{field}: "):
        QuantSpec(**(sound | change))


def test_refused_names_come_with_what_is_allowed():
    with pytest.raises(ConfigError, match="half, integer, asymmetric, minimum, lut"):
        QuantSpec(bits=4, code="nf4", sharing="channel")
    with pytest.raises(ConfigError, match="tensor, channel, group, lowrank"):
        QuantSpec(bits=4, code="half", sharing="block")
