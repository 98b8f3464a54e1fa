"""What every runtime must do, as checks that run inside `launch`; also a program that runs them all.

`python runtime_contract.py cpu|cuda|xla FOLDER` writes FOLDER/results-RANK.json: for every check an empty text or
the traceback. The tests run it in processes of their own, since an XLA device or a world size cannot be undone.
"""

import json
import sys
import threading
import time
import traceback
from pathlib import Path

import numpy as np
import torch
from runtime_training import check_training_compiles_in_step_one_only_and_equals_plain_training  # noqa: F401
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from qat_lora.errors import DeviceError
from qat_lora.runtime import base
from qat_lora.runtime.base import Runtime
from qat_lora.runtime.host.transfer import THREAD
from qat_lora.runtime.launch.select import status_line
from qat_lora.runtime.native import NativeRuntime
from qat_lora.runtime.xla.runtime import XlaRuntime, is_xla_device, xla_mark_step
from qat_lora.train.step import optimizer_step


def raises(kind, action) -> str:
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")


def step_until(runtime, seen, count):
    """End steps until `count` callbacks have run; nothing here waits for the device."""
    deadline = time.monotonic() + 20
    while len(seen) < count and time.monotonic() < deadline:
        runtime.step_end()
        time.sleep(0.005)
    assert len(seen) == count, seen


def prefetch_threads():
    return {t for t in threading.enumerate() if t.name.startswith(THREAD)}


def make_batch(row: int) -> dict:
    """Return a batch as the cache gives it, read-only and of its dtypes, recognisable by `row`."""
    rng = np.random.default_rng(row)
    batch = {
        "input_ids": rng.integers(0, 99, (2, 5), dtype=np.int32),
        "document_ids": np.zeros((2, 5), np.int32),
        "target_mask": np.array([[1, 1, 0, 1], [1, 1, 1, 0]], np.bool_),
        "head_ids": np.full((2, 4, 3), row, np.int32),
        "head_logits": rng.normal(size=(2, 4, 3)).astype(np.float16),
        "lse@2": rng.normal(size=(2, 4)).astype(np.float32),
    }
    for array in batch.values():
        array.flags.writeable = False
    return {**batch, "note": f"row {row}"}


# --- identity ---------------------------------------------------------------------------------------------------


def check_protocol_and_status(runtime, folder):
    assert isinstance(runtime, Runtime)
    assert 0 <= runtime.rank < runtime.replicas
    assert runtime.is_main == (runtime.rank == 0)
    line = status_line(runtime, torch.bfloat16, 32)
    assert line == f"{runtime.description} · bf16 · effective batch 32"
    assert status_line(runtime, torch.float32, 4).endswith(" · float32 · effective batch 4")
    assert is_xla_device(runtime.device) == is_xla_device() == isinstance(runtime, XlaRuntime)
    assert is_xla_device(torch.ones(1, device=runtime.device)) == isinstance(runtime, XlaRuntime)
    assert not is_xla_device("cpu")
    xla_mark_step()
    if isinstance(runtime, XlaRuntime):
        assert runtime.description == "XLA on CPU · 1 device"
    elif runtime.device.type == "cpu":
        assert runtime.description.startswith("CPU · ")
        assert runtime.description.endswith(" · 2 processes") == (runtime.replicas == 2)


# --- place ------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        book = torch.arange(4.0)
        self.register_buffer("book", book)
        self.frozen.register_buffer("book", book)


def check_place_keeps_shared_weights_shared(runtime, folder):
    module = Tied()
    values = {name: t.clone() for name, t in module.state_dict().items()}
    placed = runtime.place(module)
    assert placed.head.weight is placed.embed.weight
    assert placed.frozen.book is placed.book
    assert [name for name, _ in placed.named_parameters()] == ["embed.weight", "frozen.weight", "frozen.bias"]
    assert placed.embed.weight.requires_grad and not placed.frozen.weight.requires_grad
    assert {p.device.type for p in placed.parameters()} == {runtime.device.type}
    for name, tensor in placed.state_dict().items():
        torch.testing.assert_close(tensor.cpu(), values[name], rtol=0, atol=0)


class Growing(nn.Linear):
    def _apply(self, fn, recurse=True):
        self.register_parameter("extra", nn.Parameter(torch.zeros(3)))
        return super()._apply(fn, recurse)


