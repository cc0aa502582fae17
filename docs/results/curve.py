"""Draw docs/learning_curve.svg from the numbers of the quickstart in docs/results/smollm2_addition.

python docs/results/curve.py
"""

import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
PICTURE = HERE.parent / "learning_curve.svg"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 270, 56, 24, 52, 42
COLORS = ("#2563eb", "#d97706", "#059669")
FONT = 'font-family="system-ui, sans-serif"'


def read(seed: int) -> list[dict]:
    """Return the metrics of the run with this seed, a dict for each step."""
    text = (HERE / "smollm2_addition" / f"s{seed}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def held_out(rows: list[dict]) -> list[tuple[int, float]]:
    """Return (number of steps done, held-out accuracy) of each evaluation of a run.

    Evaluations run before a step, which is the step of their row, and after the last step.
    """
    found = [(row["step"] - 1, row["eval/accuracy"]) for row in rows if "eval/accuracy" in row]
    return [*found[:-1], (rows[-1]["step"], found[-1][1])]


def draw(runs: list[list[dict]]) -> str:
    """Return the picture as SVG: held-out accuracy of each seed, and in grey the mean reward of training over seeds."""
    steps = len(runs[0])

    def place(step: float, value: float) -> tuple[float, float]:
        width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return round(LEFT + width * step / steps, 1), round(TOP + height * (1 - value), 1)

    def line(points: list[tuple[float, float]], color: str, width: float) -> str:
        path = " ".join(f"{x},{y}" for x, y in (place(*point) for point in points))
        return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"/>'

    def text(x: float, y: float, words: str, more: str = "") -> str:
        return f'<text x="{x}" y="{y}" {FONT} font-size="13" fill="#374151" {more}>{words}</text>'

    minutes = [rows[-1]["training_s"] / 60 for rows in runs]
    title = (
        f"SmolLM2-135M learns to add: {steps} steps of GRPO, "
        f"{min(minutes):.1f} to {max(minutes):.1f} minutes on two CPU cores"
    )
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{title}</title>",
    ]
    out.append(f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>')
    out.append(text(LEFT, 24, title, 'font-weight="600"'))
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        (x, y), (end, _) = place(0, value), place(steps, value)
        out.append(f'<line x1="{x}" y1="{y}" x2="{end}" y2="{y}" stroke="#e5e7eb"/>')
        out.append(text(x - 8, y + 4, f"{value:g}", 'text-anchor="end"'))
    for step in range(0, steps + 1, 10):
        out.append(text(place(step, 0)[0], HEIGHT - BOTTOM + 20, str(step), 'text-anchor="middle"'))
    out.append(text(WIDTH - RIGHT, HEIGHT - 6, "steps", 'text-anchor="end"'))
    reward = [sum(rows[i]["reward/mean"] for rows in runs) / len(runs) for i in range(steps)]
    out.append(line([(i + 0.5, value) for i, value in enumerate(reward)], "#9ca3af", 1.2))
    for seed, (rows, color) in enumerate(zip(runs, COLORS, strict=True)):
        points = held_out(rows)
        out.append(line(points, color, 2.2))
        out += [f'<circle cx="{x}" cy="{y}" r="3.2" fill="{color}"/>' for x, y in (place(*point) for point in points)]
        out.append(f'<circle cx="{LEFT + 8 + 84 * seed}" cy="40" r="4" fill="{color}"/>')
        out.append(text(LEFT + 17 + 84 * seed, 44, f"seed {seed}"))
    out.append(text(LEFT + 262, 44, "held-out accuracy; grey: mean reward of the samples in training"))
    return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw([read(seed) for seed in range(3)]), encoding="utf-8")
