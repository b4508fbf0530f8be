"""From logits to tokens: one function for every row of every program.

Order on a row: grammar mask -> raw log-probabilities -> float32 -> allowed_token_ids -> bad_words -> min_tokens,
logit_bias and other processors that can change the argmax -> penalties -> thinking budget -> temperature -> min_p and
argmax-invariant processors -> top_k -> top_p -> draw. Greedy rows take the argmax of what the thinking budget left.
Where nothing that the grammar allows is left, the grammar wins: the row is drawn as if nothing else had been asked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from jaxserve.batch import SlotRow
from jaxserve.sampling.builtin import unpack_bits
from jaxserve.sampling.logprobs import Logprobs, Wanted, find_logprobs, no_logprobs
from jaxserve.sampling.penalties import TokenUse, penalize
from jaxserve.sampling.processor import LogitsProcessor, Row
from jaxserve.sampling.thinking import Markers, force, forced_token, sections_of_window
from models.base import Array
from pallas_kernels.distribution import Filters, find_distribution
from pallas_kernels.draw import random_uniforms, random_words
from pallas_kernels.rejection import Proposal, rejection_sample

MAX_LISTED = 128  # logprob_token_ids of a request
# Randomness of (seed, position) is split into streams; those from 16 on are the drafts' (speculative.drafting).
STREAM_DRAW = 0
STREAM_VERIFY = 1


@struct.dataclass
class Window:
    """The rows to be sampled: 1+K of each of b slots. Row j of a slot comes after its drafts[:j]."""

    rows: SlotRow  # [b, ...]
    history: Array  # [b, L] int32
    drafts: Array  # [b, K] int32, -1 = none
    used: Array  # [b, 1+K] bool, False = padding: its result means nothing and must cost nothing
    section: Array  # [b] int32, where the open thinking section began, -1 = none
    allowed: Array | None = None  # [b, 1+K, W] uint32, a bit for every token that is legal; None = no grammars

    @property
    def num_tokens(self) -> jax.Array:
        """[b, 1+K], tokens before each row."""
        return self.rows.num_tokens[:, None] + jnp.arange(self.used.shape[1], dtype=jnp.int32)

    def history_with_drafts(self) -> jax.Array:
        """[b, L]; what does not fit is dropped, as no row that counts comes after it."""
        slots = jnp.arange(len(self.history))[:, None]
        return self.history.at[slots, self.num_tokens[:, :-1]].set(self.drafts, mode="drop")


@struct.dataclass
class Emitted:
    """Of every slot: tokens [b, 1+K] int32, -1 after the last; finite [b], False where the first row had nothing to
    draw from; logprobs of [b, 1+K], zeros for rows that did not ask."""

    tokens: jax.Array
    finite: jax.Array
    logprobs: Logprobs


@struct.dataclass
class Rows:
    """What is drawn from, of R = b * (1+K) rows."""

    raw: jax.Array  # [R, V] float32
    final: jax.Array  # [R, V] float32, after all that comes before temperature
    filters: Filters  # [R]
    words: jax.Array  # [R, 8] uint32


@dataclass(frozen=True)
class Sampler:
    """Everything about sampling that is the same for all requests, and so part of the compiled step.

    vocab_limit: ids from here on are padding of the logits and never emitted. processors: in the order they apply.
    markers: of thinking sections, None where the engine knows none. max_logprobs: most that a request may ask for.
    method: how drafts are verified (pallas_kernels.rejection). rates: for synthetic, of a draft given those before it.
    implementation: of the draw and the verification (pallas_kernels.implementation).
    """

    vocab_limit: int
    processors: tuple[LogitsProcessor, ...] = ()
    markers: Markers | None = None
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"
    method: str = "coupled"
    rates: tuple[float, ...] | None = None
    implementation: str | None = None

    @property
    def max_listed(self) -> int:
        """Most logprob_token_ids that a request may list."""
        return min(self.max_logprobs, MAX_LISTED)

    def verify(
        self,
        logits: jax.Array,
        window: Window,
        use: TokenUse,
        draft_logits: jax.Array | None = None,
        shaped: bool = True,
    ) -> Emitted:
        """The tokens of b slots: the drafts that are kept, and the one after them.

        logits: [b, 1+K, V] (any float dtype). draft_logits: [b, K, V] that drafts were drawn from as they are, None
        where drafts are deterministic. shaped: False states that no row uses anything that comes before temperature (or
        a processor), and nothing of that is run. Of the rest, a batch that is all greedy, has no filter or wants no
        log-probabilities runs only what it needs.
        """
        b, width, _ = logits.shape
        rows = self.prepare(logits, window, use, shaped)
        by_slot = partial(jax.tree.map, lambda x: x.reshape(b, width, *x.shape[1:]))
        uniforms = rates = proposal = None
        if self.method != "coupled" and width > 1:
            first = window.num_tokens[:, 0] - window.rows.prompt_len
            uniforms = random_uniforms(window.rows.seed, first, STREAM_VERIFY, width - 1)
            rates = None if self.rates is None else jnp.array(self.rates[: width - 1], jnp.float32)
            if draft_logits is not None and self.method != "synthetic":
                proposal = Proposal(draft_logits, as_they_are(b))
        with jax.named_scope("verify"):
            verified = rejection_sample(
                by_slot(rows.final),
                window.drafts,
                by_slot(rows.filters),
                by_slot(rows.words),
                uniforms,
                method=self.method if width > 1 else "coupled",
                proposal=proposal,
                rates=rates,
                valid=window.used[:, 0],
                implementation=self.implementation,
            )
        tokens = jnp.maximum(verified.tokens, 0).reshape(-1)
        return Emitted(verified.tokens, verified.finite, by_slot(self.logprobs(rows, tokens, window)))

    def prepare(self, logits: jax.Array, window: Window, use: TokenUse, shaped: bool) -> Rows:
        """What the rows of logits [b, 1+K, V] are drawn from; `shaped` as in `verify`."""
        _, width, vocab = logits.shape
        model = self.mask_padding(logits.astype(jnp.float32))
        legal = constrained(model, window.allowed)
        final = self.shape(legal, window, use) if shaped else legal
        if shaped and window.allowed is not None:
            final = grammar_wins(legal, final, window.allowed)
        final = final.reshape(-1, vocab)

        def each_row(x: jax.Array) -> jax.Array:
            return jnp.repeat(x, width, axis=0)

        rows = window.rows
        filters = jax.tree.map(each_row, rows.filters)
        if shaped:
            final, filters = self._apply_invariant(final, filters, window)
        position = (window.num_tokens - rows.prompt_len[:, None]).reshape(-1)
        raw = (model if self.logprobs_mode == "model_logprobs" else legal).reshape(-1, vocab)
        return Rows(raw, final, filters, random_words(each_row(rows.seed), position, STREAM_DRAW))

    def score(self, logits: jax.Array, targets: tuple[jax.Array, jax.Array]) -> Logprobs:
        """Raw log-probabilities of given tokens. logits [n, 1, V]; targets: tokens [n], number wanted of each [n]."""
        tokens, number = targets
        raw = self.mask_padding(logits[:, 0].astype(jnp.float32))
        wanted = Wanted(number, jnp.full((len(tokens), 0), -1))
        return find_logprobs(raw, tokens, wanted, self.max_logprobs, self.logprobs_mode.endswith("logprobs"))

    def mask_padding(self, logits: jax.Array) -> jax.Array:
        vocab = logits.shape[-1]
        return (
            logits if self.vocab_limit >= vocab else jnp.where(jnp.arange(vocab) < self.vocab_limit, logits, -jnp.inf)
        )

    def shape(self, logits: jax.Array, window: Window, use: TokenUse) -> jax.Array:
        """All that comes before temperature: logits [b, 1+K, V] float32 -> the same."""
        history = window.history_with_drafts()
        for index, processor in enumerate(self.processors):
            if not processor.argmax_invariant:
                logits = self._apply(index, logits, window, history)
        logits = penalize(logits, window.rows.penalties, use, window.drafts)
        if self.markers is not None:
            logits = force(logits, self._forced(window, history))
        # What follows reads the logits several times; without a barrier XLA would do all of the above as often.
        return jax.lax.optimization_barrier(logits)

    def _apply(self, index: int, logits: jax.Array, window: Window, history: jax.Array) -> jax.Array:
        processor, rows = self.processors[index], window.rows
        context = Row(rows.processors[index], history, window.num_tokens, rows.prompt_len)
        if processor.neutral_when_empty:
            return processor.apply_rows(logits, context)
        uses = rows.uses[:, index]

        def run() -> jax.Array:
            return jnp.where(uses[:, None, None], processor.apply_rows(logits, context), logits)

        return jax.lax.cond(jnp.any(uses & window.used[:, 0]), run, lambda: logits)

    def _forced(self, window: Window, history: jax.Array) -> jax.Array:
        """[b, 1+K] int32, the token that the thinking budget forces, -1 = none."""
        markers, width = self.markers, window.used.shape[1]
        assert markers is not None

        def slot(section: jax.Array, budget: jax.Array, history: jax.Array, num: jax.Array) -> jax.Array:
            sections = sections_of_window(markers, section, history, num[0], width - 1)
            return jax.vmap(lambda s, n: forced_token(markers, s, budget, history, n))(sections, num)

        return jax.vmap(slot)(window.section, window.rows.thinking_budget, history, window.num_tokens)

    def _apply_invariant(self, logits: jax.Array, filters: Filters, window: Window) -> tuple[jax.Array, Filters]:
        """Temperature, min_p and the argmax-invariant processors on logits [R, V], where there are such processors."""
        indices = [i for i, p in enumerate(self.processors) if p.argmax_invariant]
        if not indices:
            return logits, filters
        b, width = window.used.shape
        used = jnp.any(window.rows.uses[:, jnp.array(indices)], axis=1)
        row = jnp.repeat(used, width) & (filters.temperature > 0)
        zeros, ones = jnp.zeros_like(filters.top_k), jnp.ones_like(filters.top_p)

        def run() -> jax.Array:
            shaped = filtered(logits, replace(filters, top_k=zeros, top_p=ones)).reshape(b, width, -1)
            history = window.history_with_drafts()
            for index in indices:
                shaped = self._apply(index, shaped, window, history)
            return jnp.where(row[:, None], shaped.reshape(logits.shape), logits)

        done = replace(
            filters,
            temperature=jnp.where(row, 1.0, filters.temperature),
            min_p=jnp.where(row, 0.0, filters.min_p),
        )
        return jax.lax.cond(jnp.any(row), run, lambda: logits), done

    def logprobs(self, rows: Rows, tokens: jax.Array, window: Window) -> Logprobs:
        """Of tokens [R], in the engine's mode; zeros for rows that did not ask."""
        kind, _, unit = self.logprobs_mode.partition("_")
        width = window.used.shape[1]
        number, ids = (jnp.repeat(x, width, axis=0) for x in (window.rows.num_logprobs, window.rows.logprob_ids))
        wanted = Wanted(jnp.where(window.used.reshape(-1), number, -1), ids)

        def find() -> Logprobs:
            source = filtered(rows.final, rows.filters) if kind == "processed" else rows.raw
            return find_logprobs(source, tokens, wanted, self.max_logprobs, unit == "logprobs")

        none = no_logprobs(tokens.shape, min(self.max_logprobs, rows.raw.shape[1]), ids.shape[-1])
        return jax.lax.cond(jnp.any(wanted.number >= 0), find, lambda: none)


