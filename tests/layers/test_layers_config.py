"""Both commands that make a student take the same words for it."""

from dataclasses import fields

from qat_lora.layers.calibrate.config import QuantizeConfig
from qat_lora.options import QatOptions, QuantizeOptions


def test_quantize_and_qat_share_every_setting_of_how_codes_are_made():
    shared = {field.name: field for field in fields(QuantizeConfig)}
    for command in (QuantizeOptions, QatOptions):
        own = {field.name: field for field in fields(command)}
        assert set(shared) <= set(own)
        differ = {name for name in shared if own[name].default != shared[name].default}
        assert differ <= {"preset"}, differ
