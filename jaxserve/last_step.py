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
from jaxserve.structured.device import (
    EXHAUSTED,
    ON_HOST,
    GrammarRow,
    Grammars,
    after_token,
    allowed_words,
    flags,
    forced_tokens,
    legal_prefix,
    states_of_window,
)
from models.base import Array


@struct.dataclass
class StepOutput:
    """What the host learns. tokens [B, 1+K] int32, -1 after the last; n_emitted, n_drafts [B] int32, how many of them
    there are and how many drafts were verified; finite [B] bool; logprobs of [B, 1+K]; grammar [B] int32, the flags of
    the states that the texts are in (structured.device)."""

    tokens: Array
    n_emitted: Array
    n_drafts: Array
    finite: Array
    logprobs: Logprobs | None  # None once it is known that nobody asked
    grammar: Array | None  # None where no request of the batch has one


def sample(
    parts: Parts,
    shaped: bool,
    drafts: int,
    state: BatchState,
    logits: jax.Array,
    run: jax.Array,
    grammars: Grammars | None = None,
) -> tuple[BatchState, StepOutput]:
    """One token for every slot that runs, or as many as its first `drafts` drafts were right about.

    grammars: None states that no request of the batch has one.
    """
    b = len(run)
    rows = jax.tree.map(lambda x: x[:b], state.rows)
    run = run & state.active[:b]
    used, _ = window_positions(view_of(state), run, drafts)
    window = Window(rows, state.tokens[:b], state.drafts[:b, :drafts], used, state.section[:b])
    if grammars is not None:
        with jax.named_scope("grammar"):
            states = _grammar_states(parts, grammars, window, state.grammar_state[:b])
            words = allowed_words(grammars, rows.grammar.classes, states)
            legal = legal_prefix(words, window.drafts)
            if state.draft_logits is not None:
                # A draft that was drawn has to be rejected, not left out: its place is then drawn from p less q. The
                # row behind it is not drawn from.
                words = jnp.where(legal[..., None], words, jnp.uint32(0xFFFFFFFF))
                legal = jnp.pad(legal[:, :-1], ((0, 0), (1, 0)), constant_values=True)
            used = used & legal
            drafts_left = jnp.where(used[:, 1:], window.drafts, -1)
            window = replace(window, drafts=drafts_left, used=used, allowed=words)
    own = (state.use,) if state.draft_logits is None else (state.use, state.draft_logits)

    def verify(logits: jax.Array, window: Window, use: Any, draft_logits: jax.Array | None = None) -> Any:
        if draft_logits is not None:
            draft_logits = draft_logits[: len(logits), :drafts]
        return parts.sampler.verify(logits, window, use, draft_logits, shaped)

    with jax.named_scope("sample"):
        emitted = deal_slots(parts.mesh, verify, logits, window, *own)
    with jax.named_scope("commit"):
        exhausted = found = None
        if grammars is not None:
            history = _history_with(window, emitted.tokens)
            following = _states_after(parts, grammars, window, states, history)
            exhausted = flags(grammars.arena, following) == EXHAUSTED
        tokens, done = _stop(emitted.tokens, rows, emitted.finite, exhausted)
        state = _commit(parts, state, tokens, rows, run, run & done)
        if grammars is not None:
            state, found = _commit_grammar(state, grammars, rows, following, tokens, run)
    counts = jnp.sum(tokens >= 0, axis=1), jnp.sum(used[:, 1:], axis=1)
    return state, StepOutput(tokens, *counts, emitted.finite | ~run, emitted.logprobs, found)


def propose(
    parts: Parts,
    drafts: int,
    pages: int,
    num_foreign: int,
    weights: Weights,
    draft_kv: Any,
    state: BatchState,
    hidden: Hidden | None,
    n_emitted: jax.Array,
    run: jax.Array,
) -> tuple[Any, BatchState]:
    """Up to `drafts` drafts for every slot that took part in a step, after `sample` gave it n_emitted [B] tokens.

    num_foreign: as in ProposeContext.
    """
    assert parts.proposer is not None
    proposer = parts.proposer.with_num_speculative_tokens(drafts)
    context = replace(propose_context(state, n_emitted, run, pages, hidden), num_foreign=num_foreign)
    with jax.named_scope("propose"):
        proposal = proposer.propose(weights.proposer, draft_kv, context, parts.mesh)
    return proposal.kv, _with_drafts(parts, state, proposal.drafts, proposal.draft_logits, run)


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
    made = drafts_of_continuation(context, expected, drafts)
    there = state.drafts[: len(run), :drafts]
    on_host = (state.rows.grammar.classes[: len(run)] == ON_HOST)[:, None]  # the host knows what the grammar forces
    return _put_drafts(state, _joined(jnp.where(on_host, made, there), jnp.where(on_host, there, made)), run)


def _with_drafts(
    parts: Parts, state: BatchState, drafts: jax.Array, logits: jax.Array | None, run: jax.Array
) -> BatchState:
    """The batch with a proposal, drafts [B, K], behind those that a grammar forced."""
    forced = state.drafts[: len(drafts), : drafts.shape[1]]
    state = _put_drafts(state, _joined(forced, drafts), run)
    if logits is None or state.draft_logits is None:
        return state
    certain = jnp.where(jnp.arange(logits.shape[-1]) == forced[..., None], 0.0, -jnp.inf)
    logits = jnp.where((forced >= 0)[..., None], certain, logits)
    return replace(state, draft_logits=put_slots(parts.mesh, state.draft_logits, logits, run))


