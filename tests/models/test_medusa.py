"""Medusa heads in their published layouts against NumPy."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from models.medusa import load_medusa

D, VOCAB, HEADS = 32, 89, 3
LAYOUTS = {
    "medusa_head": (
        "medusa_head.{i}.{j}.linear.",
        "medusa_head.{i}.{n}.weight",
        ("medusa_num_heads", "medusa_num_layers"),
    ),
    "authors": ("{i}.{j}.linear.", "{i}.{n}.weight", ("medusa_num_heads", "medusa_num_layers")),
    "blocks": ("blocks.{i}.layers.{j}.", "lm_heads.{i}.weight", ("num_heads", "num_hidden_layers")),
}


@pytest.fixture(scope="module")
def target(make_llama):
    return make_llama(hidden_size=D, vocab_size=VOCAB)


def make(layers, bias):
    """weights[i] = [(w, b) of each block], table."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)

    return [([(normal(D, D), normal(D) if bias else 0) for _ in range(layers)], normal(VOCAB, D)) for _ in range(HEADS)]


def save(path, heads, layout):
    block, table, (num_heads, num_layers) = LAYOUTS[layout]
    tensors, n = {}, len(heads[0][0])
    for i, (blocks, lm_head) in enumerate(heads):
        tensors[table.format(i=i, n=n)] = lm_head
        for j, (w, b) in enumerate(blocks):
            tensors[block.format(i=i, j=j) + "weight"] = w
            if np.ndim(b):
                tensors[block.format(i=i, j=j) + "bias"] = b
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({num_heads: HEADS, num_layers: n, "hidden_size": D}))


def reference(head, x):
    blocks, table = head
    for w, b in blocks:
        y = x @ w.T + b
        x = x + y / (1 + np.exp(-y))
    return x @ table.T


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits(target, tmp_path, layout, layers, bias):
    heads = make(layers, bias)
    save(tmp_path, heads, layout)
    model = load_medusa(tmp_path, target)
    assert (model.num_heads, model.num_layers, model.bias) == (HEADS, layers, bias)
    params = model.load_params(None)
    hidden = np.random.default_rng(1).standard_normal((5, D)).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        for i, head in enumerate(heads):
            actual = model.logits(params, jnp.asarray(hidden), i)
            np.testing.assert_allclose(actual, reference(head, hidden.astype(np.float64)), atol=1e-5)


def test_bad_checkpoints(target, tmp_path):
    save(tmp_path, make(1, True), "authors")
    config = {"medusa_num_heads": HEADS + 1, "medusa_num_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"medusa_head\.3\.\S* is missing"):
        load_medusa(tmp_path, target).load_params(None)
    (tmp_path / "config.json").write_text(json.dumps(config | {"medusa_num_heads": HEADS - 1}))
    with pytest.raises(ValueError, match=r"has no place for: medusa_head\.2"):
        load_medusa(tmp_path, target).load_params(None)
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 0}))
    with pytest.raises(ValueError, match="medusa_num_heads=0 must be an integer >= 1"):
        load_medusa(tmp_path, target)
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 90}))
    with pytest.raises(ValueError, match="vocab_size=90 of the draft heads must be the target's, 89"):
        load_medusa(tmp_path, target)
