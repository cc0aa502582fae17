"""Code that runs inside a sandbox; it needs only the standard library.

zygote.py     starts programs, one after another
alone.py      a process that becomes one program, in a sandbox for this program only
processes.py  starts the processes of one program
modules.py    imports common modules before programs start
isolate.py    sets namespaces, limits and privileges of a program
filter.py     forbids system calls with a seccomp filter
watch.py      kills a program at its limits
leftovers.py  removes files that a program has left in its folder
talk.py       exchanges lines of JSON with the caller
session.py    a program that keeps its state and answers calls
judge.py      runs tests on another program
values.py     encodes data exchanged between a program and its caller
"""
