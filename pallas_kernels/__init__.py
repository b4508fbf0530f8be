"""The step from logits to tokens as functions of arrays, callable from any JAX program. Knows nothing of requests.

Each operation has a definition in plain jnp, which serves every platform and is what kernels are tested against.
"""

from pallas_kernels.draw import random_words
from pallas_kernels.top_k_top_p import Drawn, Filters, top_k_top_p_sample

__all__ = ["Drawn", "Filters", "random_words", "top_k_top_p_sample"]
