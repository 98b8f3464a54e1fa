"""Every recipe resolves with the command that its first line names, passes its `--dry-run`, and they are one chain."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from qat_lora import cli
from qat_lora.config import leaves, resolve
from qat_lora.models.load import QUANT_METHOD
from qat_lora.plan.devices import named
from qat_lora.quant.presets import PRESETS, preset
from qat_lora.registry import COMMANDS
from qat_lora.runtime.launch.select import Found, choose

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
    return resolve(COMMANDS[command_of(recipe)].options_class(), recipe=recipe)


def test_there_are_recipes_for_each_documented_use():
    names = {recipe.stem for recipe in RECIPES}
    presets = ("q4_r32", "q2_0")
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
    cls = COMMANDS["recover"].options_class()
    assert resolve(cls, recipe=recipe, flags={("run", "device"): "cpu"}).run.device == "cpu"


@pytest.fixture
def planned(tmp_path, monkeypatch, capfd):
    """Return the function from a command line to what its `--dry-run` says, where Hub names are folders here."""
    config = json.loads((ROOT / "tests/data/qwen3-0.6b.json").read_text())
    for name in ("q4_r32", "q2_0"):
        stored = {"quant_method": QUANT_METHOD, "preset": preset(name, ()).to_dict()}
        write(tmp_path / f"runs/Qwen3-0.6B_{name}/config.json", config | {"quantization_config": stored})
    write(tmp_path / "Qwen/Qwen3-0.6B/config.json", config)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("USE_TORCH_XLA", "0")
    monkeypatch.delenv("PJRT_DEVICE", raising=False)

    def plan(recipe: Path, *more: object) -> dict:
        before = sorted(tmp_path.rglob("*"))
        cli.main([*command_of(recipe).split(), "--recipe", str(recipe), "--dry-run", "--json", *map(str, more)])
        assert sorted(tmp_path.rglob("*")) == before, "a dry run wrote something"
        return json.loads(capfd.readouterr().out)

    return plan


def write(file: Path, config: dict) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(config))


@pytest.mark.parametrize("name", ["q4_r32", "q2_0"])
@pytest.mark.parametrize("place", PLACES)
def test_a_recovery_recipe_builds_and_fits_the_place_that_it_names(place, name, planned):
    """Every shape on the meta device, wherever this runs; the estimate of memory is compared with the device's."""
    file = ROOT / "recipes" / f"recover_qwen3-0.6b_{name}_{place}.yaml"
    recipe, (device,) = resolved(file), named((place,))
    assert (recipe.run.chips.num_chips == "all") == (device.chips > 1)
    quantise = resolved(ROOT / "recipes" / f"quantize_qwen3-0.6b_{name}.yaml")
    assert quantise.joint_rank == recipe.lora.recovery_r and quantise.preset == name
    plan = planned(file, "--num-chips", device.chips)
    rows, rank = (8 if place == "laptop" else 32), recipe.lora.recovery_r
    assert (plan["replicas"], plan["effective_batch"], plan["steps"]) == (device.chips, rows, recipe.loop.max_steps)
    assert plan["tokens"] == rows * 1024 * recipe.loop.max_steps
    assert (plan["parameters"], plan["quantised"]) == (596_049_920, 440_401_920)
    assert plan["trained"] == rank * 630_784 + (6_881_280 if recipe.train_scales else 0)
    assert plan["total_bytes"] < 0.9 * device.memory_gb * 1e9
    there = plan["devices"]["this CPU" if place == "laptop" else place]  # which may have less memory than a laptop
    assert (there["fits"] or place == "laptop") and there["hours"] > 0
    (about_the_cache,) = plan["assumed"]
    assert about_the_cache.startswith("caches/wikitext103_L1024_K128 is not there yet: rows of 1,024 tokens and 128 e")


@pytest.mark.parametrize(("name", "bits"), [("q4_r32", 4.73), ("q2_0", 2.25)])
def test_a_quantising_recipe_builds(name, bits, planned):
    plan = planned(ROOT / "recipes" / f"quantize_qwen3-0.6b_{name}.yaml")
    assert plan["layers"] == 196 and plan["quantised"] == 440_401_920
    assert plan["bits_per_weight"] == pytest.approx(bits, abs=0.01)


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.stem.startswith("cache")], ids=lambda r: r.stem)
def test_a_cache_recipe_runs_with_another_teacher_and_text(recipe, planned, tiny, tmp_path):
    """The forecast times a real teacher, so a tiny one stands in, and text that the machine has."""
    chats = tmp_path / "chats.jsonl"
    turns = [{"from": "human", "value": "row"}, {"from": "gpt", "value": "the scale of a row and the loss of it"}]
    chats.write_text(200 * (json.dumps({"conversations": turns}) + "\n"))
    teacher = shutil.copytree(tiny.teacher, tmp_path / "teacher")
    (teacher / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    text = tiny.text if "wikitext" in recipe.stem else chats
    own = resolved(recipe)
    plan = planned(
        recipe,
        *("--teacher", teacher, "--dataset", text, "--format", "auto", "--device", "cpu", "--dtype", "float32"),
        *("--length", min(own.length, 128), "--num-rows", 8, "--eval-rows", 1, "--teacher-batch-size", 2),
    )
    assert plan["rows"] == 8
