"""What a trajectory is worth: graders, and the processes that run those which cannot be trusted to end."""
