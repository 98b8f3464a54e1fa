"""The report: the text of its tables, its files, and scores that are odd."""

import json
import math

import pytest

from qat_lora.evaluate.plots import colours_of, plot_report, plot_scores
from qat_lora.evaluate.report import markdown_table, save_json, table_rows, text_table

SCORES = {
    "teacher": {"ppl": 12.3456, "nll": 2.51, "kl": 0.0, "top1": 1.0, "tokens": 99},
    "quantised": {"ppl": 1234.5, "nll": 7.1184, "kl": 1.25, "top1": 0.3333, "tokens": 99, "bits_per_weight": 2.25},
}
SCORES["quantised"] |= {"size_mb": 12.345, "bits_over_all_weights": 4.5}


def test_tables():
    rows = table_rows(SCORES)
    assert text_table(rows) == "\n".join(
        [
            "model      perplexity     nll  KL to teacher  same top-1  bits/weight    MB  bits, whole file",
            "---------  ----------  ------  -------------  ----------  -----------  ----  ----------------",
            "teacher         12.35  2.5100         0.0000      100.0%            -     -                 -",
            "quantised    1,234.50  7.1184         1.2500       33.3%         2.25  12.3              4.50",
        ]
    )
    assert markdown_table(rows).splitlines() == [
        "| model | perplexity | nll | KL to teacher | same top-1 | bits/weight | MB | bits, whole file |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        "| teacher | 12.35 | 2.5100 | 0.0000 | 100.0% | - | - | - |",
        "| quantised | 1,234.50 | 7.1184 | 1.2500 | 33.3% | 2.25 | 12.3 | 4.50 |",
    ]


def test_json(tmp_path):
    save_json(SCORES, tmp_path / "scores.json")
    assert json.loads((tmp_path / "scores.json").read_text()) == SCORES


def odd(**changed):
    return {"teacher": SCORES["teacher"], "student": {**SCORES["quantised"], **changed}}


@pytest.mark.parametrize(
    "scores",
    [
        SCORES,
        {"teacher": SCORES["teacher"]},
        odd(kl=0.0, ppl=12.3456),
        odd(ppl=math.inf, kl=900.0),
        odd(ppl=math.nan, kl=math.nan),
        {"teacher": SCORES["teacher"]} | {f"student {i}": SCORES["quantised"] for i in range(14)},
    ],
    ids=["usual", "teacher alone", "equal", "infinite", "not a number", "fifteen"],
)
@pytest.mark.parametrize("curve", [False, True])
def test_the_picture_is_there_for_any_scores(tmp_path, scores, curve):
    pytest.importorskip("matplotlib")
    draw = (lambda axis: axis.plot([0, 1], [1, 0])) if curve else None
    plot_scores(scores, tmp_path / "scores.png", draw)
    image = (tmp_path / "scores.png").read_bytes()
    assert image[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(image[16:20], "big") == (1890 if curve else 1260)
    assert text_table(table_rows(scores)).count("\n") == len(scores) + 1


def test_a_model_has_one_colour_in_both_pictures(tmp_path, monkeypatch):
    """The bars of perplexity in `scores.png` and in `report.png`, in the order of the tables."""
    plt = pytest.importorskip("matplotlib.pyplot")
    from matplotlib.colors import to_hex
    from test_evaluate_report_card import FULL

    monkeypatch.setattr(plt, "close", lambda figure: None)
    models = FULL["models"]
    plot_report(FULL, tmp_path / "report.png")
    panels = {axis.get_title(loc="left"): axis for axis in plt.gcf().axes}
    plot_scores(models, tmp_path / "scores.png")
    both = [[to_hex(bar.get_facecolor()) for bar in axis.patches] for axis in (panels["Perplexity"], plt.gcf().axes[0])]
    monkeypatch.undo()
    plt.close("all")
    assert both[0] == both[1] == [colours_of(models)[name] for name in models] and len(set(both[0])) == len(models)
