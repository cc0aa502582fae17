"""Kernels of spmdrl. Each has a plain-torch twin in `reference.py`, which is also what runs where there is no GPU."""

from spmdrl_kernels.linear import collision_probability, linear_logprob

__all__ = ["collision_probability", "linear_logprob"]
