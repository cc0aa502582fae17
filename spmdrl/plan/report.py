"""Formats a plan and its verdict as text or JSON, and draws memory per phase as stacked bars (SVG)."""

import math
from dataclasses import asdict
from html import escape
from typing import Any

from spmdrl.config.plan import count
from spmdrl.config.schema import Config
from spmdrl.plan.run import GIB, OUTSIDE, Plan, Planned
from spmdrl.session.job import job_of

ROWS = (
    ("parameters", ("parameters",)),
    ("gradients", ("gradients",)),
    ("optimizer", ("optimizer",)),
    ("activations", ("activations",)),
    ("logits", ("logits",)),
    ("push buckets", ("push buffers",)),
    ("engine weights", ("engine weights",)),
    ("engine workspace", ("engine workspace",)),
    ("KV cache", ("KV cache",)),
)
"""Rows of the memory table. Each row has a name and sums the tags with the given suffixes."""
DISK_GB_S = 2
"""Assumed write bandwidth of a shared file system in GB/s (1e9 bytes per second), for estimating checkpoint time."""
PHASES = ("push", "rollout", "logp", "update")
COLOURS = ("#4e79a7", "#a0cbe8", "#f28e2b", "#59a14f", "#8cd17d", "#e15759", "#b07aa1", "#d4a6c8", "#76b7b2")
"""One colour per table row (Tableau palette)."""
BAR, GAP, HEIGHT, LEFT, TOP = 46, 14, 320, 64, 48


def rows_of(tags: dict[str, int]) -> dict[str, int]:
    """Return the bytes per table row; tags that match no row are counted as activations."""
    rows = dict.fromkeys((name for name, _ in ROWS), 0)
    for tag, size in tags.items():
        row = next((name for name, ends in ROWS if tag.endswith(ends)), "activations")
        rows[row] += size
    return rows


def gib(size: float) -> str:
    """Format a number of bytes in GiB, such as `12.34`."""
    return f"{size / GIB:,.2f}"


def text_of(plan: Plan) -> str:
    """Return the plan as text."""
    cfg, gpu = plan.cfg, plan.gpu
    lines = [
        f"model    {cfg.model.path}, {plan.numbers / 1e9:,.2f} G parameters, {cfg.model.dtype}",
        *job_of(cfg).lines(cfg, plan.world),
        *(plan.images.lines(cfg.policy.max_tokens_per_microbatch, plan.exchanged) if plan.images else ()),
        f"GPU      {gpu.name}: {gpu.memory_gib:g} GiB, of which {gib(OUTSIDE)} are left to CUDA and NCCL (estimate)",
    ]
    for planned in plan.kinds:
        lines += ["", *kind_lines(planned)]
    lines += ["", *verdict_lines(plan)]
    return "\n".join(lines)


def kind_lines(planned: Planned) -> list[str]:
    """Return the report lines for one kind of rank."""
    kind, rank = planned.kind, planned.rank
    of = f" of {' and '.join(rank.step.models)}" if len(rank.step.models) > 1 else ""
    held = f"{rank.step.numbers / 1e9:,.3f} G parameters each{of}, " if rank.step.numbers else ""
    lines = [f"{kind.name}: {count(kind.ranks, 'rank')}, {held}planned as rank {kind.rank}"]
    phases = [phase for phase in PHASES if phase in rank.memory]
    tables = {phase: rows_of(rank.memory[phase]) for phase in phases}
    lines.append("  " + f"{'GiB on the device':<20}" + "".join(f"{phase:>10}" for phase in phases))
    for name, _ in ROWS:
        if any(tables[phase][name] for phase in phases):
            lines.append("  " + f"{name:<20}" + "".join(f"{gib(tables[phase][name]):>10}" for phase in phases))
    totals = "".join(f"{gib(sum(tables[phase].values())):>10}" for phase in phases)
    lines.append("  " + f"{'sum':<20}" + totals)
    for name, size in rank.step.host.items():
        lines.append(f"  host: {name} {gib(size)} GiB")
    if planned.engine:
        e = planned.engine
        lines.append(
            f"  engine over {count(e['ranks'], 'rank')}: the cache holds {count(e['tokens'], 'token')}, "
            f"{count(e['sequences'], 'sequence')} of full length (at most {e['capacity']:,} run at a time)"
        )
        if e["unknown"]:
            lines.append(f"  tensors that no rule of the engine covers, counted whole: {', '.join(e['unknown'][:4])}")
    for phase in (*PHASES, "parking"):
        bound = planned.bounds.get(phase)
        if bound is None or not bound.seconds:
            continue
        load = rank.loads.get(phase)
        sent = sorted(load.sent.items(), key=lambda item: -item[1])[:3] if load else []
        largest = "".join(f"; {axis} {kind} {size / 1e9:,.2f} GB" for (axis, kind), size in sent if size > 5e6)
        flops = f"; {load.flops / 1e12:,.0f} TFLOP" if load and load.flops else ""
        lines.append(f"  {phase}: at least {bound.seconds:,.1f} s ({bound.by}){flops}{largest}")
    return lines


