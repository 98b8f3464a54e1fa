"""Counting optimised HLO: hand-written programs whose bytes and operations are known."""

import pytest

from benchmarks.compiled import hlo
from qat_lora.errors import DamagedFileError

LOOP = """HloModule loop, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %a_b = f32[] add(%a, %b)
}

%layer (p0: f32[8,16], p1: f32[6,16,16], p2: s32[]) -> f32[8,16] {
  %p0 = f32[8,16]{1,0} parameter(0)
  %p1 = f32[6,16,16]{2,1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %slice = f32[1,16,16]{2,1,0} dynamic-slice(%p1, %p2, %zero, %zero), dynamic_slice_sizes={1,16,16}
  %weight = f32[16,16]{1,0} bitcast(%slice)
  ROOT %dot = f32[8,16]{1,0} dot(%p0, %weight), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (state: (s32[], f32[8,16], f32[6,16,16])) -> (s32[], f32[8,16], f32[6,16,16]) {
  %state = (s32[], f32[8,16]{1,0}, f32[6,16,16]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[8,16]{1,0} get-tuple-element(%state), index=1
  %w = f32[6,16,16]{2,1,0} get-tuple-element(%state), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %y = f32[8,16]{1,0} fusion(%x, %w, %i), kind=kOutput, calls=%layer, metadata={op_name="layer/dot"}
  ROOT %out = (s32[], f32[8,16]{1,0}, f32[6,16,16]{2,1,0}) tuple(%next, %y, %w)
}

%condition (state.1: (s32[], f32[8,16], f32[6,16,16])) -> pred[] {
  %state.1 = (s32[], f32[8,16]{1,0}, f32[6,16,16]{2,1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %bound = s32[] constant(6)
  ROOT %less = pred[] compare(%i.1, %bound), direction=LT
}

ENTRY %main (x.1: f32[8,16], w.1: f32[6,16,16]) -> f32[8,16] {
  %x.1 = f32[8,16]{1,0} parameter(0)
  %w.1 = f32[6,16,16]{2,1,0} parameter(1)
  %start = s32[] constant(0)
  %before = (s32[], f32[8,16]{1,0}, f32[6,16,16]{2,1,0}) tuple(%start, %x.1, /*index=2*/%w.1)
  %while.1 = (s32[], f32[8,16]{1,0}, f32[6,16,16]{2,1,0}) while(%before), condition=%condition, body=%body
  ROOT %y.1 = f32[8,16]{1,0} get-tuple-element(%while.1), index=1
}
"""
NOTED = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"6"}}')
LAYER_BYTES = 4 * (8 * 16 + 16 * 16 + 1 + 8 * 16)  # x, one weight of six, the number of the layer, y
PRODUCT = 2 * 8 * 16 * 16


def entry(*lines: str, before: str = "") -> str:
    """Return a module of one computation."""
    return (
        f"HloModule m\n{before}\nENTRY %e (p: f32[4]) -> f32[4] {{\n"
        + "\n".join(f"  {line}" for line in lines)
        + "\n}\n"
    )


@pytest.mark.parametrize("text", [LOOP, NOTED])
def test_a_loop_counts_as_often_as_it_runs_and_a_slice_as_a_slice(text):
    counts = hlo.count(text)
    assert counts.matrix_operations == 6 * PRODUCT
    assert counts.loops == 1 and counts.unknown_trips == []
    counter, bound = 6 * (4 + 4 + 4), 7 * (4 + 4 + 1)
    assert counts.bytes == 6 * LAYER_BYTES + counter + bound == counts.hbm_bytes
    assert counts.largest[0] == {
        "name": "y",
        "opcode": "fusion",
        "from": "layer/dot",
        "times": 6,
        "bytes": 6 * LAYER_BYTES,
        "operations": 6 * PRODUCT,
    }
    assert counts.instructions == hlo.instruction_count(text) == 28


def test_control_a_body_counted_once_is_six_times_too_little():
    text = LOOP.replace("constant(6)", "constant(1)")
    assert hlo.count(text).matrix_operations == PRODUCT


def test_nested_loops_multiply():
    outer = LOOP.replace("%while.1 = ", "%inner.1 = ").replace("ENTRY %main", "%again")
    outer = outer.replace("get-tuple-element(%while.1)", "get-tuple-element(%inner.1)")
    calls = """
ENTRY %all (x.2: f32[8,16], w.2: f32[6,16,16]) -> f32[8,16] {
  %x.2 = f32[8,16]{1,0} parameter(0)
  %w.2 = f32[6,16,16]{2,1,0} parameter(1)
  %first = f32[8,16]{1,0} call(%x.2, %w.2), to_apply=%again
  ROOT %second = f32[8,16]{1,0} call(%first, %w.2), to_apply=%again
}
"""
    assert hlo.count(outer + calls).matrix_operations == 2 * 6 * PRODUCT


def test_a_loop_of_unknown_length_is_named():
    counts = hlo.count(LOOP.replace("direction=LT", "direction=GT"))
    assert counts.unknown_trips == ["while.1"] and counts.matrix_operations == PRODUCT


def test_an_update_in_place_counts_the_update():
    update = """
%put (b: f32[6,16], u: f32[1,16], i: s32[]) -> f32[6,16] {
  %b = f32[6,16]{1,0} parameter(0)
  %u = f32[1,16]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %z = s32[] constant(0)
  ROOT %d = f32[6,16]{1,0} dynamic-update-slice(%b, %u, %i, %z)
}
"""
    lines = (
        "%b.1 = f32[6,16]{1,0} parameter(0)",
        "%u.1 = f32[1,16]{1,0} parameter(1)",
        "%i.1 = s32[] parameter(2)",
        "ROOT %f = f32[6,16]{1,0} fusion(%b.1, %u.1, %i.1), kind=kLoop, calls=%put",
    )
    assert hlo.count(entry(*lines, before=update)).bytes == 64 + 64 + 4
    plain = (*lines[:3], "ROOT %d.1 = f32[6,16]{1,0} dynamic-update-slice(%b.1, %u.1, %i.1, %i.1)")
    assert hlo.count(entry(*plain)).bytes == 64 + 64


