"""Processes that work for this one and can be killed: environments and graders run in them.

processes.py   a fixed number of them: started, spoken to in JSON lines, watched by a clock, killed and replaced
child.py       one of them, from its parent's side
in_child.py    the child's side
"""
