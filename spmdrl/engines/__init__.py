"""Engines that sample. A new engine is a folder here that implements the contract.

engine.py   the Engine contract: submit, poll, abort, load, sleep, wake
build.py    builds an engine by its name, after checks of the model
needs.py    finds the parts of a checkpoint that an engine's loader reads
hf/         plain transformers
vllm/       vLLM in this process
sglang/     SGLang, a server process for each group of ranks
"""
