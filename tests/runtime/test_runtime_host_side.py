"""The parts of a runtime that know no device: reading ahead, deferred calls, atomic files."""

import json
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from qat_lora.runtime import base
from qat_lora.runtime.base import random_states, save_tensors, set_random_states
from qat_lora.runtime.host.transfer import DeferredCalls, host_tensors, host_value, prefetch


def test_prefetch_raises_what_prepare_raises():
    assert list(prefetch(range(4), lambda n: n * n)) == [0, 1, 4, 9]
    with pytest.raises(ZeroDivisionError):
        list(prefetch([1, 0], lambda n: 1 // n))


def test_prefetch_of_a_dropped_consumer_leaves_no_thread():
    before = threading.active_count()
    items = prefetch(iter(int, 1), str)  # endless
    assert next(items) == "0"
    del items
    assert threading.active_count() == before


def test_prefetch_holds_at_most_two_items_beyond_the_one_in_use():
    alive = []

    def source():
        for n in range(50):
            alive.append(n)
            yield n

    for n in prefetch(source(), int):
        assert len(alive) <= n + 3
    assert len(alive) == 50


HANGING = """
import signal
import threading
from qat_lora.runtime.host import transfer

def source():
    yield 1
    print("reading", flush=True)
    threading.Event().wait()  # a disk that never answers

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start without it
transfer._HANGING_S = 0.1
for item in transfer.prefetch(source(), int):
    pass
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_whose_reader_hangs_can_be_stopped(number):
    process = subprocess.Popen([sys.executable, "-c", HANGING], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout.readline() == b"reading\n"
        process.send_signal(number)
        assert process.wait(60) == -number
    finally:
        process.kill()
        process.stdout.close()


def test_host_tensors_own_their_memory(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(6, dtype=np.int64))
    mapped = np.load(tmp_path / "ids.npy", mmap_mode="r")
    tensors = host_tensors({"input_ids": mapped, "rank": np.arange(3, dtype=np.uint8), "T": torch.ones(2).double()})
    tensors["input_ids"] += 1
    assert mapped.tolist() == list(range(6))
    assert tensors["rank"].dtype == torch.uint8
    assert tensors["T"].dtype == torch.float32


def test_deferred_calls_keep_their_order():
    calls, seen, ready = DeferredCalls(), [], set()
    for n in range(4):
        calls.add(seen.append, lambda n=n: n in ready, lambda n=n: [n])
    ready |= {1, 2}
    calls.run_ready()
    assert seen == []  # 0 is not there, and nothing overtakes it
    ready.add(0)
    calls.run_ready()
    assert seen == [0, 1, 2]
    calls.run_ready(wait=True)
    assert seen == [0, 1, 2, 3]


def test_host_value_is_a_number_or_an_array_of_its_own():
    tensor = torch.ones(2)
    array = host_value(tensor)
    tensor += 1
    assert array.tolist() == [1.0, 1.0]
    assert host_value(torch.tensor(3)) == 3 and type(host_value(torch.tensor(3))) is int
    assert host_value(torch.ones(1, dtype=torch.bfloat16)).dtype == np.float32
    assert host_value(torch.ones((), requires_grad=True)) == 1.0


@pytest.mark.parametrize("atomic", [True, False], ids=["ours", "naive"])
def test_a_write_that_dies_half_way_leaves_the_old_file(tmp_path, monkeypatch, atomic):
    path = tmp_path / "state.safetensors"
    save_tensors({"a": torch.ones(4)}, path)
    whole = base.save_file

    def half(tensors, target, **settings):
        whole(tensors, target, **settings)
        with open(target, "rb+") as file:
            file.truncate(file.seek(0, 2) // 2)
        raise OSError("no space left")

    monkeypatch.setattr(base, "save_file", half)
    write = save_tensors if atomic else half
    with pytest.raises(OSError, match="no space left"):
        write({"a": torch.zeros(4)}, path)
    if atomic:
        assert load_file(path)["a"].tolist() == [1, 1, 1, 1]
        assert list(tmp_path.iterdir()) == [path]
    else:  # the control: the fault is real
        with pytest.raises(Exception, match="(?i)invalid|incomplete|header|buffer"):
            load_file(path)


def test_random_states_restore_what_is_drawn():
    torch.manual_seed(3)
    torch.randn(7)
    text = json.dumps(random_states())
    expected = torch.randn(5)
    torch.manual_seed(4)
    set_random_states(json.loads(text))
    assert torch.equal(torch.randn(5), expected)


def test_a_state_of_an_absent_device_is_left_out():
    set_random_states({**random_states(), "cuda": "AAAA"})
