"""`quantize --dry-run`: what a quantised model would weigh, and what making it takes."""

import math
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from qat_lora.cache.storage.store import read_manifest
from qat_lora.errors import ModelError
from qat_lora.layers import convert
from qat_lora.layers.calibrate.fisher import MOST_LOGITS, fisher_bytes, kept_shape
from qat_lora.layers.calibrate.fit import EFFORTS, FOLLOWED, ITERATIONS, OVERSAMPLED, TURN_ROUNDS, Effort
from qat_lora.layers.calibrate.upcast import PIECE
from qat_lora.layers.experts import siblings_of
from qat_lora.layers.lora import of_one_input
from qat_lora.models.load import cast
from qat_lora.options import EstimateOptions, QuantizeOptions
from qat_lora.plan.devices import Device, likely
from qat_lora.plan.memory import GIB, IMPORTS_BYTES, meta_model
from qat_lora.plan.step import token_share, widths
from qat_lora.plan.training import device_of
from qat_lora.quant.gptq import BLOCK
from qat_lora.quant.initialize import COMPENSATED, GROUPS
from qat_lora.quant.presets import preset
from qat_lora.quant.scales import CLIPS, FINER
from qat_lora.quant.scales import SWEEPS as LOW_RANK_SWEEPS
from qat_lora.quant.spec import SUPER, QuantSpec
from qat_lora.registry import DryRun, Requirements
from qat_lora.setup.allocation import HEAD_ROWS, JOINT_RANKS, JOINT_TURNS, Choices, choices
from qat_lora.setup.common import calibration_batch_rows

FLOAT32_RATE = {"tpu": 1 / 6, "cuda": 1 / 15}  # of bfloat16's: six passes of a TPU, none of a card's product units
COLUMN_S = {"cuda": 10 * 5e-6, "cpu": 9e-6}  # seconds to start what a column takes; a TPU's are one program
COLUMN_PASSES = {"tpu": 11, "xla": 11}  # times a column's round moves its block, as in a v6e's program; else twice
CLIP_OPERATIONS = 8  # to round a weight at one clip, and to weigh the error


class SolverWork(NamedTuple):
    """What solving for codes, scales and the adapters beside them takes, without calibration and factorisations."""

    operations: int
    bytes: int  # to and from memory
    columns: int  # columns that wait for the one before

    def seconds(self, device: Device) -> float:
        """Return the time that a device's rates, or its host's launches, allow at best; a CPU does all in turn."""
        rate, started = device.tflops * 1e12 * FLOAT32_RATE.get(device.device, 1.0), COLUMN_S.get(device.device, 0.0)
        times = self.operations / rate, self.bytes / (device.gbps * 1e9), self.columns * started
        return sum(times) if device.device == "cpu" else max(times)


