"""What a GGUF file states is compared with what it holds before anything follows it."""

import struct

import gguf
import numpy as np
import pytest

from qat_lora.errors import ModelError
from qat_lora.files.gguf_header import read_header


def write(file, number=None, **settings):
    """Write a small file; `number` replaces the type of its second tensor."""
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_uint32("qwen3.block_count", 2)
    writer.add_array("tokenizer.ggml.tokens", ["a", "Ġb", "c"])
    writer.add_array("some.numbers", [1.5, 2.5])
    for name, value in settings.items():
        writer.add_uint32(name.replace("__", "."), value)
    writer.add_tensor("a.weight", np.ones((4, 64), np.float32))
    blocks = gguf.quants.quantize(np.ones((2, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.b.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = file.read_bytes()
    if number is not None:
        at = data.index(b"blk.0.b.weight") + 14 + 4 + 16
        file.write_bytes(data[:at] + struct.pack("<I", number) + data[at + 4 :])
    return file


def test_settings_and_places(tmp_path):
    file = write(tmp_path / "x.gguf")
    header, theirs = read_header(file), gguf.GGUFReader(file)
    assert header.architecture == "qwen3" and header.of_model("block_count") == 2
    assert header.settings["tokenizer.ggml.tokens"] == ["a", "Ġb", "c"] and header.settings["some.numbers"] == [
        1.5,
        2.5,
    ]
    found = {name: (t.kind, t.shape, t.offset, t.size) for name, t in header.tensors.items()}
    assert found == {
        t.name: (t.tensor_type.name, tuple(map(int, t.shape[::-1])), t.data_offset, t.n_bytes) for t in theirs.tensors
    }


def test_every_cut_is_one_line_that_names_what_is_lacking(tmp_path):
    data, file = write(tmp_path / "x.gguf").read_bytes(), tmp_path / "cut.gguf"
    for size in range(0, len(data), 7):
        file.write_bytes(data[:size])
        if size < len(data) - 32:  # padding after the last tensor
            with pytest.raises(ModelError, match=r"no GGUF file|is cut off") as caught:
                read_header(file)
    assert "blk.0.b.weight of type Q8_0" in str(caught.value)


def test_what_cannot_be_decoded_is_refused_by_name(tmp_path):
    with pytest.raises(ModelError, match=r"blk.0.b.weight is of the type 137"):
        read_header(write(tmp_path / "a.gguf", number=137))
    with pytest.raises(ModelError, match=r"blk.0.b.weight of type Q2_K cannot have the shape \(2, 64\)"):
        read_header(write(tmp_path / "b.gguf", number=10))
    with pytest.raises(ModelError, match="blocks of 64, and 160 lie there"):
        read_header(write(tmp_path / "c.gguf", number=42))
    with pytest.raises(ModelError, match="one of 3 parts"):
        read_header(write(tmp_path / "d.gguf", split__count=3))
