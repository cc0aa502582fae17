"""Where foreign code runs: programs written by a model, kept in by the kernel.

base.py         a program, its limits, and how it ended
open.py         chooses a sandbox that works here
bubblewrap.py   the command that starts one
warm.py         runs programs and sessions in it
inside/         what runs inside
"""
