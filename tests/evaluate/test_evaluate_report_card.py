"""The report card: every part there or left out, for usual and for odd scores."""

import copy
import math

import pytest

from qat_lora.evaluate import report as card
from qat_lora.evaluate.report import plot_report
from qat_lora.evaluate.tally import BINS


def model(kl, bits=None):
    means = {"ppl": 10.0 + kl, "nll": 2.3, "kl": kl, "top1": 0.7, "tokens": 99, "accuracy": 0.4, "ece": 0.05}
    return means | {
        "bits_per_weight": bits,
        "interval": {name: [value * 0.9, value * 1.1] for name, value in means.items()},
    }


POINTS = {name: 0.1 for name in ("smallest", "median", "0.1", "1", "5", "10", "90", "95", "99", "99.9", "largest")}
WORST = {"text": "text 0", "document": "a.py", "before": "def f(`|", "token": " x", "teacher": "\n", "student": "```"}
WORST |= {"teacher_p": 0.98, "student_p": 0.51, "kl": 9.5}
DAMAGE = {
    "kl": POINTS,
    "changed_top1": 0.125,
    "delta_p": POINTS | {"mean": -0.01, "rms": 0.2},
    "worst_tokens": [WORST] * 10,
}
DAMAGE |= {"documents": {"count": 1234, "kl": POINTS, "worst": []}}


def report(students=2, texts=2, **parts):
    models = {"teacher": model(0.0), **{f"student {i} <b>": model(0.5 * i, 2.25) for i in range(1, students + 1)}}
    bins = {"tokens": [30.0] * BINS, "confidence": [0.5] * BINS, "accuracy": [0.4] * BINS}
    difference = {"difference": -0.1, "interval": [-0.2, 0.1], "clear": False}
    names = [name for name in models if name != "teacher"]
    return {
        "schema": card.SCHEMA,
        "setup": {
            "teacher": "t",
            "protocol": "sliding",
            "length": 64,
            "stride": 32,
            "dtype": "float32",
            "device": "CPU",
            "resamples": 1000,
        },
        "texts": {f"text {i}": {"rows": 30, "tokens": 99} for i in range(texts)},
        "models": models,
        "calibration": dict.fromkeys(models, bins),
        "pairs": [{"first": names[0], "second": b, "kl": difference, "nll": difference} for b in names[1:]],
        "domains": {f"text {i}": models for i in range(texts)},
        "generation": None,
        "overlap": None,
        "tasks": None,
        "damage": dict.fromkeys(names, DAMAGE),
        **parts,
    }


GENERATION = {
    name: {"repetition": 0.5, "distinct_1": 0.1, "distinct_2": 0.2, "termination": 0.0, "tokens": 64.0}
    for name in ("teacher", "student 1 <b>", "student 2 <b>")
}
FULL = report(
    generation=GENERATION,
    overlap={"run": 13, "tokens": 99, "seen": 50, "share": 0.5, "by_text": {"text 0": 0.5}, "cache_tokens": 1000},
    tasks={name: {"arc": {"acc": 0.25, "acc_stderr": 0.1}} for name in GENERATION},
)


def without_documents():
    odd = DAMAGE | {"documents": {"count": 0, "kl": None, "worst": []}}
    return report(students=1, damage={"student 1 <b>": odd})


def ruined():
    odd = report()
    of = odd["models"]["student 1 <b>"]
    of |= {"ppl": math.inf, "kl": math.nan, "ece": math.nan, "interval": dict.fromkeys(of["interval"], [math.nan] * 2)}
    odd["calibration"] = copy.deepcopy(odd["calibration"])
    odd["calibration"]["student 1 <b>"] |= {"tokens": [0.0] * BINS, "confidence": [None] * BINS}
    return odd


REPORTS = {"full": FULL, "one text": report(texts=1), "teacher alone": report(students=0), "ruined": ruined()}
REPORTS |= {"fifteen": report(students=15, texts=1), "one student": report(students=1)}
REPORTS |= {"without documents": without_documents()}


@pytest.mark.parametrize("name", REPORTS)
def test_every_report_has_its_tables_and_picture(tmp_path, name):
    pytest.importorskip("matplotlib")
    found = REPORTS[name]
    plot_report(found, tmp_path / "s.png")
    png = (tmp_path / "s.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    text = card.markdown_report(found, "s.png")
    assert text.count("\n## ") == len(card.tables(found)) + len(found["damage"])
    assert text.count("\n|") == sum(len(rows) + 1 for rows in card.tables(found).values())
    assert "![" in text and "![" not in card.markdown_report(found, None)
    shown = card.terminal_report(found)
    assert shown.endswith("\n".join(card.notes(found))) and all(f"{title}\n" in shown for title in card.tables(found))


def test_tables_and_notes_of_the_full_report():
    headings = [heading.split(" (")[0].split(",")[0] for heading in card.tables(FULL)]
    damage = "KL of single tokens"
    assert headings == ["Scores", damage, "Differences between students", "By text", "Greedy generation", "Tasks"]
    first = card.score_rows(FULL["models"])
    assert first[1] == ["teacher", "10.00", "9.00–11.00", "-", "-", "-", "40.0%", "5.0%", "-", "-", "-"]
    assert first[2][3:5] == ["0.5000", "0.4500–0.5500"] and first[2][-3] == "2.25"
    assert card.pair_rows(FULL["pairs"])[1][1] == "-0.1000 (-0.2000 to +0.1000), not clear"
    assert card.tables(FULL)["Greedy generation"][:2] == [
        ["model", "repeated 4-grams", "distinct tokens", "distinct pairs", "ended", "mean tokens"],
        ["teacher", "50.0%", "10.0%", "20.0%", "0.0%", "64"],
    ]
    assert card.tables(FULL)["By text"][1:3] == [
        ["text 0", "teacher", "10.00", "-", "-", "99"],
        ["text 0", "student 1 <b>", "10.50", "0.5000", "70.0%", "99"],
    ]
    assert card.damage_rows(FULL["damage"])[:3] == [
        ["model", "median", "90 %", "99 %", "99.9 %", "largest", "changed top-1", "mean Δp", "RMS Δp"],
        ["student 1 <b>", *["0.1000"] * 5, "12.50%", "-1.000%", "20.000%"],
        ["student 1 <b>: means of 1,234 documents", *["0.1000"] * 5, "-", "-", "-"],
    ]
    worst = card.worst_tokens(FULL)["Worst tokens of student 2 <b>"]
    assert len(worst) == 11 and worst[1] == worst[2] == ["9.50", "def f(`|", "' x'", "'\\n' 98%", "'```' 51%"]
    assert card.task_rows(FULL["tasks"]) == [
        ["task", "metric", *GENERATION],
        ["arc", "acc", "0.2500", "0.2500", "0.2500"],
    ]
    notes = card.notes(FULL)
    assert "windows of 64 tokens moved on by 32" in notes[1] and notes[-1].startswith("Warning: 50.0%")
    assert "not looked at" in card.notes(report())[-1]
    few = report()
    few["texts"] = {"t": {"rows": 3, "tokens": 9}}
    assert any(line.startswith("Warning: 3 rows are few") for line in card.notes(few))
