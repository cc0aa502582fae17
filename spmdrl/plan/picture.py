"""Draws a plan as an SVG: stacked bars of each phase's memory, one group of bars per kind of ranks."""

import math
from html import escape

from spmdrl.plan.report import PHASES, ROWS, gib, rows_of
from spmdrl.plan.run import GIB, OUTSIDE, Plan

COLOURS = ("#4e79a7", "#a0cbe8", "#f28e2b", "#59a14f", "#8cd17d", "#e15759", "#b07aa1", "#d4a6c8", "#76b7b2")
"""One colour per row of the table (Tableau's palette)."""
BAR, GAP, HEIGHT, LEFT, TOP = 46, 14, 320, 64, 48


def picture(plan: Plan) -> str:
    """Return an SVG: bytes by owner in each phase, and a line at the memory of the GPU."""
    limit = plan.gpu.memory_gib * GIB
    stacks = [
        (planned.kind.name, [(phase, rows_of(tags)) for phase in PHASES if (tags := planned.rank.memory.get(phase))])
        for planned in plan.kinds
    ]
    most = max([limit, *(sum(rows.values()) + OUTSIDE for _, bars in stacks for _, rows in bars)]) * 1.05
    body, x = [], LEFT + GAP
    for name, bars in stacks:
        begin = x
        for phase, rows in bars:
            body += _bar(x, rows, most, f"{name}, {phase}")
            body.append(_text(x + BAR / 2, TOP + HEIGHT + 16, phase))
            x += BAR + GAP
        body.append(_text((begin + x - GAP) / 2, TOP + HEIGHT + 36, name, "font-weight='bold'"))
        x += 2 * GAP
    y = _y(limit, most)
    body.append(f"<line x1='{LEFT}' x2='{x}' y1='{y:.1f}' y2='{y:.1f}' stroke='#c00' stroke-dasharray='6 4'/>")
    body.append(_text(LEFT + 4, y - 5, f"{plan.gpu.name}: {plan.gpu.memory_gib:g} GiB", "fill='#c00'", "start"))
    tick = round_step(most / GIB) * GIB
    for i in range(int(most / tick) + 1):
        body.append(_text(LEFT - 6, _y(i * tick, most) + 4, f"{i * tick / GIB:,.3g}", "", "end"))
    body.append(_text(LEFT - 6, TOP - 8, "GiB", "", "end"))
    known = f" of {plan.gpu.host_memory_gib:,.0f}" if plan.gpu.host_memory_gib else ""
    host = f"host memory of a node: {gib(plan.host_of_node())}{known} GiB"
    body.append(_text(x + GAP, TOP + 18 * (len(ROWS) + 2), host, "", "start"))
    names = [name for name, _ in ROWS] + ["CUDA and NCCL (estimate)"]
    for i, (name, colour) in enumerate(zip(names, (*COLOURS, "#bbbbbb"), strict=True)):
        top = TOP + 18 * i
        body.append(f"<rect x='{x + GAP}' y='{top}' width='12' height='12' fill='{colour}'/>")
        body.append(_text(x + GAP + 18, top + 10, name, "", "start"))
    title = f"{plan.cfg.model.path} on {plan.world:,} ranks: GiB of the device in each phase"
    body.insert(0, _text(LEFT, 24, title, "font-size='15'", "start"))
    size = f"width='{max(x + 300, LEFT + 9 * len(title))}' height='{TOP + HEIGHT + 52}'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {size} font-family='sans-serif' font-size='12'>"
    return "\n".join([head, "<rect width='100%' height='100%' fill='white'/>", *body, "</svg>\n"])


def round_step(most: float) -> float:
    """Return a step of 1, 2 or 5 times a power of ten that divides an axis up to `most` into 4 to 10 parts."""
    power = 10.0 ** math.floor(math.log10(most))
    return next(step for step in (power / 5, power / 2, power, 2 * power) if most / step <= 10)


def _bar(x: int, rows: dict[str, int], most: float, name: str) -> list[str]:
    """Draw one stack from the bottom up; a pointer over a part shows its bytes."""
    out, below = [], 0
    parts = [*zip(rows, rows.values(), COLOURS, strict=True), ("CUDA and NCCL", OUTSIDE, "#bbbbbb")]
    for row, size, colour in parts:
        if size:
            y, height = _y(below + size, most), size / most * HEIGHT
            title = escape(f"{name}: {row} {gib(size)} GiB")
            out.append(
                f"<rect x='{x}' y='{y:.2f}' width='{BAR}' height='{height:.2f}' fill='{colour}'>"
                f"<title>{title}</title></rect>"
            )
            below += size
    return out


def _y(size: float, most: float) -> float:
    return TOP + HEIGHT * (1 - size / most)


def _text(x: float, y: float, text: str, more: str = "", anchor: str = "middle") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' {more}>{escape(text)}</text>"
