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


def bare_layer(spec, out_features=32, in_features=128):
    """Return a quantised layer of random weights."""
    from qat_lora.layers.quant_linear import QuantLinear
    from qat_lora.quant.initialize import quantize_weight

    torch.manual_seed(0)
    linear = torch.nn.Linear(in_features, out_features, bias=False)
    return QuantLinear.from_linear(linear, spec, quantize_weight(linear.weight.detach(), spec, "absmax"))


def bits_of(words, bits, count):
    """Return the first codes of a row of 32-bit words, as one number is taken apart."""
    stream = int.from_bytes(words.numpy().tobytes(), "little")
    return [(stream >> (bits * i)) & (2**bits - 1) for i in range(count)]


def qwen3_sizes(tensors, integers):
    """Return the bytes that a container takes for Qwen3-0.6B: layers, vocabulary table as `integers` and norms.

    `tensors` gives the tensors of `integers(rows, columns)`; their bytes grow by the same number with each row.
    """
    hidden, mlp, blocks, vocabulary = 1024, 3072, 28, 151_936
    shapes = [(2048, hidden), (1024, hidden), (1024, hidden), (hidden, 2048)]
    shapes += [(mlp, hidden), (mlp, hidden), (hidden, mlp)]
    layers = 0
    for rows, columns in shapes:
        few, more = (sum(t.nbytes for t in tensors(integers(count, columns)).values()) for count in (32, 64))
        layers += few + (more - few) * (rows - 32) // 32
    adapter = 2 * 16 * sum(rows + columns for rows, columns in shapes)
    return blocks * layers, blocks * adapter, vocabulary * hidden, 4 * (blocks * (2 * hidden + 256) + hidden)
