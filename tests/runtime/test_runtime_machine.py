"""The machine: its heap, and its name in results."""

from datetime import date

import pytest
import torch

from qat_lora.runtime.host import machine
from qat_lora.runtime.host.machine import large_tensors_apart, made_with


def test_the_processor_is_the_one_that_the_system_names(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some CPU 9\nflags\t: fpu\n\nmodel name\t: Other\n")
    said = made_with(cpuinfo)
    assert said["machine"].endswith("of Some CPU 9") and said["machine"].split()[0].isdigit()
    assert date.fromisoformat(said["date"]) and f"torch {torch.__version__.split('+')[0]}" in said["versions"]


def test_without_proc_there_is_still_a_machine(tmp_path):
    assert len(made_with(tmp_path / "nothing")["machine"].split(" of ")[1]) > 2


def test_the_c_library_is_as_before_once_tensors_need_not_lie_apart(monkeypatch):
    calls = []
    monkeypatch.setattr(machine, "_c_library", lambda name: lambda *given: calls.append((name, *given)))
    with pytest.raises(KeyError), large_tensors_apart(16):
        assert calls == [("mallopt", -3, 16 << 20), ("mallopt", -1, 32 << 20)]
        raise KeyError
    assert calls[2:] == [("mallopt", -3, 32 << 20), ("mallopt", -1, 64 << 20)]
