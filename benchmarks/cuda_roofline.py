"""What one training step asks of a GPU, counted without one, and the least time that an H200 would take for it.

Claims, for a rank-8 adapter on a `q4_r32` student in bfloat16 with a frozen base, K = 128: with compiled decoder
layers, FlexAttention and the Triton loss, a micro-batch of Qwen3-0.6B (16 x 1,024 tokens) launches at most 2,000
kernels and its roofline is at least 110,000 tokens/s; Qwen3-8B reaches 14,000; an optimizer step launches at most 40.

Nothing is run: the step is traced at real shape on meta tensors, which have no memory. A figure is one of two kinds:

* `eager`: every operation that PyTorch calls is a kernel (a `_foreach_` operation: as many as its tensors and their
  chunks of 65,536 numbers need), and reads its arguments and writes its results once.
* `compiled`, a model and called so: the decoder layer's forward and backward graphs as AOTAutograd hands them to a
  compiler (decomposed, partitioned with recomputation), under a written fusion rule. Each product and each attention
  is a kernel; so is each connected set of elementwise work and reductions that lies between the same products, done as
  late as possible: what is recomputed is part of what uses it. A kernel reads each tensor from outside once and writes
  what others read. The loss by the Triton kernel is a model too: per chunk two products and `LOSS_KERNELS` kernels, of
  which one reads the logits twice and writes their gradient once.

Roofline: a kernel takes the longest of its bytes at `BANDWIDTH`, its operations at `RATE` and `LEAST_S`; the host
launches one in `HOST_S` (compiled: `HOST_COMPILED_S`); the step takes the longer of device and host, which is named.
These rates are assumptions for an H200 (4.8 TB/s and 989 T operations/s on paper), no measurements.

A step that is traced may not stop a GPU's queue: reading a value back, `nonzero` and a copy from memory that is not
pinned raise `Sync`. On meta tensors too, since autograd on fake CUDA tensors asks the driver for a stream.

    python benchmarks/cuda_roofline.py --model 0.6b 8b --out benchmarks/results/cuda_roofline.json
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_layers import GradientCheckpointingLayer

from qat_lora.layers.convert import add_lora, make_quant_skeleton
from qat_lora.layers.lora import LoraConfig
from qat_lora.losses import objective as objective_module
from qat_lora.losses.objective import ObjectiveConfig, objective_loss
from qat_lora.models.load import CausalLM, make_qwen3
from qat_lora.quant.presets import preset
from qat_lora.runtime.native import NativeRuntime
from qat_lora.setup.trainable import recovery_parts
from qat_lora.train.optim import OptimConfig, build_optimizer, optimized
from qat_lora.train.step import optimizer_step, zero_sums

SIZES = {
    "0.6b": {"hidden": 1024, "layers": 28, "heads": 16, "kv_heads": 8, "head_dim": 128, "mlp": 3072},
    "8b": {"hidden": 4096, "layers": 36, "heads": 32, "kv_heads": 8, "head_dim": 128, "mlp": 12288},
    "toy": {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp": 192},
}
VOCABULARY, TOP_K, DRAWS, RANK = 151_936, 128, 8, 8
BANDWIDTH, RATE, LEAST_S = 4.0e12, 6.0e14, 2.5e-6  # bytes/s, operations/s, s
MASKED_ATTENTION = (1.0, 170e12, 115e12)  # share of L x L that is computed, rate forward, rate backward
FLEX_ATTENTION = (0.5, 500e12, 400e12)  # causal; that documents end earlier is not counted on
HOST_S, HOST_COMPILED_S = 7e-6, 5e-6
LOSS_KERNELS, LOSS_CHUNK_BYTES = 6, 2**30
FOREACH_TENSORS = {
    1: 110,
    2: 64,
    3: 48,
    4: 36,
    5: 30,
}  # of a launch, by lists: MultiTensorApply.cuh
FOREACH_CHUNK, FOREACH_BLOCKS = 65_536, 320
VIEWS = """view _unsafe_view transpose t
expand slice select unsqueeze squeeze detach alias permute split split_with_sizes
as_strided unbind reshape unflatten lift_fresh _reshape_alias diagonal empty new_empty empty_like empty_strided getitem
sym_size set_"""
FREE = frozenset(VIEWS.split())
PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2)}


class Sync(RuntimeError):
    """An operation that stops the queue of a GPU."""


class Kernel(NamedTuple):
    """Work of one operation."""

    name: str
    launches: int
    bytes: int
    operations: int

    @property
    def seconds(self) -> float:
        """Roofline of the operation on the device."""
        return max(self.bytes / BANDWIDTH, self.operations / RATE, self.launches * LEAST_S)


@dataclass
class Work:
    """A sum of kernels."""

    kernels: int = 0
    bytes: int = 0
    operations: int = 0
    seconds: float = 0.0
    names: collections.Counter[str] = field(default_factory=collections.Counter)

    def add(self, kernel: Kernel, seconds: float | None = None) -> None:
        """Count a kernel; its time by the roofline unless it is given."""
        self.kernels += kernel.launches
        self.bytes += kernel.bytes
        self.operations += kernel.operations
        self.seconds += kernel.seconds if seconds is None else seconds
        self.names[kernel.name] += kernel.launches

    def plus(self, other: Work, times: int = 1) -> Work:
        """Return this work and another one, so many times."""
        names = self.names + collections.Counter({name: times * count for name, count in other.names.items()})
        numbers = zip(self.numbers(), other.numbers(), strict=True)
        return Work(*(mine + times * theirs for mine, theirs in numbers), names)

    def numbers(self) -> tuple[int, int, int, float]:
        """Return what adds up."""
        return self.kernels, self.bytes, self.operations, self.seconds

    def report(self) -> dict[str, Any]:
        """Return the figures for a result."""
        kernels, size, operations, seconds = self.numbers()
        return {
            "kernels": kernels,
            "gb": round(size / 1e9, 2),
            "tera_operations": round(operations / 1e12, 3),
            "roofline_ms": round(1e3 * seconds, 2),
        }


def total(parts: Iterable[Work]) -> Work:
    """Return the sum of several."""
    return functools.reduce(Work.plus, parts, Work())


def touched(tensor: Tensor) -> int:
    """Return the bytes behind a tensor; what is broadcast counts once."""
    size = tensor.element_size()
    for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= extent if stride else 1
    return size


def operations_of(name: str, shapes: list[torch.Size]) -> int:
    """Return the operations of a product, by the shapes of its tensors; 0 for others."""
    if name not in PRODUCTS:
        return 0
    left, right = (shapes[i] for i in PRODUCTS[name])
    return 2 * left.numel() * right[-1]


def foreach_launches(lists: list[list[Tensor]]) -> int:
    """Return the kernels of one `_foreach_` operation over so many lists."""
    count, chunks = len(lists[0]), sum(-(-t.numel() // FOREACH_CHUNK) for t in lists[0])
    return max(-(-count // FOREACH_TENSORS[min(5, len(lists))]), -(-chunks // FOREACH_BLOCKS))


def bare(name: str) -> str:
    """Return an operation's name without namespace, overload and the underscore of the in-place form."""
    name = name.split("::")[-1].split(".")[0]
    return name if name.startswith("_") else name.rstrip("_")


