"""Every recipe resolves with the command that its first line names, and the chain of recipes fits together."""

from pathlib import Path

import pytest
import yaml

from qat_lora import cli
from qat_lora.config import leaves, resolve
from qat_lora.quant.spec import PRESETS
from qat_lora.runtime.select import Found, choose

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


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
    places = ("tpu", "gpu", "laptop")
    assert {f"recover_qwen3-0.6b_{p}_{place}" for p in ("q4_r32", "w2g64") for place in places} < names
    assert {"quantize_qwen3-0.6b_q4_r32", "quantize_qwen3-0.6b_w2g64", "cache_wikitext103_L1024_K128"} < names


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
