"""The command line: every flag explained, one frozen list of them, precedence, JSON, exit codes.

`python tests/test_cli.py > tests/data/cli_flags.txt` renews the frozen list after a change that is meant.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from qat_lora import cli
from qat_lora.cli import EXAMPLES
from qat_lora.config import leaves, save_yaml, to_dict
from qat_lora.registry import COMMANDS

FROZEN = Path(__file__).parent / "data" / "cli_flags.txt"
WITHOUT_UNIT = {"seed"}


def commands(group: click.Group = cli.cli, words: str = "") -> dict[str, click.Command]:
    """Return every command by its words."""
    found: dict[str, click.Command] = {}
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        if isinstance(command, click.Group):
            found |= commands(command, f"{words}{name} ")
        else:
            found[f"{words}{name}"] = command
    return found


def flags(command: click.Command) -> list[click.Parameter]:
    return command.get_params(click.Context(command))


def flag_list() -> str:
    """Return the commands with their flags, arguments and defaults, one a line."""
    lines = []
    for words, command in sorted(commands().items()):
        for parameter in flags(command):
            if "--help" in parameter.opts:
                continue
            kind = parameter.metavar or ("switch" if getattr(parameter, "is_flag", False) else "TEXT")
            default = re.search(r"default: ([^\]]*)\]$", getattr(parameter, "help", "") or "")
            names = " ".join(parameter.opts)
            lines.append(f"{words}: {names} {kind}" + (f" = {default[1]}" if default else ""))
    return "\n".join(lines)


def options_of(words: str) -> type:
    return COMMANDS[words].options_class()


def test_commands_and_flags_are_the_frozen_ones():
    assert flag_list() == FROZEN.read_text(encoding="utf-8").rstrip("\n"), __doc__


@pytest.mark.parametrize("words", [words for words, command in COMMANDS.items() if command.options])
def test_every_flag_is_unique_and_explained(words):
    seen: dict[str, str] = {}
    for parameter in flags(commands()[words]):
        for name in parameter.opts:
            assert name not in seen, f"{name} means both {seen.get(name)} and {parameter.name}"
            seen[name] = str(parameter.name)
    for leaf in leaves(options_of(words)):
        text = cli._help(leaf)
        assert "--" + leaf.name.replace("_", "-") in seen
        assert "default" in text or "(required)" in text, f"--{leaf.name} shows no default"
        if int in (leaf.type, *getattr(leaf.type, "__args__", ())):
            assert leaf.field.metadata["unit"] or leaf.name in WITHOUT_UNIT, f"--{leaf.name} has no unit"


@pytest.mark.parametrize("words", commands())
def test_help(words, capfd):
    cli.main([*words.split(), "--help"])
    out, err = capfd.readouterr()
    assert out.startswith(f"Usage: qat-lora {words}") and not err


LONG = [
    words for words, command in COMMANDS.items() if command.options and len([*leaves(options_of(words))]) > cli.MANY
]


def help_of(words: str, capfd, flag: str = "--help", width: int = 100) -> str:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("COLUMNS", str(width))
        cli.main([*words.split(), flag])
    return capfd.readouterr().out


@pytest.mark.parametrize("words", LONG)
def test_help_of_many_settings_fits_a_screen(words, capfd):
    """The common settings in groups, with examples; all of them behind --help-all, other names included."""
    short, whole = help_of(words, capfd), help_of(words, capfd, "--help-all")
    assert len(short.splitlines()) <= 45 and max(map(len, short.splitlines())) <= 110
    every = list(leaves(options_of(words)))
    shown = set(re.findall(r"^  (--[a-z-]+)", short, re.MULTILINE))
    assert shown == {cli._flag_name(leaf.name) for leaf in every if leaf.field.metadata["common"]}
    assert 6 <= len(shown) <= 16 and f"--help-all shows all {len(every)} settings" in short
    assert all(cli._flag_name(name) in whole for leaf in every for name in leaf.names)
    assert short.count("\n  qat-lora ") >= 1 + (words != "estimate") and "\nRun:\n" in short


def test_help_of_few_settings_shows_all(capfd):
    assert help_of("push", capfd) == help_of("push", capfd, "--help-all")
    assert "--private" in help_of("push", capfd) and "--help-all" not in help_of("push", capfd)


def test_help_on_a_narrow_terminal(capfd):
    lines = help_of("recover", capfd, width=50).splitlines()
    assert all(len(line) <= 50 for line in lines if not line.startswith("  qat-lora")), max(lines, key=len)


@pytest.mark.parametrize("line", EXAMPLES.read_text(encoding="utf-8").splitlines())
def test_examples_of_help_are_understood(line, resolved):
    assert resolved(*line.split()[1:])


def test_an_unknown_flag_shows_the_three_nearest(capfd):
    with pytest.raises(SystemExit):
        cli.main([*RECOVER, "--learning-rte", "1"])
    err = capfd.readouterr().err
    assert err.startswith("error: No such option '--learning-rte'; the nearest: --lr, --learn, --log-steps (see ")


@pytest.mark.parametrize(("arguments", "shows"), [([], "recover"), (["cache"], "verify"), (["--version"], "0.")])
def test_without_a_command_there_is_help(arguments, shows, capfd):
    cli.main(arguments)
    assert shows in capfd.readouterr().out


class Seen(Exception):
    """Carries the options that a command line led to."""


@pytest.fixture
def resolved(monkeypatch):
    """Return the function from arguments to the options that the command would run with."""

    def stop(command, options):
        raise Seen(options)

    monkeypatch.setattr("qat_lora.runtime.launch.start.run", stop)

    def resolve(*arguments):
        with pytest.raises(Seen) as caught:
            cli.main(arguments)
        return caught.value.args[0]

    return resolve


RECOVER = ("recover", "--checkpoint", "q", "--kd-cache-dir", "c")


def test_flags_words_and_recipe(resolved, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("train:\n  lr: 3e-5\n  warmup_steps: 3\nloop:\n  max_steps: 5\nrun:\n  dtype: bfloat16\n")
    arguments = (*RECOVER, "--recipe", str(recipe), "--lr", "1e-2", "--warmup-steps", "4", "train.lr=0.5")
    options = resolved(*arguments)
    assert (options.train.lr, options.train.warmup_steps, options.loop.max_steps) == (0.5, 4, 5)
    assert options.run.dtype == "bfloat16" and options.checkpoint == "q"


def test_the_guides_words(resolved):
    options = resolved(*RECOVER, "device_type=tpu", "global_batch_size=1024", "train.lr=3e-4")
    assert (options.run.device, options.loop.global_batch_size, options.train.lr) == ("tpu", 1024, 3e-4)
    assert resolved(*RECOVER, "--device-type", "tpu").run.device == "tpu"
    assert resolved(*RECOVER, "--tpu").run.tpu is True
    assert resolved(*RECOVER, "--tpu", "tpu=false").run.tpu is False


def test_the_guides_flags(resolved):
    """The commands of the user's guide, DESIGN section 3."""
    build = "cache build --teacher T --dataset D --dataset-config C --split S --text-field F --format text"
    options = resolved(*build.split(), *["--length", "1024", "--top-k", "128", "--out", "O"])
    assert (options.text.dataset_config, options.text.split, options.text.text_field) == ("C", "S", "F")
    assert (options.length, options.top_k, options.run.out) == (1024, 128, "O")
    train = "recover --tpu --model M --checkpoint runs/v2_q4/best.pt --kd-cache-dir C --recovery-r 8 --batch-size 4"
    options = resolved(*train.split(), *["--accumulation-steps", "8", "--max-steps", "1000"])
    assert options.run.tpu and options.checkpoint == "runs/v2_q4/best.pt" and options.lora.recovery_r == 8
    assert (options.loop.batch_size, options.loop.accumulation_steps, options.loop.max_steps) == (4, 8, 1000)