def constrained(logits: jax.Array, allowed: jax.Array | None) -> jax.Array:
    """logits [b, 1+K, V] with nothing left but what allowed [b, 1+K, W] allows."""
    if allowed is None:
        return logits
    # Whoever comes next reads the logits several times; without a barrier XLA would unpack the masks as often.
    return jax.lax.optimization_barrier(jnp.where(unpack_bits(allowed, logits.shape[-1]), logits, -jnp.inf))


def grammar_wins(legal: jax.Array, shaped: jax.Array, allowed: jax.Array) -> jax.Array:
    """`shaped` under the mask once more, or `legal` where that leaves nothing. [b, 1+K, V]; NaN stays."""
    shaped = constrained(shaped, allowed)
    return jnp.where(jnp.max(shaped, axis=-1, keepdims=True) == -jnp.inf, legal, shaped)


def as_they_are(slots: int) -> Filters:
    """Filters [S] under which logits are drawn from unchanged."""
    one, none = jnp.ones(slots, jnp.float32), jnp.zeros(slots, jnp.float32)
    return Filters(temperature=one, min_p=none, top_k=none.astype(jnp.int32), top_p=one)


def filtered(logits: jax.Array, filters: Filters) -> jax.Array:
    """The distribution that is drawn from, as logits [R, V]: -inf for what min_p, top_k and top_p remove, the others
    under temperature and relative to the largest. Those of greedy rows stay as they are."""
    top = jnp.max(logits, axis=-1)
    random = filters.temperature > 0
    found = find_distribution(logits, top, filters, random)
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)
    kept = found.threshold.keeps(logits[:, None], ids[None])[:, 0] | ~random[:, None]
    return jnp.where(kept, jnp.where(random[:, None], found.scaled(logits), logits), -jnp.inf)
