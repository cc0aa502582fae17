"""A sandbox for programs that a model writes, enforced by the Linux kernel.

base.py         types of a program, its limits and its outcome
open.py         chooses a sandbox that works on this machine
bubblewrap.py   the command that starts a sandbox in namespaces
sandlock.py     the command that starts a sandbox with Landlock and seccomp, on machines without user namespaces
supervisor.py   the process behind sandlock.py, which starts a sandbox for each program
containers.py   the commands that start a sandbox in a container
places.py       the paths, environment variables and user id of programs
cgroup.py       creates a cgroup for each sandbox, if this user is allowed to
warm.py         runs programs one after another in a sandbox that stays open
session.py      programs that answer messages, and Python sessions
tests.py        runs tests that the tested program cannot see
fusion.py       runs programs on a SandboxFusion service
inside/         code that runs inside the sandbox
"""