QUANTIZE, PUSH = ("quantize", "--model", "m"), ("push", "folder", "owner/name")
CHAT, GENERATE = ("chat", "s"), ("generate", "--student", "s", "--prompt", "p")
BUILD = ("cache", "build", "--teacher", "t", "--dataset", "d")
EXPORT = ("export", "--student", "s")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ((*PUSH, "--dtype", "bfloat16"), "dtype"),
        ((*QUANTIZE, "--num-chips", "4"), "num-chips"),
        ((*PUSH, "run.dtype=bfloat16"), "run.dtype"),
        ((*QUANTIZE, "num_chips=4"), "num_chips"),
        ((*PUSH, "--device-type", "tpu"), "device-type"),
        ((*PUSH, "--seed", "1"), "seed"),
        ((*CHAT, "--out", "x"), "out"),
        ((*GENERATE, "--overwrite"), "overwrite"),
        ((*EXPORT, "--seed", "1"), "seed"),
        ((*BUILD, "--parallel", "spmd"), "parallel"),
        ((*BUILD, "--shard-base"), "shard-base"),
    ],
)
def test_what_a_command_does_not_use_is_refused_and_not_shown(line, name, capfd):
    with pytest.raises(SystemExit) as caught:
        cli.main(line)
    err = capfd.readouterr().err
    assert caught.value.code == 2 and err.startswith(f"error: {name}: this command does not use it"), err
    words = " ".join(line[: 2 if line[0] == "cache" else 1])
    flag = "--" + name.rpartition(".")[2].replace("_", "-")
    assert flag not in [opt for parameter in flags(commands()[words]) for opt in parameter.opts]


