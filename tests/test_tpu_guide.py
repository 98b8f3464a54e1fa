"""docs/tpu.md says what the tool says: its tables are estimated anew, and the tests that it names exist.

After a change of the estimate: `python tests/test_tpu_guide.py` prints the tables to paste.
"""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from qat_lora.cli import main
from qat_lora.layers.lora import LoraConfig
from qat_lora.options import EstimateOptions, RunConfig
from qat_lora.plan import memory as estimates
from qat_lora.plan.devices import named

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "tests/data/qwen3-0.6b.json"
GUIDE = (ROOT / "docs/tpu.md").read_text(encoding="utf-8")
MODEL = "Qwen/Qwen3-0.6B"
LENGTHS = (512, 1024, 2048)
MOST_ROWS = 256
EPOCH_STEPS, STEP_ROWS = 250, 32  # 8,000 rows of 1,024 tokens, as in recipes/
# Chip or card, number, rows of a micro-batch, whether layers are computed again.
PLACES = (
    ("v5e", 1, 4, False),
    ("v5e", 8, 4, False),
    ("v6e", 1, 4, False),
    ("v6e", 4, 4, False),
    ("v6e", 8, 4, False),
    ("a100", 1, 16, False),
    ("h100", 1, 16, False),
    ("h200", 1, 16, False),
)


def student(folder: Path, preset: str) -> EstimateOptions:
    """Return the settings of a recipe's run."""
    rank, scales = {"q4_r32": (8, False), "w2g64": (32, True)}[preset]
    lora, run = LoraConfig(recovery_r=rank), RunConfig(dtype="bfloat16")
    return EstimateOptions(model=str(folder), preset=preset, train_scales=scales, lora=lora, run=run)


def batch_table(folder: Path) -> list[str]:
    """Return the largest micro-batch, a power of two, that fits a chip: plain, and with layers computed again."""
    lines = [
        "| student | chip | " + " | ".join(f"{length} tokens" for length in LENGTHS) + " |",
        "|---|---|" + "---|" * 3,
    ]
    for preset in ("q4_r32", "w2g64"):
        asked = student(folder, preset)
        built = estimates.skeleton(asked)
        for chip, names in (("v5e", "v5e-1, v5e-8"), ("v6e", "v6e-1, v6e-4, v6e-8")):
            cells = []
            for length in LENGTHS:
                tried = [replace(asked, length=length, gradient_checkpointing=again) for again in (False, True)]
                cells.append("/".join(most_rows(built, options, chip) for options in tried))
            lines.append(f"| {preset} | {names} | {' | '.join(cells)} |")
    return lines


def most_rows(built: estimates.Shapes, options: EstimateOptions, chip: str) -> str:
    """Return the largest power of two, up to `MOST_ROWS`, that the estimate calls fitting."""
    rows = 1
    while rows <= MOST_ROWS:
        found = estimates.forecast(built, replace(options, batch_size=rows), named((chip,)))
        if not found["devices"][chip]["fits"]:
            break
        rows *= 2
    return str(rows // 2) if rows > 1 else "none"


def cost_table(folder: Path) -> list[str]:
    """Return minutes and dollars of an epoch and of the recipe's run, each place with its own batch."""
    lines = ["| device | rows, checkpointing | `q4_r32`: epoch | 1,000 steps | `w2g64`: epoch | 2,000 steps |"]
    lines.append("|---|---|---|---|---|---|")
    asked = {preset: student(folder, preset) for preset in ("q4_r32", "w2g64")}
    built = {preset: estimates.skeleton(options) for preset, options in asked.items()}
    for kind, chips, rows, again in PLACES:
        (device,) = named((f"{kind}-{chips}" if kind.startswith("v") else kind,))
        cells = [device.name, f"{rows}, {'yes' if again else 'no'}"]
        for preset, run_steps in (("q4_r32", 1000), ("w2g64", 2000)):
            for steps in (EPOCH_STEPS, run_steps):
                mine = replace(
                    asked[preset],
                    batch_size=rows,
                    accumulation_steps=STEP_ROWS // (rows * chips),
                    gradient_checkpointing=again,
                    max_steps=steps,
                )
                there = estimates.forecast(built[preset], mine, [device])["devices"][device.name]
                assert there["fits"] and there["tokens"] == steps * STEP_ROWS * 1024, (device, preset)
                cells.append(f"{60 * there['hours']:.1f}, {there['usd']:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def examples() -> list[tuple[str, list[str]]]:
    """Return the guide's `$ qat-lora estimate` commands with the lines printed below each."""
    blocks = re.findall(
        r"^    \$ (qat-lora estimate (?:.*\\\n)*.*)\n((?:    (?!\$ ).*\n|\n(?=    (?!\$ )))+)", GUIDE, re.M
    )
    return [(command.replace("\\\n", " "), [line.strip() for line in shown.splitlines()]) for command, shown in blocks]


@pytest.fixture
def config_folder(tmp_path, monkeypatch):
    """Where the Hub's name means a folder with that model's config.json and nothing else."""
    (tmp_path / MODEL).mkdir(parents=True)
    (tmp_path / MODEL / "config.json").write_bytes(CONFIG.read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path / MODEL


def test_the_batch_table_is_the_estimates(config_folder):
    assert "\n".join(batch_table(config_folder)) in GUIDE


def test_the_cost_table_is_the_estimates(config_folder):
    assert "\n".join(cost_table(config_folder)) in GUIDE


def test_the_estimates_shown_are_those_printed(config_folder, capsys):
    assert len(examples()) >= 2
    for command, shown in examples():
        main(shlex.split(command)[1:])
        printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
        assert [line for line in shown if line not in printed] == [], command


def test_each_trouble_has_a_test_and_each_test_exists():
    table = GUIDE.split("## Troubleshooting")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 11
    for row in rows:
        named_tests = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", row)
        assert named_tests, row
        for file, test in named_tests:
            assert test and f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{test}"


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(CONFIG.read_bytes())
        print("\n".join([*batch_table(Path(folder)), "", *cost_table(Path(folder))]))
