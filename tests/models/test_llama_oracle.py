"""The Llama family against transformers: the paged forward gives the logits of one plain torch forward.

Checkpoints are tiny, random in every weight (also in norms and biases, which a fresh model has at 1 and 0), and written
by transformers itself. Each is run over pages in three ways: the whole prompt as one group, tiles of 8 positions in
several calls, and one position at a time.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models.base import ForwardInputs

torch = pytest.importorskip("torch", reason="the reference implementation needs torch (extra: oracle)")

LENGTH = 37  # of the prompts, and max_model_len
PAGE = 4
TILE = 8
VOCAB = 89
WINDOW = 7

ROPES = {
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "yarn": {"factor": 4.0, "beta_fast": 4.0, "original_max_position_embeddings": 32, "rope_theta": 100.0},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
}


def rope(kind):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0} | ROPES[kind]}


# name: (configuration class, options, how it is saved)
CASES = {
    "llama": ("Llama", {}, {}),
    "llama, tied, bfloat16 in shards": (
        "Llama",
        {"tie_word_embeddings": True, "num_key_value_heads": 4},
        {"dtype": torch.bfloat16, "max_shard_size": "8KB"},
    ),
    "llama, biases, linear rope": (
        "Llama",
        {"attention_bias": True, "max_position_embeddings": 16, **rope("linear")},
        {},
    ),
    "llama, llama3 rope": ("Llama", rope("llama3"), {}),
    # These frequencies depend on the length of the sequence: both sides see exactly max_model_len positions, more than
    # the original maximum.
    "llama, dynamic rope": ("Llama", {"max_position_embeddings": 16, **rope("dynamic")}, {}),
    "mistral, window": ("Mistral", {"sliding_window": WINDOW}, {}),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}, {}),
    "qwen3, windows on the second layer": (
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        {},
    ),
    "qwen3, yarn rope": ("Qwen3", rope("yarn"), {}),
}
BFLOAT16 = "llama, tied, bfloat16 in shards"


class Reference:
    """A checkpoint on disk, two prompts, and torch's float32 logits of them [2, LENGTH, VOCAB]."""

    def __init__(self, name, directory):
        kind, options, saving = CASES[name]
        import transformers

        shape = {
            "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        }  # fmt: skip
        config = getattr(transformers, f"{kind}Config")(**shape | options)
        model = transformers.AutoModelForCausalLM.from_config(config)
        randomise(model, saving.get("dtype", torch.float32))
        self.directory = directory
        model.save_pretrained(directory, **{k: v for k, v in saving.items() if k != "dtype"})
        # Read back: a model cast to bfloat16 and back has lost bits of its rotary frequencies as well.
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        )
        self.tokens = np.random.default_rng(1).integers(0, VOCAB, (2, LENGTH))
        with torch.no_grad():
            self.logits = model(torch.from_numpy(self.tokens)).logits.numpy()
        assert self.logits.std() > 0.5  # or an absolute tolerance would mean nothing


def randomise(model, dtype):
    model.to(dtype)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 2:
            noise *= 1.5 / parameter.shape[1] ** 0.5
        elif "norm" in name:
            noise = 1 + 0.3 * noise
        parameter.data.copy_(noise)


@pytest.fixture(scope="module", params=CASES)
def reference(request, tmp_path_factory):
    return Reference(request.param, tmp_path_factory.mktemp("checkpoint"))


# A call is a list of groups (prompt, first position, count); a schedule is the groups' width and its calls.
WHOLE = (LENGTH + 3, [[(0, 0, LENGTH), (1, 0, LENGTH)]])
TILES = (
    TILE,
    [
        [(0, 0, 8), (0, 8, 8), (1, 0, 8), (0, 16, 8)],  # tiles of one prompt see each other within a call
        [(1, 8, 8), (0, 24, 3), (1, 16, 8), (1, 24, 1)],  # tiles need not be full
        [(0, 27, 8), (0, 35, 2), (1, 25, 8), (1, 33, 4)],
    ],
)
DECODE = (1, [[(0, t, 1 if t < LENGTH else 0), (1, t - 5, 1 if t >= 5 else 0)] for t in range(LENGTH + 5)])
SCHEDULES = {"whole": WHOLE, "tiles": TILES, "decode": DECODE}


