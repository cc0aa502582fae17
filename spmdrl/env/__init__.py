"""Environments in which the policy acts over turns, and the tools that they offer: messages, JSON values and floats.

base.py        types that callers and workers share: an opening, a turn of the assistant, a reply, settings
pool.py        the caller's side: environments in processes that can be killed; records.py keeps each so that it can be
               opened again, and chooses its process
worker.py      the process's side; env_instance.py runs one environment there, and limits.py bounds every call
forms.py       makes an environment from a name: a class in a file, a list of tools, a built-in one
operations.py  typed functions as tools, with JSON schemas from their types and docstrings
arguments.py   arguments of a call, checked by a schema
answers.py     any result of a tool as valid text of bounded length
messages.py    the messages of a row's prompt, and a check of those that an environment returns
builtin.py     built-in environments
gyms.py        environments of other libraries by name or class: Gymnasium, skyrl-gym and TextArena, and puzzles of
               reasoning-gym (attempts.py)
trl.py         environments and tools written for TRL
verl_form.py   verl's YAML files of tools and interactions, which verl_env.py runs; verl_stand_ins.py has the classes of
               verl that users' files import
calls.py       text of a turn -> calls of tools; call_formats.py has the forms, call_reading.py their common parts
calculator.py, python_tool.py (programs in the sandbox), search.py, mcp_tools.py (with mcp_connection.py)
__main__.py    the commands `init` and `try` (terminal.py over play.py, which waits for one episode at a time)
"""

from spmdrl.env.answers import Answer, History

__all__ = ["Answer", "History"]
