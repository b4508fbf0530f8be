"""The last step: from the logits of every slot's rows to tokens, to the new batch, and to drafts for the step after."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxserve.batch import BatchState
from jaxserve.sampling.logprobs import Logprobs
from jaxserve.sampling.sampler import Window
from jaxserve.sampling.slots import deal_slots, put_slots, use_of_emitted
from jaxserve.sampling.thinking import sections_of_window
from jaxserve.speculative.continuation import Continuation, drafts_of_continuation
from jaxserve.speculative.proposer import ProposeContext
from jaxserve.step import Hidden, Parts, Weights, view_of, window_positions
from models.base import Array


@struct.dataclass
class StepOutput:
    """What the host learns. tokens [B, 1+K] int32, -1 after the last; n_emitted, n_drafts [B] int32, how many of them
    there are and how many drafts were verified; finite [B] bool; logprobs of [B, 1+K]."""

    tokens: Array
    n_emitted: Array
    n_drafts: Array
    finite: Array
    logprobs: Logprobs | None  # None once it is known that nobody asked


def sample(
    parts: Parts, shaped: bool, drafts: int, state: BatchState, logits: jax.Array, run: jax.Array
) -> tuple[BatchState, StepOutput]:
    """One token for every slot that runs, or as many as its first `drafts` drafts were right about."""
    b = len(run)
    rows = jax.tree.map(lambda x: x[:b], state.rows)
    run = run & state.active[:b]
    used, _ = window_positions(view_of(state), run, drafts)
    window = Window(rows, state.tokens[:b], state.drafts[:b, :drafts], used, state.section[:b])
    own = (state.use,) if state.draft_logits is None else (state.use, state.draft_logits)

    def verify(logits: jax.Array, window: Window, use: Any, draft_logits: jax.Array | None = None) -> Any:
        if draft_logits is not None:
            draft_logits = draft_logits[: len(logits), :drafts]
        return parts.sampler.verify(logits, window, use, draft_logits, shaped)

    with jax.named_scope("sample"):
        emitted = deal_slots(parts.mesh, verify, logits, window, *own)
    with jax.named_scope("commit"):
        tokens, done = _stop(emitted.tokens, rows, emitted.finite)
        state = _commit(parts, state, tokens, rows, run & done)
    counts = jnp.sum(tokens >= 0, axis=1), jnp.sum(used[:, 1:], axis=1)
    return state, StepOutput(tokens, *counts, emitted.finite | ~run, emitted.logprobs)


def propose(
    parts: Parts,
    drafts: int,
    pages: int,
    weights: Weights,
    draft_kv: Any,
    state: BatchState,
    hidden: Hidden | None,
    n_emitted: jax.Array,
    run: jax.Array,
) -> tuple[Any, BatchState]:
    """Up to `drafts` drafts for every slot that took part in a step, after `sample` gave it n_emitted [B] tokens."""
    assert parts.proposer is not None
    proposer = parts.proposer.with_num_speculative_tokens(drafts)
    context = propose_context(state, n_emitted, run, pages, hidden)
    with jax.named_scope("propose"):
        proposal = proposer.propose(weights.proposer, draft_kv, context, parts.mesh)
    return proposal.kv, _with_drafts(parts, state, proposal.drafts, proposal.draft_logits)


def propose_context(
    state: BatchState, n_emitted: jax.Array, run: jax.Array, pages: int, hidden: Hidden | None
) -> ProposeContext:
    """What a proposer sees of the batch after a step."""
    b = len(run)
    rows = jax.tree.map(lambda x: x[:b], state.rows)
    return ProposeContext(
        tokens=state.tokens[:b],
        num_tokens=rows.num_tokens,
        n_emitted=n_emitted,
        run=run,
        block_tables=state.block_tables[:b, :pages],
        hidden=None if hidden is None else hidden.rows,
        previous_hidden=None if hidden is None else hidden.before,
        seed=rows.seed,
        prompt_len=rows.prompt_len,
        max_tokens_total=rows.max_tokens_total,
        temperature=rows.filters.temperature,
    )


def continue_with(parts: Parts, drafts: int, state: BatchState, expected: Continuation, run: jax.Array) -> BatchState:
    """Drafts [B, K] that the host made before it knew the newest tokens, as far as these are what it expected."""
    context = propose_context(state, jnp.ones(len(run), jnp.int32), run, 1, None)
    return _with_drafts(parts, state, drafts_of_continuation(context, expected, drafts), None)


def _with_drafts(parts: Parts, state: BatchState, drafts: jax.Array, logits: jax.Array | None) -> BatchState:
    b, k = drafts.shape
    put = state.drafts.at[:b].set(-1).at[:b, :k].set(drafts)
    if logits is None or state.draft_logits is None:
        return replace(state, drafts=put)
    return replace(state, drafts=put, draft_logits=put_slots(parts.mesh, state.draft_logits, logits))


def _stop(tokens: jax.Array, rows: Any, finite: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cut tokens [B, 1+K] after the first stop id and at the length limit; which slots are done."""
    width = tokens.shape[1]
    room = (rows.max_tokens_total - rows.num_tokens)[:, None]
    stops = jnp.any(tokens[:, :, None] == rows.stop_ids[:, None, :], axis=-1) & (tokens >= 0)  # [B, 1+K]
    stopped_before = jnp.cumsum(stops, axis=1) - stops > 0
    tokens = jnp.where(stopped_before | (jnp.arange(width) >= room), -1, tokens)
    full = jnp.sum(tokens >= 0, axis=1) >= room[:, 0]
    return tokens, jnp.any(stops & (tokens >= 0), axis=1) | full | ~finite


def _commit(parts: Parts, state: BatchState, tokens: jax.Array, rows: Any, done: jax.Array) -> BatchState:
    """Append the emitted tokens to the histories, and to what is kept of them."""
    b, width = tokens.shape
    at = jnp.where(tokens >= 0, rows.num_tokens[:, None] + jnp.arange(width), state.tokens.shape[1])
    emitted = jnp.sum(tokens >= 0, axis=1)
    history = state.tokens.at[jnp.arange(b)[:, None], at].set(tokens, mode="drop")
    section = state.section
    markers = parts.sampler.markers
    if markers is not None:
        sections = jax.vmap(partial(sections_of_window, markers), in_axes=(0, 0, 0, None))(
            section[:b], history[:b], rows.num_tokens, width
        )
        section = section.at[:b].set(jnp.take_along_axis(sections, emitted[:, None], axis=1)[:, 0])
    return replace(
        state,
        tokens=history,
        active=state.active.at[:b].set(state.active[:b] & ~done),
        drafts=state.drafts.at[:b].set(-1),
        section=section,
        use=use_of_emitted(parts.mesh, state.use, tokens),
        rows=replace(state.rows, num_tokens=state.rows.num_tokens.at[:b].set(rows.num_tokens + emitted)),
    )
