"""Kernels in Pallas Mosaic GPU, for Hopper."""
