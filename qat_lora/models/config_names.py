"""config.json under both names of what transformers 5 renamed.

transformers 5 writes `dtype` and `rope_parameters` alone. Other engines (mlx-lm, transformers 4,
sglang, lmdeploy) read `torch_dtype`, `rope_theta` and `rope_scaling`. They drop keys that they do
not know and compute positions with a default, often 10,000, without a message. So the older names
are written beside those of today.
"""

from typing import Any

BASE, SHARE = "rope_theta", "partial_rotary_factor"
GPT_NEOX = {BASE: "rotary_emb_base", SHARE: "rotary_pct"}
RENAMED = {"gpt_neox": GPT_NEOX, "gpt_neox_japanese": GPT_NEOX}
"""Families that had older names of their own."""


def with_older_names(config: dict[str, Any], positions: bool = True) -> dict[str, Any]:
    """Return the settings of a config.json with older names beside those of transformers 5.

    A `text_config` in it gets them too. With `positions` False, the settings of rotary positions
    are left as they are.
    """
    named = dict(config)
    if isinstance(config.get("text_config"), dict):
        named["text_config"] = with_older_names(config["text_config"], positions)
    dtype = config.get("dtype") or config.get("torch_dtype")
    if isinstance(dtype, str):
        named["dtype"] = dtype
        named["torch_dtype"] = dtype
    if config.get("model_type") == "qwen3_moe" and "num_local_experts" in config:
        named["num_experts"] = config["num_local_experts"]
    if positions and isinstance(config.get("rope_parameters"), dict):
        named |= _older_positions(config)
    return named


def without_type(rope: Any) -> Any:
    """Return rotary settings, nested or not, without `type`: to transformers it is `rope_type`."""
    if not isinstance(rope, dict):
        return rope
    return {name: without_type(value) for name, value in rope.items() if name != "type"}


def _older_positions(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config's rotary settings by their older names; {} where they have none."""
    rope = config["rope_parameters"]
    full, local = rope, None
    if any(isinstance(of_layers, dict) for of_layers in rope.values()):  # kinds of layers differ
        full = rope.get("full_attention")
        local = rope.get("sliding_attention")
    if not full:
        return {}
    renamed = RENAMED.get(str(config.get("model_type")), {})
    found = {renamed.get(name, name): full[name] for name in (BASE, SHARE) if name in full}
    if local and BASE in local:
        found["rope_local_base_freq"] = local[BASE]
    found["rope_scaling"] = _older_scaling(full, config)
    return found


def _older_scaling(rope: dict[str, Any], config: dict[str, Any]) -> dict[str, Any] | None:
    """Return what `rope_scaling` says of scaled positions, None where they are not scaled.

    A `type` that came with the model stays. None is added but Phi 3's: transformers 5 would keep
    it as one more setting.
    """
    scaling = {name: value for name, value in rope.items() if name not in (BASE, SHARE)}
    kind = scaling.get("rope_type", "default")
    if kind == "default" and not scaling.keys() - {"rope_type", "type"}:
        return None
    if kind == "longrope" and "original_max_position_embeddings" in config:
        # Phi 3: transformers 4 takes `type`, `short_factor` and `long_factor`, and refuses others.
        scaling["type"] = scaling.pop("rope_type")
        scaling.pop("original_max_position_embeddings", None)
    return scaling
