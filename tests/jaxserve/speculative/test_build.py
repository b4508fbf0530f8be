"""From a speculative_config to a proposer."""

import json
import re
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import models
from jaxserve.speculative import (
    SpeculativeConfig,
    Stateless,
    Target,
    make_proposer,
    make_suffix_proposer,
    required_feature_layers,
)
from jaxserve.speculative.hidden_state import HiddenStateProposer
from jaxserve.speculative.ngram import NgramProposer
from models.eagle import Eagle, Eagle3
from models.mtp import MTP
from models.params import is_spec

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 16,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip


def config(method, **options):
    return SpeculativeConfig.from_dict({"method": method, "num_speculative_tokens": 2} | options)


def save(path, specs, changes):
    """A checkpoint of zeros with every tensor that the specs name."""
    tensors = {}
    for spec in jax.tree.leaves(specs, is_leaf=is_spec):
        tensors |= {n.format(i=0): np.zeros(s, np.float32) for n, s in zip(spec.sources, spec.parts, strict=True)}
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    return str(path)


@pytest.fixture(scope="module")
def llama():
    return models.from_config(CONFIG | {"num_hidden_layers": 6}, dtype="float32")


@pytest.fixture(scope="module")
def target(llama):
    return Target(llama, block_size=4, max_model_len=64)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A one-layer model on disk."""
    return save(tmp_path_factory.mktemp("draft"), models.from_config(CONFIG, platform="cpu").specs(), {})


def test_ngram(target):
    assert make_proposer(config("ngram", prompt_lookup_max=3), target) == NgramProposer(2, 3, 3)


def test_suffix(target):
    options = config("suffix", suffix_decoding_max_cached_requests=0, suffix_decoding_max_spec_factor=9.0)
    proposer = make_suffix_proposer(options)
    proposer.add_finished([1, 2, 3])
    assert proposer.propose([1]) == []
    assert proposer.propose([1, 2, 1]) == [2, 1]
    with pytest.raises(ValueError, match="method is 'suffix'; its proposer runs on the host"):
        make_proposer(options, target)


def test_draft_model(target, small):
    proposer = make_proposer(config("draft_model", model=small, draft_sample_method="probabilistic"), target)
    assert proposer.model.config.num_layers == 1
    assert (proposer.vocab_size, proposer.probabilistic, proposer.replicated) == (16, True, False)
    assert proposer.model.rope_length == 64
    wide = replace(target, tensor_parallel_size=2)
    assert make_proposer(config("draft_model", model=small, draft_tensor_parallel_size=1), wide).replicated
    with pytest.raises(ValueError, match="draft_tensor_parallel_size is 3; it must be 1 or the target's, 2"):
        make_proposer(config("draft_model", model=small, draft_tensor_parallel_size=3), wide)
    with pytest.raises(ValueError, match="max_model_len 128; it must be at least the engine's, 256"):
        make_proposer(config("draft_model", model=small), replace(target, max_model_len=256))


def test_heads(target, llama, tmp_path):
    layer = models.from_config(CONFIG, dtype="float32")
    heads = {
        "eagle": (Eagle(layer, llama), {}),
        "eagle3": (Eagle3(layer, llama, draft_vocab_size=5), {"draft_vocab_size": 5}),
        "mtp": (MTP(layer, llama), {}),
    }
    for method, (head, changes) in heads.items():
        path = tmp_path / method
        path.mkdir()
        if method == "mtp":  # behind the target's last layer
            head = _behind(head, llama.config.num_layers)
        proposer = make_proposer(config(method, model=save(path, head.specs(), changes)), target)
        assert isinstance(proposer, HiddenStateProposer)
        assert type(proposer.head).__name__.lower() == method
        proposer.load_params(llama.load_params(None), None)
    assert required_feature_layers(config("eagle3", model=str(tmp_path / "eagle3")), llama) == (2, 3, 3)
    assert required_feature_layers(config("eagle", model=str(tmp_path / "eagle")), llama) == ()


def _behind(head, index):
    class Renamed:
        def specs(self):
            def move(spec):
                names = (re.sub(r"layers\.(0|\{i\})\.", f"layers.{index}.", name) for name in spec.sources)
                return replace(spec, sources=tuple(names))

            return jax.tree.map(move, head.specs(), is_leaf=is_spec)

    return Renamed()


def test_heads_need_a_llama(random_markov):
    target = Target(random_markov(5), block_size=4, max_model_len=64)
    with pytest.raises(ValueError, match="method is 'eagle'; it needs a target of the Llama family, not MarkovLM"):
        make_proposer(config("eagle", model="nowhere"), target)


def test_mtp_without_weights(target):
    with pytest.raises(ValueError, match="model is None; method mtp needs the path of its weights"):
        make_proposer(config("mtp"), target)


@dataclass(frozen=True)
class Repeat(Stateless):
    num_speculative_tokens: int

    def with_num_speculative_tokens(self, count):
        return Repeat(count)

    def propose(self, params, kv, context, mesh):
        raise NotImplementedError


def make_repeat(config, target):
    return Repeat(config.max_drafts + target.block_size)


def test_custom(target):
    assert make_proposer(config("custom", proposer=make_repeat), target) == Repeat(6)


def test_custom_by_name(target, monkeypatch, tmp_path):
    (tmp_path / "my_proposers.py").write_text(
        "from jaxserve.speculative.ngram import NgramProposer\n"
        "def make(config, target): return NgramProposer(config.max_drafts, 1, 2)\n"
    )
    info = tmp_path / "my_proposers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: my_proposers\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[jaxserve.proposers]\nmine = my_proposers:make\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my_proposers:make", "mine"):
        assert make_proposer(config("custom", proposer=name), target) == NgramProposer(2, 1, 2)
    with pytest.raises(ValueError, match=r"proposer is 'other'; it must be a class, .*: mine"):
        make_proposer(config("custom", proposer="other"), target)
    with pytest.raises(ValueError, match="proposer is 'my_proposers:absent', which cannot be imported"):
        make_proposer(config("custom", proposer="my_proposers:absent"), target)
    with pytest.raises(ValueError, match="proposer is 'no_such_module:X', which cannot be imported"):
        make_proposer(config("custom", proposer="no_such_module:X"), target)


def test_custom_that_is_no_proposer(target):
    with pytest.raises(ValueError, match=r"it lacks num_speculative_tokens, .*propose"):
        make_proposer(config("custom", proposer=lambda config, target: object()), target)
