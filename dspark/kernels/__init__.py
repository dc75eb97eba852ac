"""Kernels and layouts behind the plain functions of `target`, `draft` and `losses`."""
