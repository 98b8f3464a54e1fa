"""A quantised student of the tiny teacher, and an adapter for it with factors that float16 holds exactly."""

import pytest
import torch
from toy_pipeline import call, quantize_options


@pytest.fixture(scope="session")
def student(tiny, tmp_path_factory):
    return call("quantize", quantize_options(tiny, tmp_path_factory.mktemp("export") / "student", init="mse"))


def with_adapter(folder, config):
    """Load a student with a random adapter on it."""
    from qat_lora.layers.convert import add_lora
    from qat_lora.models.load import load_model

    model = load_model(str(folder))
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for layer in add_lora(model.module, config).values():
            for factor in (layer.lora_A, layer.lora_B):
                factor.copy_((torch.randn(factor.shape, generator=draw) * 0.1).half())
    return model


@pytest.fixture
def adapted(student, tmp_path):
    """A model with an adapter, and the folder that the adapter was saved to."""
    from qat_lora.files.identity import checkpoint_sha256
    from qat_lora.layers.lora import LoraConfig
    from qat_lora.models.adapter import save_adapter

    config = LoraConfig(recovery_r=3, recovery_alpha=5.0)
    model = with_adapter(student, config)
    save_adapter(model.module, config, tmp_path / "adapter", student, checkpoint_sha256(student))
    return model, tmp_path / "adapter"
