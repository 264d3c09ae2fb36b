"""Naiad kernels."""
