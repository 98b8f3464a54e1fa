"""NaN and infinity are found wherever they are, and huge numbers are none."""

import json

import pytest
import torch

from qat_lora.errors import ModelError
from qat_lora.files.finite import check_finite, json_text, not_finite

KINDS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_odd_number_anywhere(dtype, bad):
    for shape in ((1,), (7,), (33, 65)):
        tensor = torch.full(shape, torch.finfo(dtype).max, dtype=dtype)  # whose sum would be infinite
        assert not_finite({"a": tensor, "b": torch.ones(2, dtype=torch.uint8), "c": torch.empty(0)}) is None
        for at in {0, tensor.numel() // 2, tensor.numel() - 1}:
            odd = tensor.clone()
            odd.view(-1)[at] = bad
            assert not_finite({"fine": tensor, "layer.weight": odd}) == (
                f"layer.weight is NaN or infinite in 1 of {odd.numel()} places"
            )
    with pytest.raises(ModelError, match=r"^here: layer.weight is NaN or infinite"):
        check_finite({"layer.weight": odd}, "here")


def test_tensors_without_numbers_are_left_alone():
    assert not_finite({"a": torch.empty(3, device="meta"), "b": torch.tensor([1, 2])}) is None


def test_json_names_the_number():
    assert json.loads(json_text({"a": [1.5, None]}, "x")) == {"a": [1.5, None]}
    with pytest.raises(ModelError, match=r"^scores.json: teacher.interval.1 is nan"):
        json_text({"student": {"ppl": 1.0}, "teacher": {"interval": [1.0, float("nan")]}}, "scores.json")
    with pytest.raises(ModelError, match=r"^x: the number is inf"):
        json_text(float("inf"), "x")
    with pytest.raises(TypeError):
        json_text(object(), "x")
