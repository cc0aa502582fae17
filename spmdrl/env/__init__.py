"""Environments in which the policy acts over several turns, and tools that it calls.

Environments receive and return messages, other JSON values, and floats.

base.py        types that callers and workers share: an opening, a turn of the assistant, a reply, settings
pool.py        the caller's side: runs environments in processes that can be killed; records.py records each environment
               so that it can be opened again, and chooses the process in which it runs
worker.py      the worker process's side; env_instance.py runs one environment in it, and limits.py gives every call a
               time limit
forms.py       loads an environment by name: a class in a file, a list of tools, or a built-in environment
operations.py  typed functions as tools, with JSON schemas from their types and docstrings
arguments.py   checks the arguments of a tool call against the schema of the tool
answers.py     converts any result of a tool to valid text of bounded length
messages.py    reads the messages of a row's prompt, and checks the messages that an environment returns
builtin.py     built-in environments
gyms.py        wraps environments of other libraries: Gymnasium, skyrl-gym, TextArena and reasoning-gym, whose puzzles
               attempts.py scores
trl.py         wraps environments and tools written for TRL
verl_form.py   reads verl's YAML files of tools and interactions, which verl_env.py runs; verl_stand_ins.py defines the
               classes of verl that users' files import
calls.py       parses tool calls in the text of a turn; call_formats.py has a parser for each form in which models write
               calls, and call_reading.py the code that these parsers share
calculator.py, python_tool.py (programs in the sandbox), search.py, mcp_tools.py (with mcp_connection.py): tools
__main__.py    the commands `init` and `try`; `try` uses terminal.py and play.py, which runs one episode at a time
"""

from spmdrl.env.answers import Answer, History

__all__ = ["Answer", "History"]
