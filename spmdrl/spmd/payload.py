"""Processed images, which are held once per content and travel between ranks beside the sequences that show them."""

from dataclasses import dataclass

import torch

from spmdrl.spmd.exchange import Table, exchange
from spmdrl.spmd.peers import Peers

FACTS = 10
"""Count of the numbers that travel beside the pixels: tokens, kind, three of the layout, dimensions, four sizes."""
PLAIN, GRID, TILES = 0, 1, 2
"""Kinds of layout: neither, `Payload.grid`, `Payload.tiles`."""


@dataclass(frozen=True, eq=False)
class Payload:
    """One processed image, on the CPU."""

    name: str
    """32 hex digits that name the content: `pixels`, their layout, and the settings of the processor."""
    pixels: torch.Tensor
    """float32, as transformers' processor returns them for this image alone: [patches, values of a patch], or for the
    tiled families [tiles, 3, side, side], row by row, with the whole image last."""
    tokens: int
    """Number of placeholders in expanded ids; equals the number of image features."""
    grid: tuple[int, int, int] | None = None
    """Number of patches along time (1), height and width; None for the tiled families."""
    tiles: tuple[int, int] | None = None
    """Rows and columns of tiles, or (0, 0) if the only tile is the whole image; None if the family has no tiles."""


def numbers_of(names: list[str]) -> torch.Tensor:
    """Return the names of payloads as numbers, int64 [n, 2]."""
    halves = [int.from_bytes(bytes.fromhex(name)[i : i + 8], signed=True) for name in names for i in (0, 8)]
    return torch.tensor(halves, dtype=torch.int64).view(-1, 2)


def names_of(numbers_n2: torch.Tensor) -> list[str]:
    """Return the names of payloads: the inverse of `numbers_of`."""
    return [b"".join(half.to_bytes(8, signed=True) for half in row).hex() for row in numbers_n2.tolist()]


def fetch(held: dict[str, Payload], wanted: list[str], peers: Peers) -> dict[str, Payload]:
    """Return the wanted payloads by name, from this rank or the first rank that holds them. Collective.

    held: payloads that this rank holds. wanted: names of those that it needs, without duplicates; some rank holds each.
    """
    mine = {name: held[name] for name in wanted if name in held}
    if peers.group is None:
        return mine
    lacking = [name for name in wanted if name not in held]
    wants = [names_of(rows.cpu()) for rows in peers.rows(numbers_of(lacking))]
    needed = {name for names in wants for name in names}
    offers = [names_of(rows.cpu()) for rows in peers.rows(numbers_of([name for name in held if name in needed]))]
    holder = {name: rank for rank in reversed(range(len(offers))) for name in offers[rank]}
    sent = [(name, rank) for rank, names in enumerate(wants) for name in names if holder[name] == peers.index]
    received, _ = exchange(_table(held, sent), lambda rows: rows[:, 2], peers.group, peers.device)
    return mine | _payloads(received)


def _table(held: dict[str, Payload], sent: list[tuple[str, int]]) -> Table:
    """Return the payloads to send as items with the keys (name as two numbers, rank that receives it)."""
    payloads = [held[name] for name, _ in sent]
    to = torch.tensor([rank for _, rank in sent], dtype=torch.int64)
    facts = torch.zeros(len(sent), FACTS, dtype=torch.int64)
    for row, payload in zip(facts, payloads, strict=True):
        layout = payload.grid or payload.tiles or ()
        kind = PLAIN if payload.grid is payload.tiles is None else GRID if payload.tiles is None else TILES
        shape = payload.pixels.shape
        row[: 2 + len(layout)] = torch.tensor([payload.tokens, kind, *layout])
        row[5 : 6 + len(shape)] = torch.tensor([len(shape), *shape])
    pixels = torch.cat([torch.zeros(0), *(payload.pixels.flatten() for payload in payloads)])
    sizes = torch.tensor([payload.pixels.numel() for payload in payloads], dtype=torch.int64)
    keys = torch.cat([numbers_of([name for name, _ in sent]), to[:, None]], 1)
    return Table(keys, {"facts": torch.ones_like(to), "pixels": sizes}, {"facts": facts, "pixels": pixels})


def _payloads(table: Table) -> dict[str, Payload]:
    """Return received payloads by name: the inverse of `_table`."""
    out = {}
    pixels = table.values["pixels"].split(table.lengths["pixels"].tolist())
    for name, facts, flat in zip(names_of(table.keys_nK[:, :2]), table.values["facts"].tolist(), pixels, strict=True):
        tokens, kind, *layout = facts[:5]
        grid = tuple(layout) if kind == GRID else None
        tiles = tuple(layout[:2]) if kind == TILES else None
        # A slice of all pixels would keep the others in memory.
        shaped = flat.clone().view(facts[6 : 6 + facts[5]])
        out[name] = Payload(name, shaped, tokens, grid, tiles)  # pyright: ignore[reportArgumentType]
    return out
