"""Greedy continuations against token-by-token generation, and their figures by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from qat_lora.errors import ConfigError, TextError
from qat_lora.evaluate.health import HealthConfig, continue_greedily, health, take_prompts
from qat_lora.generate.sample import stream_ids
from qat_lora.models.load import load_model


def test_figures_by_hand():
    loop = [1, 2, 1, 2, 1, 2, 1, 2]  # 5 runs of four, 2 different
    ends = [3, 4, 5, 0, 9, 9, 9]
    found = health([loop, ends], {0})
    assert found == {
        "repetition": pytest.approx((3 / 5 + 0) / 2),
        "distinct_1": pytest.approx(5 / 11),
        "distinct_2": pytest.approx((2 + 2) / (7 + 2)),
        "termination": 0.5,
        "tokens": 5.5,
    }
    assert health([loop, ends], set())["termination"] == 0
    assert health([[0], [0, 1]], {0}) == dict.fromkeys(("repetition", "distinct_1", "distinct_2", "tokens"), 0.0) | {
        "termination": 1.0
    }


def test_batched_greedy_text_is_that_of_one_prompt_at_a_time(tiny):
    model, cpu = load_model(str(tiny.teacher)), torch.device("cpu")
    prompts = np.array([[5, 17, 200], [300, 2, 90], [7, 7, 7]])
    cuts = []
    runtime = SimpleNamespace(device=cpu, mark_step=lambda: cuts.append(1))
    found = continue_greedily(model, prompts, 12, runtime)
    assert found.tolist() == [list(stream_ids(model, prompt, 12, device=cpu)) for prompt in prompts.tolist()]
    assert len(cuts) == 12


def row(ids, starts=(0,)):
    begins = np.zeros(len(ids), np.bool_)
    begins[list(starts)] = True
    return SimpleNamespace(input_ids=np.array(ids, np.int32), doc_starts=begins)


def test_prompts_are_beginnings_of_rows_that_are_one_document():
    rows = [row([1, 2, 3, 4]), row([5, 6, 7, 8], (0, 2)), row([9, 9, 9, 1], (0, 3)), row([4, 4, 4, 4])]
    config = HealthConfig(generate=3, prompt_tokens=3)
    assert take_prompts(rows, config).tolist() == [[1, 2, 3], [9, 9, 9], [4, 4, 4]]
    assert len(take_prompts(rows, HealthConfig(generate=1, prompt_tokens=3))) == 1
    with pytest.raises(TextError, match="prompt_tokens.*5"):
        take_prompts(rows, HealthConfig(generate=3, prompt_tokens=5))


@pytest.mark.parametrize(("name", "value"), [("generate", -1), ("generate_tokens", 3), ("prompt_tokens", 0)])
def test_settings_that_mean_nothing_are_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        HealthConfig(**{name: value})
