"""Grammars inside the step: what each row may say, and where its text stands afterwards.

All tables lie in one arena of words, and a state is the address of its record: the address of its mask, its flags, the
token it forces, and the next state for every class of tokens. So masks and states are gathers, whatever grammars are in
the batch; a request without one stays in state FREE, where everything is legal. Masks of requests that are matched on
the host come in beside the arena.

Axes: B slots, K drafts, L history, A words of the arena, W words of a mask.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct

from models.base import Array

FREE = 0
HEADER = 3  # words of a record before its transitions
EXHAUSTED, DEAD = 1, 2  # flags
NO_TABLE, ON_HOST = 0, -1  # in place of the address of a table's classes


@struct.dataclass
class Grammars:
    """arena: [A] uint32. host_masks: [S, 1+K, W] uint32, for the rows of requests that are matched on the host."""

    arena: Array
    host_masks: Array


@struct.dataclass
class GrammarRow:
    """Of one request, int32 scalars. classes: address of its table's token classes, two to a word; or NO_TABLE or
    ON_HOST. start: the table's first state."""

    classes: Array
    start: Array


def put_words(grammars: Grammars, address: jax.Array, words: jax.Array) -> Grammars:
    """Part of a table, words [n] uint32, at an address of the arena."""
    return replace(grammars, arena=jax.lax.dynamic_update_slice(grammars.arena, words, (address,)))


def put_host_masks(grammars: Grammars, rows: jax.Array, words: jax.Array) -> Grammars:
    """Masks words [n, W] of rows [2, n] int32: slots, past the end = nothing, and places in their windows."""
    return replace(grammars, host_masks=grammars.host_masks.at[rows[0], rows[1]].set(words, mode="drop"))


def advance(arena: jax.Array, classes: jax.Array, state: jax.Array, token: jax.Array) -> jax.Array:
    """The state after a token, all int32 of one shape; the same state without a table, in FREE, and for token -1."""
    moves = (classes > NO_TABLE) & (state != FREE) & (token >= 0)
    pair = arena[jnp.where(moves, classes + token // 2, 0)]
    token_class = (pair >> (16 * (token & 1)).astype(jnp.uint32)) & 0xFFFF
    following = arena[jnp.where(moves, state + HEADER + token_class.astype(jnp.int32), 0)]
    return jnp.where(moves, following.astype(jnp.int32), state)


def after_token(
    arena: jax.Array, end: tuple[int, ...] | None, row: GrammarRow, state: jax.Array, history: jax.Array, num: jax.Array
) -> jax.Array:
    """The state of one slot once its history [L] has `num` tokens, from the one before the last of them.

    end: the marker after which a grammar begins that is still FREE; None where there are no thinking sections.
    """
    following = advance(arena, row.classes, state, history[num - 1])
    if end is None:
        return following
    index = num - len(end) + jnp.arange(len(end))
    ended = (num >= len(end)) & jnp.all(history[jnp.maximum(index, 0)] == jnp.array(end))
    return jnp.where((row.classes > NO_TABLE) & (state == FREE) & ended, row.start, following)


def states_of_window(
    arena: jax.Array,
    end: tuple[int, ...] | None,
    row: GrammarRow,
    state: jax.Array,
    history: jax.Array,
    num: jax.Array,
    drafts: int,
) -> jax.Array:
    """[1+K] int32 of one slot: the state before the token at num, num + 1, ... of its history [L]."""

    def step(state: jax.Array, ahead: jax.Array) -> tuple[jax.Array, jax.Array]:
        following = after_token(arena, end, row, state, history, num + ahead + 1)
        return following, following

    _, rest = jax.lax.scan(step, state, jnp.arange(drafts))
    return jnp.concatenate([state[None], rest])


def allowed_words(grammars: Grammars, classes: jax.Array, states: jax.Array) -> jax.Array:
    """[B, 1+K, W] uint32: the tokens that are legal in states [B, 1+K], or as the host says where classes [B] do."""
    b, width = states.shape
    words = grammars.host_masks.shape[-1]
    address = grammars.arena[states.reshape(-1)].astype(jnp.int32)
    of_tables = jax.vmap(lambda a: jax.lax.dynamic_slice(grammars.arena, (a,), (words,)))(address)
    on_host = (classes == ON_HOST)[:, None, None]
    return jnp.where(on_host, grammars.host_masks[:b, :width], of_tables.reshape(b, width, words))


def legal_prefix(words: jax.Array, drafts: jax.Array) -> jax.Array:
    """[B, 1+K] bool: rows whose drafts before them are all legal. words [B, 1+K, W], drafts [B, K]."""
    token = jnp.maximum(drafts, 0)
    word = jnp.take_along_axis(words[:, :-1], (token // 32)[..., None], axis=-1)[..., 0]
    legal = ((word >> (token % 32).astype(jnp.uint32)) & 1).astype(bool)
    first = jnp.ones((len(drafts), 1), bool)
    return jnp.concatenate([first, jnp.cumprod(legal, axis=1).astype(bool)], axis=1)


def flags(arena: jax.Array, states: jax.Array) -> jax.Array:
    """EXHAUSTED: nothing but a stop id is legal; DEAD: an illegal token came. [...] int32."""
    return arena[states + 1].astype(jnp.int32)


def forced_tokens(arena: jax.Array, classes: jax.Array, state: jax.Array, count: int) -> jax.Array:
    """[B, count] int32: the tokens by which states [B] have to go on, -1 after the last."""

    def step(state: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        token = jnp.where(classes > NO_TABLE, jax.lax.bitcast_convert_type(arena[state + 2], jnp.int32), -1)
        following = advance(arena, classes, state, token)
        return jnp.where(token >= 0, following, FREE), token

    return jnp.moveaxis(jax.lax.scan(step, state, None, length=count)[1], 0, 1)
