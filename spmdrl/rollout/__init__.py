"""Engines that sample, inside the training process. `engine.py` is the contract; an engine only adds a file."""