def plan_quantize(options: QuantizeOptions) -> DryRun:
    """Plan a quantisation; ModelError: no config.json here or on the Hub, or codes; ConfigError: as `check_reach`."""
    config, module = meta_model(str(options.model))
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"model: {options.model} is quantised already; give the full-precision model")
    parameters = sum(p.numel() for p in module.parameters())
    chosen = preset(options.preset, options.keep, options.override, options.quantize_head)
    share, reach = convert.reach_of(module, chosen, convert.check_reach(module, chosen))
    stored = config.dtype if isinstance(getattr(config, "dtype", None), torch.dtype) else torch.float32  # in its files
    measured = choices(options, module, stored.itemsize) if options.target.name else None
    convert.make_quant_skeleton(module, chosen)
    cast(module, stored)
    layers, bits = convert.quant_layers(module).values(), convert.bits_per_weight(module)
    quantised = sum(layer.in_features * layer.out_features for layer in layers)
    codes_bytes, rest_bytes = int(bits["base"] * quantised) // 8, stored.itemsize * module.rest_weights
    has_text = options.text.dataset is not None or options.kd_cache_dir is not None
    cached = options.kd_cache_dir and Path(options.kd_cache_dir).expanduser().exists()
    length = read_manifest(str(options.kd_cache_dir)).fingerprint.length if cached else options.calibration_length
    tokens = options.rows_of(length) * length * has_text
    size, scratch = config.get_text_config(), fisher_bytes(module, options.init, options.metric) if has_text else 0
    rows_bytes = 4 * tokens * size.hidden_size
    # The Fisher information takes a piece of the head in float32, its logits four times, and what every block gets.
    batch = min(calibration_batch_rows(length), options.rows_of(length)) * length * (scratch > 0)
    states = batch * (size.num_hidden_layers + 2) * size.hidden_size
    piece = (batch > 0 and stored.itemsize < 4) * min(PIECE, size.vocab_size * size.hidden_size)
    fisher = 4 * (states + piece) + 16 * min(MOST_LOGITS, batch * size.vocab_size)
    of_block = Counter[str | None]()
    for name, layer in convert.quant_layers(module).items():
        of_block[convert.block_of(name)] += 4 * layer.in_features * layer.out_features
    widest = max(max(layer.in_features, layer.out_features) * layer.in_features for layer in layers)
    # Of text: states of both models, and four matrices of the widest layer; else two.
    solving_bytes = 3 * max(of_block.values()) // 2 + (rows_bytes + 8 * widest) * (1 + has_text)
    report: dict[str, Any] = {"model": str(options.model), "preset": options.preset, "parameters": parameters}
    report |= {"quantised": quantised, "layers": len(layers), "quantised_share": share, "scratch_bytes": scratch}
    report |= {"bits_per_weight": bits["base"], "bits_per_weight_model": bits["model"]}
    report |= {"stored_bytes": int(bits["model"] * parameters) // 8 + rest_bytes}
    report["rest_bytes"] = rest_bytes  # of an encoder of images, which are stored as they are
    weights = stored.itemsize * parameters + rest_bytes, 4 * (parameters - quantised) + codes_bytes
    report |= {"weights_bytes": max(weights), "own_bytes": IMPORTS_BYTES + max(fisher, solving_bytes)}
    forms = Path(__file__).with_name("quantize.txt").read_text(encoding="utf-8").rstrip().split("---")
    device, solving, own = device_of(options.run), "", report["own_bytes"]
    held = report["weights_bytes"] * (device != "cpu")
    if options.init in COMPENSATED:
        work = solver_work(module, options, COLUMN_PASSES.get(device, 2), measured)
        passes = calibration_operations(module, size, options, tokens, length, device, measured)
        rate = 1e12 * EstimateOptions.utilisation
        chips = {chip.name: chip for chip in likely(device, 1)}
        seconds = {name: passes / (chip.tflops * rate) + work.seconds(chip) for name, chip in chips.items()}
        report["solvers"] = {**work._asdict(), "calibration_operations": passes, "seconds": seconds}
        fit = {n: "fits" if own + held < 0.9e9 * chip.memory_gb else "does not fit" for n, chip in chips.items()}
        times = ", ".join(f"{time / 3600:.2g} h on {name} ({fit[name]})" for name, time in seconds.items())
        solving = forms[1].format(**report["solvers"], times=times)
    rest = f", of which {rest_bytes / GIB:.3f} GiB are no text and stay as they are" if rest_bytes else ""
    gib = {name.replace("_bytes", "_gib"): report[name] / GIB for name in report if name.endswith("_bytes")}
    target = measured.range_text if measured else ""
    text = forms[0].format(**report, **gib, reach=reach, rest=rest, solving=solving, target=target)
    starts = 4 * options.start_rank * sum(layer.in_features + layer.out_features for layer in layers)
    disk = 2 * (report["stored_bytes"] + starts) + scratch  # finished blocks are kept until the whole is written
    return DryRun(report, text, Requirements("this quantisation", own + held, own, disk))


def calibration_operations(
    module: Any,
    config: Any,
    options: QuantizeOptions,
    tokens: int,
    length: int,
    device: str,
    found: Choices | None,
) -> int:
    """Return the operations for all rows: for the Fisher information, states, moments and what is measured."""
    size, named = widths(config), convert.quant_layers(module)
    is_xla = device in COLUMN_PASSES  # under XLA each expert computes every token
    layers = {name: (layer, 1 if is_xla else token_share(module, config, name)) for name, layer in named.items()}
    products = 2 * sum(share * layer.in_features * layer.out_features for layer, share in layers.values())
    attention = 2 * config.num_hidden_layers * length * size.queries
    # Fisher: forward, again in the backward pass, gradients of activations (attention's: 5 products, not 2), outputs.
    to_logits = 2 * config.vocab_size * size.hidden
    of_outputs = sum(2 * share * math.prod(kept_shape(layer.out_features)) for layer, share in layers.values())
    fisher = 3 * products + 4.5 * attention + 2 * to_logits + of_outputs
    # States: both streams through all of a block, the student's also to each of its stages (three past attention), and
    # two moments for layers of one input.
    together = [name for names in of_one_input(named) for name in names[1:]]
    moments = sum(2 * share * layer.in_features**2 for name, (layer, share) in layers.items() if name not in together)
    # What hidden states lack, for the layers that add to them; four trials of scales between layers, on one batch.
    writers = [layer for name, (layer, _) in layers.items() if name.endswith(("o_proj", "down_proj"))]
    has_experts = any(siblings_of(name) for name in layers)
    lacks = 0 if has_experts else sum(2 * layer.in_features * layer.out_features for layer in writers)
    inputs = 3.5 * products + 5 * attention + 2 * moments + lacks
    if found:  # one stream more, one for a head's input, and teacher and student for every format of a head
        heads = sum(bool(convert.LM_HEAD.search(names[0])) for names, *_ in found.points)
        scored = 2 * heads * min(1, HEAD_ROWS / options.rows_of(options.calibration_length))
        inputs += moments + (1 + (heads > 0) + scored) * (products + attention) + scored * to_logits
    batch = min(calibration_batch_rows(length), options.rows_of(length)) * length
    fisher_tokens = min(tokens, -(-EFFORTS[options.effort].fisher_tokens // batch) * batch)
    trials = 4 * batch * (products + attention)
    return int(tokens * inputs + trials + (options.metric == "fisher") * fisher_tokens * fisher)


def solver_work(module: Any, options: QuantizeOptions, column_passes: int, measured: Choices | None) -> SolverWork:
    """Return what `quant/gptq.py` and `quant/initialize.py` do to a quantised model's layers, and to measure them."""
    parts, fisher = [], options.metric == "fisher"
    for names, spec, rank in measured.points if measured else ():
        layers = map(module.get_submodule, names if rank == 0 else ())
        parts += [layer_work(x.out_features, x.in_features, spec, 1, False, column_passes) for x in layers]
    for name, layer in convert.quant_layers(module).items():
        inside = not convert.LM_HEAD.search(name)
        beside = bool(options.rank_of_codes and inside)
        effort = EFFORTS[options.effort]
        shape, descends = (layer.out_features, layer.in_features), options.init == "descent"
        coupled = fisher and inside and len(kept_shape(layer.out_features)) == 2
        if measured and beside:
            parts.append(layer_work(*shape, layer.spec, JOINT_TURNS * len(JOINT_RANKS), False, column_passes))
        turns = 1 + effort.turns if beside else 1
        parts.append(layer_work(*shape, layer.spec, turns, descends, column_passes, coupled, effort, beside))
    return SolverWork(*map(sum, zip(*parts, strict=True)))


def layer_work(
    rows: int,
    columns: int,
    spec: QuantSpec,
    turns: int,
    descends: bool,
    column_passes: int,
    coupled: bool = False,
    effort: Effort = EFFORTS["best"],
    beside: bool = False,
) -> SolverWork:
    """Return a layer's work for so many turns, in float32, by whole products.

    `coupled`: with two-sided rounds; `beside`: codes are chosen beside an adapter.
    """
    rounds = 0
    if descends:
        rounds = turns * TURN_ROUNDS + effort.rounds - TURN_ROUNDS if beside else effort.rounds
    both = effort.two_sided_rounds if descends and coupled and spec.sharing != "tensor" else 0
    levels = 0 if spec.sharing == "lowrank" else 2 if spec.step_bits else 1  # K-quants: steps, their scales
    # Products with H: sweeps, refits and the slope after each, and at the start, or where an adapter has followed.
    alone = turns + rounds * (1 + 2 * levels) + (turns + beside if descends else 0)
    paired = both * (1 + 2 * levels) + both // FOLLOWED
    size = SUPER if spec.step_bits else spec.group_size if spec.sharing == "group" and spec.group_size else BLOCK
    weights, sweeps, refits = rows * columns, rounds + both, (rounds + both) * levels
    products = 2 * weights * (columns * (alone + paired) + int(rows * both * (1 + 1 / GROUPS)))
    # The best adapter for each turn, for what is descended to, before, between and after two-sided rounds, and at the
    # end: an error between triangular roots, in four parts, and passes over it.
    fitted = (turns + 2 + (both > 0) + both // FOLLOWED) * beside
    products += 2 * weights * fitted * (5 * (rows + columns) // 8 + 2 * (ITERATIONS + 1) * OVERSAMPLED)
    block, clips = size * turns + BLOCK * sweeps, turns * (CLIPS * (1 + spec.signed) + len(FINER))
    factors = (spec.rank or 0) * ((spec.rank or 0) + 1) * 2 * LOW_RANK_SWEEPS * turns  # the Gram matrices of both
    within = weights * (2 * block + CLIP_OPERATIONS * clips + factors)
    # A block's errors pass over the whole weight, which is read and written; a group's products are only read.
    passes = columns * (2 * turns / size + 2 * sweeps / BLOCK + refits / size)
    passes += 3 * (alone + paired - turns - sweeps - refits) + column_passes * block + 2 * clips
    # A group of rows reads all of H for each product, and all rows' errors for its targets.
    moments = columns**2 * (alone + GROUPS * paired) + GROUPS * weights * both
    waiting = columns * (turns + rounds + GROUPS * both)
    return SolverWork(products + within, int(4 * (weights * passes + moments)), waiting)
