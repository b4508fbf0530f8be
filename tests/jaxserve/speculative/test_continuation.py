"""What the host expected a step ago, against what the device has said since."""

import jax
import jax.numpy as jnp
import pytest

from jaxserve.speculative.continuation import Continuation, drafts_of_continuation, empty_continuation
from jaxserve.speculative.proposer import ProposeContext


def drafts_of(context, continuation, count):
    return jax.jit(drafts_of_continuation, static_argnums=2)(context, continuation, count).tolist()


def context_of(history, num_tokens, room=99):
    b = len(history)
    return ProposeContext(
        tokens=jnp.asarray(history, jnp.int32), num_tokens=jnp.asarray(num_tokens), n_emitted=jnp.ones(b, jnp.int32),
        run=jnp.ones(b, bool), block_tables=jnp.zeros((b, 1), jnp.int32), hidden=None, previous_hidden=None,
        seed=jnp.zeros((b, 2), jnp.uint32), prompt_len=jnp.ones(b, jnp.int32),
        max_tokens_total=jnp.asarray(num_tokens) + room, temperature=jnp.zeros(b),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("known", "continuation", "expected"),
    [
        (4, [5, 6, 7, 8, 9], [5, 6]),  # nothing was in flight
        (5, [5, 6, 7, 8, 9], [6, 7]),  # one token, as expected
        (7, [5, 6, 7, 8, 9], [8, 9]),  # three of them
        (6, [5, 0, 7, 8, 9], [-1, -1]),  # the second was another one
        (8, [5, 6, 7, 8, 9], [9, -1]),
        (9, [5, 6, 7, 8, 9], [-1, -1]),  # all of it is known by now
        (5, [5, 6, -1, -1, -1], [6, -1]),
        (6, [5, -1, -1, -1, -1], [-1, -1]),
        (5, [-1] * 5, [-1, -1]),
    ],
)
def test_alignment(known, continuation, expected):
    """The host proposed after four tokens, 1 2 3 4; the device has gone on to `known` of them."""
    history = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 9]]
    given = Continuation(jnp.asarray([4]), jnp.asarray([continuation]), jnp.full((1, 5), 2))
    assert drafts_of(context_of(history, [known]), given, 2) == [expected]


def test_alignment_of_a_slot_that_was_given_away():
    """A continuation that starts beyond the history belongs to somebody else."""
    given = Continuation(jnp.asarray([7]), jnp.asarray([[5, 6, 7]]), jnp.full((1, 4), 2))
    assert drafts_of(context_of([[1, 2, 3, 4, 0, 0, 0, 0]], [4]), given, 2) == [[-1, -1]]


def test_drafts_end_with_the_request():
    given = Continuation(jnp.asarray([4]), jnp.asarray([[5, 6, 7, 8, 9]]), jnp.full((1, 4), 2))
    context = context_of([[1, 2, 3, 4, 5, 6, 7, 8, 9, 9]], [5], room=2)
    assert drafts_of(context, given, 2) == [[6, -1]]


def test_nothing_expected():
    nothing = empty_continuation(2, 3)
    assert nothing.tokens.shape == (2, 7)
    assert drafts_of(context_of([[1, 2, 3]] * 2, [2, 3]), nothing, 3) == [[-1] * 3] * 2


@pytest.mark.parametrize(("known", "expected"), [(4, [5, -1]), (5, [6, 7]), (6, [-1, -1]), (7, [8, 9])])
def test_how_many_depends_on_what_was_said(known, expected):
    given = Continuation(jnp.asarray([4]), jnp.asarray([[5, 6, 7, 8, 9]]), jnp.asarray([[1, 2, 0, 9]]))
    assert drafts_of(context_of([[1, 2, 3, 4, 5, 6, 7, 8, 9, 9]], [known]), given, 2) == [expected]