def test_tiles_are_whole_and_memory_on_the_chip_is_not_hbm():
    counts = hlo.count(
        entry(
            "%p = bf16[1024,8]{1,0:T(8,128)(2,1)} parameter(0)",
            "%s = (bf16[1024,8]{1,0:T(8,128)(2,1)S(1)}, bf16[1024,8]{1,0}, u32[]{:S(2)}) copy-start(%p)",
            "%d = bf16[1024,8]{1,0:T(8,128)(2,1)S(1)} copy-done(%s)",
            "ROOT %n = bf16[1024,8]{0,1:T(8,128)(2,1)S(1)} negate(%d)",
        )
    )
    padded, packed = 1024 * 128 * 2, 1024 * 8 * 2
    assert counts.hbm_bytes == padded
    assert counts.bytes == 2 * padded + padded + packed


@pytest.mark.parametrize(
    "attributes,shapes,operations",
    [
        ("dim_labels=bf_io->bf", ((8, 32), (32, 16), (8, 16)), 2 * 8 * 32 * 16),
        # Eight products of [2, 128] and [128, 1024] as one over dilated positions.
        (
            "window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0io->0bf",
            ((8, 2, 128), (8, 128, 1024), (8, 2, 1024)),
            2 * 8 * 2 * 128 * 1024,
        ),
        # A 3 x 3 window over 4 x 4 with a border: the corners see 4 of 9.
        (
            "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f",
            ((1, 4, 4, 1), (3, 3, 1, 1), (1, 4, 4, 1)),
            2 * 10 * 10,
        ),
    ],
)
def test_products_written_as_convolutions(attributes, shapes, operations):
    assert hlo.convolution_operations(*shapes, attributes) == operations


def test_exchanges_and_custom_calls():
    counts = hlo.count(
        entry(
            "%p = f32[4]{0} parameter(0)",
            "%g = f32[16]{0} all-gather(%p), dimensions={0}",
            "%s = (f32[4]{0}, f32[16]{0}) all-gather-start(%p), dimensions={0}",
            "%d = f32[16]{0} all-gather-done(%s)",
            "%r = f32[4]{0} all-reduce(%p), to_apply=%sum",
            'ROOT %c = f32[4]{0} custom-call(%g, %d, %r), custom_call_target="flash"',
        )
    )
    assert counts.collectives == {
        "all-gather": {"number": 2, "bytes": 2 * 64},
        "all-reduce": {"number": 1, "bytes": 16},
    }
    assert counts.custom_calls == {"flash": {"number": 1, "bytes": 64 + 64 + 16 + 16}}
    assert counts.bytes == 2 * (16 + 64) + 2 * 16 + 160


def test_an_exchange_beside_other_work_counts_once():
    gather = (
        'f32[16]{0} all-gather(%p), channel_id=2, dimensions={0}, backend_config={"async_collective_fusion_config":{}}'
    )
    parts = f"""
%begin (p: f32[4]) -> (f32[4], f32[16]) {{
  %p = f32[4]{{0}} parameter(0)
  %g = {gather}
  ROOT %c = (f32[4]{{0}}, f32[16]{{0}}) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}}

%meanwhile (p: f32[4], b: f32[16], x: f32[8]) -> (f32[8], f32[4], f32[16], f32[16]) {{
  %p = f32[4]{{0}} parameter(0)
  %b = f32[16]{{0}} parameter(1)
  %x = f32[8]{{0}} parameter(2)
  %n = f32[8]{{0}} negate(%x)
  %g = {gather}
  ROOT %t = (f32[8]{{0}}, f32[4]{{0}}, f32[16]{{0}}, f32[16]{{0}}) tuple(%n, %p, %b, %g)
}}

%end (p: f32[4], b: f32[16]) -> f32[16] {{
  %p = f32[4]{{0}} parameter(0)
  %b = f32[16]{{0}} parameter(1)
  %g = {gather}
  ROOT %d = f32[16]{{0}} custom-call(%p, %b, %g), custom_call_target="AsyncCollectiveDone"
}}
"""
    counts = hlo.count(
        entry(
            "%a = f32[4]{0} parameter(0)",
            "%v = f32[8]{0} parameter(1)",
            "%s = (f32[4]{0}, f32[16]{0}) fusion(%a), kind=kCustom, calls=%begin",
            "%s0 = f32[4]{0} get-tuple-element(%s), index=0",
            "%s1 = f32[16]{0} get-tuple-element(%s), index=1",
            "%m = (f32[8]{0}, f32[4]{0}, f32[16]{0}, f32[16]{0}) fusion(%s0, %s1, %v), kind=kCustom, calls=%meanwhile",
            "%m1 = f32[4]{0} get-tuple-element(%m), index=1",
            "%m3 = f32[16]{0} get-tuple-element(%m), index=3",
            "ROOT %e = f32[16]{0} fusion(%m1, %m3), kind=kCustom, calls=%end",
            before=parts,
        )
    )
    assert counts.collectives == {"all-gather": {"number": 1, "bytes": 64}}
    assert counts.bytes == (16 + 16 + 64) + (32 + 32)  # its start, and the work meanwhile


@pytest.mark.parametrize("text", ["", "HloModule m\n", entry("nonsense")])
def test_what_is_no_hlo_is_refused(text):
    with pytest.raises(DamagedFileError, match="hlo: "):
        hlo.count(text)
