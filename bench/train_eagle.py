"""Train an EAGLE head for a model on its own greedy outputs, on whatever JAX runs on, and say how far it is right.

    python bench/train_eagle.py --output DIR                 the demo model, under an hour on two CPU cores
    python bench/train_eagle.py --output DIR --smoke         a minute: does it run, does the loss fall
    python bench/train_eagle.py --model PATH --output DIR    another model of the Llama family

The head is written in the published layout (config.json, model.safetensors) and is served with
speculative_config={"method": "eagle", "model": DIR, "num_speculative_tokens": 3}.

The recipe is that of EAGLE (Li et al. 2024): the target is frozen; from its hidden state at position p - 1, with a
little uniform noise, and token p, the head is to predict the hidden state at p (smooth L1), and the distribution that
the target's lm_head reads from it (cross entropy, weight 0.1). Prompts that were held out measure the acceptance length
by running the proposer along the target's outputs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

import models
from jaxserve import LLM, SamplingParams
from jaxserve.speculative.hidden_state import HiddenStateProposer
from jaxserve.speculative.proposer import PrefillContext, ProposeContext
from models.base import ForwardInputs
from models.eagle import Eagle
from models.gguf import demo_model_path
from models.heads import head_layer

PAGE = 16
NOISE = 0.2  # of the hidden states, as in EAGLE
CE_WEIGHT, CE_ROWS = 0.1, 128  # rows of a batch whose distributions are compared: logits are wide
CLIP = 0.5
TASKS = (
    "Explain {} to a child.", "Write a short story about {}.", "List five facts about {}.", "Why does {} matter?",
    "Write a poem about {}.", "What are common mistakes with {}?", "Give me a plan to learn about {}.",
    "Summarize the history of {}.",
)  # fmt: skip
TOPICS = (
    "rivers", "the moon", "bread", "chess", "volcanoes", "bees", "money", "sleep", "computers", "music", "trains",
    "the sea", "democracy", "mathematics", "gardens", "ice", "cities", "dogs", "light", "books", "bridges", "tea",
    "wind power", "dinosaurs", "painting", "football", "rain", "the heart", "maps", "time", "forests", "salt",
    "robots", "kites", "deserts", "glass", "whales", "spelling", "clocks", "mountains", "paper", "friendship",
    "electricity", "cheese", "the Romans", "magnets", "vaccines", "stars", "shoes", "honesty", "soil", "recycling",
    "swimming", "languages", "castles", "birds", "cooking", "photography", "bicycles", "patience",
)  # fmt: skip


@dataclass(frozen=True)
class Corpus:
    """Token ids [N, T] with the target's hidden states [N, T, D]; prompt and length [N] count tokens."""

    tokens: np.ndarray
    hidden: np.ndarray
    prompt: np.ndarray
    length: np.ndarray

    def take(self, index: Any) -> Corpus:
        return Corpus(self.tokens[index], self.hidden[index], self.prompt[index], self.length[index])

    @property
    def num_output_tokens(self) -> int:
        return int((self.length - self.prompt).sum())


# ---- the target's own outputs ----


