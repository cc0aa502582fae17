"""Messages and seed with which adapters begin an episode, from its row."""

OPENING = "prompt_messages"
"""Key of a row that holds the messages of its prompt with its system's message and its history before them, if any."""


def prompt_of(row: dict) -> list[dict]:
    """Return the messages of a row's prompt, after those that its other columns give; a text is a user's message."""
    prompt = row.get(OPENING) or row.get("prompt") or []
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(each) for each in prompt]


def opening(row: dict, text: str) -> list[dict]:
    """Return the row's prompt with a first observation after it, in its last message if that is a user's."""
    messages = prompt_of(row)
    if messages and messages[-1].get("role") == "user" and isinstance(messages[-1].get("content"), str):
        messages[-1]["content"] = "\n\n".join(part for part in (messages[-1]["content"], text) if part)
        return messages
    return [*messages, {"role": "user", "content": text}]


def seed_of(row: dict, seed: int) -> int:
    """Return the seed of an episode, below 2^31: the row's column `seed`, if there is one, or the run's of the sample.

    All samples of a prompt share the column, and so begin alike.

    Raises:
        ValueError: the column holds no whole number.
    """
    own = row.get("seed")
    if own is None:
        return seed % 2**31
    if isinstance(own, bool) or not isinstance(own, int):
        raise ValueError(f"the column seed of a row holds a whole number, not {own!r}")
    return own % 2**31
