"""Decoder layers of one kind as one: their tensors stored stacked, [layers, ...], and run as a loop of the graph.

PyTorch/XLA traces a model anew for every micro-batch. Layer by layer that is 470 ms of host time for 28 layers whose
device time is a tenth of it, a program of hundreds of megabytes, and an optimizer over 392 small tensors. torch_xla's
`scan_layers` stacks the weights inside the graph, a copy of the model in every step. Here they are stacked once, on the
host, each weight formed from its codes there: the device computes with the weights that are exported.

The model keeps its own forward. In its list of layers the first of a run of equal ones becomes `StackedLayers`, which
computes all of them, and the others pass on what they get. The layers as they were stay on the host, out of sight;
`apart` fills them with what was trained and puts them back for a while, so whatever reads a model by the names of its
layers (export, adapters) knows of no stacks, nor does a disk: `by_layer` goes between. Layers are of one kind if
modules, settings and shapes are equal; those that draw random numbers (dropout) stay apart.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from qat_lora.layers.convert import block_of, linear_layers
from qat_lora.layers.quant_linear import Dense, Packed, QuantLinear

# `Runtime.layer_scan`: (body, recompute) -> the loop.
Scan = Callable[[Callable[..., Tensor], bool], Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], Tensor]]
RANGE = re.compile(r"\[(\d+):(\d+)\]")  # layers of a stack, as a slice: `model.layers.[0:28].mlp.up_proj.lora_A`


class StackedLayers(nn.Module):
    """Equal decoder layers, computed as a loop; parameters and buffers are theirs, stacked, with `/` for `.`."""

    is_stack = True  # to a runtime that spreads weights: the first dimension is the layers'

    def __init__(self, layers: Sequence[nn.Module], scan: Scan) -> None:
        """Take over the tensors of the layers, which are left with those that train or are stored."""
        super().__init__()
        self.gradient_checkpointing = False
        self.layers = tuple(layers)  # a tuple hides them from `modules` and `to`
        self._scan, self._scans = scan, dict[Any, Any]()
        self._template = (_skeleton(layers[0]),)
        _copy_plain(layers[0], self)
        for name, first in _tensors(layers[0]).items():
            own = [_tensors(layer)[name] for layer in layers]
            stack = torch.stack([tensor.detach() for tensor in own])
            if not first.requires_grad:
                for tensor, part in zip(own, stack, strict=True):
                    tensor.data = part  # one copy on the host, not two
            if isinstance(first, nn.Parameter):
                self.register_parameter(_flat(name), nn.Parameter(stack, requires_grad=first.requires_grad))
            else:
                self.register_buffer(_flat(name), stack)
        for layer in layers:
            for module in layer.modules():
                if isinstance(module, QuantLinear) and isinstance(module.source, Dense):
                    module.source = Packed()  # the codes are enough for who looks at the layers

    def forward(self, hidden_BLH: Tensor, **given: Any) -> Tensor:
        """Return what the last layer makes of hidden states; all layers get the same further arguments."""
        leaves, form = tree_flatten(given)
        shared = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        fixed = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        key = repr((fixed, form, torch.is_autocast_enabled(hidden_BLH.device.type), self.gradient_checkpointing))
        if key not in self._scans:
            self._scans[key] = self._scan(self._body(leaves, form), self.gradient_checkpointing)
        stacked = [*self._parameters.values(), *self._buffers.values()]
        result: Tensor = self._scans[key](hidden_BLH, stacked, shared)
        return result

    def _body(self, leaves: Sequence[Any], form: Any) -> Callable[..., Tensor]:
        """Return the function of one layer: (hidden states, its tensors, the tensors among the arguments)."""
        names = [name.replace("/", ".") for name in (*self._parameters, *self._buffers)]
        fixed, template = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves], self._template[0]
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def body(hidden: Tensor, slices: Sequence[Tensor], shared: Sequence[Tensor]) -> Tensor:
            arguments = list(fixed)
            for place, tensor in zip(places, shared, strict=True):
                arguments[place] = tensor
            given = tree_unflatten(arguments, form)
            own = dict(zip(names, slices, strict=True))
            output = torch.func.functional_call(template, own, (hidden,), given)
            return output if isinstance(output, Tensor) else output[0]

        return body

    def fill(self) -> None:
        """Copy what trains here into the layers."""
        for name, stack in self._parameters.items():
            if stack is not None and stack.requires_grad:
                for layer, value in zip(self.layers, stack.detach().cpu(), strict=True):
                    layer.get_parameter(name.replace("/", ".")).data.copy_(value)


class _Passed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        _copy_plain(layer, self)

    def forward(self, hidden_BLH: Tensor, **_: Any) -> Tensor:
        return hidden_BLH


def stack_layers(model: nn.Module, scan: Scan) -> tuple[int, int]:
    """Stack the decoder layers of a model, in place, wherever neighbours are of one kind; return (stacked, all)."""
    count = total = 0
    for path in sorted({block.rpartition(".")[0] for name, _ in linear_layers(model) if (block := block_of(name))}):
        blocks = model.get_submodule(path)
        assert isinstance(blocks, nn.ModuleList)
        layers, end = list(blocks), 0
        total += len(layers)
        for kind, run in groupby(layers, _kind):
            start, end = end, end + len(list(run))
            if kind is not None and end - start > 1:
                blocks[start] = StackedLayers(layers[start:end], scan)
                for i in range(start + 1, end):
                    blocks[i] = _Passed(layers[i])
                count += end - start
    return count, total


def forget_layers(model: nn.Module) -> None:
    """Drop the layers that stacks were made of, for a model of which nobody asks them."""
    for _, _, layers in _stacks(model):
        layers.layers = ()


@contextmanager
def apart(model: nn.Module) -> Iterator[None]:
    """Put the layers of every stack back for a while, on the host, with what has been trained."""
    with ExitStack() as stack:
        for parent, start, layers in list(_stacks(model)):
            layers.fill()
            stack.callback(_put, parent, start, list(parent[start : start + len(layers.layers)]))
            _put(parent, start, layers.layers)
        yield


def _put(parent: nn.ModuleList, start: int, layers: Sequence[nn.Module]) -> None:
    for i, layer in enumerate(layers):
        parent[start + i] = layer


def _stacks(model: nn.Module) -> Iterator[tuple[nn.ModuleList, int, StackedLayers]]:
    for parent in model.modules():
        if isinstance(parent, nn.ModuleList):
            for i, layer in enumerate(parent):
                if isinstance(layer, StackedLayers):
                    yield parent, i, layer


def trained_paths(model: nn.Module, groups: Mapping[str, Mapping[str, nn.Parameter]]) -> dict[str, dict[str, str]]:
    """Return where in a model its trained parameters are, by kind and name: objects change as a model is placed."""
    paths = {id(parameter): path for path, parameter in model.named_parameters()}
    return {kind: {name: paths[id(p)] for name, p in tensors.items()} for kind, tensors in groups.items()}


def parameters_at(model: nn.Module, paths: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, nn.Parameter]]:
    """Return the parameters at `trained_paths`, those of stacked layers as stacks under a name with a range."""
    stacks: dict[str, tuple[str, StackedLayers]] = {}
    names = {id(module): path for path, module in model.named_modules()}
    for parent, start, layers in _stacks(model):
        prefix, end = names[id(parent)], start + len(layers.layers)
        stacks |= {f"{prefix}.{i}.": (f"{prefix}.[{start}:{end}].", layers) for i in range(start, end)}
    found: dict[str, dict[str, nn.Parameter]] = {kind: {} for kind in paths}
    for kind, tensors in paths.items():
        for name, path in tensors.items():
            block = f"{block_of(path)}."
            if block in stacks:
                whole, layers = stacks[block]
                found[kind][name.replace(block, whole, 1)] = layers.get_parameter(_flat(path.removeprefix(block)))
            else:
                found[kind][name] = model.get_parameter(path)
    return found


def layer_names(name: str) -> list[str]:
    """Return the names of the layers' tensors that a name with a range stands for, or the name itself."""
    found = RANGE.search(name)
    if found is None:
        return [name]
    return [name[: found.start()] + str(i) + name[found.end() :] for i in range(int(found[1]), int(found[2]))]