class Count(TorchDispatchMode):
    """Counts kernels by part, and with `watch` refuses what stops a GPU's queue."""

    def __init__(self, watch: bool = False) -> None:
        super().__init__()
        self.parts: dict[str, Work] = collections.defaultdict(Work)
        self.part = "other forward"
        self.watch = watch
        self.pinned: list[Tensor] = []

    @contextlib.contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Count for this part meanwhile."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operation and count it."""
        kwargs, name = kwargs or {}, bare(function._schema.name)
        inputs = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if self.watch:
            self._refuse(name, inputs, args, kwargs)
        out = function(*args, **kwargs)
        outputs = [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, Tensor)]
        if name in FREE or not any(t.device.type == "meta" for t in inputs + outputs):
            return out
        size, launches = sum(map(touched, inputs + outputs)), 1
        if name == "gather":
            size = 2 * touched(args[2]) + 3 * touched(out)
        elif name in ("scatter", "scatter_add"):
            in_place = function._schema.name.endswith("_")
            size = 3 * touched(args[2]) + (0 if in_place else 2 * touched(args[0]))
        elif name == "embedding":
            size = 2 * touched(out)
        elif name.startswith("_foreach"):
            lists = [x for x in (*args, out) if isinstance(x, list | tuple) and x and isinstance(x[0], Tensor)]
            launches = foreach_launches(lists)
        elif name == "cat":
            launches = -(-len(args[0]) // 128)  # tensors that a launch of CatArrayBatchedCopy takes
        shapes = [x.shape for x in inputs]
        joined = self.part == "adapters" and name in PRODUCTS and min(*shapes[0], *shapes[1]) > 3 * RANK
        kernel = Kernel(name, launches, size, operations_of(name, shapes))
        self.parts["base products" if joined else self.part].add(kernel)
        return out

    def _refuse(self, name: str, inputs: list[Tensor], args: Any, kwargs: Any) -> None:
        """Raise Sync for a read, an operation whose shape is data, or a copy from memory that is not pinned."""
        devices = {t.device.type for t in inputs}
        by_mask = name in ("index", "index_put") and any(t.dtype == torch.bool for t in inputs[1:])
        names = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2")
        if "meta" in devices and (by_mask or name in names):
            raise Sync(f"{name} on the device")
        to = kwargs.get("device")
        if name == "_to_copy" and to is not None and devices == {"meta"} and torch.device(to).type == "cpu":
            raise Sync("a tensor is read back")
        sent = name == "_to_copy" and to is not None and torch.device(to).type == "meta" and devices == {"cpu"}
        if sent and not (kwargs.get("non_blocking") and any(inputs[0] is tensor for tensor in self.pinned)):
            raise Sync("a copy to the device from memory that is not pinned, or that is waited for")
        if name == "copy" and [t.device.type for t in inputs[:2]] == ["meta", "cpu"]:
            raise Sync("a copy to the device from memory that is not pinned")


class _Attention(torch.autograd.Function):
    """Attention as one kernel forward and one backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, note: Callable[[str, list[Tensor]], None]) -> Any:
        ctx.save_for_backward(query, key, value)
        ctx.note = note
        out = torch.empty_like(query)
        note("forward", [query, key, value, out])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        saved = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in saved]
        ctx.note("backward", [*saved, grad, *grads])
        return *grads, None


def attention_seconds(query: Any, kind: tuple[float, float, float], backward: bool) -> tuple[int, float]:
    """Return operations and seconds of an attention over queries [B, H, L, D]."""
    rows, heads, length, width = query.shape
    share, rate_forward, rate_backward = kind
    operations = round((10 if backward else 4) * rows * heads * length**2 * width * share)
    return operations, max(LEAST_S, operations / (rate_backward if backward else rate_forward))


def count_attention(count: Count) -> Callable[..., Any]:
    """Return an attention function for transformers that counts what `sdpa` with a mask in memory does."""

    def note(which: str, tensors: list[Tensor]) -> None:
        operations, seconds = attention_seconds(tensors[0], MASKED_ATTENTION, which == "backward")
        kernel = Kernel("attention", 1, sum(map(touched, tensors)), operations)
        count.parts[f"attention {which}"].add(kernel, seconds)

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> Any:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        return _Attention.apply(query, key, value, note).transpose(1, 2).contiguous(), None

    return attend


class Student(NamedTuple):
    """A student on meta tensors, ready to train, and a batch for it."""

    model: CausalLM
    trained: dict[str, dict[str, nn.Parameter]]
    batch: dict[str, Tensor]


def make_student(size: str, rows: int, length: int, vocabulary: int = VOCABULARY) -> Student:
    """Return the student of a size with a rank-8 adapter, and a batch of rows."""
    with torch.device("meta"):
        model = make_qwen3(Path("."), vocabulary, **SIZES[size], positions=length)
        model.module.to(torch.bfloat16)
        make_quant_skeleton(model.module, preset("q4_r32"))
        add_lora(model.module, LoraConfig(recovery_r=RANK))
        trained = recovery_parts(model, False, False, torch.bfloat16)
        positions = (rows, length - 1)
        batch = {
            "input_ids": torch.zeros(rows, length, dtype=torch.int64),
            "document_ids": torch.zeros(rows, length, dtype=torch.int32),
            "target_mask": torch.ones(positions, dtype=torch.bool),
            "head_ids": torch.zeros(*positions, TOP_K, dtype=torch.int64),
            "head_logits": torch.zeros(*positions, TOP_K),
            "lse": torch.zeros(positions),
            "log_tail": torch.zeros(positions),
            "tail_draw_ids": torch.zeros(*positions, DRAWS, dtype=torch.int64),
        }
    for parameters in trained.values():
        for parameter in parameters.values():
            parameter.grad = torch.zeros_like(parameter)
    return Student(model, trained, batch)


def tag_parts(model: CausalLM, count: Count) -> None:
    """Count norms, base products and adapters apart."""
    kinds = {"QuantLinear": "base products", "LoraLinear": "adapters"}
    outer: list[str] = []

    def enter(part: str) -> None:
        outer.append(count.part)
        count.part = part

    def leave(*_: Any) -> None:
        count.part = outer.pop()

    for module in model.module.modules():
        name = type(module).__name__
        part = "norms" if name.endswith("RMSNorm") else kinds.get(name)
        if part is not None:
            module.register_forward_pre_hook(lambda *_, part=part: enter(part))
            module.register_forward_hook(leave)


def no_autocast() -> Any:
    """Meta tensors have no autocast, and asking for it raises."""
    return mock.patch("torch.is_autocast_enabled", lambda *_: False)


def micro_batch_eager(student: Student, chunk_mb: int, watch: bool = False) -> Count:
    """Trace forward, loss and backward of a micro-batch as eager PyTorch calls them."""
    count, (model, _, batch) = Count(watch), student
    AttentionInterface.register("counted", count_attention(count))
    AttentionMaskInterface.register("counted", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.module.set_attn_implementation("counted")
    tag_parts(model, count)
    real = objective_module.fused_linear_kd

    def loss(*args: Any, **kwargs: Any) -> Any:
        with count.of("loss"):
            return real(*args, **kwargs)

    config = ObjectiveConfig("hybrid", loss_chunk_mb=chunk_mb)
    weights = {"kd": torch.ones(1, device="meta")}
    with no_autocast(), mock.patch.object(objective_module, "fused_linear_kd", loss), count:
        hidden = model.hidden(batch["input_ids"], batch["document_ids"])
        with count.of("loss inputs"):
            result = objective_loss(hidden, model.lm_head(), batch, config, weights)
        with count.of("backward"):
            result.loss_sum.backward()
    return count


class MetaRuntime(NativeRuntime):
    """The native runtime on a device without memory, with the exchange between two replicas counted as a kernel."""

    def __init__(self, count: Count, replicas: int = 2) -> None:
        super().__init__("cpu")
        self.device, self.replicas, self._count = torch.device("meta"), replicas, count

    def numbers(self, values: Sequence[float]) -> Tensor:
        """Send numbers as the native runtime does to a GPU, from memory that is only said to be pinned."""
        host = torch.tensor(values, dtype=torch.float32)
        self._count.pinned.append(host)
        return host.to(self.device, non_blocking=True)

    def _mean(self, total: Tensor) -> Tensor:
        self._count.parts[self._count.part].add(Kernel("all_reduce", 1, 2 * touched(total), 0))
        return total / self.replicas


def optimizer_eager(student: Student, replicas: int, watch: bool = False) -> Count:
    """Trace an optimizer step, with clipping, moving average and the exchange between replicas."""
    count = Count(watch)
    count.part = "optimizer"
    runtime = MetaRuntime(count, replicas)
    optimizer = build_optimizer(OptimConfig(ema=0.99), student.trained, runtime)
    sums = zero_sums(ObjectiveConfig(), runtime.device)
    with count:
        optimizer_step(optimizer, optimized(optimizer), sums, 1.0, runtime)
    return count


class Program(NamedTuple):
    """The graphs of a decoder layer, as a compiler gets them."""

    forward: torch.fx.Graph
    backward: torch.fx.Graph


class _Stop(Exception):
    """The first layer's inputs are known."""


def layer_program(student: Student) -> Program:
    """Return the first decoder layer's graphs, with attention by a block mask."""
    model, _, batch = student
    model.compile_layers()
    layers = [module for module in model.module.modules() if isinstance(module, GradientCheckpointingLayer)]
    inputs: list[Any] = []
    graphs: dict[str, torch.fx.Graph] = {}

    def grab(_module: Any, args: Any, kwargs: Any) -> None:
        inputs.extend((args, kwargs))
        raise _Stop

    def keep(name: str) -> Callable[..., Any]:
        def compiler(module: torch.fx.GraphModule, _inputs: Any) -> Any:
            graphs[name] = module.graph
            return make_boxed_func(module.forward)

        return compiler

    for layer in layers:
        layer._compiled_call_impl = None
    handle = layers[0].register_forward_pre_hook(grab, with_kwargs=True)
    backend = aot_autograd(
        fw_compiler=keep("forward"),
        bw_compiler=keep("backward"),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    on_meta = mock.patch("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    with no_autocast(), on_meta:
        with contextlib.suppress(_Stop):
            model.hidden(batch["input_ids"], batch["document_ids"])
        handle.remove()
        args, kwargs = inputs
        torch.compile(layers[0], fullgraph=True, backend=backend, dynamic=False)(*args, **kwargs).sum().backward()
    torch._dynamo.reset()
    return Program(graphs["forward"], graphs["backward"])


def sources(node: torch.fx.Node) -> list[tuple[torch.fx.Node, Any]]:
    """Return what an operation reads: where each tensor was made, and the tensor as it is seen."""
    found = []
    for given in node.all_input_nodes:
        if isinstance(given.meta.get("val"), Tensor):
            found.append((_maker(given), given.meta["val"]))
    return found


def _maker(node: torch.fx.Node) -> torch.fx.Node:
    """Return what made the memory that a node is a view of."""
    return _maker(node.all_input_nodes[0]) if kind_of(node) == "view" else node


def kind_of(node: torch.fx.Node) -> str:
    """Return what the fusion rule makes of a node: `given`, `view`, `product`, `attention` or `fusible`."""
    if node.op != "call_function":
        return "given"
    name = bare(str(getattr(node.target, "__name__", node.target)))
    if name in FREE:
        return "view"
    if "attention" in name:
        return "attention"
    return "product" if name in PRODUCTS else "fusible"


def fused(graph: torch.fx.Graph) -> Work:
    """Return the work of a graph under the fusion rule (see above)."""
    work, depth, group = Work(), dict[torch.fx.Node, int](), dict[torch.fx.Node, torch.fx.Node]()
    nodes = [node for node in graph.nodes if kind_of(node) in ("product", "attention", "fusible")]

    def root(node: torch.fx.Node) -> torch.fx.Node:
        while group[node] is not node:
            node = group[node]
        return node

    made = {node: [source for source, _ in sources(node) if kind_of(source) != "given"] for node in nodes}
    for node in nodes:
        depth[node] = max((depth[source] + (kind_of(source) != "fusible") for source in made[node]), default=0)
        group[node] = node
    latest: dict[torch.fx.Node, int] = {}
    for node in reversed(nodes):
        depth[node] = latest.get(node, depth[node])
        for source in made[node]:
            if kind_of(source) == "fusible":
                latest[source] = min(latest.get(source, depth[node]), depth[node])
    for node in nodes:
        for source in made[node]:
            if kind_of(source) == kind_of(node) == "fusible" and depth[source] == depth[node]:
                group[root(source)] = root(node)
    users: dict[torch.fx.Node, set[Any]] = collections.defaultdict(set)
    for node in graph.nodes:
        if kind_of(node) != "view":
            for source in node.all_input_nodes:
                users[_maker(source)].add(root(node) if node in group else node)
    members: dict[torch.fx.Node, list[torch.fx.Node]] = collections.defaultdict(list)
    for node in nodes:
        members[root(node)].append(node)
    for head, inside in members.items():
        reads = {source: value for node in inside for source, value in sources(node) if source not in inside}
        writes = [node.meta["val"] for node in inside if users[node] - {head}]
        tensors = [*reads.values(), *(t for t in torch.utils._pytree.tree_leaves(writes) if isinstance(t, Tensor))]
        work.add(*_kernel(kind_of(head), head, sum(map(touched, tensors)), [v.shape for _, v in sources(head)]))
    return work


def _kernel(kind: str, head: torch.fx.Node, size: int, shapes: list[torch.Size]) -> tuple[Kernel, float | None]:
    """Return a group's kernel, and its time where the roofline is not that of products."""
    if kind == "attention":
        backward = "backward" in str(head.target)
        query = sources(head)[0][1]
        operations, seconds = attention_seconds(query, FLEX_ATTENTION, backward)
        return Kernel("attention", 2 if backward else 1, size, operations), seconds  # backward: Σ dO O, then all three
    name = bare(str(getattr(head.target, "__name__", head.target))) if kind == "product" else "fused"
    return Kernel(name, 1, size, operations_of(name, shapes)), None


def triton_loss(rows: int, length: int, width: int, vocabulary: int) -> Work:
    """Return the work of the loss with one kernel over the logits, a model."""
    work, positions = Work(), rows * (length - 1)
    chunks = -(-positions * vocabulary * 2 // LOSS_CHUNK_BYTES)
    count = -(-positions // chunks)
    logits, hidden, head = 2 * count * vocabulary, 2 * count * width, 2 * vocabulary * width
    for _ in range(chunks):
        for _ in range(2):
            work.add(Kernel("mm", 1, logits + hidden + head, 2 * count * vocabulary * width))
        work.add(Kernel("triton", 1, 3 * logits, 0))
        work.add(Kernel("small", LOSS_KERNELS - 1, 20 * count * TOP_K, 0))
    return work


def around_layers(student: Student) -> Work:
    """Trace what is left of a micro-batch without its layers and its loss: embedding, masks, rotations, last norm."""
    count, (model, _, batch) = Count(), student
    layers = [module for module in model.module.modules() if isinstance(module, GradientCheckpointingLayer)]
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(mock.patch.object(layer, "forward", lambda hidden, **_: hidden))
        stack.enter_context(no_autocast())
        stack.enter_context(count)
        hidden = model.hidden(batch["input_ids"], batch["document_ids"])
        hidden.backward(hidden.detach())
    return count.parts["other forward"]


def compiled(student: Student) -> dict[str, Work]:
    """Return the work of a micro-batch by part, layers compiled and loss by the Triton kernel; a model."""
    program, config = layer_program(student), student.model.config
    rows, length = student.batch["input_ids"].shape
    layers = config.num_hidden_layers
    build_optimizer(OptimConfig(), student.trained, MetaRuntime(Count()))
    count, made = Count(), [p for parameters in student.trained.values() for p in parameters.values()]
    with count:
        torch._foreach_add_([p.grad for p in made], [p.detach() for p in made])  # `gradients_apart`
    return {
        "layers forward": Work().plus(fused(program.forward), layers),
        "layers backward": Work().plus(fused(program.backward), layers),
        "gradients added": count.parts["other forward"],
        "around the layers": around_layers(student),
        "loss": triton_loss(rows, length, config.hidden_size, student.model.vocab_size),
    }


def verdict(parts: dict[str, Work], tokens: int) -> dict[str, Any]:
    """Return the figures of a micro-batch by part, their sum, and what it is bound by."""
    whole = total(parts.values())
    in_layers = sum(work.kernels for name, work in parts.items() if name.startswith("layers"))
    host_s = in_layers * HOST_COMPILED_S + (whole.kernels - in_layers) * HOST_S
    return {
        "parts": {name: work.report() for name, work in parts.items()},
        "all": whole.report(),
        "host_ms": round(1e3 * host_s, 1),
        "bound_by": "host" if host_s > whole.seconds else "device",
        "tokens_per_s": round(tokens / max(host_s, whole.seconds)),
    }


def measure(size: str, rows: int, length: int, chunk_mb: int) -> dict[str, Any]:
    """Return the counts and rooflines of a size."""
    student = make_student(size, rows, length)
    began = time.perf_counter()
    parts = micro_batch_eager(student, chunk_mb).parts
    optimizer = {f"{n} GPUs": optimizer_eager(student, n).parts["optimizer"] for n in (1, 2)}
    return {
        "rows": rows,
        "length": length,
        "loss_chunk_mb": chunk_mb,
        "trace_s": round(time.perf_counter() - began, 1),
        "eager": verdict(parts, rows * length),
        "compiled": verdict(compiled(make_student(size, rows, length)), rows * length),
        "optimizer": {name: work.report() for name, work in optimizer.items()},
    }


def main() -> None:
    """Measure the sizes asked for, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=SIZES, default=["0.6b"])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--chunk-mb", type=int, default=ObjectiveConfig().loss_chunk_mb)
    parser.add_argument("--machine", default="no GPU: traced")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    sizes = {size: measure(size, arguments.rows, arguments.length, arguments.chunk_mb) for size in arguments.model}
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": arguments.machine,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "command": " ".join(["python", *sys.argv]),
        "models": sizes,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
