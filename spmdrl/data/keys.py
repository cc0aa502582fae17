"""Names of samples in messages."""


def describe(key: object) -> str:
    """A key in words: an int is a prompt index, a tuple begins with (prompt, sample), others are shown as they are."""
    if isinstance(key, tuple) and len(key) >= 2:
        return f"prompt {key[0]}, sample {key[1]}"
    return f"prompt {key}" if isinstance(key, int) else f"item {key}"
