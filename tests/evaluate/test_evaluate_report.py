"""The report: the text of its tables, its files, and scores that are odd."""

import json

import pytest

from qat_lora.evaluate.report import colours_of, markdown_table, plot_report, save_json, table_rows, text_table

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


def test_a_model_has_one_colour_in_all_panels_and_more_are_drawn_beside_them(tmp_path, monkeypatch):
    """The bars of perplexity, in the order of the tables."""
    plt = pytest.importorskip("matplotlib.pyplot")
    from matplotlib.colors import to_hex
    from test_evaluate_report_card import FULL

    monkeypatch.setattr(plt, "close", lambda figure: None)
    plot_report(FULL, tmp_path / "report.png", lambda axis: axis.set_title("Training", loc="left"))
    panels = {axis.get_title(loc="left"): axis for axis in plt.gcf().axes}
    colours = [to_hex(bar.get_facecolor()) for bar in panels["Perplexity"].patches]
    monkeypatch.undo()
    plt.close("all")
    assert "Training" in panels
    assert colours == [colours_of(FULL["models"])[name] for name in FULL["models"]]
    assert len(set(colours)) == len(colours)
