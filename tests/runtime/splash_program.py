"""The splash kernel, interpreted, against attention in float64; prints the largest differences as JSON.

A program of its own: it sets jax's platform. Also the control: documents that are left out must be seen.
"""

import json
import os

os.environ["JAX_PLATFORMS"] = "cpu"

import jax.numpy as jnp
import numpy as np
import torch

from qat_lora.runtime.xla import splash


def oracle(query, key, value, document, scale, window):
    heads = query.shape[1] // key.shape[1]
    query, key, value = (tensor.double().requires_grad_() for tensor in (query, key, value))
    here = torch.arange(query.shape[2])
    seen = (document[:, :, None] == document[:, None]) & (here[:, None] >= here)
    seen &= here[:, None] - here < (window or len(here))
    scores = query @ key.repeat_interleave(heads, 1).mT * scale
    scores = scores.masked_fill(~seen[:, None], -1e300)
    return (query, key, value), scores.softmax(-1) @ value.repeat_interleave(heads, 1), seen


def error(found, wanted):
    return float(np.abs(np.asarray(found, dtype=np.float64) - wanted.detach().numpy()).max())


def differences(rows, heads, groups, length, width, window, cuts):
    torch.manual_seed(length)
    query, d_output = (torch.randn(rows, heads, length, width) for _ in range(2))
    key, value = (torch.randn(rows, groups, length, width) for _ in range(2))
    starts = torch.zeros(rows, length, dtype=torch.int64)
    for row, at in cuts:
        starts[row, at] = 1
    scale = width**-0.5
    given, output, seen = oracle(query, key, value, starts.cumsum(1), scale, window)
    wanted = torch.autograd.grad(output, given, d_output.double())
    documents = splash._documents(seen.int().argmax(-1))
    arrays = [jnp.asarray(tensor.numpy()) for tensor in (query * scale, key, value, documents)]
    found, log_sum = splash.forward(*arrays, window=window, interpret=True)
    gradients = splash.backward(*arrays, found, log_sum, jnp.asarray(d_output.numpy()), window=window, interpret=True)
    unmasked, _ = splash.forward(*arrays[:3], jnp.ones_like(arrays[3]), window=window, interpret=True)
    gradients = [gradients[0] * scale, *gradients[1:]]
    return {
        "output": error(found, output),
        "gradients": max(error(one, other) for one, other in zip(gradients, wanted, strict=True)),
        "control": error(unmasked, output),
    }


if __name__ == "__main__":
    splash.FUSED_LENGTH = 256
    cases = [(2, 4, 2, 256, 64, None, [(0, 33), (0, 70), (1, 200)]), (1, 4, 1, 384, 128, 100, [(0, 1), (0, 190)])]
    print(json.dumps([differences(*case) for case in cases]))
