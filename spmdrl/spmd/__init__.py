"""One program, many ranks: process groups, exchange of ragged tensors, the prompt queue, seeds, lockstep."""
