"""Gives each start of all ranks its own key prefix in a store that outlives it.

torchrun's agent keeps one store through all its restarts. Keys of an earlier start (addresses of processes that are
gone, counters) must not be found by the next one. Nothing that ranks know by themselves tells two starts apart: an
agent counts only the restarts that its own node asked for.
"""

import secrets
import time
from datetime import timedelta

import torch.distributed as dist

EVERY = 0.02
"""Seconds between two looks of rank 0."""


def own_names(store: dist.Store, rank: int, size: int, wait: timedelta) -> dist.Store:
    """The store under a prefix that no other start has. Collective over all ranks of this start.

    Rank 0 makes the prefix up and answers each rank that asks, under a key that only the asking rank knows, until all
    have it. Requests of processes that are gone are answered too, which does no harm. torchrun starts no process before
    all processes of the start before have ended.

    Raises:
        RuntimeError: a rank has not come within `wait`.
    """
    talk, me = dist.PrefixStore("joining", store), secrets.token_hex(8)
    if rank:
        # All requests stand in one text: rank 0 needs one look for all ranks, and reads it when their count has risen.
        talk.append("asks", f"{me} ")  # type: ignore[attr-defined]
        talk.add("asked", 1)
        try:
            talk.wait([f"answer/{me}"], wait)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank 0 did not answer within {wait.total_seconds():.0f} s of this rank's start: look at its log, and "
                "whether every node runs the same command"
            ) from error
        prefix = talk.get(f"answer/{me}").decode()
        talk.add(f"has/{prefix}", 1)
        return dist.PrefixStore(prefix, store)
    until, answered, seen = time.monotonic() + wait.total_seconds(), 0, 0
    while talk.add(f"has/{me}", 0) < size - 1:
        if (asked := talk.add("asked", 0)) != seen:
            seen, who = asked, talk.get("asks").decode().split()
            if further := who[answered:]:
                keys = [f"answer/{one}" for one in further]
                talk.multi_set(keys, [me] * len(keys))  # type: ignore[attr-defined]
            answered = len(who)
        if time.monotonic() > until:
            came = f"{talk.add(f'has/{me}', 0) + 1} of {size} ranks came"
            raise RuntimeError(
                f"{came} within {wait.total_seconds():.0f} s: look at the logs of the others, and whether every node "
                "runs the same command"
            )
        time.sleep(EVERY)
    return dist.PrefixStore(me, store)
