"""A sandbox for programs that a model writes; the kernel keeps them in.

base.py         a program, its limits, and how it ended
open.py         chooses a sandbox that works here
bubblewrap.py   the command that starts one in namespaces
sandlock.py     the command that starts one by Landlock and seccomp, where there are no namespaces
supervisor.py   the program of sandlock: a sandbox for each program
containers.py   the commands of container engines
places.py       the places and the environment that programs get
cgroup.py       a cgroup for each sandbox, where this user may make one
warm.py         runs programs in it, one after another
session.py      programs that answer messages, and Python sessions
tests.py        tests of a program that it cannot see
fusion.py       programs that a service runs: SandboxFusion
inside/         programs that run inside
"""
