"""Shapes of arguments: what does not fit is refused by name, with what it is and what it must be."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.distribution import Filters
from pallas_kernels.draw import check_vocab


def expect(name: str, x: Any, *shapes: tuple[int | str, ...]) -> None:
    """Raises ValueError where x has none of the shapes. A size given as a letter may be anything."""
    shape = jnp.shape(x)
    if not any(_fits(shape, wanted) for wanted in shapes):
        raise ValueError(f"{name} has shape {shape}; it must be {' or '.join(map(_text, shapes))}")


def expect_filters(name: str, filters: Filters, *shapes: tuple[int | str, ...]) -> None:
    """`expect` of every field."""
    for field in fields(Filters):
        expect(f"{name}.{field.name}", getattr(filters, field.name), *shapes)


def check_rows(
    logits: jax.Array, filters: Filters, words: jax.Array, valid: jax.Array | None, mask: jax.Array | None
) -> None:
    """Raises ValueError where arguments of `top_k_top_p_sample` do not fit each other, or V is too large for a draw."""
    expect("logits", logits, ("R", "V"))
    rows, vocab = logits.shape
    check_vocab(vocab)
    expect_filters("filters", filters, (rows,))
    expect("words", words, (rows, 8))
    if valid is not None:
        expect("valid", valid, (rows,))
    if mask is not None:
        expect("mask", mask, (rows, -(-vocab // 32)))


def _fits(shape: tuple[int, ...], wanted: tuple[int | str, ...]) -> bool:
    return len(shape) == len(wanted) and all(isinstance(w, str) or w == n for n, w in zip(shape, wanted, strict=True))


def _text(shape: tuple[int | str, ...]) -> str:
    if any(isinstance(size, str) for size in shape):
        return f"[{', '.join(map(str, shape))}]"
    return str(shape)