def test_a_recipes_unused_setting_is_refused_and_a_runs_config_has_none(resolved, tmp_path, capfd):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: m\nrun:\n  chips:\n    num_chips: all\n")
    with pytest.raises(SystemExit):
        cli.main(["quantize", "--recipe", str(recipe)])
    assert "run.chips.num_chips: this command does not use it" in capfd.readouterr().err
    options = resolved(*QUANTIZE, "--seed", "3")
    save_yaml(options, recipe)
    assert resolved("quantize", "--recipe", str(recipe)) == options
    assert set(to_dict(options)["run"]) == {"out", "overwrite", "device", "tpu", "dtype", "seed", "quiet", "json"}


def test_an_adapter_is_copied_so_it_takes_no_type(capfd):
    with pytest.raises(SystemExit):
        cli.main([*EXPORT, "--form", "adapter", "--dtype", "bfloat16"])
    assert capfd.readouterr().err.startswith("error: dtype: bfloat16 means nothing with --form adapter")


def test_lists_repeat_or_take_commas(resolved):
    arguments = ("eval", "--teacher", "t", "--dataset", "d", "--students", "a=x,y", "--students", "z")
    assert resolved(*arguments).students == ("a=x", "y", "z")


@pytest.fixture(scope="module")
def work(tiny, tmp_path_factory):
    """A cache, a student, a run and its scores, made by the command line; with what it printed as JSON."""
    root = tmp_path_factory.mktemp("cli")
    lines = {
        "cache build": ["--teacher", tiny.teacher, "--dataset", tiny.text, "--length", 32, "--top-k", 8],
        "quantize": ["--model", tiny.teacher, "--dataset", tiny.text, "--calibration-rows", 8],
        "recover": ["--checkpoint", root / "quantize", "--kd-cache-dir", root / "cache build", "--max-steps", 2],
        "eval": ["--teacher", tiny.teacher, "--dataset", tiny.held_out, "--length", 32, "--students"],
        "generate": ["--student", root / "recover", "--prompt", "the model", "--max-new-tokens", 3],
        "export": ["--student", root / "recover"],
    }
    lines["eval"].append(f"q={root / 'quantize'},r={root / 'recover'}")
    lines["cache build"] += ["--eval-rows", 2, "--num-rows", 12]
    lines["quantize"] += ["--calibration-length", 32, "--start-rank", 4]
    lines["recover"] += ["--recovery-r", 4, "--batch-size", 2]
    for words, line in lines.items():
        line += ["--device", "cpu", *([] if words == "generate" else ["--out", root / words])]
    return root, {words: [*words.split(), *map(str, line)] for words, line in lines.items()}


