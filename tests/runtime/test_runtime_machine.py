"""A result names day, machine and versions, wherever it is made."""

from datetime import date

import torch

from qat_lora.runtime.host.machine import made_with


def test_the_processor_is_the_one_that_the_system_names(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some CPU 9\nflags\t: fpu\n\nmodel name\t: Other\n")
    said = made_with(cpuinfo)
    assert said["machine"].endswith("of Some CPU 9") and said["machine"].split()[0].isdigit()
    assert date.fromisoformat(said["date"]) and f"torch {torch.__version__.split('+')[0]}" in said["versions"]


def test_without_proc_there_is_still_a_machine(tmp_path):
    assert len(made_with(tmp_path / "nothing")["machine"].split(" of ")[1]) > 2