def check_place_refuses_another_parameter_count(runtime, folder):
    message = raises(DeviceError, lambda: runtime.place(Growing(2, 2)))
    assert "2 parameters with 6 values became 3 with 9" in message and "Growing" in message


# --- feed -------------------------------------------------------------------------------------------------------


def check_feed_dtypes_order_and_values(runtime, folder):
    others = prefetch_threads()  # of this process's earlier tests
    batches = [make_batch(row) for row in range(5)]
    seen = 0
    for row, batch in enumerate(runtime.feed(iter(batches))):
        assert {name: value.dtype for name, value in batch.items() if name != "note"} == {
            "input_ids": torch.int64,
            "document_ids": torch.int32,
            "target_mask": torch.bool,
            "head_ids": torch.int64,
            "head_logits": torch.float32,
            "lse@2": torch.float32,
        }
        assert batch["note"] == f"row {row}"
        for name, array in batches[row].items():
            if name != "note":
                assert batch[name].device.type == runtime.device.type
                assert (batch[name].cpu().numpy() == array).all(), name
        seen += 1
    assert seen == 5
    assert prefetch_threads() <= others


def check_feed_raises_what_the_source_raises_after_its_items(runtime, folder):
    others = prefetch_threads()  # of this process's earlier tests

    def source():
        yield make_batch(0)
        yield make_batch(1)
        raise OSError("disk gone")

    seen = []
    message = raises(OSError, lambda: seen.extend(b["note"] for b in runtime.feed(source())))
    assert message == "disk gone"
    assert seen == ["row 0", "row 1"]
    assert prefetch_threads() <= others


def check_feed_stops_with_its_consumer(runtime, folder):
    others = prefetch_threads()  # of this process's earlier tests
    asked = []

    def source():
        for row in range(1000):
            asked.append(row)
            yield make_batch(row)

    feed = runtime.feed(source())
    next(feed)
    next(feed)
    feed.close()
    assert prefetch_threads() <= others
    assert 2 <= len(asked) <= 5, asked

    def broken():
        for _ in runtime.feed(source()):
            raise KeyError("in the step")

    raises(KeyError, broken)
    assert prefetch_threads() <= others


def check_feed_reads_ahead_while_a_batch_is_in_use(runtime, folder):
    asked = threading.Event()

    def source():
        yield make_batch(0)
        asked.set()
        yield make_batch(1)

    feed = runtime.feed(source())
    next(feed)
    assert asked.wait(20)
    assert len(list(feed)) == 1


# --- replicas ---------------------------------------------------------------------------------------------------


def check_reduce_gradients_averages(runtime, folder):
    values = [torch.zeros(2, 3), torch.zeros(5), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(2)]
    a, b, c, frozen = [nn.Parameter(v.to(runtime.device)) for v in values]
    frozen.requires_grad_(False)
    a.grad = torch.full((2, 3), 1.0 + runtime.rank).to(runtime.device)
    if runtime.is_main:  # a parameter that only one replica reached
        b.grad = torch.arange(5.0).to(runtime.device)
    c.grad = torch.full((4,), 2.0 * runtime.rank, dtype=torch.bfloat16).to(runtime.device)
    runtime.reduce_gradients([a, b, c, frozen])
    n = runtime.replicas
    ranks = torch.arange(float(n))
    torch.testing.assert_close(a.grad.cpu(), torch.full((2, 3), (1.0 + ranks).mean().item()))
    torch.testing.assert_close(b.grad.cpu(), torch.arange(5.0) / n)
    torch.testing.assert_close(c.grad.cpu(), torch.full((4,), (2 * ranks).mean().item(), dtype=torch.bfloat16))
    assert frozen.grad is None
    runtime.reduce_gradients([frozen])


