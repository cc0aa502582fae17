"""Declarations of settings: default, valid values, the jobs that read them, and whether a resume may change them.

A setting declared as a plain field, without `setting`, accepts every value of its type. Every job that has the section
reads this setting. A resume must keep its value unless the section declares `FREE`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from tyro.conf import Suppress

C = TypeVar("C", bound=type)


class Free:
    """Reasons why a setting does not affect the weights after a step, so that a resume may change it."""

    WATCHED = "place and length of a run, and how it is observed"
    KEPT = "results that a run shows and keeps"
    LAYOUT = "law 2: how ranks divide the work"
    COMPUTED = "law 2: how a rank computes the same numbers"
    DRAWN = "law 3: draws depend on the data, not on the engine or on other sequences in it"
    LIMIT = "limits: a run that does not reach them is the same run"


class Job:
    """Jobs that ignore some settings in the sections that they share with other jobs."""

    EVALUATE, DISTILL, ONLINE = "evaluate", "distill", "online_preference"
    PREFERENCE, REWARD_MODEL = "preference", "reward_model"
    SUPERVISED = "supervised"
    """All jobs that train on a given data set."""


@dataclass(frozen=True)
class Rule:
    """The valid values of one setting, regardless of other settings. None is also valid if the type allows it."""

    valid: Callable[[Any], bool]
    """Function that returns True for valid values. NaN is never valid."""
    says: str
    """Description of the valid values, for the error message."""


NOT_NEGATIVE = Rule(lambda x: 0 <= x < math.inf, "must be 0 or more")
COUNT = Rule(lambda x: x >= 1, "must be at least 1")
POSITIVE = Rule(lambda x: 0 < x < math.inf, "must be above 0")
SHARE = Rule(lambda x: 0 < x <= 1, "must be above 0 and at most 1")
UNIT = Rule(lambda x: 0 <= x <= 1, "must be from 0 to 1")
FINITE = Rule(math.isfinite, "must be a finite number")


def at_least(least: float) -> Rule:
    """Return a rule that requires a finite number of at least `least`."""
    return Rule(lambda x: least <= x < math.inf, f"must be at least {least:g}")


def setting(
    default: Any,
    rule: Rule | None = None,
    free: str = "",
    only_with: Callable[[Any], Any] | None = None,
    unread_by: tuple[str, ...] = (),
) -> Any:
    """Return a dataclass field for a setting.

    rule: the valid values. free: the reason why a resume may change the setting, or "" if a resume must keep it. If a
    resume may change every setting in a section, the section declares the reason once, as `FREE`. only_with: function
    that takes a job's settings and returns True if the job reads this setting, or None if every job reads it
    (`use.py`). unread_by: jobs without a flag for the setting (`hides`).
    """
    return dataclasses.field(
        default=default, metadata={"rule": rule, "free": free, "only_with": only_with, "unread_by": unread_by}
    )


def section(kind: Callable[..., Any], unread_by: tuple[str, ...] = (), **defaults: Any) -> Any:
    """Return a dataclass field for a section.

    kind: the section's class. unread_by: as in `setting`. defaults: values that override the class's defaults.
    """
    make = functools.partial(kind, **defaults) if defaults else kind
    return dataclasses.field(default_factory=make, metadata={"unread_by": unread_by})


def hides(job: str) -> Callable[[C], C]:
    """Return a class decorator that removes the flags of fields whose `unread_by` contains this job.

    This includes inherited fields. YAML files for other jobs can still contain these settings (`load.py`).
    """

    def hide(cls: C) -> C:
        bases = [vars(base).get("__dataclass_fields__", {}) for base in cls.__mro__]
        hints = get_type_hints(cls, include_extras=True)
        for name in {name for fields in bases for name, each in fields.items() if job in unread_by(each)}:
            cls.__annotations__[name] = Suppress[hints[name]]
        return cls

    return hide


def unread_by(field: dataclasses.Field) -> tuple[str, ...]:
    """Return the jobs without a flag for this setting or section."""
    return field.metadata.get("unread_by", ())


@dataclass(frozen=True)
class Declared:
    """The arguments of `setting` that describe a setting."""

    rule: Rule | None
    free: str
    only_with: Callable[[Any], Any] | None


@functools.cache
def declared(schema: type) -> dict[str, Declared]:
    """Return dotted name -> declaration for every field in nested dataclasses, including those without a flag."""
    hints = get_type_hints(schema)
    found: dict[str, Declared] = {}
    for field in dataclasses.fields(schema):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            found |= {f"{field.name}.{name}": each for name, each in declared(hint).items()}
            continue
        rule, free = field.metadata.get("rule"), field.metadata.get("free") or getattr(schema, "FREE", "")
        if rule and type(None) in get_args(hint) and get_origin(hint) is not None:
            rule = Rule(lambda x, valid=rule.valid: x is None or valid(x), rule.says)
        found[field.name] = Declared(rule, free, field.metadata.get("only_with"))
    return found