def generate(path: str | Path, count: int, max_tokens: int) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, greedy output ids) of `count` conversations."""
    llm = LLM(path, dtype="float32", max_model_len=max_tokens + 64, max_num_seqs=16)
    questions = [task.format(topic) for topic, task in itertools.product(TOPICS, TASKS)]
    order = np.random.default_rng(0).permutation(len(questions))[:count]
    chats = [[{"role": "user", "content": questions[i]}] for i in order]
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=max_tokens))
    return [(list(o.prompt_token_ids), list(o.outputs[0].token_ids)) for o in outputs]


def make_corpus(model: Any, params: Any, texts: list[tuple[list[int], list[int]]]) -> Corpus:
    width = -(-max(len(p) + len(o) for p, o in texts) // PAGE) * PAGE
    tokens = np.zeros((len(texts), width), np.int32)
    for row, (prompt, output) in zip(tokens, texts, strict=True):
        row[: len(prompt) + len(output)] = prompt + output
    prompt = np.array([len(p) for p, _ in texts], np.int32)
    length = prompt + np.array([len(o) for _, o in texts], np.int32)
    states = jax.jit(partial(hidden_states, model))
    batches = [states(params, tokens[i : i + 8], length[i : i + 8]) for i in range(0, len(tokens), 8)]
    return Corpus(tokens, np.concatenate([np.asarray(b) for b in batches]), prompt, length)


def hidden_states(model: Any, params: Any, tokens: jax.Array, length: jax.Array) -> jax.Array:
    """[N, T, D] of whole texts."""
    positions, tables = layout(tokens.shape, length)
    kv = model.init_kv(tables.size + 1, PAGE, None)
    return model.forward(params, kv, ForwardInputs(tokens, positions, tables), None)[0]


def layout(shape: tuple[int, ...], length: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Positions [N, T] of texts, -1 behind their ends, and block tables [N, P] that give each its own pages."""
    n, width = shape
    index = jnp.arange(width, dtype=jnp.int32)
    pages = -(-width // PAGE)
    return jnp.where(index < length[:, None], index, -1), 1 + jnp.arange(n * pages, dtype=jnp.int32).reshape(n, pages)


# ---- training ----


def loss_of(head: Eagle, own: Any, shared: Any, batch: Corpus, key: jax.Array) -> jax.Array:
    params = shared | own
    noise_key, row_key = jax.random.split(key)
    positions, tables = layout(batch.tokens.shape, batch.length)
    positions = jnp.where(positions >= 1, positions, -1)
    before = jnp.pad(batch.hidden, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    before = before + jax.random.uniform(noise_key, before.shape, minval=-NOISE / 2, maxval=NOISE / 2)
    kv = head.init_kv(tables.size + 1, PAGE, None)
    states, _ = head.forward(params, kv, ForwardInputs(batch.tokens, positions, tables), before, None)
    counted = (positions >= batch.prompt[:, None] - 1).reshape(-1)
    states, wanted = (x.reshape(-1, x.shape[-1]) for x in (states, batch.hidden))
    error = jnp.abs(states - wanted)
    smooth = jnp.where(error < 1, 0.5 * error**2, error - 0.5).mean(-1)
    regression = jnp.sum(smooth * counted) / jnp.sum(counted)
    rows = jax.random.choice(row_key, len(counted), (CE_ROWS,), p=counted / jnp.sum(counted))
    target = jax.nn.softmax(head.logits(params, wanted[rows]))
    entropy = -jnp.mean(jnp.sum(target * jax.nn.log_softmax(head.logits(params, states[rows])), axis=-1))
    return regression + CE_WEIGHT * entropy


def adam(params: Any, gradients: Any, moments: Any, step: jax.Array, rate: jax.Array) -> tuple[Any, Any]:
    """Kingma & Ba 2015, with the gradient clipped by its global norm."""
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients)))
    gradients = jax.tree.map(lambda g: g * jnp.minimum(1.0, CLIP / (norm + 1e-9)), gradients)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], gradients)
    second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, moments[1], gradients)
    new = jax.tree.map(
        lambda p, m, v: p - rate * (m / (1 - 0.9**step)) / (jnp.sqrt(v / (1 - 0.95**step)) + 1e-8),
        params,
        first,
        second,
    )
    return new, (first, second)


