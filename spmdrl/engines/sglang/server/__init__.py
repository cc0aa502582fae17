"""The server side of the SGLang engine: a separate program, started by its path with an interpreter that has SGLang.

    .venv-sglang/bin/python spmdrl/engines/sglang/server '{"options": {...}, "stop": [2], "parent": 123}'

The program does not import the spmdrl package, because its interpreter may have a different torch version. Only this
folder uses SGLang's internals: `draws.py` and `inside.py` patch SGLang's scheduler processes. `__main__.py` starts
these processes and executes the commands that its spmdrl rank sends. Written for SGLang 0.5.23.
"""
