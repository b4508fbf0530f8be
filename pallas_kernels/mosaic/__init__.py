"""Kernels in Pallas Mosaic GPU, for Hopper and later."""
