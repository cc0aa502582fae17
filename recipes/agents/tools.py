"""Custom tools, as a list of typed functions: `--env recipes/agents/tools.py:TOOLS`."""

import asyncio

STOCK = {"apple": 12, "pear": 0, "plum": 7}


def stock(fruit: str) -> int:
    """Look up how many pieces of a fruit are in stock.

    Args:
        fruit: The fruit, in the singular.
    """
    if fruit not in STOCK:
        raise ValueError(f"no {fruit}: there are {', '.join(STOCK)}")
    return STOCK[fruit]


async def price(fruit: str, pieces: int = 1) -> str:
    """Ask a slow shop for the price of some fruit.

    Args:
        fruit: The fruit, in the singular.
        pieces: How many, from 1.
    """
    await asyncio.sleep(0.05)
    return f"{pieces} {fruit}: {0.3 * pieces:.2f} euros"


TOOLS = [stock, price]
