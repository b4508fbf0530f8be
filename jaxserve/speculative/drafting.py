"""What proposers with a distribution share: picking one draft a slot, and where a draft's weights live."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.speculative.proposer import STREAM_DRAFT, ProposeContext
from pallas_kernels.draw import draw, random_words


def pick(
    logits: jax.Array, context: ProposeContext, index: jax.Array | int, probabilistic: bool
) -> tuple[jax.Array, jax.Array | None]:
    """The draft at `index` of every slot: tokens [B] int32, and the logits it was drawn from.

    logits: [B, V] float32. Without `probabilistic`, and for slots of temperature 0, it is the argmax. The logits [B, V]
    (None without `probabilistic`) are those of q = softmax(result): temperature applied, -inf but for the argmax where
    that is 0. The draw is a pure function of (seed, output position of the window, index): a later window that reaches
    the same position draws anew, as block verification needs.
    """
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if not probabilistic:
        return best, None
    with jax.named_scope("draw_draft"):
        warm = context.temperature[:, None] > 0
        z = (logits - jnp.max(logits, axis=-1, keepdims=True)) / jnp.where(warm, context.temperature[:, None], 1.0)
        only_best = jnp.where(jnp.arange(logits.shape[-1]) == best[:, None], 0.0, -jnp.inf)
        q = jnp.where(warm, z, only_best)
        words = random_words(context.seed, context.num_tokens - context.prompt_len, STREAM_DRAFT + index)
        return draw(q, lambda values, ids: jnp.exp(values), words), q


def fit_vocabulary(logits: jax.Array, vocab_size: int) -> jax.Array:
    """logits [B, W] as [B, V]: both widths may be padded past the tokenizer's vocabulary, and differently."""
    width = logits.shape[-1]
    if width >= vocab_size:
        return logits[..., :vocab_size]
    return jnp.pad(logits, ((0, 0), (0, vocab_size - width)), constant_values=-jnp.inf)


def replicate(tree: Any, mesh: Mesh | None) -> Any:
    """Whole copies on every device of the mesh: a small draft then needs no collectives in its K serial steps."""
    return tree if mesh is None else jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))
