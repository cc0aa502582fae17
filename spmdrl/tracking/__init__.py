"""What a run shows and keeps: `metrics` reduced over ranks, `trackers` they go to, the `console`, `logs` by rank."""
