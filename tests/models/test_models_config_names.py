"""Older names beside those of transformers 5, setting by setting; `test_export_config_names` reads whole folders."""

from qat_lora.models.config_names import with_older_names, without_type


def test_the_text_part_has_its_own_and_other_parts_are_left_alone():
    text = {"dtype": "bfloat16", "rope_parameters": {"rope_type": "default", "rope_theta": 123456.0}}
    codes = {"dtype": "int8", "rope_parameters": {"rope_theta": 1.0}}
    given = {"torch_dtype": "float16", "text_config": text, "quantization_config": codes}
    given |= {"vision_config": dict(text), "vocab_size": 8}
    found = with_older_names(given)
    older = {"torch_dtype": "bfloat16", "rope_theta": 123456.0, "rope_scaling": None}
    assert found == given | {"dtype": "float16", "text_config": text | older}
    assert with_older_names(found) == found
    assert with_older_names(given, positions=False)["text_config"] == text | {"torch_dtype": "bfloat16"}


def test_positions_of_several_axes_are_no_default():
    rope = {"rope_type": "default", "type": "mrope", "mrope_section": [2, 3, 3], "rope_theta": 123456.0}
    found = with_older_names({"rope_parameters": rope})
    assert found["rope_scaling"] == {"rope_type": "default", "type": "mrope", "mrope_section": [2, 3, 3]}


def test_layers_of_kinds_that_older_names_have_no_word_for():
    rope = {"main": {"rope_theta": 1e4}, "compressed": {"rope_theta": 2e4}}
    for given in ({"rope_parameters": rope}, {"rope_parameters": None}, {"rope_theta": 5.0}, {}):
        assert with_older_names(given) == given


def test_without_type():
    rope = {"full_attention": {"type": "linear", "factor": 2.0}, "sliding_attention": None}
    assert without_type(rope) == {"full_attention": {"factor": 2.0}, "sliding_attention": None}
    assert without_type(None) is None
