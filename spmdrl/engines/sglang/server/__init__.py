"""The server side of the SGLang engine: a separate program, run by path by an interpreter that has SGLang.

    .venv-sglang/bin/python spmdrl/engines/sglang/server '{"options": {...}, "stop": [2], "parent": 123}'

It imports no package of spmdrl, because its interpreter may have another torch. All accesses to SGLang's internals are
in this folder: `draws.py` and `inside.py` change its scheduler processes, `__main__.py` runs them and answers the rank.
Written for SGLang 0.5.23.
"""
