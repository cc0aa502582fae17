"""Child processes that run environments and graders, and that can be killed and replaced.

processes.py   starts a fixed number of processes, exchanges JSON lines, watches deadlines, and replaces processes
child.py       the parent's side of one process
in_child.py    the child's side of one process
"""
