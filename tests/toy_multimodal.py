"""Vision-language checkpoints of random weights: one for every family that is supported, two decoder layers each."""

import torch
import transformers

TEXT = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
TEXT |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256, "pad_token_id": None}
TEXT |= {"bos_token_id": 0, "eos_token_id": 0}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}
QWEN = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64, "patch_size": 14}
QWEN_IDS = {"image_token_id": 310, "video_token_id": 311, "vision_start_token_id": 312, "vision_end_token_id": 313}
ROPE = {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [4, 6, 6]}}
QUARTER = {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
LINEAR = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2}
LINEAR |= {"linear_num_value_heads": 2, "layer_types": ["linear_attention", "full_attention"]}
LINEAR |= {"rope_parameters": QUARTER}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS |= {"shared_expert_intermediate_size": 32}
DEEP = QWEN | {"num_position_embeddings": 64}
LOCAL = {"pad_token_id": 0, "sliding_window": 16, "query_pre_attn_scalar": 32}
LOCAL |= {"layer_types": ["sliding_attention"] * 2}  # of six layers the sixth is full
GRID = {"image_grid_pinpoints": [[28, 28]]}

# Name of the config's class, what is its own of the text, of the vision part, and of the whole.
OWN = {
    "gemma3": ("Gemma3", LOCAL, VISION, {"mm_tokens_per_image": 4, "boi_token_index": 311, "eoi_token_index": 312}),
    "idefics3": ("Idefics3", {"model_type": "llama"}, VISION, {"image_token_id": 310, "scale_factor": 2}),
    "internvl": ("InternVL", {"model_type": "qwen2"}, VISION, {"image_token_id": 310}),
    "llava": ("Llava", {"model_type": "llama"}, VISION | {"model_type": "clip_vision_model"}, {}),
    "llava_next": ("LlavaNext", {"model_type": "mistral"}, VISION | {"model_type": "clip_vision_model"}, GRID),
    "llava_onevision": ("LlavaOnevision", {"model_type": "qwen2"}, VISION | {"model_type": "siglip_vision_model"}, {}),
    "mistral3": ("Mistral3", {"model_type": "mistral"}, VISION | {"model_type": "pixtral"}, {}),
    "qwen2_vl": ("Qwen2VL", ROPE, {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}, QWEN_IDS),
    "qwen2_5_vl": ("Qwen2_5_VL", ROPE, QWEN | {"fullatt_block_indexes": [1]}, QWEN_IDS),
    "qwen3_vl": ("Qwen3VL", ROPE, DEEP | {"deepstack_visual_indexes": [0]}, QWEN_IDS),
    "qwen3_5": ("Qwen3_5", LINEAR, DEEP, QWEN_IDS),
    "qwen3_5_moe": ("Qwen3_5Moe", LINEAR | EXPERTS, DEEP, QWEN_IDS),
    "smolvlm": ("SmolVLM", {"model_type": "llama"}, VISION, {"image_token_id": 310, "scale_factor": 2}),
}
NEEDS_INDEX = ("gemma3", "llava", "llava_next", "llava_onevision", "mistral3")


def make(kind, tied=True, dtype=torch.bfloat16):
    """Return a model of a family, its weights large enough that every part counts."""
    torch.manual_seed(0)
    name, text, vision, whole = OWN[kind]
    whole = whole | ({"image_token_index": 310} if kind in NEEDS_INDEX else {})
    shared = {"tie_word_embeddings": tied}
    config = getattr(transformers, f"{name}Config")(
        text_config=TEXT | text | shared, vision_config=dict(vision), **whole, **shared
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.3 if "embed_tokens" in path else 0.12)
            elif "norm" not in path:
                parameter.normal_(0, 0.1)
    return model.to(dtype)
