"""One declaration of the weights gives initialisation, abstract shapes, shardings and the checkpoint's layout."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import models
from models.base import ForwardInputs
from models.config import ModelConfig
from models.llama import Llama
from models.params import abstract_params, is_spec, load_params, random_params
from models.sharding import make_mesh, partition_spec, sharding

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 32, "hidden_size": 24, "intermediate_size": 40,
    "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
KINDS = {
    "llama": {"attention_bias": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    # 8 divides nothing here but the feed-forward width.
    "3 KV heads": {"num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 33},
}
PLATFORMS = ["cpu", "gpu"]


@pytest.fixture(scope="module")
def mesh():
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices")
    return make_mesh(jax.devices()[:8])


class InMemory:
    """A checkpoint of random tensors for everything that `specs` reads."""

    path = Path("memory")
    generation_config = None

    def __init__(self, specs, num_layers):
        self.config = {}
        rng = np.random.default_rng(0)
        self.tensors = {}
        for spec in leaves(specs):
            for pattern, shape in zip(spec.sources, spec.parts, strict=True):
                for i in range(num_layers):
                    name = pattern.format(i=i)
                    if name not in self.tensors:
                        self.tensors[name] = 0.3 * rng.standard_normal(shape, np.float32)

    def names(self):
        return self.tensors.keys()

    def shape(self, name):
        return self.get(name).shape

    def get(self, name):
        if name not in self.tensors:
            raise ValueError(f"tensor {name!r} is missing from {self.path}")
        return self.tensors[name]


def leaves(specs):
    return jax.tree.leaves(specs, is_leaf=is_spec)


def declare(kind, platform, dtype="float32"):
    """The declaration of a model, and a checkpoint for it."""
    model = models.from_config(SHAPE | KINDS[kind], dtype, platform)
    return model.specs(), InMemory(model.specs(), model.config.num_layers)


def equal(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def described(params):
    return jax.tree.map(lambda x: (x.shape, x.dtype), params)


def agree_on_mesh(params, abstract):
    """Shape, dtype and sharding of every array are the declared ones."""
    assert described(params) == described(abstract)
    for array, want in zip(jax.tree.leaves(params), jax.tree.leaves(abstract), strict=True):
        assert array.sharding.is_equivalent_to(want.sharding, array.ndim)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mesh_of_eight_holds_what_one_device_holds(kind, platform, mesh):
    specs, checkpoint = declare(kind, platform, "bfloat16")
    one, eight = load_params(specs, checkpoint, None), load_params(specs, checkpoint, mesh)
    assert equal(one, eight)
    assert described(one) == described(abstract_params(specs, None))
    agree_on_mesh(eight, abstract_params(specs, mesh))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_what_is_split(platform, mesh):
    """The large arrays are spread out: each device has an eighth of them."""
    specs, checkpoint = declare("llama", platform)
    params = load_params(specs, checkpoint, mesh)
    layer = params["layers"][1]
    split = [params["embed"], params["lm_head"], *(layer[n] for n in ("wqkv", "bqkv", "wo", "gate_up", "down"))]
    whole = [params["final_norm"], *(layer[n] for n in ("attn_norm", "mlp_norm", "bo"))]
    assert all(x.addressable_shards[3].data.size * 8 == x.size for x in split)
    assert all(x.addressable_shards[3].data.size == x.size for x in whole)


def test_random_weights(mesh):
    """The same on every mesh, another for another seed, and of the declared scale."""
    everything, _ = declare("llama", "gpu")
    specs = {name: everything["layers"][0][name] for name in ("wqkv", "down", "mlp_norm")}
    specs["another"] = specs["wqkv"]
    params, on_mesh = random_params(specs, 7, None), random_params(specs, 7, mesh)
    assert equal(params, on_mesh)
    agree_on_mesh(on_mesh, abstract_params(specs, mesh))
    assert not equal(params, random_params(specs, 8, None))
    assert (params["mlp_norm"] == 1).all()
    assert np.std(params["wqkv"]) == pytest.approx(24**-0.5, rel=0.05)
    assert np.std(params["down"]) == pytest.approx(40**-0.5, rel=0.05)
    assert not np.array_equal(params["wqkv"], params["another"])


def test_where_the_tensors_go():
    specs, checkpoint = declare("llama", "cpu")
    params = load_params(specs, checkpoint, None)
    layer, prefix = params["layers"][1], "model.layers.1."

    def tensor(name):
        return checkpoint.get(prefix + name)

    x = np.random.default_rng(1).standard_normal(24).astype(np.float32)
    qkv = np.einsum("d,dhge->hge", x, layer["wqkv"]) + layer["bqkv"]  # [H, G+2, E]
    q, k, v = (tensor(f"self_attn.{n}_proj.weight") @ x + tensor(f"self_attn.{n}_proj.bias") for n in "qkv")
    np.testing.assert_allclose(qkv[:, :2], q.reshape(8, 2, 4), atol=1e-5)  # query head i belongs to KV head i // 2
    np.testing.assert_allclose(qkv[:, 2], k.reshape(8, 4), atol=1e-5)
    np.testing.assert_allclose(qkv[:, 3], v.reshape(8, 4), atol=1e-5)
    np.testing.assert_array_equal(layer["wo"].reshape(64, 24), tensor("self_attn.o_proj.weight").T)
    np.testing.assert_array_equal(layer["gate_up"][:, 0], tensor("mlp.gate_proj.weight").T)
    np.testing.assert_array_equal(layer["gate_up"][:, 1], tensor("mlp.up_proj.weight").T)
    np.testing.assert_array_equal(layer["attn_norm"], tensor("input_layernorm.weight"))
    np.testing.assert_array_equal(params["lm_head"], checkpoint.get("lm_head.weight"))


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.bias", "lm_head.weight"]
)
def test_missing_and_misshapen_tensors_are_named(name, platform):
    specs, checkpoint = declare("llama", platform)
    right = checkpoint.tensors[name]
    for wrong in (right[:-1], right.T[None], right.reshape(-1)[: right.size // 2]):
        checkpoint.tensors[name] = wrong
        with pytest.raises(ValueError, match=f"{name}.*{wrong.shape[0]}.*{right.shape[0]}"):
            load_params(specs, checkpoint, None)
    del checkpoint.tensors[name]
    with pytest.raises(ValueError, match=name):
        load_params(specs, checkpoint, None)


@pytest.mark.parametrize(("kind", "devices"), [("llama", 8), ("3 KV heads", 2)])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_forward_pass_is_the_same_on_a_mesh(kind, devices, platform, mesh):
    _, checkpoint = declare(kind, platform)
    model = Llama(ModelConfig.from_hf(SHAPE | KINDS[kind]), "float32", platform, checkpoint)
    tokens = np.random.default_rng(0).integers(0, 32, (2, 6)).astype(np.int32)
    positions = np.array([range(6), [0, 1, 2, -1, -1, -1]], np.int32)
    inputs = ForwardInputs(tokens, positions, np.array([[1, 2], [3, 4]], np.int32))

    def run(mesh):
        def step(params, kv):
            hidden, kv = model.forward(params, kv, inputs, mesh)
            return model.logits(params, hidden.reshape(12, -1)), kv[0].k

        compiled = jax.jit(step, compiler_options={"xla_backend_optimization_level": 0})
        with jax.default_matmul_precision("highest"):
            kv = model.init_kv(5, 4, mesh)
            logits, keys = compiled(model.load_params(mesh), kv)
        assert keys.sharding.is_equivalent_to(kv[0].k.sharding, keys.ndim)  # each device keeps its own heads
        return np.asarray(logits)[np.flatnonzero(positions.ravel() >= 0)], np.asarray(keys)[1:]

    for actual, expected in zip(run(make_mesh(mesh.devices[:devices])), run(None), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)


def test_partition_spec(mesh):
    assert partition_spec(("vocab", None), (64, 3), mesh) == PartitionSpec("tp", None)
    assert partition_spec(("vocab", "embed"), (63, 8), mesh) == PartitionSpec(None, None)  # 8 does not divide 63
    assert sharding(("vocab",), (64,), None) is None
    with pytest.raises(ValueError, match=r"\('vocab',\) do not describe shape \(64, 3\)"):
        partition_spec(("vocab",), (64, 3), mesh)


def test_tensors_without_a_place_are_refused(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    config = dict(
        architectures=["LlamaForCausalLM"], vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    shapes = {
        name.format(i=0): shape
        for spec in jax.tree.leaves(models.from_config(config, "float32").specs(), is_leaf=is_spec)
        for name, shape in zip(spec.sources, spec.parts, strict=True)
    }
    tensors = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, str(tmp_path / "model.safetensors"))
    models.load_model(tmp_path, "float32").load_params(None)

    save_file(
        tensors | {"model.layers.0.self_attn.q_proj.bias": np.ones(16, np.float32)}, str(tmp_path / "model.safetensors")
    )
    with pytest.raises(ValueError, match=r"no place for: model\.layers\.0\.self_attn\.q_proj\.bias"):
        models.load_model(tmp_path, "float32").load_params(None)
