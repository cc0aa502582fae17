"""The SGLang engine: one server process per group of ranks, in a separate Python environment.

engine.py     implements the Engine contract
options.py    builds the arguments of SGLang's Engine
process.py    starts and watches the server
transport.py  sends weights to the server
server/       the program of the server process
"""