def train(head: Eagle, params: Any, corpus: Corpus, steps: int, batch: int, peak: float, seconds: float) -> Any:
    """The trained parameters, after `steps` steps or `seconds`, whichever come first: the rate falls to 0 by then."""
    own = {name: params[name] for name in head.specs()}
    shared = {name: value for name, value in params.items() if name not in own}
    moments = (jax.tree.map(jnp.zeros_like, own), jax.tree.map(jnp.zeros_like, own))

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(own, moments, shared, step, progress, tokens, hidden, prompt, length):
        key = jax.random.fold_in(jax.random.key(0), step)
        some = Corpus(tokens, hidden, prompt, length)
        loss, gradients = jax.value_and_grad(partial(loss_of, head))(own, shared, some, key)
        rate = peak * jnp.minimum(progress / 0.05, 1.0) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        return *adam(own, gradients, moments, step + 1.0, rate), loss

    started, losses = time.perf_counter(), []
    for step, some in enumerate(batches(corpus, batch, steps)):
        elapsed = time.perf_counter() - started
        progress = max((step + 1) / steps, elapsed / seconds)
        if progress > 1:
            break
        arrays = (some.tokens, some.hidden, some.prompt, some.length)
        own, moments, loss = update(own, moments, shared, jnp.float32(step), jnp.float32(progress), *arrays)
        losses.append(float(loss))
        if (step + 1) % max(1, steps // 20) == 0:
            recent = np.mean(losses[-max(1, steps // 20) :])
            print(f"step {step + 1:5d}  loss {recent:.4f}  {elapsed:6.0f} s", flush=True)
    print(f"{len(losses)} steps, loss {np.mean(losses[-10:]):.4f}")
    return shared | own


def batches(corpus: Corpus, size: int, count: int) -> Iterator[Corpus]:
    """Epochs in random order."""
    rng, order = np.random.default_rng(0), np.empty(0, int)
    for _ in range(count):
        if len(order) < size:
            order = np.concatenate([order, rng.permutation(len(corpus.tokens))])
        yield corpus.take(order[:size])
        order = order[size:]


# ---- how far it is right ----


def acceptance(head: Eagle, params: Any, corpus: Corpus, drafts: int) -> tuple[float, list[float]]:
    """Mean tokens a greedy step, and the share of steps in which each draft was accepted.

    The outputs are known, so verification is a comparison: the proposer runs along them as it would in the engine.
    """
    proposer = HiddenStateProposer(head, drafts, head.layer.vocab_size, PAGE)
    propose = jax.jit(partial(proposer.propose, mesh=None), donate_argnums=1)
    kv = prefilled(proposer, params, corpus)
    n = len(corpus.tokens)
    known, emitted = corpus.prompt + 1, np.ones(n, np.int32)  # the first step has no drafts
    accepted, steps = np.zeros(drafts), 0
    while (running := known < corpus.length).any():
        proposal = propose(params, kv, propose_context(corpus, known, emitted, running, drafts))
        kv = proposal.kv
        follows = np.minimum(known[:, None] + np.arange(drafts), corpus.tokens.shape[1] - 1)
        inside = known[:, None] + np.arange(drafts) < corpus.length[:, None]
        right = (np.asarray(proposal.drafts) == np.take_along_axis(corpus.tokens, follows, axis=1)) & inside
        right = np.cumprod(right & running[:, None], axis=1)
        accepted, steps = accepted + right.sum(0), steps + int(running.sum())
        emitted = np.where(running, np.minimum(right.sum(1) + 1, corpus.length - known), 0).astype(np.int32)
        known = known + emitted
    return 1 + accepted.sum() / steps, (accepted / steps).tolist()


def prefilled(proposer: HiddenStateProposer, params: Any, corpus: Corpus) -> Any:
    """KV of all prompts, one tile each."""
    positions, tables = layout(corpus.tokens.shape, jnp.asarray(corpus.prompt - 1))
    following = np.pad(corpus.tokens, ((0, 0), (0, 1)))[:, 1:]
    hidden = jnp.asarray(corpus.hidden)
    context = PrefillContext(
        jnp.asarray(corpus.tokens), jnp.asarray(following), positions, tables, hidden, hidden[:, 0]
    )
    kv = proposer.init_kv(tables.size + 1, PAGE, None)
    return jax.jit(partial(proposer.prefill, mesh=None), donate_argnums=1)(params, kv, context)


def propose_context(
    corpus: Corpus, known: np.ndarray, emitted: np.ndarray, running: np.ndarray, drafts: int
) -> ProposeContext:
    n, width = corpus.tokens.shape
    first = known - emitted - 1  # position of the row that the step began with
    rows = np.clip(first[:, None] + np.arange(drafts + 1), 0, width - 1)
    state = corpus.hidden[np.arange(n)[:, None], rows]
    previous = corpus.hidden[np.arange(n), np.maximum(first - 1, 0)]
    _, tables = layout((n, width), jnp.asarray(corpus.length))
    i32 = partial(jnp.asarray, dtype=jnp.int32)
    return ProposeContext(
        tokens=i32(corpus.tokens), num_tokens=i32(known), n_emitted=i32(emitted), run=jnp.asarray(running),
        block_tables=tables, hidden=jnp.asarray(state), previous_hidden=jnp.asarray(previous),
        seed=jnp.zeros((n, 2), jnp.uint32), prompt_len=i32(corpus.prompt), max_tokens_total=i32(known + drafts + 2),
        temperature=jnp.zeros(n),
    )  # fmt: skip


# ---- the checkpoint ----


def save(head: Eagle, params: Any, directory: Path) -> int:
    """Write the head in the published layout, bfloat16; returns its bytes."""
    c = head.layer.config
    w = {name: np.asarray(x, np.float32) for name, x in params["layers"][0].items()}
    qkv = np.moveaxis(w["wqkv"], 0, -1)  # [H, G+2, E, D]
    pre = "layers.0."
    tensors = {
        "fc.weight": np.asarray(params["fc"]).T,
        pre + "self_attn.q_proj.weight": qkv[:, :-2].reshape(-1, c.hidden_size),
        pre + "self_attn.k_proj.weight": qkv[:, -2].reshape(-1, c.hidden_size),
        pre + "self_attn.v_proj.weight": qkv[:, -1].reshape(-1, c.hidden_size),
        pre + "self_attn.o_proj.weight": w["wo"].reshape(-1, c.hidden_size).T,
        pre + "mlp.gate_proj.weight": w["gate_up"][:, 0].T,
        pre + "mlp.up_proj.weight": w["gate_up"][:, 1].T,
        pre + "mlp.down_proj.weight": w["down"].T,
        pre + "post_attention_layernorm.weight": w["mlp_norm"],
    }
    directory.mkdir(parents=True, exist_ok=True)
    small = {name: np.ascontiguousarray(x).astype(ml_dtypes.bfloat16) for name, x in tensors.items()}
    save_file(small, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(head_config(c), indent=2))
    return sum(x.nbytes for x in small.values())


def head_config(c: models.ModelConfig) -> dict[str, Any]:
    """config.json of a one-layer head as wide as the target."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "bias": False,
        "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size, "num_hidden_layers": 1,
        "num_attention_heads": c.num_heads, "num_key_value_heads": c.num_kv_heads, "head_dim": c.head_dim,
        "vocab_size": c.vocab_size, "rms_norm_eps": c.rms_norm_eps, "rope_theta": c.rope.theta,
        "max_position_embeddings": c.max_position_embeddings, "tie_word_embeddings": False,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="target: a directory or .gguf file; default: the demo model")
    parser.add_argument("--output", type=Path, required=True, help="directory for the head")
    parser.add_argument("--sequences", type=int, default=480)
    parser.add_argument("--tokens", type=int, default=128, help="of each output")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--minutes", type=float, default=45, help="of training, at most; default: 45")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--drafts", type=int, default=3, help="K that is measured")
    parser.add_argument("--smoke", action="store_true", help="24 sequences of 24 tokens, 30 steps of 2")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    if args.smoke:
        args.sequences, args.tokens, args.steps, args.batch = 24, 24, 30, 2
    path = args.model or demo_model_path()
    started = time.perf_counter()
    texts = generate(path, args.sequences, args.tokens)
    generated = time.perf_counter()
    target = models.load_model(path, "float32")
    target_params = target.load_params(None)
    corpus = make_corpus(target, target_params, texts)
    held_out = max(4, len(texts) // 12)
    head = Eagle(head_layer(head_config(target.config), target), target)
    params = head.load_params(target_params, None)
    before, _ = acceptance(head, params, corpus.take(slice(0, held_out)), args.drafts)
    seen = corpus.take(slice(held_out, None))
    params = train(head, params, seen, args.steps, args.batch, args.rate, 60 * args.minutes)
    length, rates = acceptance(head, params, corpus.take(slice(0, held_out)), args.drafts)
    figures = {
        "output_tokens": corpus.num_output_tokens, "generate_s": generated - started,
        "total_s": time.perf_counter() - started, "bytes": save(head, params, args.output),
        "untrained_length": before, "acceptance_length": length, "acceptance_by_position": rates,
    }  # fmt: skip
    for name, value in figures.items():
        print(f"{name:24s} {value}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
