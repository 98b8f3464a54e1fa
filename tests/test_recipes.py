"""Every recipe resolves with the command that its first line names, and the chain of recipes fits together."""

from pathlib import Path

import pytest
import yaml

from qat_lora import cli
from qat_lora.config import leaves, resolve
from qat_lora.diagnose.devices import named
from qat_lora.diagnose.estimate import memory
from qat_lora.options import EstimateOptions
from qat_lora.quant.spec import PRESETS
from qat_lora.runtime.select import Found, choose

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
PLACES = ("v6e-1", "v6e-4", "v5e-8", "h100", "laptop")


def command_of(recipe: Path) -> str:
    """Return the command of the first line, `# qat-lora COMMAND --recipe recipes/FILE`."""
    first = recipe.read_text(encoding="utf-8").splitlines()[0]
    begin, end = "# qat-lora ", f" --recipe recipes/{recipe.name}"
    assert first.startswith(begin) and first.endswith(end), first
    return first.removeprefix(begin).removesuffix(end)


def resolved(recipe: Path):
    return resolve(cli._options(cli.COMMANDS[command_of(recipe)][0]), recipe=recipe)


def test_there_are_recipes_for_each_documented_use():
    names = {recipe.stem for recipe in RECIPES}
    presets = ("q4_r32", "w2g64")
    assert {f"recover_qwen3-0.6b_{preset}_{place}" for preset in presets for place in PLACES} < names
    assert {f"quantize_qwen3-0.6b_{preset}" for preset in presets} < names
    assert {"cache_wikitext103_L1024_K128", "cache_openhermes_L128_K128"} < names


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_recipe(recipe):
    options = resolved(recipe)
    given = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    count = 0
    for leaf in leaves(type(options)):
        value, wanted = options, given
        for part in leaf.path:
            value, wanted = getattr(value, part), wanted.get(part) if wanted else None
        if wanted is not None:  # what the file says is what the command gets
            assert value == (float(wanted) if isinstance(value, float) else wanted), leaf.name
            count += 1
    assert count >= 6


def test_the_recipes_are_one_chain():
    by_command: dict[str, list] = {}
    for recipe in RECIPES:
        by_command.setdefault(command_of(recipe), []).append(resolved(recipe))
    caches = {options.run.out for options in by_command["cache build"]}
    students = {options.run.out for options in by_command["quantize"]}
    assert all(o.kd_cache_dir in caches and o.preset in PRESETS for o in by_command["quantize"])
    assert all(o.kd_cache_dir in caches and o.checkpoint in students for o in by_command["recover"])
    assert {o.teacher for o in by_command["cache build"]} == {o.model for o in by_command["quantize"]}


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.stem.startswith("recover")], ids=lambda r: r.stem)
def test_a_recipes_device_can_be_had_and_changed_by_flag(recipe):
    device = resolved(recipe).run.device
    there = Found(cuda_devices=1, torch_xla=True, tpu="/dev/accel0")
    assert choose(device, False, there).kind == {"tpu": "xla"}.get(device, device)
    cls = cli._options("RecoverOptions")
    assert resolve(cls, recipe=recipe, flags={("run", "device"): "cpu"}).run.device == "cpu"


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """A folder with the config.json of Qwen3-0.6B and nothing else."""
    folder = tmp_path_factory.mktemp("Qwen3-0.6B")
    (folder / "config.json").write_bytes((ROOT / "tests/data/qwen3-0.6b.json").read_bytes())
    return folder


@pytest.mark.parametrize("preset", ["q4_r32", "w2g64"])
@pytest.mark.parametrize("place", PLACES)
def test_a_recipe_builds_and_fits_the_place_that_it_names(place, preset, qwen3):
    """Every shape on the meta device; the estimate of memory is compared with the device's."""
    recipe = resolved(ROOT / "recipes" / f"recover_qwen3-0.6b_{preset}_{place}.yaml")
    (device,) = named((place,))
    loop, steps_rows = recipe.loop, 8 if place == "laptop" else 32
    assert loop.accumulation(device.chips) * loop.batch_size * device.chips == steps_rows
    assert (recipe.run.chips.num_chips == "all") == (device.chips > 1)
    quantise = resolved(ROOT / "recipes" / f"quantize_qwen3-0.6b_{preset}.yaml")
    assert quantise.joint_rank == recipe.lora.recovery_r and quantise.preset == preset
    parts = memory(
        EstimateOptions(
            model=str(qwen3),
            preset=preset,
            train_scales=recipe.train_scales,
            lora=recipe.lora,
            batch_size=loop.batch_size,
            gradient_checkpointing=loop.gradient_checkpointing,
            attention="plain" if recipe.run.device == "tpu" else "fused",
            run=recipe.run,
        )
    )
    assert sum(parts.values()) < 0.9 * device.memory_gb * 1e9
