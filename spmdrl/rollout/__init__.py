"""Engines that sample. A new engine is a folder here that keeps the contract.

engine.py   the Engine contract: submit, poll, abort, load, sleep, wake
build.py    engines by name, and checks of a model before one is built
needs.py    which parts of a checkpoint an engine's loader reads
hf/         plain transformers
vllm/       vLLM in this process
sglang/     SGLang, a server process for each group of ranks
"""
