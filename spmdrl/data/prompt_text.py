"""Puts columns of a row into the texts of `--data.template` and `--data.prefill`."""

import re
import string


def around_prompt(prompt: str | list, row: dict, template: str) -> str | list:
    """Put the template around the prompt; in messages, around the last one from the user."""
    if isinstance(prompt, str):
        return with_values("--data.template", template, {**row, "prompt": prompt})
    for i in reversed(range(len(prompt))):
        if prompt[i].get("role") == "user":
            text = with_values("--data.template", template, {**row, "prompt": prompt[i].get("content")})
            return [*prompt[:i], {**prompt[i], "content": text}, *prompt[i + 1 :]]
    raise ValueError("--data.template goes around the user's message, and the prompt has none")


def column_names(text: str) -> list[str]:
    """Return the columns that `with_values` puts into a text; none of one that it refuses."""
    try:
        return [_base(name) for _, name, _, _ in string.Formatter().parse(text) if name is not None]
    except ValueError:
        return []


def _base(name: str) -> str:
    return name.split("[")[0].split(".")[0]


def with_values(flag: str, text: str, row: dict) -> str:
    """Apply str.format with the columns: `{name}` and `{name[key]}` only; other braces are written `{{` and `}}`."""
    try:
        for name in (name for _, name, _, _ in string.Formatter().parse(text) if name is not None):
            base = _base(name)
            if "." in re.sub(r"\[[^\]]*\]", "", name):
                raise ValueError(
                    f"{name!r} reaches into a value, which has no columns; write {{name}} or {{name[key]}}"
                )
            if base not in row:
                raise ValueError(f"no column {base!r}; there are {', '.join(map(str, row))} (--data.prompt-column)")
        return text.format(**row)
    except (ValueError, LookupError, AttributeError, TypeError) as e:
        raise ValueError(f"{flag} {text!r}: {e}; write braces that are no column as {{{{ and }}}}") from e
