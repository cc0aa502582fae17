"""spmdrl: reinforcement learning for language models as one plain torchrun program."""

__version__ = "0.1.0"
