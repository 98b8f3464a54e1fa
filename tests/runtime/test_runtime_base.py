"""Moving a module keeps what it shares, also where the move makes new Parameter objects, as XLA's does."""

import pytest
import torch
from torch import nn

from qat_lora.errors import DeviceError
from qat_lora.runtime.base import move_module


def tied() -> nn.Module:
    model = nn.ModuleDict({"embed": nn.Embedding(7, 3), "head": nn.Linear(3, 7, bias=False)})
    model["head"].weight = model["embed"].weight
    model["head"].register_buffer("mask", torch.ones(3))
    model["embed"].register_buffer("mask", model["head"].mask)
    return model


@pytest.fixture
def new_objects():
    """Let `Module.to` replace every Parameter by a new one, at each place where it is registered."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(before)


def test_control_a_plain_move_splits_what_is_tied(new_objects):
    model = tied().to("meta")
    assert model["head"].weight is not model["embed"].weight and len(list(model.parameters())) == 2


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_shared_tensors_stay_shared(device, new_objects):
    model = move_module(tied(), torch.device(device))
    assert model["head"].weight is model["embed"].weight and model["head"].mask is model["embed"].mask
    assert [p.device.type for p in model.parameters()] == [device]


def test_a_parameter_that_a_move_adds_is_refused():
    class Growing(nn.Linear):
        def _apply(self, fn, recurse=True):
            self.extra = nn.Parameter(torch.zeros(2))
            return super()._apply(fn, recurse)

    with pytest.raises(DeviceError, match="2 parameters with 6 values became 3 with 8"):
        move_module(Growing(2, 2), torch.device("cpu"))
