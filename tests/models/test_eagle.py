"""EAGLE heads against torch modules built and named as their authors' are, through the checkpoints these save."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.base import ForwardInputs
from models.eagle import feature_layers, load_eagle, load_eagle3
from models.llama import Llama

torch = pytest.importorskip("torch", reason="the reference implementation needs torch (extra: oracle)")

D, VOCAB, DRAFT_VOCAB, LENGTH, PAGE = 32, 89, 31, 21, 4
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": D, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 1, "vocab_size": VOCAB,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 1000.0, "hidden_act": "silu",
}  # fmt: skip


def randomise(module):
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 2:
            noise *= 1.5 / parameter.shape[1] ** 0.5
        parameter.data.copy_(1 + 0.3 * noise if "norm" in name else noise)


class Base(torch.nn.Module):
    """What a head shares: the rotary embedding, and a causal layer over entries (hidden[p - 1], token p)."""

    def __init__(self):
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding

        self.settings = LlamaConfig(**{k: v for k, v in CONFIG.items() if k != "architectures"})
        self.settings._attn_implementation = "eager"
        self._rotary = [LlamaRotaryEmbedding(self.settings)]  # in a list: its buffers are no part of the checkpoint
        self.layer_class = LlamaDecoderLayer

    def attend(self, attention, y):
        length = y.shape[1]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        return attention(y, self._rotary[0](y, torch.arange(length)[None]), mask)[0]

    def save(self, path, config, **buffers):
        from safetensors.torch import save_file

        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(config))
        tensors = {k: v.contiguous().clone() for k, v in self.state_dict().items()}
        save_file(tensors | buffers, path / "model.safetensors")


class EagleModule(Base):
    def __init__(self, bias):
        super().__init__()
        self.fc = torch.nn.Linear(2 * D, D, bias=bias)
        self.layers = torch.nn.ModuleList([self.layer_class(self.settings, 0)])
        self.layers[0].input_layernorm = torch.nn.Identity()
        randomise(self)

    def forward(self, embedded, hidden):
        x = self.fc(torch.cat([embedded, hidden], -1))
        layer = self.layers[0]
        x = x + self.attend(layer.self_attn, x)
        return x + layer.mlp(layer.post_attention_layernorm(x))


class Eagle3Module(Base):
    def __init__(self, residual_normed=False):
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        self.residual_normed = residual_normed
        self.fc = torch.nn.Linear(3 * D, D, bias=False)
        self.midlayer = self.layer_class(self.settings, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(self.midlayer.self_attn, name)
            setattr(self.midlayer.self_attn, name, torch.nn.Linear(2 * D, old.out_features, bias=False))
        self.midlayer.hidden_norm = LlamaRMSNorm(D, eps=1e-5)
        self.norm = LlamaRMSNorm(D, eps=1e-5)
        self.lm_head = torch.nn.Linear(D, DRAFT_VOCAB, bias=False)
        randomise(self)

    def forward(self, embedded, hidden):
        layer = self.midlayer
        normed = layer.hidden_norm(hidden)
        x = normed if self.residual_normed else hidden
        x = x + self.attend(layer.self_attn, torch.cat([layer.input_layernorm(embedded), normed], -1))
        return x + layer.mlp(layer.post_attention_layernorm(x))


@pytest.fixture(scope="module")
def target(make_llama):
    return make_llama(hidden_size=D, vocab_size=VOCAB, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture(scope="module")
def target_params(target):
    return target.load_params(None)


def run(head, params, tokens, hidden):
    """States of all entries 1.. as one group, over pages in no order."""
    pages = -(-len(tokens) // PAGE)
    tables = 1 + np.random.default_rng(0).permutation(pages)[None].astype(np.int32)
    positions = jnp.arange(1, len(tokens), dtype=jnp.int32)[None]
    inputs = ForwardInputs(jnp.asarray(tokens[1:])[None], positions, jnp.asarray(tables))
    kv = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), head.init_kv(pages + 1, PAGE, None))  # position 0 is unseen
    kv = kv.replace(v=jnp.zeros_like(kv.v))
    with jax.default_matmul_precision("highest"):
        states, _ = head.forward(params, kv, inputs, head.features(params, jnp.asarray(hidden[:-1])[None]), None)
        return np.asarray(states[0]), np.asarray(head.logits(params, states[0]))


@pytest.fixture
def problem():
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, VOCAB, LENGTH).astype(np.int32)
    return (
        tokens,
        rng.standard_normal((LENGTH, D)).astype(np.float32),
        rng.standard_normal((LENGTH, 3 * D)).astype(np.float32),
    )


def embedded_by(table, tokens):
    return torch.from_numpy(np.asarray(table)[tokens[1:]])[None]


@pytest.mark.parametrize("bias", [False, True])
def test_eagle(target, target_params, problem, tmp_path, bias):
    tokens, hidden, _ = problem
    module = EagleModule(bias)
    module.save(tmp_path, CONFIG)
    head = load_eagle(tmp_path, target)
    params = head.load_params(target_params, None)
    states, logits = run(head, params, tokens, hidden)
    with torch.no_grad():
        expected = module(embedded_by(target_params["embed"], tokens), torch.from_numpy(hidden[:-1])[None])[0].numpy()
    np.testing.assert_allclose(states, expected, atol=1e-4)
    np.testing.assert_allclose(logits, expected @ np.asarray(target_params["lm_head"]).T, atol=1e-3)
    assert params["embed"] is target_params["embed"]
    assert head.target_ids(params) is None


LAYOUTS = {
    "published": ({"draft_vocab_size": DRAFT_VOCAB, "architectures": ["LlamaForCausalLMEagle3"]}, {}),
    "speculators": (
        {
            "transformer_layer_config": CONFIG, "draft_vocab_size": DRAFT_VOCAB, "norm_before_residual": True,
            "speculators_model_type": "eagle3",
        },
        {"midlayer.": "layers.0."},
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_eagle3(target, target_params, problem, tmp_path, layout):
    tokens, _, features = problem
    config, names = LAYOUTS[layout]
    module = Eagle3Module(residual_normed=layout == "speculators")
    ids = np.sort(np.random.default_rng(1).permutation(VOCAB)[:DRAFT_VOCAB])
    buffers = {
        "d2t": torch.from_numpy(ids - np.arange(DRAFT_VOCAB)),
        "t2d": torch.from_numpy(np.isin(np.arange(VOCAB), ids)),
    }
    state = module.state_dict()
    module.state_dict = lambda: {rename(k, names): v for k, v in state.items()}
    module.save(tmp_path, ({} if layout == "speculators" else CONFIG) | config, **buffers)
    head = load_eagle3(tmp_path, target)
    params = head.load_params(target_params, None)
    beside = np.concatenate(
        [np.full((LENGTH, D), np.nan, np.float32), features], axis=1
    )  # behind the last hidden state
    states, logits = run(head, params, tokens, beside)
    with torch.no_grad():
        reduced = module.fc(torch.from_numpy(features[:-1]))[None]
        expected = module(embedded_by(target_params["embed"], tokens), reduced)
        expected_logits = module.lm_head(module.norm(expected))[0].numpy()
    np.testing.assert_allclose(states, expected[0].numpy(), atol=1e-4)
    np.testing.assert_allclose(logits, expected_logits, atol=1e-4)
    np.testing.assert_array_equal(head.target_ids(params), ids)


def rename(name, names):
    for old, new in names.items():
        name = name.replace(old, new)
    return name


def test_tables_of_its_own(target, target_params, tmp_path):
    """A copy of the target's embedding is not loaded twice; another one is used."""
    from safetensors.numpy import save_file

    module = EagleModule(bias=False)
    module.save(tmp_path, CONFIG)
    tensors = {k: v.numpy() for k, v in module.state_dict().items()}
    save_file(tensors | {"embed_tokens.weight": np.asarray(target_params["embed"])}, tmp_path / "model.safetensors")
    assert load_eagle(tmp_path, target).load_params(target_params, None)["embed"] is target_params["embed"]
    other = np.asarray(target_params["embed"]) + 1
    save_file(tensors | {"model.embed_tokens.weight": other}, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(load_eagle(tmp_path, target).load_params(target_params, None)["embed"], other)


def test_bad_checkpoints(target, target_params, tmp_path):
    from safetensors.torch import save_file

    module = EagleModule(bias=False)
    tensors = {k: v.contiguous() for k, v in module.state_dict().items()}

    def load(config=CONFIG, **changes):
        kept = {k: v for k, v in (tensors | changes).items() if v is not None}
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file(kept, tmp_path / "model.safetensors")
        load_eagle(tmp_path, target).load_params(target_params, None)

    load()
    with pytest.raises(ValueError, match=r"'fc.weight' is missing"):
        load(**{"fc.weight": None})
    with pytest.raises(ValueError, match=r"'fc.weight' in .* has shape \(32, 96\), the config implies \(32, 64\)"):
        load(**{"fc.weight": torch.zeros(D, 3 * D)})
    with pytest.raises(ValueError, match=r"has no place for: model.layers\.0\.input_layernorm\.weight"):
        load(**{"layers.0.input_layernorm.weight": torch.ones(D)})
    with pytest.raises(ValueError, match="num_hidden_layers=2 of a draft head is not supported"):
        load(CONFIG | {"num_hidden_layers": 2})
    with pytest.raises(ValueError, match="hidden_size=64 of the draft head must be the target's, 32"):
        load(CONFIG | {"hidden_size": 64})
    with pytest.raises(ValueError, match="vocab_size=90 of the draft head must be the target's, 89"):
        load(CONFIG | {"vocab_size": 90})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"draft_vocab_size": 90}))
    with pytest.raises(ValueError, match=r"draft_vocab_size=90 must be in \[1, vocab_size = 89\]"):
        load_eagle3(tmp_path, target)


def test_feature_layers():
    assert feature_layers(32) == (2, 16, 29)
    assert feature_layers(32, {"eagle_aux_hidden_state_layer_ids": [1, 5, 9]}) == (1, 5, 9)
    assert feature_layers(32, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 9]}}) == (1, 5, 9)
    with pytest.raises(ValueError, match=r"\(1, 5, 32\) must be three layers of a model with 32"):
        feature_layers(32, {"eagle_aux_hidden_state_layer_ids": [1, 5, 32]})


def test_the_scanned_program_agrees(target, target_params, problem, tmp_path):
    """The program for GPUs runs anywhere."""
    tokens, hidden, _ = problem
    EagleModule(bias=True).save(tmp_path, CONFIG)
    states = []
    for platform in ("cpu", "gpu"):
        head = load_eagle(tmp_path, Llama(target.config, platform=platform))
        states.append(run(head, head.load_params(target_params, None), tokens, hidden)[0])
    np.testing.assert_allclose(states[0], states[1], atol=1e-4)