def check_reduce_gradients_on_four_chips_is_one_all_reduce_and_a_quarter(runtime, folder):
    """The graph that four replicas would run, read as text: there is one XLA device here."""
    if not isinstance(runtime, XlaRuntime):
        return
    import torch_xla
    import torch_xla.runtime as xr

    parameters = [nn.Parameter(torch.ones(n).to(runtime.device)) for n in (3, 5)]
    for p in parameters:
        p.grad = torch.ones_like(p)
    runtime.mark_step()
    world_size, replicas = xr.world_size, runtime.replicas
    try:
        xr.world_size, runtime.replicas = lambda: 4, 4
        runtime.reduce_gradients(parameters)
        hlo = torch_xla._XLAC._get_xla_tensors_hlo([p.grad for p in parameters])
    finally:
        xr.world_size, runtime.replicas = world_size, replicas
        runtime.step_end()
    assert hlo.count(" all-reduce(") == 1, hlo
    assert "constant(0.25)" in hlo, hlo
    assert {p.grad.dtype for p in parameters} == {torch.float32}


def check_all_reduce_mean(runtime, folder):
    n = runtime.replicas
    value = torch.tensor([1.0, 2.0]).to(runtime.device) * (runtime.rank + 1)
    mean = runtime.all_reduce_mean(value)
    assert mean.device.type == runtime.device.type
    torch.testing.assert_close(mean.cpu(), torch.tensor([1.0, 2.0]) * (n + 1) / 2)
    torch.testing.assert_close(value.cpu(), torch.tensor([1.0, 2.0]) * (runtime.rank + 1))  # left as it was
    tokens = torch.tensor(3 + runtime.rank).to(runtime.device)
    torch.testing.assert_close(runtime.all_reduce_mean(tokens).cpu(), torch.tensor(3 + (n - 1) / 2))


def check_an_optimizer_step_on_four_chips_reduces_once(runtime, folder):
    """The whole step's graph: one exchange of the gradients, one of the sums, and the factor 1/4 in each."""
    if not isinstance(runtime, XlaRuntime):
        return
    import torch_xla
    import torch_xla.runtime as xr

    parameters = [nn.Parameter(torch.ones(n).to(runtime.device)) for n in (3, 5)]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    for p in parameters:
        p.grad = torch.ones_like(p)
    sums = {name: torch.ones((), device=runtime.device) * i for i, name in enumerate(("loss", "tokens"), 2)}
    runtime.mark_step()
    world_size, replicas = xr.world_size, runtime.replicas
    try:
        xr.world_size, runtime.replicas = lambda: 4, 4
        optimizer_step(optimizer, parameters, sums, 1.0, runtime)
        hlo = torch_xla._XLAC._get_xla_tensors_hlo(parameters)
    finally:
        xr.world_size, runtime.replicas = world_size, replicas
        runtime.step_end()
    assert hlo.count(" all-reduce(") == 2, hlo
    assert "constant(0.25)" in hlo, hlo


def check_agree_is_any(runtime, folder):
    assert runtime.agree(True) is True and runtime.agree(False) is False
    assert runtime.agree(runtime.rank == runtime.replicas - 1) is True
    assert runtime.processes == runtime.replicas


# --- defer ------------------------------------------------------------------------------------------------------


def check_defer_gives_values_in_order(runtime, folder):
    seen = []
    main_thread = threading.current_thread()

    def note(tag, *values):
        assert threading.current_thread() is main_thread
        seen.append((tag, *values))

    total = torch.zeros((), device=runtime.device)
    runtime.step_end()
    for step in range(4):
        total = total + step
        runtime.defer(lambda v, step=step: note(step, v), total)
        runtime.step_end()
    step_until(runtime, seen, 4)
    assert seen == [(0, 0.0), (1, 1.0), (2, 3.0), (3, 6.0)]
    assert all(type(value) is float for _, value in seen)

    seen.clear()
    array = torch.arange(6.0).reshape(2, 3).to(runtime.device)
    small = torch.tensor(0.5, dtype=torch.bfloat16).to(runtime.device)
    count = torch.tensor(7).to(runtime.device)
    runtime.defer(lambda *values: note("many", *values), array, small, count)
    runtime.defer(lambda: note("none"))
    runtime.barrier("deferred")
    (tag, got_array, got_small, got_count), none = seen
    assert (tag, got_small, got_count, none) == ("many", 0.5, 7, ("none",))
    assert isinstance(got_array, np.ndarray) and (got_array == np.arange(6.0).reshape(2, 3)).all()


