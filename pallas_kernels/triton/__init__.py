"""The kernels in Triton, through jax-triton: for GPUs before Hopper, and as the rival of the Mosaic kernels."""
