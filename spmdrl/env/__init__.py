"""Environments in which the policy acts over turns, and the tools that they offer: messages, JSON values and floats.

base.py        types that callers and workers share: an opening, a turn of the assistant, a reply, settings
pool.py        the caller's side: environments in processes that can be killed; records.py keeps each so that it can be
               opened again, processes.py says which process holds it
worker.py      the process's side; env_instance.py runs one environment there, turn.py has the answer to a turn, and
               limits.py bounds every call
forms.py       makes an environment from a name: a class in a file, a list of tools, a built-in one
trl.py         environments and tools written for TRL
operations.py  typed functions as tools, with JSON schemas; docstrings.py reads their descriptions
arguments.py   arguments of a call, checked by a schema
answers.py     any result of a tool as valid text of bounded length; messages.py checks messages of an environment
builtin.py     built-in environments
gyms.py        environments of other libraries by name or class: Gymnasium, skyrl-gym and TextArena in gym_envs.py,
               puzzles of reasoning-gym in attempts.py; opening.py makes the first messages of a row
verl_form.py   verl's YAML files of tools and interactions, which verl_env.py runs; verl_modules.py stands in for the
               modules of verl that users' files import, verl_gsm8k.py for its example
calls.py       text of a turn -> calls of tools; call_formats.py has the forms, call_reading.py what they share
calculator.py, python_tool.py (programs in the sandbox),
               search.py (with corpus.py, an index on this machine), mcp_tools.py (with mcp_connection.py)
__main__.py    the commands `init` (scaffold.py) and `try` (by_hand.py, by_model.py over play.py, which waits for one
               episode at a time; conversation_text.py prints it)
"""

from spmdrl.env.answers import Answer, History

__all__ = ["Answer", "History"]