def test_json_is_all_that_json_prints(work, capfd):
    root, lines = work
    results = {}
    for words, line in lines.items():
        capfd.readouterr()
        cli.main([*line, "--json", "--quiet"])
        out, err = capfd.readouterr()
        results[words] = json.loads(out)
        assert not err, words
    for words in ("cache build", "quantize", "recover", "export"):
        assert results[words]["out"] == str(root / words)
    assert results["quantize"]["preset"] == "q2_0" and 2 < results["quantize"]["bits_per_weight"] < 3
    assert results["recover"]["step"] == 2
    assert set(results["eval"]) == {"teacher", "q", "r"} and results["eval"]["r"]["kl"] > 0
    assert set(results["generate"]) == {"text"}
    for words, line in lines.items():  # once more, resumed: the same answer
        cli.main([*line, "--json", "--quiet"])
        assert json.loads(capfd.readouterr().out) == results[words], words


def test_cache_verify_and_info(work, capfd, tmp_path):
    root, lines = work
    cli.main([*lines["cache build"], "--quiet"])
    path = str(root / "cache build")
    capfd.readouterr()
    cli.main(["cache", "verify", path])
    out, err = capfd.readouterr()
    assert re.fullmatch(r".*: intact: 2 shards, 14 rows, 0\.0 MB in .* s\n", out) and "verify: 100%" in err
    cli.main(["cache", "verify", path, "--quiet", "--json"])
    out, err = capfd.readouterr()
    assert json.loads(out)["intact"] is True and json.loads(out)["rows"] == 14 and not err
    cli.main(["cache", "info", path])
    out = capfd.readouterr().out
    assert "rows of 32 tokens, the teacher's 8 likeliest" in out and re.search(r"train +12 rows +1 shards", out)
    cli.main(["cache", "info", path, "--json"])
    assert json.loads(capfd.readouterr().out)["splits"]["eval"]["rows"] == 2


def test_a_damaged_cache_is_named_with_exit_code_1(work, capfd, tmp_path):
    import shutil

    root, lines = work
    cli.main([*lines["cache build"], "--quiet"])
    copy = tmp_path / "copy"
    shutil.copytree(root / "cache build", copy)
    shard = copy / "s-000000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    capfd.readouterr()
    with pytest.raises(SystemExit) as caught:
        cli.main(["cache", "verify", str(copy), "--quiet"])
    err = capfd.readouterr().err
    assert caught.value.code == 1 and err.startswith("error: ") and "s-000000" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyboardInterrupt(), 130, "stopped"),
        (OSError(28, "No space left on device", "runs/x"), 2, "error: runs/x: No space left on device; make room"),
    ],
)
def test_what_is_not_our_defect_is_one_line(error, code, says, monkeypatch, capfd):
    def fail(words, options):
        raise error

    monkeypatch.setattr("qat_lora.runtime.launch.start.run", fail)
    with pytest.raises(SystemExit) as caught:
        cli.main(RECOVER)
    err = capfd.readouterr().err
    assert caught.value.code == code and err.strip().startswith(says) and err.strip().count("\n") == 0


def test_openmp_is_told_to_sleep_before_torch_loads_it():
    program = """
import contextlib, os, sys
from qat_lora.cli import main
with contextlib.suppress(SystemExit):
    main(["--version"])
print("torch" in sys.modules, os.environ.get("GOMP_SPINCOUNT"))
"""
    asked = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    for extra, told in ({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None"):
        done = subprocess.run([sys.executable, "-c", program], env=asked | extra, capture_output=True, text=True)
        assert done.stdout.splitlines()[-1] == f"False {told}", done.stderr


def test_a_defect_keeps_its_traceback(monkeypatch):
    def fail(words, options):
        raise IndexError("list index out of range")

    monkeypatch.setattr("qat_lora.runtime.launch.start.run", fail)
    with pytest.raises(IndexError):
        cli.main(RECOVER)


if __name__ == "__main__":
    print(flag_list())
