"""Processes that work for this one and can be killed: environments and graders run in them.

processes.py   starts a fixed number of them, exchanges JSON lines, watches deadlines, and replaces processes
child.py       the parent's side of one process
in_child.py    the child's side
"""
