"""Programs that run inside a sandbox; they need the standard library alone.

zygote.py     starts programs, one after another
alone.py      becomes one program, in a sandbox that holds no other
processes.py  the processes of one program
modules.py    what programs import, before they do
isolate.py    their namespaces, limits and rights
filter.py     system calls that they may not make
watch.py      ends a program at its limits
leftovers.py  removes what it has left in its folder
talk.py       lines of JSON with the caller
session.py    a program that keeps its state and answers calls
judge.py      tests of another program
values.py     data that travels between a program and its caller
"""
