"""The graphs of a compiled decoder layer, and the kernels that a written fusion rule makes of them.

The graphs are those that AOTAutograd hands to a compiler: decomposed, partitioned with recomputation. Each product and
each attention is a kernel; so is each connected set of elementwise work and reductions that lies between the same
products, done as late as possible: what is recomputed is part of what uses it. A kernel reads each tensor from outside
once and writes what others read. A model of Inductor, whose own choices need a GPU.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from roofline.counts import (
    FLEX_ATTENTION,
    FREE,
    PRODUCTS,
    Kernel,
    Work,
    attention_seconds,
    bare,
    no_autocast,
    operations_of,
    touched,
)
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from transformers.modeling_layers import GradientCheckpointingLayer

from qat_lora.models.load import CausalLM


class Program(NamedTuple):
    """The graphs of a decoder layer, as a compiler gets them."""

    forward: torch.fx.Graph
    backward: torch.fx.Graph


class _Stop(Exception):
    """The first layer's inputs are known."""


def layer_program(model: CausalLM, batch: dict[str, Tensor]) -> Program:
    """Return the first decoder layer's graphs, with attention by a block mask."""
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
