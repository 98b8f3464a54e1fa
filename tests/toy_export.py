"""An adapter with factors that float16 holds exactly."""

import torch


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
