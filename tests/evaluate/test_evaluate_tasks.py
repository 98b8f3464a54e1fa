"""The lm-eval harness on a loaded model, with a task of one local file."""

import json
import math
import warnings

import pytest
import torch
from toy_pipeline import call, eval_options, export_options

from qat_lora.errors import ConfigError
from qat_lora.evaluate.tasks import TasksConfig, check_tasks, run_tasks
from qat_lora.export.forms import FORMS
from qat_lora.models.load import load_model, load_tokenizer
from qat_lora.models.student import open_student

pytest.importorskip("lm_eval")

TASK = """task: local_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{gold}}}}"
target_delimiter: " "
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
EXAMPLES = [
    ("the model", ["layer of", "code in the row"], 1),
    ("a weight", ["token", "and to"], 0),
    ("loss", ["cache scale", "tail"], 1),
    ("quant", ["head", "a row of the model"], 0),
]


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """The settings of the task, the harness's manager (which takes seconds to make), and the task's data."""
    root = tmp_path_factory.mktemp("harness")
    data = root / "data.jsonl"
    lines = [json.dumps({"question": q, "choices": c, "gold": g}) for q, c, g in EXAMPLES]
    data.write_text("\n".join(lines) + "\n")
    (root / "tasks").mkdir()
    (root / "tasks" / "local.yaml").write_text(TASK.format(data=data))
    config = TasksConfig(tasks=("local_choice",), tasks_path=str(root / "tasks"))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr("datasets.config.HF_DATASETS_CACHE", root / "datasets")
        patch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        yield config, check_tasks(config), data


def right(model, tokenizer, question, choices, gold):
    """Whether the choice with the highest log-likelihood is the right one, computed here in float64."""
    totals = []
    for choice in choices:
        context = tokenizer(question, add_special_tokens=False)["input_ids"]
        whole = tokenizer(f"{question} {choice}", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = model.module(torch.tensor([whole])).logits[0].double()
        log_probs = torch.log_softmax(logits, -1)
        totals.append(math.fsum(float(log_probs[i - 1, whole[i]]) for i in range(len(context), len(whole))))
    return totals.index(max(totals)) == gold


def test_a_local_task_scores_what_the_likelihoods_say(tiny, local):
    config, manager, _ = local
    model, tokenizer = load_model(str(tiny.teacher)), load_tokenizer(tiny.teacher)
    found = run_tasks(model.module, tokenizer, config, manager, batch_size=2, max_length=64, seed=0)
    wanted = sum(right(model, tokenizer, *example) for example in EXAMPLES) / len(EXAMPLES)
    assert found["local_choice"]["acc"] == pytest.approx(wanted)
    assert set(found["local_choice"]) <= {"acc", "acc_stderr"}


def test_one_command_runs_tasks_on_every_export(tiny, adapted, local, tmp_path, monkeypatch):
    """Each form is scored with its adapter: as the likelihoods of the opened export say."""
    monkeypatch.setattr("qat_lora.commands.evaluate.check_tasks", lambda _: local[1])
    students = {form: call("export", export_options(adapted[1], tmp_path / f"as-{form}", form=form)) for form in FORMS}
    students["run"] = adapted[1]
    call("evaluate", eval_options(tiny, students, tmp_path / "scores", eval_rows=1, harness=local[0]))
    found = json.loads((tmp_path / "scores" / "report.json").read_text())["tasks"]
    assert found.keys() == {"teacher", *students}
    for name, folder in students.items():
        model, tokenizer = open_student(str(folder)).model, load_tokenizer(tiny.teacher)
        wanted = sum(right(model, tokenizer, *example) for example in EXAMPLES) / len(EXAMPLES)
        assert found[name]["local_choice"]["acc"] == pytest.approx(wanted)


def test_too_little_memory_is_not_taken_for_the_task_s_fault(tiny, local, monkeypatch):
    config, manager, _ = local
    model, tokenizer = load_model(str(tiny.teacher)), load_tokenizer(tiny.teacher)
    starved = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")
    monkeypatch.setattr(model.module, "forward", lambda *args, **kwargs: (_ for _ in ()).throw(starved))
    with pytest.raises(torch.OutOfMemoryError, match="9.00 GiB"):
        run_tasks(model.module, tokenizer, config, manager, batch_size=2, max_length=64, seed=0)


def test_unknown_tasks_and_tasks_that_fail_are_named(tiny, local, monkeypatch):
    config, manager, data = local
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **_: manager)
    with pytest.raises(ConfigError, match="knows no no_such_task;.*--tasks-path"):
        check_tasks(TasksConfig(tasks=("local_choice", "no_such_task")))
    data.unlink()
    model, tokenizer = load_model(str(tiny.teacher)), load_tokenizer(tiny.teacher)
    with pytest.raises(ConfigError, match="local_choice did not run"):
        run_tasks(model.module, tokenizer, config, manager, batch_size=2, max_length=64, seed=0)


@pytest.mark.parametrize(("name", "value"), [("task_limit", 0), ("task_shots", -1)])
def test_settings_that_mean_nothing_are_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        TasksConfig(**{name: value})
