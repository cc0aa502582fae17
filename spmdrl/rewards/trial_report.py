"""Reports a trial of a reward (`trial.py`): whether right answers score best, source by source, and further notes."""

import json
import math

from spmdrl.config.user_code import printable
from spmdrl.data.scores import is_right
from spmdrl.rewards.trial import OTHER, Row, Trial

ENOUGH = 0.95
"""Least share of the rows of a source whose right answers should score best."""
BY_CHANCE = 0.2
"""Share of the rows for which another row's answer may be right: short truths are often the same in another form."""


def verdicts(found: Trial) -> list[str]:
    """Return what is wrong with a reward, by what answers of each kind got; empty if nothing is."""
    out = [*_not_best(found), *_undeserving(found)]
    rewards = [r for _, row in found.rows for r in row.rewards.values()]
    if left_out := [(i, r.ungraded) for _, row in found.rows for i, r in row.rewards.items() if r.ungraded]:
        index, why = left_out[0]
        rows = f"in {len(dict(left_out))} of {len(found.sources)} rows"
        out.append(
            f"{len(left_out)} of {len(rewards)} answers could not be graded, {rows}, the first (prompt {index}) "
            f"because {printable(why)}"
        )
    if odd := sum(not r.ungraded and not math.isfinite(r.score) for r in rewards):
        out.append(f"{odd} of {len(rewards)} answers get a score that is not finite, and such samples are left out")
    if late := sum(r.timed_out for r in rewards):
        out.append(f"{late} of {len(rewards)} gradings took too long (--reward.timeout)")
    return out


def _not_best(found: Trial) -> list[str]:
    """Sources whose right answers do not score best."""
    best, most, out = found.best(), found.undeserved(), []
    if not best:
        if any(row.rewards for row in found.of("gold")):
            return ["none of the right answers could be graded: nothing is known of them"]
        return ["no row holds an answer that can be tried: nothing is known of right answers"]
    for source, (count, share) in found.best_shares().items():
        if not count or share >= ENOUGH:
            continue
        its = [i for i, name in found.sources.items() if name == source and i in best]
        right, wrong = (sum(x.get(i, 0.0) for i in its) / count for x in (best, most))
        of = f" of {source}" if len(set(found.sources.values())) > 1 else ""
        out.append(
            f"right answers score best in {share:.1%} of the rows{of} (in their best form they get {right:.3g} on "
            f"average, and the best of those that deserve nothing {wrong:.3g}): the reward does not find the truth "
            "(--reward.function, --data.answer-column) or rewards something else, or rows are wrong"
        )
    return out


def _undeserving(found: Trial) -> list[str]:
    """Kinds of answers that deserve nothing and score as much as right ones."""
    best, least, named = found.best(), {}, []
    for _, row in found.rows:
        least |= {i: min(score, least.get(i, score)) for i, score in row.by_prompt.items()}

    def as_much(i: int, score: float) -> bool:
        # Where right answers get the least that there is, `_not_best` tells of it.
        return score >= best.get(i, 1.0) and (is_right(score) or score > least[i])

    for row in found.of("garbage"):
        scores = row.by_prompt
        share = sum(as_much(i, score) for i, score in scores.items()) / len(scores) if scores else 0.0
        if share > (BY_CHANCE if row.kind.startswith(OTHER) else 0.0):
            named.append(f"`{row.kind}` ({share:.1%} of the rows)")
    return [f"wrong and empty answers score as much as right ones: {', '.join(named)}"] if named else []


def notes(found: Trial) -> list[str]:
    """Return what is no mistake, and good to know."""
    best, out = found.best(), []
    if best and len(best) < len(found.sources):
        out.append(
            f"{len(found.sources) - len(best)} of {len(found.sources)} rows have no right answer that was graded"
        )
    if best and (full := sum(is_right(x) for x in best.values()) / len(best)) < ENOUGH:
        out.append(f"right answers get 1 or more in {full:.1%} of the rows, and eval/accuracy counts such scores alone")
    most = found.undeserved()
    if count := sum(is_right(x) and x < best.get(i, x) for i, x in most.items()):
        out.append(
            f"answers that deserve nothing get 1 or more in {count / len(most):.1%} of the rows, if less than right"
            " ones, and eval/accuracy counts them as right"
        )
    shares = found.best_shares()
    for source, (count, share) in shares.items() if len(shares) > 1 else ():
        told = f"right answers score best in {share:.1%} of {count}" if count else "no right answer was graded"
        out.append(f"rows of {source}: {told}")
    return out


def table(rows: list[tuple[str, Row]]) -> str:
    """Return the table that a user reads."""
    lines = [f"{'answers':8} {'written':40} {'tried':>6} {'score >= 1':>10} {'mean':>8} {'least':>8} {'most':>8}"]
    for sort, row in rows:
        scores = row.scores
        numbers = "not graded"
        if scores:
            numbers = f"{row.right:10.1%} {sum(scores) / len(scores):8.3f} {min(scores):8.3f} {max(scores):8.3f}"
        lines.append(f"{sort:8} {row.kind:40} {len(row.rewards):6} {numbers:>10}")
    return "\n".join(lines)


def as_json(found: Trial) -> str:
    """Return kinds, verdicts and notes as one JSON object."""
    kinds = [
        {"answers": sort, "written": row.kind, "tried": len(row.rewards), "right": row.right if row.scores else None}
        for sort, row in found.rows
    ]
    problems = verdicts(found)
    return json.dumps({"ok": not problems, "problems": problems, "notes": notes(found), "kinds": kinds})
