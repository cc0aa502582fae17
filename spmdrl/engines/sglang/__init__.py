"""The SGLang engine: one server process for each group of ranks, in a separate Python environment.

engine.py     implements the Engine contract
options.py    the arguments of SGLang's Engine
process.py    starts and watches the server
transport.py  sends weights to it
server/       the program of the server process
"""
