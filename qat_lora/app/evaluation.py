"""The command that scores students against their teacher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qat_lora import outputs
from qat_lora.app.shared import fits_positions, load, picture, say, text_batches
from qat_lora.config import to_dict
from qat_lora.errors import ConfigError
from qat_lora.evaluate.report import markdown_table, plot_scores, save_json, table_rows, text_table
from qat_lora.evaluate.score import score
from qat_lora.models import checkpoint_sha256, load_tokenizer, tokenizer_sha256
from qat_lora.options import EvalOptions
from qat_lora.runtime.base import Runtime
from qat_lora.students import open_student
from qat_lora.text.sources import describe_source


def evaluate(options: EvalOptions, runtime: Runtime) -> dict[str, Any]:
    """Score models side by side on held-out text; write table, JSON and picture; return the scores."""
    run = options.run
    teacher = load(str(options.teacher), options.hub, run.dtype)
    fits_positions(teacher, options.length)
    tokenizer = load_tokenizer(teacher.folder, options.hub.trust_remote_code)
    opened = {}
    for word in options.students:
        name, equals, folder = word.rpartition("=")
        name = name if equals else Path(folder).name
        if name in opened or name == "teacher":
            raise ConfigError(f"students: two are named {name!r}; give each a name as NAME=FOLDER")
        opened[name] = open_student(folder, options.hub, run.dtype)
        other = tokenizer_sha256(load_tokenizer(opened[name].model.folder))
        if other != tokenizer_sha256(tokenizer):
            raise ConfigError(
                f"students: {name} has another tokenizer than the teacher, so KL between them means nothing"
            )
    rows = min([teacher.vocab_size, *(s.model.vocab_size for s in opened.values())])
    out = Path(run.out or "runs/eval")
    identity = {name: student.sha256 for name, student in opened.items()}
    identity["teacher"] = checkpoint_sha256(teacher.folder)
    text = describe_source(options.text)
    settings = to_dict(options) | {"run": {"dtype": run.dtype}, "weights": identity, "text": text}
    texts = text_batches(options.text, tokenizer, options.length, options.eval_rows, options.batch_size)
    if outputs.claim(out, "eval", settings, run.overwrite):
        say(run, f"{out} is complete already")
        known = json.loads((out / "scores.json").read_text(encoding="utf-8"))
        say(run, text_table(table_rows(known)))
        return known
    models = {name: student.model.with_vocabulary(rows) for name, student in opened.items()}
    for model in (teacher, *models.values()):
        runtime.place(model.module)
    say(run, f"{runtime.description} · {run.dtype} · {len(models) + 1} models")
    results = score(teacher.with_vocabulary(rows), models, runtime.feed(texts), run.quiet, runtime.cut)
    scores: dict[str, Any] = {}
    for name, result in results.items():
        scores[name] = result.as_dict()
        if name in opened:
            scores[name]["bits_per_weight"] = opened[name].bits_per_weight
    table = table_rows(scores)
    save_json(scores, out / "scores.json")
    (out / "scores.md").write_text(markdown_table(table) + "\n", encoding="utf-8")
    picture(run, lambda: plot_scores(scores, out / "scores.png"))
    outputs.complete(out)
    say(run, text_table(table))
    return scores