def paged_logits(model, tokens, schedule):
    """The logits of every position of `tokens` [2, LENGTH], computed by the calls of a schedule."""
    width, calls = SCHEDULES[schedule]
    model = model.with_max_model_len(LENGTH)
    params = model.load_params(None)
    pages = -(-LENGTH // PAGE)
    order = 1 + np.random.default_rng(2).permutation(2 * pages + 3)  # pages of the pool in no order, some unused
    tables = np.zeros((2, pages + 2), np.int32)  # longer than needed, like those of an engine
    tables[:, :pages] = order[: 2 * pages].reshape(2, pages)

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiles in half the time
    def step(params, kv, inputs):
        hidden, kv = model.forward(params, kv, inputs, None)
        logits = model.logits(params, hidden.reshape(-1, hidden.shape[-1]))
        return logits.reshape(*hidden.shape[:2], -1), kv

    kv = model.init_kv(len(order) + 1, PAGE, None)
    result = np.full((*tokens.shape, VOCAB), np.nan, np.float32)
    for groups in calls:
        offset = np.arange(width)
        prompt, start, count = (np.array(column)[:, None] for column in zip(*groups, strict=True))
        positions = np.where(offset < count, start + offset, -1).astype(np.int32)
        batch = tokens[prompt, np.maximum(positions, 0)].astype(np.int32)
        inputs = ForwardInputs(jnp.asarray(batch), jnp.asarray(positions), jnp.asarray(tables[prompt[:, 0]]))
        with jax.default_matmul_precision("highest"):
            logits, kv = step(params, kv, inputs)
        for (p, first, n), values in zip(groups, np.asarray(logits), strict=True):
            result[p, first : first + n] = values[:n]
    return result


RUNS = [("cpu", "whole"), ("cpu", "tiles"), ("cpu", "decode"), ("gpu", "tiles")]


@pytest.mark.parametrize(("platform", "schedule"), RUNS)
def test_logits(reference, platform, schedule):
    """The "gpu" program runs anywhere."""
    model = models.load_model(reference.directory, "float32", platform)
    actual = paged_logits(model, reference.tokens, schedule)
    np.testing.assert_allclose(actual, reference.logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("schedule", ["whole", "decode"])
def test_logits_of_the_gpu_program(schedule, tmp_path):
    reference = Reference("qwen3, windows on the second layer", tmp_path)
    model = models.load_model(tmp_path, "float32", "gpu")
    actual = paged_logits(model, reference.tokens, schedule)
    np.testing.assert_allclose(actual, reference.logits, rtol=0, atol=1e-4)


def test_the_sharded_checkpoint_has_shards(tmp_path):
    Reference(BFLOAT16, tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3


@pytest.mark.parametrize(("platform", "schedule"), [("cpu", "decode"), ("gpu", "tiles")])
def test_bfloat16(platform, schedule, tmp_path):
    """bfloat16 weights, activations and KV: close to float32, as far as eight bits of mantissa allow."""
    reference = Reference(BFLOAT16, tmp_path)
    model = models.load_model(tmp_path, "bfloat16", platform)
    error = np.abs(paged_logits(model, reference.tokens, schedule) - reference.logits)
    assert error.mean() < 0.03
    assert error.max() < 0.4


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_feature_layers(platform, tmp_path):
    """Behind the last hidden state: what the layers read, in the order asked for."""
    import transformers

    reference = Reference("llama", tmp_path)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    with torch.no_grad():
        states = oracle(torch.from_numpy(reference.tokens), output_hidden_states=True).hidden_states
    model = models.load_model(tmp_path, "float32", platform).with_feature_layers((1, 0, 1))
    params, tables = model.load_params(None), jnp.asarray([[1, 2], [4, 3]], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), reference.tokens.shape)
    inputs = ForwardInputs(jnp.asarray(reference.tokens, jnp.int32), positions, tables)
    with jax.default_matmul_precision("highest"):
        hidden, _ = model.forward(params, model.init_kv(5, LENGTH, None), inputs, None)
        logits = model.logits(params, hidden[0])
    expected = np.concatenate([states[i].numpy() for i in (2, 1, 0, 1)], axis=-1)
    np.testing.assert_allclose(hidden, expected, rtol=0, atol=1e-4)
    np.testing.assert_allclose(logits, reference.logits[0], rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match=r"feature_layers=\(0, 2\) must be in \[0, 1\]"):
        model.with_feature_layers((0, 2))
