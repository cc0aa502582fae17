"""What flows: prompts, trajectories, packed batches, micro-batches."""
