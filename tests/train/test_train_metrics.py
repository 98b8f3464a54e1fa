"""The log's files and the picture of the training curve."""

import json
from contextlib import closing

import pytest
import torch

from qat_lora.errors import DamagedFileError, ModelError
from qat_lora.files.pictures import COLOURS
from qat_lora.train.metrics import EMPTY, MetricsLog, append_lines, cut_back, log_mark, plot_curve, read_metrics

CPU = torch.device("cpu")


def write_steps(path, steps):
    with closing(MetricsLog(path, 10, steps[0] - 1, True, CPU)) as log:
        log.write([{"step": s, "loss": 1.0 / s, "tokens": 100.0 + s, "grad_norm": 2.0, "lr": 0.1 * s} for s in steps])


def test_one_json_object_a_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [1, 2, 3])
    write_steps(path, [4])
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    assert found[1]["loss"] == 0.5 and found[1]["tokens"] == 102.0 and found[1]["lr"] == 0.2
    assert all(line["tokens_per_s"] > 0 for line in found)
    assert found[0]["tokens_per_s"] == found[2]["tokens_per_s"]  # one rate for what arrived together


def test_the_rate_leaves_pauses_out(tmp_path, monkeypatch):
    now = iter([100.0, 110.0, 112.0])
    monkeypatch.setattr("qat_lora.train.metrics.time.perf_counter", lambda: next(now))
    with closing(MetricsLog(tmp_path / "m.jsonl", 10, 0, True, CPU)) as log:  # 100
        log.pause()  # 110
        log.write([{"step": 1, "loss": 1.0, "tokens": 50.0, "lr": 0.1}])  # 112
    assert read_metrics(tmp_path / "m.jsonl")[0]["tokens_per_s"] == 25.0


@pytest.mark.parametrize("start", [0, 6])
def test_the_rate_leaves_the_first_step_of_a_run_out(tmp_path, monkeypatch, start):
    now = iter([0.0, 90.0, 100.0, 120.0])
    monkeypatch.setattr("qat_lora.train.metrics.time.perf_counter", lambda: next(now))
    lines = [{"step": start + s, "loss": 1.0, "tokens": 50.0, "lr": 0.1} for s in (1, 2, 3, 4)]
    with closing(MetricsLog(tmp_path / "m.jsonl", 10, start, True, CPU)) as log:
        log.pause()  # after the first step's 90 s of compiling
        log.write(lines[:3])
        log.write(lines[3:])
    assert [line["tokens_per_s"] for line in read_metrics(tmp_path / "m.jsonl")] == [10.0, 10.0, 10.0, 2.5]


def test_cut_back_to_a_mark_compares_and_keeps_every_byte(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_lines(path, [{"step": 1, "kl": 0.25}])
    mark, whole = log_mark(path), path.read_bytes()
    append_lines(path, [{"step": 2, "kl": 0.5}])
    cut_back(path, mark)
    assert path.read_bytes() == whole
    for damaged in (whole.replace(b"0.25", b"0.35"), whole[:-1]):
        path.write_bytes(damaged)
        with pytest.raises(DamagedFileError, match=r"metrics.jsonl: its first \d+ bytes are not what was written"):
            cut_back(path, mark)
    path.unlink()
    assert log_mark(path) == EMPTY


@pytest.mark.parametrize("line", ["3", "[]", "{}", '{"step": "1"}', "{", "[" * 100_000, '{"step": 1, "loss": null}'])
def test_odd_lines_are_one_line(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 0, "loss": 1.0}}\n{line}\n{{"step": 2, "loss": 1.0}}\n')
    with pytest.raises(DamagedFileError, match=r"metrics.jsonl: line 2 is not what was written") as caught:
        read_metrics(path, "loss")
    assert "\n" not in str(caught.value)


def test_a_number_that_is_none_is_not_logged(tmp_path):
    with pytest.raises(ModelError, match=r"metrics.jsonl: kl is nan"):
        append_lines(tmp_path / "metrics.jsonl", [{"step": 1, "kl": float("nan")}])


def test_cut_back_makes_no_file(tmp_path):
    cut_back(tmp_path / "metrics.jsonl", EMPTY)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kl", [{}, {"kl": 0.4}])
