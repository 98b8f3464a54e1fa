"""`cache info`: the picture and the decoded rows."""

import json
import struct
import sys

import numpy as np
import pytest
import torch

from qat_lora.cache.tools.describe import describe, plot_tail_mass, render
from qat_lora.cli import main
from qat_lora.data.sources import TextConfig
from qat_lora.models.load import load_model, load_tokenizer
from qat_lora.options import CacheBuildOptions, RunConfig
from qat_lora.registry import COMMANDS
from qat_lora.runtime.launch.start import run


@pytest.fixture(scope="module")
def cache(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("describe") / "c"
    options = CacheBuildOptions(
        teacher=str(tiny.teacher),
        text=TextConfig(dataset=str(tiny.text), format="text"),
        length=32,
        top_k=5,
        num_rows=6,
        run=RunConfig(out=str(out), device="cpu", quiet=True),
    )
    return run(COMMANDS["cache build"], options)


def test_rows_as_text_are_the_teachers_choices(cache, tiny, capsys):
    main(["cache", "info", str(cache), "--tokenizer", str(tiny.teacher), "--json"])
    shown = json.loads(capsys.readouterr().out)["rows"][0]
    tokenizer, teacher = load_tokenizer(tiny.teacher), load_model(str(tiny.teacher))
    text = "".join(shown["tokens"])
    assert text == tokenizer.decode(shown["input_ids"]) and len(text) > 20
    ids = torch.tensor([shown["input_ids"]])
    with torch.no_grad():
        logits = teacher.module(ids).logits[0]
    sure, best = logits.softmax(-1).topk(3)
    assert shown["top_tokens"] == [[tokenizer.decode([int(i)]) for i in row] for row in best]
    np.testing.assert_allclose(shown["top_probabilities"], sure, atol=2e-3)
    main(["cache", "info", str(cache), "--tokenizer", str(tiny.teacher)])
    out = capsys.readouterr().out
    first = f'"{shown["top_tokens"][1][0]}" ({shown["top_probabilities"][1][0]:.1%})'
    assert "what the teacher expects" in out and first in out


def test_the_wrong_tokenizer_is_refused(cache, tiny, tmp_path, capsys):
    other = json.loads((tiny.teacher / "tokenizer.json").read_text())
    other["added_tokens"][0]["content"] = "<other>"
    vocabulary = other["model"]["vocab"]
    name = next(word for word, i in vocabulary.items() if i == other["added_tokens"][0]["id"])
    vocabulary["<other>"] = vocabulary.pop(name)
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(SystemExit) as left:
        main(["cache", "info", str(cache), "--tokenizer", str(tmp_path)])
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("error: tokenizer: ")


def test_the_plot_is_a_picture_of_every_sampled_position(cache, tmp_path, capsys, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn = []
    close = pyplot.close
    monkeypatch.setattr(pyplot, "close", lambda figure: drawn.append(figure) or close(figure))
    main(["cache", "info", str(cache), "--plot", str(tmp_path / "tail.png")])
    assert "tail mass" in capsys.readouterr().out
    data = (tmp_path / "tail.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 600 and height > 300
    heights = [bar.get_height() for bar in drawn[0].axes[0].patches]
    assert sum(heights) == pytest.approx(100)


def test_no_tail_and_no_targets_can_be_drawn(tmp_path, fingerprint, random_rows, write_cache):
    pytest.importorskip("matplotlib")
    fp = fingerprint(top_k=31)  # K = V: all of log_tail is minus infinity
    rows = random_rows(fp, 2)
    plot_tail_mass(write_cache(tmp_path / "all", fp, rows), tmp_path / "all.png")
    rows["loss_mask"][:] = 0
    empty = write_cache(tmp_path / "none", fp, rows)
    plot_tail_mass(empty, tmp_path / "none.png")
    assert describe(empty)["target_fraction"] == 0
    assert (tmp_path / "all.png").stat().st_size > 1000 < (tmp_path / "none.png").stat().st_size


def test_without_matplotlib_the_message_holds_the_cure(cache, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        main(["cache", "info", str(cache), "--plot", str(tmp_path / "tail.png")])
    assert "pip install 'qat-lora[plot]'" in capsys.readouterr().err


def test_text_from_a_cache_does_not_steer_the_terminal(tmp_path, fingerprint, random_rows, write_cache):
    fp = fingerprint()
    path = write_cache(tmp_path / "c", fp, random_rows(fp, 2))
    shown = render(describe(path, decode=lambda ids: "\x1b[2J\r\n\u202eé"))
    assert '"\\x1b[2J\\r\\n\\u202eé"' in shown and "\x1b" not in shown and "\r" not in shown
