"""Repetition, frequency and presence penalties.

What they need to know of a request, how often each token is in its output and which are in its prompt, lives on the
device and is updated by the tokens that a step emits: no histogram is rebuilt and no history sent, so the cost does not
depend on the length of an output. Under tensor parallelism slot s lives on device s mod G, where its rows are sampled.

Axes: G devices, n slots of one device, V vocabulary, W = ceil(V/32) words of bits.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct

from jaxserve.sampling.builtin import unpack_bits
from models.base import Array


@struct.dataclass
class Penalties:
    """Of every slot, [S] float32."""

    repetition: Array  # 1 = off
    frequency: Array  # 0 = off
    presence: Array  # 0 = off


@struct.dataclass
class TokenUse:
    """counts: [n, V], how often each token is in the output. prompt: [n, W] uint32, a bit for each in the prompt."""

    counts: Array
    prompt: Array


def empty_use(slots: int, vocab: int, max_model_len: int) -> TokenUse:
    """Nothing used. Counts are of the smallest type that can count to max_model_len."""
    kind = next(t for t in (jnp.uint8, jnp.uint16, jnp.uint32) if jnp.iinfo(t).max >= max_model_len)
    return TokenUse(jnp.zeros((slots, vocab), kind), jnp.zeros((slots, -(-vocab // 32)), jnp.uint32))


def count_history(use: TokenUse, slot: jax.Array, tokens: jax.Array, num: jax.Array, prompt_len: jax.Array) -> TokenUse:
    """Start over at a slot with a history tokens [l] of which num are known. A slot past the end changes nothing."""
    vocab, words = use.counts.shape[1], use.prompt.shape[1]
    at = jnp.arange(len(tokens))
    output = jnp.where((at >= prompt_len) & (at < num), tokens, vocab)
    prompt = jnp.where(at < prompt_len, tokens, words * 32)
    counts = jnp.zeros(vocab, use.counts.dtype).at[output].add(1, mode="drop")
    seen = jnp.zeros(words * 32, bool).at[prompt].set(True, mode="drop").reshape(words, 32)
    bits = jnp.sum(seen.astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32), axis=1, dtype=jnp.uint32)
    return TokenUse(
        use.counts.at[slot].set(counts, mode="drop"),
        use.prompt.at[slot].set(bits, mode="drop"),
    )


def count_emitted(use: TokenUse, tokens: jax.Array) -> TokenUse:
    """Add what a step emitted: tokens [b, 1+K] of the first b slots, -1 = none."""
    rows = jnp.arange(len(tokens))[:, None]
    at = jnp.where(tokens >= 0, tokens, use.counts.shape[1])
    return replace(use, counts=use.counts.at[rows, at].add(1, mode="drop"))


def penalize(logits: jax.Array, penalties: Penalties, use: TokenUse, drafts: jax.Array) -> jax.Array:
    """logits [b, 1+K, V] float32 of the first b slots; row j comes after drafts[:, :j] ([b, K] int32, -1 = none).

    A token of the prompt or the output has its logit divided by the repetition penalty where it is positive and
    multiplied where not; then frequency * count and presence * (count > 0) of the output are taken from it.
    """
    b, width, vocab = logits.shape
    penalties = jax.tree.map(lambda x: x[:, None, None], penalties)
    counts = use.counts[:b, None]  # [b, 1, V]
    in_prompt = unpack_bits(use.prompt[:b, None], vocab)
    result = _apply(logits, penalties, counts, in_prompt)
    if width == 1:
        return result
    # The drafts before a row count as its output. They touch at most K logits of it, which are computed once more.
    k = drafts.shape[1]
    ids = jnp.broadcast_to(jnp.maximum(drafts, 0)[:, None], (b, width, k))
    before = (jnp.arange(k) < jnp.arange(width)[:, None]) & (drafts >= 0)[:, None]  # [b, 1+K, K]
    repeats = jnp.sum((drafts[:, None, :, None] == drafts[:, None, None, :]) & before[:, :, None, :], axis=-1)
    take = jax.vmap(jax.vmap(lambda row, i: row[i]))
    raw = take(logits, ids)
    total = jnp.take_along_axis(use.counts[:b], ids[:, 0], axis=1)[:, None].astype(jnp.int32) + repeats
    prompt = jnp.take_along_axis(in_prompt[:, 0], ids[:, 0], axis=1)[:, None]
    fixed = _apply(raw, penalties, total, prompt)
    put = jax.vmap(jax.vmap(lambda row, i, x: row.at[i].set(x, mode="drop")))
    return put(result, jnp.where(before, ids, vocab), fixed)


def _apply(logits: jax.Array, penalties: Penalties, counts: jax.Array, in_prompt: jax.Array) -> jax.Array:
    in_output = counts > 0
    factor = jnp.where(logits > 0, 1 / penalties.repetition, penalties.repetition)
    logits = logits * jnp.where(in_output | in_prompt, factor, 1.0)
    return logits - penalties.frequency * counts.astype(jnp.float32) - jnp.where(in_output, penalties.presence, 0.0)
