"""Environments in which a policy acts over turns, and the tools that come with them."""