def by_layer(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with every stack cut into its layers'; a tensor without dimensions is that of all layers."""
    cut: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        names = layer_names(name)
        cut |= dict(zip(names, tensor if len(names) > 1 and tensor.ndim else [tensor] * len(names), strict=True))
    return cut


def _tensors(layer: nn.Module) -> dict[str, Tensor]:
    """Return all tensors of a layer by name; those of a weight formed from codes are the weight and the bias."""
    found: dict[str, Tensor] = {}
    formed: list[str] = []
    for path, module in layer.named_modules():
        if path.startswith(tuple(formed)):
            continue
        prefix = f"{path}." if path else ""
        own = {**module._parameters, **module._buffers}
        if _is_formed(module):
            formed.append(prefix)
            weight, bias = module.effective(), module.bias
            own = {"weight": nn.Parameter(weight, requires_grad=False)}
            own["bias"] = None if bias is None else nn.Parameter(bias.to(weight.dtype), requires_grad=False)
        found |= {f"{prefix}{name}": tensor for name, tensor in own.items() if tensor is not None}
    return found


def _is_formed(module: nn.Module) -> bool:
    return isinstance(module, QuantLinear) and isinstance(module.source, Dense)


def _skeleton(layer: nn.Module) -> nn.Module:
    """Return a copy of a layer without numbers, in which weights that were formed from codes are ordinary ones."""
    shared = {id(module.config): module.config for module in layer.modules() if hasattr(module, "config")}
    empty = {id(tensor): tensor.to("meta") for tensor in (*layer.parameters(), *layer.buffers())}
    made = copy.deepcopy(layer, {**shared, **empty})
    for path, module in list(made.named_modules()):
        if _is_formed(module):
            bias = module.bias is not None
            made.set_submodule(path, nn.Linear(module.in_features, module.out_features, bias=bias, device="meta"))
    return made


def _kind(layer: nn.Module) -> Any:
    """Return what equal layers have equal; None for a layer that draws random numbers."""
    settings = []
    for path, module in layer.named_modules():
        plain = _plain(module)
        if any(value for name, value in plain.items() if name == "p" or "dropout" in name):  # p: nn.Dropout's
            return None
        form = "" if not isinstance(module, QuantLinear) or _is_formed(module) else module.extra_repr()
        settings.append((path, type(module).__name__, form, tuple(sorted(plain.items(), key=str))))
    return repr((settings, [(n, t.shape, t.dtype, t.requires_grad) for n, t in _tensors(layer).items()]))


def _plain(module: nn.Module) -> dict[str, Any]:
    """Return a module's settings: its attributes that are numbers or texts, but for its place among the layers."""
    kinds = bool | int | float | str | None
    return {k: v for k, v in vars(module).items() if isinstance(v, kinds) and k != "layer_idx"}


def _copy_plain(layer: nn.Module, to: nn.Module) -> None:
    """Give a stand-in the settings of a layer, which some models read."""
    for name, value in _plain(layer).items():
        if not hasattr(to, name):
            setattr(to, name, value)


def _flat(name: str) -> str:
    return name.replace(".", "/")