def _joined(first: jax.Array, then: jax.Array) -> jax.Array:
    """Drafts `first` [B, K], with those of `then` behind them where these begin in the same way."""
    agrees = jnp.all((first < 0) | (then == first), axis=1, keepdims=True)
    return jnp.where(agrees & (first < 0), then, first)


def _put_drafts(state: BatchState, drafts: jax.Array, run: jax.Array) -> BatchState:
    """The batch with drafts [B, <= K] of the slots that run; those of the others are still to be verified."""
    b, k = drafts.shape
    padded = jnp.pad(drafts, ((0, 0), (0, state.drafts.shape[1] - k)), constant_values=-1)
    return replace(state, drafts=state.drafts.at[:b].set(jnp.where(run[:, None], padded, state.drafts[:b])))


def _grammar_states(parts: Parts, grammars: Grammars, window: Window, state: jax.Array) -> jax.Array:
    """[B, 1+K] int32, in which state of its grammar each row is drawn."""

    def slot(row: GrammarRow, state: jax.Array, history: jax.Array, num: jax.Array) -> jax.Array:
        return states_of_window(grammars.arena, parts.grammar_marker, row, state, history, num, drafts)

    drafts = window.drafts.shape[1]
    rows = window.rows
    return jax.vmap(slot)(rows.grammar, state, window.history_with_drafts(), rows.num_tokens)


def _states_after(parts: Parts, grammars: Grammars, window: Window, states: jax.Array, history: jax.Array) -> jax.Array:
    """[B, 1+K] int32, the state after each emitted token, from those before the rows that emitted them."""

    def one(row: GrammarRow, state: jax.Array, history: jax.Array, num: jax.Array) -> jax.Array:
        return after_token(grammars.arena, parts.grammar_marker, row, state, history, num)

    of_rows = jax.vmap(one, in_axes=(None, 0, None, 0))
    return jax.vmap(of_rows)(window.rows.grammar, states, history, window.num_tokens + 1)


def _commit_grammar(
    state: BatchState, grammars: Grammars, rows: Any, following: jax.Array, tokens: jax.Array, run: jax.Array
) -> tuple[BatchState, jax.Array]:
    """The batch with its new states and the drafts that these force; the states' flags [B]."""
    b, k = len(tokens), state.drafts.shape[1]
    emitted = jnp.sum(tokens >= 0, axis=1)
    last = jnp.take_along_axis(following, jnp.maximum(emitted - 1, 0)[:, None], axis=1)[:, 0]
    new = jnp.where(emitted > 0, last, state.grammar_state[:b])
    forced = forced_tokens(grammars.arena, rows.grammar.classes, new, k)
    room = rows.max_tokens_total - rows.num_tokens - emitted - 1
    usable = (state.active[:b] & (emitted > 0))[:, None] & (jnp.arange(k) < room[:, None])
    state = replace(state, grammar_state=state.grammar_state.at[:b].set(new))
    return _put_drafts(state, jnp.where(usable, forced, -1), run), flags(grammars.arena, new)


def _history_with(window: Window, tokens: jax.Array) -> jax.Array:
    """[B, L], the histories with emitted tokens [B, 1+K] behind them; what does not fit is dropped."""
    at = jnp.where(tokens >= 0, window.num_tokens, window.history.shape[1])
    return window.history.at[jnp.arange(len(tokens))[:, None], at].set(tokens, mode="drop")


def _stop(tokens: jax.Array, rows: Any, finite: jax.Array, exhausted: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Cut tokens [B, 1+K] after the first stop id, where the grammar leaves nothing more to say, and at the length
    limit; which slots are done. exhausted: [B, 1+K] bool, the grammar's state after each token, or None."""
    width = tokens.shape[1]
    room = (rows.max_tokens_total - rows.num_tokens)[:, None]
    stops = jnp.any(tokens[:, :, None] == rows.stop_ids[:, None, :], axis=-1) & (tokens >= 0)  # [B, 1+K]
    if exhausted is not None:
        stops |= exhausted & (tokens >= 0)
    stopped_before = jnp.cumsum(stops, axis=1) - stops > 0
    tokens = jnp.where(stopped_before | (jnp.arange(width) >= room), -1, tokens)
    full = jnp.sum(tokens >= 0, axis=1) >= room[:, 0]
    return tokens, jnp.any(stops & (tokens >= 0), axis=1) | full | ~finite


def _commit(
    parts: Parts, state: BatchState, tokens: jax.Array, rows: Any, run: jax.Array, done: jax.Array
) -> BatchState:
    """Append the emitted tokens to the histories, and to what is kept of them; verified drafts are gone."""
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
        _put_drafts(state, jnp.full((b, state.drafts.shape[1]), -1), run),
        tokens=history,
        active=state.active.at[:b].set(state.active[:b] & ~done),
        section=section,
        use=use_of_emitted(parts.mesh, state.use, tokens),
        rows=replace(state.rows, num_tokens=state.rows.num_tokens.at[:b].set(rows.num_tokens + emitted)),
    )
