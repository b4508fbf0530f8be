"""The last step dealt out over devices: slot s belongs to device s mod G, which samples all of its rows.

Logits leave lm_head split by vocabulary. Splitting them by slot instead is one all-to-all, after which every device
does the whole last step for its own slots, beside the penalty counts that it keeps of them. Only what was sampled is
exchanged afterwards. Dealing slots out one by one, not in blocks, keeps the devices equally busy when only the first
few slots run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.sampling.penalties import TokenUse, count_emitted, count_history
from models.sharding import constrain

_AXIS = "tp"
_BY_DEVICE, _WHOLE = PartitionSpec(_AXIS), PartitionSpec()


def by_device(tree: Any, mesh: Mesh | None) -> Any:
    """Arrays [S, ...] of all slots (a multiple of G), each on the device of its slot: device-major."""
    return tree if mesh is None else jax.device_put(tree, NamedSharding(mesh, _BY_DEVICE))


def deal_slots(mesh: Mesh | None, function: Callable[..., Any], logits: jax.Array, window: Any, *own_state: Any) -> Any:
    """function(logits [n, 1+K, V], window, *own_state) of every device's slots, put together.

    logits: [B*(1+K), V]. window: a pytree of [B, ...], the same on all devices. own_state: pytrees kept by device, as
    `by_device` places them. Where the devices do not divide B, all of them do everything.
    """
    b = len(jax.tree.leaves(window)[0])
    width, vocab = logits.shape[0] // b, logits.shape[1]
    if mesh is None or (not own_state and b % mesh.size):
        return function(logits.reshape(b, width, vocab), window, *own_state)

    def own(logits: jax.Array, window: Any, *own_state: Any) -> Any:
        sampled = function(logits[:, 0], jax.tree.map(lambda x: _of_own_slots(mesh, x), window), *own_state)
        return jax.tree.map(lambda x: _interleave(jax.lax.all_gather(x, _AXIS)), sampled)

    # Only the logits are dealt out. The batch stays whole: a sharding that leaked into the token history would be
    # undone by gathering the history.
    specs = (PartitionSpec(None, _AXIS), _WHOLE, *(_BY_DEVICE for _ in own_state))
    deal = jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=_WHOLE, check_vma=False)
    by_device = constrain(logits, (None, "vocab"), mesh).reshape(b // mesh.size, mesh.size, width, vocab)
    return deal(by_device, window, *own_state)


def _of_own_slots(mesh: Mesh, x: jax.Array) -> jax.Array:
    """[B, ...] -> [B / G, ...], inside shard_map."""
    by_device = x.reshape(x.shape[0] // mesh.size, mesh.size, *x.shape[1:])
    return jax.lax.dynamic_index_in_dim(by_device, jax.lax.axis_index(_AXIS), axis=1, keepdims=False)


def _interleave(x: jax.Array) -> jax.Array:
    """[G, n, ...] -> [n * G, ...] in order of slots."""
    x = jnp.swapaxes(x, 0, 1)
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def put_slots(mesh: Mesh | None, stored: jax.Array, values: jax.Array, run: jax.Array) -> jax.Array:
    """`stored` [S, K, ...], kept by device, with values [B, k, ...], k <= K, for the slots that run [B]."""

    def put(stored: jax.Array, values: jax.Array, run: jax.Array) -> jax.Array:
        rows = jnp.where(run, jnp.arange(len(run)), len(stored))
        return stored.at[rows, : values.shape[1]].set(values, mode="drop")

    if mesh is None:
        return put(stored, values, run)
    by_device = values.reshape(len(values) // mesh.size, mesh.size, *values.shape[1:])
    deal = jax.shard_map(
        lambda stored, values, run: put(stored, values[:, 0], _of_own_slots(mesh, run)),
        mesh=mesh,
        in_specs=(_BY_DEVICE, PartitionSpec(None, _AXIS), _WHOLE),
        out_specs=_BY_DEVICE,
        check_vma=False,
    )
    return deal(stored, by_device, run)


def use_of_history(
    mesh: Mesh | None, use: TokenUse, slot: jax.Array, tokens: jax.Array, num: jax.Array, prompt_len: jax.Array
) -> TokenUse:
    """`count_history` on the device of the slot."""

    def own(use: TokenUse, slot: jax.Array, *history: jax.Array) -> TokenUse:
        return count_history(use, _local(mesh, len(use.counts), slot), *history)

    return _on_devices(mesh, own)(use, slot, tokens, num, prompt_len)


def use_of_emitted(mesh: Mesh | None, use: TokenUse, tokens: jax.Array) -> TokenUse:
    """`count_emitted` for tokens [B, 1+K]."""

    def own(use: TokenUse, tokens: jax.Array) -> TokenUse:
        return count_emitted(use, tokens if mesh is None else _of_own_slots(mesh, tokens))

    return _on_devices(mesh, own)(use, tokens)


def move_own(mesh: Mesh | None, own: Any, source: jax.Array, target: jax.Array) -> Any:
    """Copy slot `source` of arrays kept by device to slot `target`, which may belong to another device."""

    def move(own: Any, source: jax.Array, target: jax.Array) -> Any:
        size = len(jax.tree.leaves(own)[0])
        at, to = _local(mesh, size, source), _local(mesh, size, target)

        def one(x: jax.Array) -> jax.Array:
            row = x.at[at].get(mode="fill", fill_value=0)
            if mesh is not None:
                wide = row if jnp.issubdtype(x.dtype, jnp.floating) else row.astype(jnp.uint32)
                row = jax.lax.psum(wide, _AXIS).astype(x.dtype)
            return x.at[to].set(row, mode="drop")

        return jax.tree.map(one, own)

    return _on_devices(mesh, move)(own, source, target)


def _local(mesh: Mesh | None, size: int, slot: jax.Array) -> jax.Array:
    """Index of a slot on its own device; past the end on the others."""
    if mesh is None:
        return slot
    own = slot % mesh.size == jax.lax.axis_index(_AXIS)
    return jnp.where(own, slot // mesh.size, size)


def _on_devices(mesh: Mesh | None, function: Callable[..., Any]) -> Callable[..., Any]:
    if mesh is None:
        return function

    def call(use: Any, *args: Any) -> Any:
        specs = (_BY_DEVICE, *(_WHOLE for _ in args))
        return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=_BY_DEVICE, check_vma=False)(use, *args)

    return call
