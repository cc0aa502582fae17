"""Multi-turn environments for the policy, and the tools that it calls.

Environments receive and return messages, other JSON values, and floats.

base.py        types shared by callers and workers: an opening, an assistant turn, a reply, settings
pool.py        the caller's side: runs environments in processes that can be killed; records.py keeps the data needed to
               reopen each environment, and assigns environments to processes
worker.py      the worker process's side; env_instance.py runs one environment in it, and limits.py gives every call a
               time limit
forms.py       loads an environment by name: a class in a file, a list of tools, or a built-in environment
operations.py  typed functions as tools, with JSON schemas from their types and docstrings
arguments.py   checks tool-call arguments against the tool's schema
answers.py     converts any tool result to valid text of bounded length
pictures.py    finds the images in what environments and tools return, and encodes them
messages.py    reads a row's prompt messages, and checks the messages that an environment returns
builtin.py     built-in environments
gyms.py        wraps environments from other libraries: Gymnasium, skyrl-gym, TextArena and reasoning-gym; attempts.py
               scores reasoning-gym's puzzles
trl.py         wraps environments and tools written for TRL
verl_form.py   reads verl's YAML files of tools and interactions, which verl_env.py runs; verl_stand_ins.py defines
               stand-ins for the verl classes that user files import
calls.py       parses tool calls in a turn's text; call_formats.py has one parser per tool-call format, and
               call_reading.py the code that these parsers share
calculator.py, python_tool.py (programs in the sandbox), search.py, mcp_tools.py (with mcp_connection.py): tools
__main__.py    the commands `init` and `try`; `try` uses terminal.py and play.py, which runs one episode at a time
"""

from spmdrl.env.answers import Answer, History
from spmdrl.env.pictures import open_image

__all__ = ["Answer", "History", "open_image"]
