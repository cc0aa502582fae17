"""Child processes that can be killed and replaced. Environments and graders run in them.

processes.py   starts a fixed number of processes, exchanges JSON lines, watches deadlines, and replaces processes
child.py       the parent's side of one process
in_child.py    the child's side of one process
"""