def check_defer_keeps_the_value_of_the_call(runtime, folder):
    seen = []
    value = torch.ones(3, device=runtime.device)
    runtime.step_end()
    runtime.defer(seen.append, value)
    if isinstance(runtime, XlaRuntime):  # cannot, so it must say so
        value += 1
        message = raises(RuntimeError, lambda: runtime.barrier("changed"))
        assert "changed in place" in message
        assert not seen
    else:
        value += 1
        runtime.barrier("changed")
        assert seen[0].tolist() == [1.0, 1.0, 1.0]


def check_defer_raises_what_the_callback_raises(runtime, folder):
    def fail(value):
        raise OSError(f"disk full at {value}")

    def go():
        runtime.defer(fail, torch.ones((), device=runtime.device))
        runtime.barrier("failing")

    assert raises(OSError, go) == "disk full at 1.0"
    runtime.barrier("and is forgotten")


# --- save -------------------------------------------------------------------------------------------------------


def check_save_loads_back(runtime, folder):
    weight = torch.arange(6.0).reshape(2, 3).to(runtime.device)
    state = {
        "a": weight,
        "tied": weight,
        "transposed": weight.t(),
        "half": torch.ones(2, dtype=torch.bfloat16).to(runtime.device),
        "parameter": nn.Parameter(torch.tensor(2.5).to(runtime.device)),
    }
    path = folder / "deep" / "state.safetensors"
    for _ in range(2):  # over an old file too
        runtime.save(state, path)
    assert [p.name for p in path.parent.iterdir()] == ["state.safetensors"]
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        loaded = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    expected = torch.tensor([[0.0, 1, 2], [3, 4, 5]])
    assert torch.equal(loaded["a"], expected) and torch.equal(loaded["tied"], expected)
    assert torch.equal(loaded["transposed"], expected.t())
    assert loaded["half"].dtype == torch.bfloat16
    assert loaded["parameter"].item() == 2.5


def check_save_is_called_by_all_and_all_see_the_whole_file(runtime, folder):
    """The main process writes its own values, slowly, over an old file; none returns before the new one."""
    path, save_file = folder / "state.safetensors", base.save_file

    def slowly(*args, **settings):
        time.sleep(0.1)
        save_file(*args, **settings)

    base.save_file = slowly
    try:
        for turn in range(3):
            runtime.save({"value": torch.full((5000,), 10.0 * turn + runtime.rank).to(runtime.device)}, path)
            assert load_file(path)["value"].unique().tolist() == [10.0 * turn]
            assert [p.name for p in folder.iterdir()] == [path.name]
            runtime.barrier("read")
    finally:
        base.save_file = save_file


# --- numerics ---------------------------------------------------------------------------------------------------


def check_autocast(runtime, folder):
    a = torch.ones(4, 4, device=runtime.device)
    with runtime.autocast(torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
    with runtime.autocast(torch.float32):
        assert (a @ a).dtype == torch.float32


def check_checkpoint_gives_the_same_gradients(runtime, folder):
    checkpoint = runtime.checkpoint_function()
    torch.manual_seed(0)
    blocks = runtime.place(nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]))
    x = torch.randn(2, 8).to(runtime.device)  # asks for no gradient, as behind a frozen embedding
    for dtype in (torch.float32, torch.bfloat16):
        gradients = []
        for recompute in (False, True):
            blocks.zero_grad()
            with runtime.autocast(dtype):
                hidden = x
                for block in blocks:
                    hidden = checkpoint(block, hidden) if recompute else block(hidden)
            hidden.float().pow(2).sum().backward()
            runtime.mark_step()
            gradients.append([p.grad.cpu() for p in blocks.parameters()])
        for plain, recomputed in zip(*gradients, strict=True):
            assert plain.abs().max() > 0
            torch.testing.assert_close(recomputed, plain, rtol=1e-6, atol=1e-7)


CHECKS = {name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")}


def run_all(runtime, folder) -> dict[str, str]:
    results = {}
    for name, check in CHECKS.items():
        try:
            (folder / name).mkdir(parents=True, exist_ok=True)
            check(runtime, folder / name)
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
    return results


def main(kind: str, folder: Path) -> None:
    torch.set_num_threads(1)
    runtime = XlaRuntime("CPU") if kind == "xla" else NativeRuntime(kind)  # type: ignore[arg-type]
    results = runtime.launch(lambda: run_all(runtime, folder))
    assert not torch.distributed.is_initialized()
    (folder / f"results-{runtime.rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