@pytest.mark.parametrize("evaluated", [True, False])
def test_the_curve_is_the_kl_on_one_scale_with_the_learning_rate_below(tmp_path, evaluated, kl, monkeypatch):
    pyplot, drawn = pytest.importorskip("matplotlib.pyplot"), []
    close = pyplot.close
    monkeypatch.setattr(pyplot, "close", lambda figure: drawn.append(figure) or close(figure))
    lines = [{"step": step, "loss": 0.5, "lr": 1e-4, **(kl if step > 2 else {})} for step in range(1, 122)]
    append_lines(tmp_path / "m.jsonl", lines)
    if evaluated:
        append_lines(tmp_path / "e.jsonl", [{"step": 0, "kl": 0.3}])
    plot_curve(tmp_path / "m.jsonl", tmp_path / "e.jsonl", tmp_path / "curve.png")
    image = (tmp_path / "curve.png").read_bytes()
    assert image[:8] == b"\x89PNG\r\n\x1a\n" and int.from_bytes(image[16:20], "big") == 1050
    above, below = drawn[0].axes
    labels = [f"training {'KL' if kl else 'loss'}", *(["evaluation KL"] if evaluated else [])]
    assert [text.get_text() for text in above.get_legend().get_texts()] == labels
    assert [line.get_color() for line in above.lines] == [COLOURS[0], COLOURS[0], *([COLOURS[1]] if evaluated else [])]
    assert above.get_xlim() == below.get_xlim() and below.get_ylabel() == "learning rate"
    assert set(below.lines[0].get_ydata()) == {1e-4} and below.get_legend() is None


def test_the_curve_has_every_kinds_learning_rate(tmp_path, monkeypatch):
    pyplot, drawn = pytest.importorskip("matplotlib.pyplot"), []
    close = pyplot.close
    monkeypatch.setattr(pyplot, "close", lambda figure: drawn.append(figure) or close(figure))
    lines = [{"step": step, "loss": 0.5, "lr_scales": 1e-4, "lr_norms": 3e-4} for step in range(1, 12)]
    append_lines(tmp_path / "m.jsonl", lines)
    plot_curve(tmp_path / "m.jsonl", tmp_path / "e.jsonl", tmp_path / "curve.png")
    below = drawn[0].axes[1]
    assert [text.get_text() for text in below.get_legend().get_texts()] == ["lr_scales", "lr_norms"]
    assert [set(line.get_ydata()) for line in below.lines] == [{1e-4}, {3e-4}]


BOUND = "KL, lower bound (top-K)"


@pytest.mark.parametrize(
    ("train", "evaluated", "labels"),
    [
        (("kl_bound",), ("kl_bound",), (f"training {BOUND}", f"evaluation {BOUND}")),
        (("kl_bound",), ("kl",), (f"training {BOUND}", "evaluation KL")),
        (
            ("kl", "kl_bound"),
            ("kl", "kl_bound"),
            (f"training {BOUND}", f"evaluation {BOUND}"),
        ),  # begun by an older version
        (("kl",), ("nll",), ("training KL", "evaluation loss")),
    ],
)
def test_the_curve_calls_a_bound_a_bound(tmp_path, train, evaluated, labels, monkeypatch):
    pyplot, drawn = pytest.importorskip("matplotlib.pyplot"), []
    close = pyplot.close
    monkeypatch.setattr(pyplot, "close", lambda figure: drawn.append(figure) or close(figure))
    for file, names, more in (("m.jsonl", train, {"loss": 2.0, "lr": 1e-4}), ("e.jsonl", evaluated, {})):
        lines = [{"step": step, names[step * len(names) // 8]: 0.1 * step, **more} for step in range(8)]
        append_lines(tmp_path / file, lines)
    plot_curve(tmp_path / "m.jsonl", tmp_path / "e.jsonl", tmp_path / "curve.png")
    above = drawn[0].axes[0]
    assert tuple(text.get_text() for text in above.get_legend().get_texts()) == labels
    assert list(above.lines[0].get_ydata()) == list(above.lines[2].get_ydata()) == [0.1 * step for step in range(8)]
