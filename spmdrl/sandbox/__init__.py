"""The sandbox runs programs written by a model; the kernel keeps them in.

base.py         a program, its limits, and how it ended
open.py         chooses a sandbox that works here
bubblewrap.py   the command that starts one
warm.py         runs programs in it, one after another
session.py      programs that are spoken to, and Python sessions
tests.py        tests of a program that it cannot see
inside/         what runs inside
"""
