"""Engines that sample responses. Each engine is a folder that implements the `Engine` contract.

engine.py   the Engine contract: submit, poll, abort, load, sleep, wake
build.py    checks that model and settings fit the chosen engine, and builds the engine
needs.py    finds the parts of a checkpoint that an engine's loader reads
hf/         plain transformers
vllm/       vLLM, inside the processes of the ranks
sglang/     SGLang, one server process for each group of ranks
"""
