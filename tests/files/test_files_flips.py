"""A few single bits flipped in each kind of file that the pipeline writes; `benchmarks/flips.py` flips hundreds."""

import pytest
from flips import counted, flips, make

from qat_lora.files.checksums import SUMS


@pytest.fixture(scope="module")
def work(tiny, tmp_path_factory):
    return make(tiny, tmp_path_factory.mktemp("flips") / "work", ("compressed-tensors", "gguf"), whole=False)


def test_no_flipped_bit_is_taken_in_silence(work):
    kinds, faults = counted(flips(work, 36, 7))
    assert faults == [] and sum(by.get("refused", 0) for by in kinds.values()) >= 33 and len(kinds) > 18


def test_without_checksums_they_are_taken_in_silence(work):
    """The positive control: in folders without checksums, flipped factors load."""
    for file in work.rglob(SUMS):
        file.unlink()
    for file in work.rglob("qat_lora.json"):
        file.write_text(file.read_text().replace('"checksums"', '"of old"'))
    _, faults = counted(flips(work, 6, 7, lambda kind: kind.endswith("adapter_model.safetensors")))
    assert len([fault for fault in faults if fault.endswith("SILENT")]) >= 3
