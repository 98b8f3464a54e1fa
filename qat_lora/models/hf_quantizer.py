"""Our plug-in for transformers: `quant_method: qat-lora` in a config, and the modules that it stands for.

Importing this module registers both, after which `AutoModelForCausalLM.from_pretrained` and PEFT load our checkpoints
like any other. After `import qat_lora` it is imported together with transformers' quantizers (`register.py`). It is
apart from `load.py`, which imports model classes and tokenizers, since it runs in programs that only load a checkpoint.
"""

from pathlib import Path
from typing import Any

from torch import nn
from transformers.core_model_loading import WeightConverter
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from qat_lora.files.checksums import check_folder
from qat_lora.files.finite import check_finite
from qat_lora.layers.convert import make_quant_skeleton, quant_layers
from qat_lora.layers.experts import has_split_experts, split_experts
from qat_lora.models.multimodal import cut_to_text, sees
from qat_lora.quant.presets import Preset

QUANT_METHOD = "qat-lora"


@register_quantization_config(QUANT_METHOD)
class QatLoraQuantizationConfig(QuantizationConfigMixin):
    """The `quantization_config` of a checkpoint's config.json: the preset, rule by rule."""

    def __init__(self, preset: dict[str, Any], **extra: Any) -> None:
        self.quant_method = QUANT_METHOD
        self.preset = preset
        self.details = extra.get("details", {})


@register_quantizer(QUANT_METHOD)
class QatLoraQuantizer(HfQuantizer):
    """Tells transformers which modules to expect in our checkpoints and in which types to save them."""

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        for folder in {Path(file).parent for file in kwargs.get("checkpoint_files") or ()}:
            check_folder(folder)
        cut = cut_to_text(model) if sees(model.config) else []
        split_experts(model)
        make_quant_skeleton(model, Preset.from_dict(self.quantization_config.preset))
        for parts, name, part in cut:
            parts[name] = part
        return model

    def update_weight_conversions(self, weight_conversions: list[Any], model: nn.Module) -> list[Any]:
        """Return renamings alone for a model whose experts are stored one by one: nothing is to be fused."""
        if not has_split_experts(model):
            return super().update_weight_conversions(weight_conversions, model)
        return [conversion for conversion in weight_conversions if not isinstance(conversion, WeightConverter)]

    def get_state_dict_and_metadata(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the state with scales and tables as float16, their stored type."""
        state = model.state_dict()
        for name, layer in quant_layers(model).items():
            for part, parameter in layer.named_parameters(recurse=False):
                if part != "bias":
                    state[f"{name}.{part}"] = parameter.detach().half()
        check_finite(state, "model")
        if has_split_experts(model) or sees(model.config):
            model._weight_conversions = []  # tensors keep the names of their modules
        return state, {}

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Return True: codes and scales are ordinary tensors."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: adapters train on top."""
        return True