def verdict_lines(plan: Plan) -> list[str]:
    """Return the report lines for the whole job; the last one is the verdict."""
    worst = plan.worst()
    phase, _ = worst.peak()
    lines = []
    sizes = [f"{phase} {gib(most)} / {gib(mean)}" for phase, (most, mean) in plan.phases().items()]
    lines.append(f"memory   GiB of the fullest rank / of the mean rank: {', '.join(sizes)}")
    if plan.seconds:
        lines.append(f"step     at least {plan.seconds:,.3g} s, by peak rates; real kernels and links take longer")
    host = plan.host_of_node()
    if host:
        known = plan.gpu.host_memory_gib
        of = f" of {known:,.0f}" if known else ""
        lines.append(f"node     {gib(host)} GiB{of} in host memory, {count(plan.gpu.gpus_per_node, 'rank')}")
    saved = max(planned.rank.step.checkpoint for planned in plan.kinds)
    if saved:
        seconds = f"{saved / 1e9 / DISK_GB_S:,.0f} s at {DISK_GB_S} GB/s of all nodes together"
        lines.append(f"saved    {gib(saved)} GiB a checkpoint, of all ranks; {seconds}")
    if plan.fits:
        lines.append(
            f"verdict  fits with {gib(plan.spare)} GiB to spare on each {plan.gpu.name} ({worst.kind.name}, in {phase})"
        )
    else:
        lines.append(f"verdict  does not fit: {' and '.join(lacks(plan))}")
    return lines


def lacks(plan: Plan) -> list[str]:
    """Return a description of each memory shortfall: on devices, in KV caches, on hosts."""
    found = []
    if plan.device_spare < 0:
        found.append(f"{gib(-plan.device_spare)} GiB too much for each {plan.gpu.name} {where(plan)}")
    for planned in plan.kinds:
        if lack := planned.engine.get("lack"):
            longest = plan.cfg.rollout.max_prompt_tokens + plan.cfg.rollout.max_new_tokens
            found.append(
                f"{gib(lack)} GiB too little in the engine's KV cache for one sequence of {longest:,} tokens "
                f"({planned.kind.name}): raise {cache_flag(plan.cfg)} or --rollout.tp"
            )
            break
    if (plan.host_spare or 0) < 0:
        found.append(f"{gib(-(plan.host_spare or 0))} GiB too much for the host memory of each node {parked(plan)}")
    return found


def cache_flag(cfg: Config) -> str:
    """Return the flag that sets the engine's KV cache size."""
    return "--rollout.kv-cache-gib" if cfg.rollout.kv_cache_gib else "--rollout.gpu-memory-utilization"


def parked(plan: Plan) -> str:
    """Describe the two largest items in a node's host memory."""
    host = max((p.rank.step.host for p in plan.kinds), key=lambda held: sum(held.values()))
    each = plan.gpu.gpus_per_node
    largest = sorted(host, key=lambda name: -host[name])[:2]
    return "(" + " and ".join(f"{name} {gib(each * host[name])}" for name in largest) + " GiB)"


def where(plan: Plan) -> str:
    """Describe the fullest device: its kind of rank, the phase, and the two largest table rows."""
    worst = plan.worst()
    phase, _ = worst.peak()
    rows = rows_of(worst.rank.memory[phase])
    largest = sorted(rows, key=lambda name: -rows[name])[:2]
    named = " and ".join(f"{name} {gib(rows[name])}" for name in largest)
    return f"({worst.kind.name}, in {phase}; {named} GiB)"


def facts_of(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON-serialisable numbers: bytes, seconds, FLOPs."""
    kinds = []
    for planned in plan.kinds:
        rank = planned.rank
        kinds.append(
            {
                "kind": asdict(planned.kind),
                "device_bytes": {phase: rows_of(tags) for phase, tags in rank.memory.items()},
                "mean_device_bytes": planned.means,
                "held_bytes": rank.step.held,
                "host_bytes": rank.step.host,
                "parameters": rank.step.numbers,
                "flops": {phase: load.flops for phase, load in rank.loads.items()},
                "sent_bytes": {
                    phase: {f"{axis}: {kind}": n for (axis, kind), n in load.sent.items()}
                    for phase, load in rank.loads.items()
                },
                "collectives": {
                    phase: {f"{axis}: {kind}": n for (axis, kind), n in load.calls.items()}
                    for phase, load in rank.loads.items()
                },
                "least_seconds": {phase: {"seconds": b.seconds, "by": b.by} for phase, b in planned.bounds.items()},
                "engine": planned.engine,
                "microbatches": rank.micros,
                "ranks_of_axes": planned.axes,
            }
        )
    return {
        "world": plan.world,
        "gpu": asdict(plan.gpu),
        "parameters": plan.numbers,
        "images": plan.images.facts() | {"exchanged_bytes": plan.exchanged} if plan.images else None,
        "fits": plan.fits,
        "device_bytes": {phase: {"worst": most, "mean": mean} for phase, (most, mean) in plan.phases().items()},
        "spare_bytes": plan.spare,
        "host_spare_bytes": plan.host_spare,
        "least_seconds": plan.seconds,
        "host_bytes_of_node": plan.host_of_node(),
        "checkpoint_bytes": max(planned.rank.step.checkpoint for planned in plan.kinds),
        "verdict": verdict_lines(plan)[-1].removeprefix("verdict").strip(),
        "kinds": kinds,
    }


def picture(plan: Plan) -> str:
    """Return an SVG with one stacked bar per phase (bytes by purpose) and a line at the GPU's memory size."""
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
    """Return a tick step (1, 2 or 5 times a power of ten) that splits the axis from 0 to `most` into 4 to 10 parts."""
    power = 10.0 ** math.floor(math.log10(most))
    return next(step for step in (power / 5, power / 2, power, 2 * power) if most / step <= 10)


def _bar(x: int, rows: dict[str, int], most: float, name: str) -> list[str]:
    """Return the rectangles of one stacked bar, bottom to top; each shows its bytes in a tooltip."""
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
