"""Gives each start of a job its own key prefix in a store that outlives the start.

torchrun's agent keeps one store through all restarts, and a start must not find keys of an earlier one (addresses of
processes that are gone, counters). Ranks have no common number of the start: an agent counts only the restarts that its
own node requested.
"""

import secrets
import time
from datetime import timedelta

import torch.distributed as dist

EVERY = 0.02
"""Seconds between two polls of rank 0."""


def own_names(store: dist.Store, rank: int, size: int, wait: timedelta) -> dist.Store:
    """Return the store under a prefix that no other start has. Collective over all ranks of this start.

    Rank 0 draws the prefix and answers each rank's request, under a key that only this rank knows, until all ranks have
    the prefix. It also answers requests of processes that are gone, which does no harm: torchrun starts processes only
    after all processes of the start before have ended.

    Raises:
        RuntimeError: a rank has not come within `wait`.
    """
    joining, me = dist.PrefixStore("joining", store), secrets.token_hex(8)
    if rank:
        # All requests are in one text, so that rank 0 needs one read for all ranks, after their count has risen.
        joining.append("requests", f"{me} ")  # type: ignore[attr-defined]
        joining.add("requested", 1)
        try:
            joining.wait([f"answer/{me}"], wait)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank 0 did not answer within {wait.total_seconds():.0f} s of this rank's start: check its log, and "
                "that every node runs the same command"
            ) from error
        prefix = joining.get(f"answer/{me}").decode()
        joining.add(f"has/{prefix}", 1)
        return dist.PrefixStore(prefix, store)
    until, answered, seen = time.monotonic() + wait.total_seconds(), 0, 0
    while joining.add(f"has/{me}", 0) < size - 1:
        if (count := joining.add("requested", 0)) != seen:
            seen, requests = count, joining.get("requests").decode().split()
            if keys := [f"answer/{name}" for name in requests[answered:]]:
                joining.multi_set(keys, [me] * len(keys))  # type: ignore[attr-defined]
            answered = len(requests)
        if time.monotonic() > until:
            came = f"{joining.add(f'has/{me}', 0) + 1} of {size} ranks came"
            raise RuntimeError(
                f"{came} within {wait.total_seconds():.0f} s: check the logs of the others, and that every node runs "
                "the same command"
            )
        time.sleep(EVERY)
    return dist.PrefixStore(me, store)
