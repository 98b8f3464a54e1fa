"""docs/tpu.md says what the tool says: its tables are estimated anew, and tests provoke each trouble that it names.

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
# Chip, number, rows of a micro-batch, whether layers are computed again.
PLACES = (
    ("v5e", 1, 4, False),
    ("v5e", 8, 4, False),
    ("v6e", 1, 4, False),
    ("v6e", 4, 4, False),
    ("v6e", 8, 4, False),
)

# The guide's troubles, each with tests that provoke it, none on a TPU.
PROVOKED_BY = {
    "stuck at step 0": {
        "train/test_train_compile_watch.py": ["test_the_first_step_is_reported_by_phases_and_steady_ones_are_silent"]
    },
    "stuck on several chips": {
        "train/test_train_replicas.py": ["test_one_replica_ends_all", "test_without_agreement_skewed_signals_hang"]
    },
    "recompiling": {
        "train/test_train_compile_watch.py": [
            "test_a_recompile_names_the_shape_that_changed",
            "test_more_recompiles_than_allowed_are_an_error",
        ],
        "commands/test_commands_recover_xla.py": [
            "test_training_compiles_three_graphs_and_all_in_step_one",
            "test_evaluation_adds_one_graph_and_saving_none",
        ],
        "train/test_train_optim.py": ["test_state_and_gradients_exist_before_the_first_step_and_keep_their_names"],
        "evaluate/test_evaluate_xla.py": ["test_one_graph_a_kind_of_work_and_the_figures_of_the_cpu"],
    },
    "every step is slow": {
        "commands/test_commands_recover_xla.py": ["test_training_reads_nothing_back_and_sends_nothing_to_the_host"]
    },
    "out of memory": {
        "plan/test_plan_advice.py": [
            "test_every_device_is_understood",
            "test_a_run_that_does_not_fit_says_what_to_lower",
        ]
    },
    "`aten::kl_div: an autograd kernel was not registered`": {
        "losses/test_losses_xla.py": ["test_kl_div_warns_of_its_gradient_and_our_loss_does_not"]
    },
    "TPU not found": {
        "runtime/test_runtime_select.py": [
            "test_refusal_says_what_was_found_and_what_to_do",
            "test_a_tpu_that_is_not_there_is_an_error_for_people",
        ]
    },
    "variables or versions that do not fit": {
        "commands/test_commands_doctor.py": [
            "test_variables",
            "test_tpu_num_devices_is_ours_alone",
            "test_torch_xla_fits_torch",
            "test_libtpu_fits_torch_xla",
        ]
    },
    "a recipe that cannot work here": {
        "plan/test_plan_training.py": ["test_what_the_run_would_refuse_is_refused"],
        "commands/test_commands_doctor.py": ["test_chips_and_whether_a_planned_run_fits_one"],
    },
    "preemption": {
        "train/test_train_kills.py": ["test_killed_and_stopped_at_random_moments_it_is_the_uninterrupted_run"]
    },
    "slow inference": {
        "generate/test_generate_sample.py": ["test_one_forward_of_the_row_and_then_one_of_a_token"],
        "generate/test_generate_xla.py": ["test_same_values_and_few_graphs"],
    },
    "weight tying": {
        "runtime/test_runtime_base.py": [
            "test_shared_tensors_stay_shared",
            "test_control_a_plain_move_splits_what_is_tied",
        ]
    },
    "notebook crashes": {
        "runtime/test_runtime_start.py": [
            "test_a_notebook_that_has_touched_the_device_is_told_to_restart",
            "test_a_notebook_shares_its_model_with_forked_workers",
        ]
    },
}


def student(folder: Path, preset: str) -> EstimateOptions:
    """Return the settings of a recipe's run."""
    rank, scales = {"q4_r32": (8, False), "q2_0": (32, True)}[preset]
    lora, run = LoraConfig(recovery_r=rank), RunConfig(dtype="bfloat16")
    return EstimateOptions(model=str(folder), preset=preset, train_scales=scales, lora=lora, run=run)


def batch_table(folder: Path) -> list[str]:
    """Return the largest micro-batch, a power of two, that fits a chip: plain, and with layers computed again."""
    lines = [
        "| student | chip | " + " | ".join(f"{length} tokens" for length in LENGTHS) + " |",
        "|---|---|" + "---|" * 3,
    ]
    for preset in ("q4_r32", "q2_0"):
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
    lines = ["| device | rows, checkpointing | `q4_r32`: epoch | 1,000 steps | `q2_0`: epoch | 2,000 steps |"]
    lines.append("|---|---|---|---|---|---|")
    asked = {preset: student(folder, preset) for preset in ("q4_r32", "q2_0")}
    built = {preset: estimates.skeleton(options) for preset, options in asked.items()}
    for kind, chips, rows, again in PLACES:
        (device,) = named((f"{kind}-{chips}",))
        cells = [device.name, f"{rows}, {'yes' if again else 'no'}"]
        for preset, run_steps in (("q4_r32", 1000), ("q2_0", 2000)):
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


def test_tests_provoke_each_trouble():
    table = GUIDE.split("## Troubleshooting")[1].split("\n## ")[0]
    troubles = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert troubles == list(PROVOKED_BY) and len(troubles) >= 11
    for file, names in (entry for by_file in PROVOKED_BY.values() for entry in by_file.items()):
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert [name for name in names if f"def {name}(" not in text] == [], file


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(CONFIG.read_bytes())
        print("\n".join([*batch_table(Path(folder)), "", *cost_table(Path(folder))]))
