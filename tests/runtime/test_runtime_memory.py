"""The C library's heap is as before once tensors need not lie apart. What it gives back: `test_layers_disk_offload`."""

import pytest

from qat_lora.runtime.host import memory
from qat_lora.runtime.host.memory import large_tensors_apart


def test_the_c_library_is_as_before_once_tensors_need_not_lie_apart(monkeypatch):
    calls = []
    monkeypatch.setattr(memory, "_c_library", lambda name: lambda *given: calls.append((name, *given)))
    with pytest.raises(KeyError), large_tensors_apart():
        assert calls == [("mallopt", -3, 1 << 20)]
        raise KeyError
    assert calls[1:] == [("mallopt", -3, 32 << 20), ("mallopt", -1, 64 << 20)]
