"""The step from logits to tokens as functions of arrays, callable from any JAX program. Knows nothing of requests.

Each operation has a definition in plain jnp, which serves every platform and is what kernels are tested against.
"""

from pallas_kernels.block_shape import AttentionShape, BlockShape
from pallas_kernels.distribution import Filters
from pallas_kernels.draw import random_uniforms, random_words
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.rejection import Proposal, Verified, rejection_sample
from pallas_kernels.sharded import sample_by_rows, sample_by_vocabulary
from pallas_kernels.top_k_top_p import Drawn, top_k_top_p_sample

__all__ = [
    "AttentionShape",
    "BlockShape",
    "Drawn",
    "Filters",
    "Proposal",
    "Verified",
    "paged_attention",
    "random_uniforms",
    "random_words",
    "rejection_sample",
    "sample_by_rows",
    "sample_by_vocabulary",
    "top_k_top_p_sample",
]
