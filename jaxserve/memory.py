"""What is put on the devices for good, weights and page pools, and how many pages there is memory for.

And what a host leaves to this process, of memory and of areas to map."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import psutil
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.config import EngineConfig
from jaxserve.step import Cache, Parts, Weights
from models.base import ForwardInputs, Params

_LIMIT_CPU = 8 << 30  # of a host's memory, what the fraction for the page pool is taken of at most
_CGROUP = Path("/sys/fs/cgroup")
_PROC = Path("/proc")


def load_weights(parts: Parts, params: Params | None = None) -> Weights:
    """params: the model's, where they are on the devices already."""
    params = parts.model.load_params(parts.mesh) if params is None else params
    return Weights(params, {} if parts.proposer is None else parts.proposer.load_params(params, parts.mesh))


def make_cache(parts: Parts, params: Params, num_blocks: int, block_size: int, keep_boundary_hidden: bool) -> Cache:
    """The page pools, zeroed. params: the model's."""
    model, proposer, mesh = parts.model, parts.proposer, parts.mesh
    kv = model.init_kv(num_blocks, block_size, mesh)
    boundary = None
    if keep_boundary_hidden:
        inputs = ForwardInputs(*(jax.ShapeDtypeStruct((1, 1), jnp.int32) for _ in range(3)))
        hidden, _ = jax.eval_shape(lambda p, c, x: model.forward(p, c, x, mesh), params, kv, inputs)
        whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        boundary = jnp.zeros((num_blocks, hidden.shape[-1]), hidden.dtype, device=whole)
    draft_kv = None if proposer is None else proposer.init_kv(num_blocks, block_size, mesh)
    return Cache(kv=kv, boundary=boundary, draft_kv=draft_kv, block_size=block_size)


def affordable_blocks(page: Cache, fraction: float) -> int | None:
    """How many pages this fraction of each device's free memory holds; None where a page takes none.

    page: a Cache of one page. Three binary digits of the number are kept, so that a restart, which finds a little more
    or less memory, has programs of the same shapes.
    """
    bytes_of: dict[jax.Device, int] = {}
    for array in jax.tree.leaves(page):
        for shard in array.addressable_shards:
            bytes_of[shard.device] = bytes_of.get(shard.device, 0) + shard.data.nbytes
    if not any(bytes_of.values()):
        return None
    if next(iter(bytes_of)).platform == "cpu":  # whose devices share the host's memory
        count = int(fraction * min(free_host_memory(), _LIMIT_CPU)) // sum(bytes_of.values())
    else:
        count = min(int(fraction * _free(device)) // size for device, size in bytes_of.items() if size)
    return count >> (places := max(count.bit_length() - 3, 0)) << places


def _free(device: jax.Device) -> int:
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise ValueError(f"num_blocks must be given: {device} does not say how much memory it has")
    return int(stats["bytes_limit"] - stats["bytes_in_use"])


def free_host_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes that the host, and a container's limit (cgroup v2), leave this process without swapping."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        kept = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no limit, or another system
        return free
    return free if limit == "max" else min(free, max(int(limit) - used + int(kept.get("inactive_file", 0)), 0))


def free_memory_areas(proc: Path = _PROC) -> int | None:
    """Memory areas that this process may still map; None where the system does not say."""
    try:
        limit = int((proc / "sys/vm/max_map_count").read_text())
        with (proc / "self/maps").open("rb") as maps:
            return limit - sum(1 for _ in maps)
    except (OSError, ValueError):
        return None


def num_blocks(config: EngineConfig, max_model_len: int, page: Cache) -> int:
    """Pages for everyone at full length, or as many as memory allows; page 0 is nobody's. page: a Cache of one page.

    Call it when the weights are loaded. Raises ValueError where memory does not allow one request of full length.
    """
    length = -(-max_model_len // config.block_size)
    wanted, needed = 1 + config.max_num_seqs * length, 1 + length
    affordable = affordable_blocks(page, config.kv_cache_memory_fraction)
    if affordable is None:
        return wanted
    if affordable < needed:
        size = sum(x.nbytes for x in jax.tree.leaves(page))
        raise ValueError(
            f"max_model_len {max_model_len} needs {needed} KV pages of {size} bytes, memory allows {affordable}: "
            "lower max_model_len, or raise kv_cache_memory_fraction or num_blocks"
        )
    return min(wanted, affordable)
