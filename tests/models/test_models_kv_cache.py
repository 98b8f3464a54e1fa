"""A token at a time over kept keys and values is the forward of the whole row, whatever the layers attend to."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from qat_lora.models.kv_cache import begin, step
from qat_lora.models.load import CausalLM

VOCABULARY, LENGTH, KNOWN = 61, 12, 5
SLIDING, FULL = "sliding_attention", "full_attention"


def make(kinds, window, folder):
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=len(kinds),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        layer_types=list(kinds),
        use_sliding_window=window is not None,
        sliding_window=window,
    )
    module = Qwen3ForCausalLM(config).eval().requires_grad_(False)
    with torch.no_grad():  # as made, attention is nearly uniform
        for parameter in module.parameters():
            if parameter.ndim == 2:
                parameter.mul_(10)
    return CausalLM(module, folder)


def walked(model, ids_BL, padding):
    """Hidden states of a row whose end is written one token at a time over padding."""
    row = ids_BL.clone()
    row[:, KNOWN:] = padding
    hidden, cache = begin(model, row, KNOWN)
    found = [hidden[:, :KNOWN]]
    for position in range(KNOWN, LENGTH):
        found.append(step(model, ids_BL[:, position : position + 1], torch.tensor([position]), cache))
    return torch.cat(found, 1)


@pytest.mark.parametrize(
    ("kinds", "window"), [((FULL, FULL), None), ((SLIDING, FULL), 3), ((SLIDING, SLIDING), 4)], ids=str
)
def test_a_token_at_a_time_is_the_whole_row(kinds, window, tmp_path):
    model = make(kinds, window, tmp_path)
    ids = torch.randint(0, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model.hidden(ids, torch.zeros_like(ids))
        for padding in (0, 7):  # what is not yet written is never seen
            assert (walked(model, ids, padding) - wanted).abs().max() < 1e-5
        other = ids.clone()
        other[:, 0] = (other[:, 0] + 1) % VOCABULARY
        seen = (model.hidden(other, torch.zeros_like(ids)) - wanted).abs().amax((0, 2)) > 1e-4
    assert seen[KNOWN - 1] and (seen[-1] or window)  # a forward that looked at nothing would pass the rest


@pytest.mark.parametrize(("kinds", "window"), [((FULL, FULL), None), ((SLIDING, FULL), 3)], ids=str)
def test_rows_that_begin_with_padding_are_those_without(kinds, window, tmp_path):
    model = make(kinds, window, tmp_path)
    ids = torch.randint(0, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    padding, before = torch.tensor([0, 2, 4]), KNOWN + 4

    def walked_from(padding_B):
        hidden, cache = begin(model, ids[:, :before], before, padding_B, LENGTH - before)
        steps = [step(model, ids[:, p : p + 1], torch.tensor([p]), cache) for p in range(before, LENGTH)]
        return torch.cat([hidden, *steps], 1)

    with torch.no_grad():
        found, naive = walked_from(padding), walked_from(None)
        for row, cut in enumerate(padding.tolist()):
            alone = ids[row : row + 1, cut:]
            wanted = model.hidden(alone, torch.zeros_like(alone))[0]
            assert (found[row, cut:] - wanted).abs().max() < 1e-5
            assert not cut or (naive[row, cut:] - wanted).abs().max() > 1e-3
