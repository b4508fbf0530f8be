"""What differs between the versions of JAX that are supported, 0.10.2 to 0.12: Mosaic GPU is not a stable interface."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

plgpu: Any = mosaic_gpu  # whose signatures are those of one version

JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])


def load(ref: Any, index: Any, layout: Any, interpret: Any) -> jax.Array:
    """ref[index] into registers in a layout: from GMEM or SMEM, whatever its swizzle."""
    if interpret and JAX_VERSION < (0, 12):  # knows of no layouts
        return ref[index]
    if JAX_VERSION < (0, 12):
        return plgpu.load(ref, index, layout=layout, optimized=False)
    return plgpu.load(ref.at[index] if index else ref, layout=layout, optimized=False)


def matmul(a: Any, b: Any, interpret: Any, transposed: bool = False) -> jax.Array:
    """a @ b, or a @ b.T, in float32 by the tensor cores. a: [64, K] in registers or SMEM. b: a reference to SMEM.

    The interpreters know a part of wgmma (no operand in registers; on 0.10.2 no transposition either), so there it is
    loads and a product, which the race detector watches.
    """
    if interpret:
        x, y = a[...], b[...]
        return jnp.dot(x, y.T if transposed else y, preferred_element_type=jnp.float32)

    def multiply(accumulator: Any) -> jax.Array:
        plgpu.wgmma(accumulator, a, plgpu.transpose_ref(b, (1, 0)) if transposed else b)
        return accumulator[...]

    shape = (a.shape[0], b.shape[0 if transposed else 1])
    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


def interpret_params(detect_races: bool = False) -> Any:
    """What makes `mosaic_kernel` run on a CPU, instruction by instruction."""
    if JAX_VERSION < (0, 12):
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

        return InterpretGPUParams(detect_races=detect_races)
    return plgpu.InterpretGPUParams(detect_races=detect_races)


def races_found() -> bool:
    """Whether the last interpreted kernel with race detection raced. 0.12 raises instead."""
    if JAX_VERSION >= (0, 12):
        return False
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    return bool(gpu_callbacks.get_races().races_found)


def jax_triton() -> Any:
    """The module jax_triton, repaired: up to 0.4.1 its rule for dead code lacks an argument that 0.12 passes."""
    import jax_triton as module
    from jax._src.interpreters import partial_eval
    from jax_triton.triton_lib import triton_kernel_call_p

    if JAX_VERSION >= (0, 12):
        rules: Any = partial_eval.dce_rules
        rules[triton_kernel_call_p] = _keep
    return module


def _keep(used_outputs: Any, live_inputs: Any, equation: Any) -> tuple[list[bool], Any]:
    return [True] * len(equation.invars), equation


def mosaic_kernel(body: Callable[..., None], *, interpret: Any, **keywords: Any) -> Callable[..., Any]:
    """A Mosaic GPU kernel of one warpgroup a block. interpret: False, or `interpret_params()`."""
    return plgpu.kernel(
        body,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        **keywords,
    )


def jit_kernel(*static: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """jax.jit for a function that starts one kernel; static: names of its arguments.

    Called outside of jit on a CPU, where Mosaic kernels are interpreted, it returns when the kernel is done: the
    interpreter calls back into JAX, and both wait for ever when the caller starts something else meanwhile.
    """

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        jitted = jax.jit(function, static_argnames=static)

        @wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            result = jitted(*args, **keywords)
            traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(result))
            return result if traced or jax.default_backend() != "cpu" else jax.block_until_ready(result)

        return call

    return wrap
