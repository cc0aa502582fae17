"""Converts configs to YAML for `--config` and to dicts for trackers, compares configs, and removes secrets."""

import json
import os
import re
from typing import Any

import yaml

from spmdrl.config.fields import get, leaves

REDACTED = "<redacted>"
RESOLVED = "# Every setting of a run, as it was resolved: what the run does not use may stand here, too."
"""First line written by `to_yaml`, which `is_resolved` uses to recognise such files."""
# Match only whole words, so that max_new_tokens is not treated as a secret.
_SECRET_NAME = re.compile(r"(^|[._])(token|secret|password|passwd|credential|credentials|key|apikey)$", re.IGNORECASE)
# Matches keys for Hugging Face, OpenAI, GitHub, GitLab, AWS, NVIDIA, Slack, Google, Groq, xAI and wandb (exactly
# 40 hex digits), bearer headers, and logins in URLs. `_SECRET_QUERY` matches secrets in a URL's query.
_SECRET_VALUE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|A[KS]IA[A-Z0-9]{12,}|nvapi-[\w-]{16,}|xox[abcdeprs]-[\w-]{10,}|xapp-[\w-]{10,}|AIza[\w-]{30,}|gsk_[A-Za-z0-9]{16,}"
    r"|xai-[A-Za-z0-9]{16,})\b|^[0-9a-f]{40}$"
    r"|(?i:bearer\s+[\w.~+/-]{8,})|(?<=://)[^/\s@]+(?=@)"
)
_SECRET_QUERY = re.compile(
    r"([?&;][\w.-]*(?:token|secret|password|passwd|credential|key|signature|sig|auth)[\w.-]*=)[^&;\s'\"]+",
    re.IGNORECASE,
)
_SECRET_VARIABLE = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|(API|ACCESS|SECRET)KEY|(^|_)KEY(_ID)?|(^|_)PAT)$", re.IGNORECASE
)
LEAST = 8
"""Minimum length, in characters, of environment variable values to redact; shorter ones might be ordinary words."""


def redact(name: str, value: Any) -> Any:
    """Return a setting's value without credentials, which are recognised by their format or by the setting's name.

    A tuple becomes a list of redacted items; values that are neither text nor lists are returned unchanged.
    """
    if isinstance(value, tuple | list):
        return [redact(name, item) for item in value]
    if not isinstance(value, str) or not value:
        return value
    if name == "reward.kwargs":
        return _redact_json(value)
    return REDACTED if _SECRET_NAME.search(name) else redact_text(value)


def _redact_json(text: str) -> str:
    """Return a JSON text without credentials. Values of keys whose names suggest a secret are also removed."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        return redact_text(text)
    shown = {key: REDACTED if _SECRET_NAME.search(f"x.{key}") else value for key, value in found.items()}
    return redact_text(text if shown == found else json.dumps(shown))


def redact_text(text: str) -> str:
    """Return a text without credentials.

    Credentials are recognised by their format, or because an environment variable such as `HF_TOKEN` has the same
    value.
    """
    for name, value in os.environ.items():
        if len(value) >= LEAST and value in text and _SECRET_VARIABLE.search(name):
            text = text.replace(value, REDACTED)
    return _SECRET_QUERY.sub(rf"\1{REDACTED}", _SECRET_VALUE.sub(REDACTED, text))


def to_dict(config: Any) -> dict[str, Any]:
    """Return a config as nested dicts in schema order, redacted; tuples become lists."""
    nested: dict[str, Any] = {}
    for name in leaves(type(config)):
        *sections, last = name.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = redact(name, get(config, name))
    return nested


def to_yaml(config: Any) -> str:
    """Return the text of a run folder's `config.yaml`, from which `--config` restores the config except for secrets."""
    text = yaml.dump(to_dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return f"{RESOLVED}\n{text}"


def diff(a: Any, b: Any) -> dict[str, tuple[Any, Any]]:
    """Return dotted name -> (value in a, value in b) for settings that differ between two configs with the same schema.

    Values are redacted.
    """
    pairs = ((name, get(a, name), get(b, name)) for name in leaves(type(a)))
    return {name: (redact(name, left), redact(name, right)) for name, left, right in pairs if left != right}


class _Dumper(yaml.SafeDumper):
    """Dumper that writes sections in block style and lists on one line."""


_Dumper.add_representer(
    list, lambda dumper, items: dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)
)
