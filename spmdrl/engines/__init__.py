"""Engines that sample responses. Each engine is a folder that implements the `Engine` contract.

engine.py   the Engine contract: submit, poll, abort, load, sleep, wake
build.py    checks that the chosen engine supports the model and settings, and builds it
needs.py    finds out which parts of a checkpoint an engine's loader reads
hf/         plain transformers
vllm/       vLLM, inside the processes of the ranks
sglang/     SGLang, one server process per group of ranks
"""
