"""Environments in which the policy acts over turns, and the tools that they offer: messages, JSON values and floats.

base.py        types that callers and workers share: an opening, a turn of the assistant, a reply, settings
pool.py        the caller's side: runs environments in processes that can be killed; records.py records each environment
               so that it can be opened again, and chooses its process
worker.py      the worker process's side; env_instance.py runs one environment in it, and limits.py bounds every call
forms.py       makes an environment from a name: a class in a file, a list of tools, a built-in one
operations.py  typed functions as tools, with JSON schemas from their types and docstrings
arguments.py   checks the arguments of a call by a schema
answers.py     converts any result of a tool to valid text of bounded length
messages.py    reads the messages of a row's prompt, and checks the messages that an environment returns
builtin.py     built-in environments
gyms.py        wraps environments of other libraries: Gymnasium, skyrl-gym and TextArena, and puzzles of reasoning-gym
               (attempts.py)
trl.py         wraps environments and tools written for TRL
verl_form.py   reads verl's YAML files of tools and interactions, which verl_env.py runs; verl_stand_ins.py defines the
               classes of verl that users' files import
calls.py       parses tool calls in the text of a turn; call_formats.py has a reader for each form of call, and
               call_reading.py the code that these readers share
calculator.py, python_tool.py (programs in the sandbox), search.py, mcp_tools.py (with mcp_connection.py): tools
__main__.py    the commands `init` and `try`; `try` uses terminal.py and play.py, which runs one episode at a time
"""

from spmdrl.env.answers import Answer, History

__all__ = ["Answer", "History"]
