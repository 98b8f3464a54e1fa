"""Tensors on disk: like those in memory, without a name, and refused where the disk is full."""

import errno
import os

import pytest
import torch

from qat_lora.errors import ConfigError
from qat_lora.layers.calibrate.fisher import zeros_in
from qat_lora.runtime.host.machine import give_back


def test_zeros_on_disk_add_up_like_those_in_memory_and_leave_no_name_behind(tmp_path):
    found, expected = zeros_in(tmp_path)(3, 5), torch.zeros(3, 5)
    assert not list(tmp_path.iterdir())
    assert torch.equal(found, expected)
    for seed in range(4):
        more = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed))
        found += more
        expected = expected + more
    assert torch.equal(found, expected) and torch.equal(found.div_(7), expected / 7)
    assert zeros_in(tmp_path)(4).shape == (4,)


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs Linux")
def test_what_is_on_disk_is_not_the_process_s_own_memory(tmp_path):
    def own_kb():
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

    held, before = zeros_in(tmp_path)(4096, 1024), own_kb()
    held += 1
    assert own_kb() - before < 8 * 1024 < held.nbytes // 1024 // 2 + 1
    freed = [torch.ones(1 << 18) for _ in range(64)]  # 64 MB from the heap, with something alive above
    above = torch.ones(1000)
    del freed
    give_back()
    assert own_kb() - before < 24 * 1024 and above.sum() == 1000


def test_what_a_killed_run_left_is_removed(tmp_path):
    (tmp_path / ".scratch").write_bytes(b"12345")
    (tmp_path / ".scratch-of-others").write_bytes(b"1")
    assert zeros_in(tmp_path)(2).tolist() == [0.0, 0.0]
    assert [file.name for file in tmp_path.iterdir()] == [".scratch-of-others"]


def test_a_full_disk_is_an_error_with_a_way_out(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(ConfigError, match="no room for 4 MB more of what --metric fisher keeps.*--metric outputs"):
        zeros_in(tmp_path)(1000, 1000)
    assert not list(tmp_path.iterdir())
