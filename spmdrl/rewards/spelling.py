r"""Spellings of one mathematical answer in LaTeX, `\mathrm{e}` and e, `\left(` and (, written in one way."""

import re

from spmdrl.rewards.names import crossed
from spmdrl.rewards.text import CURRENCY, SIGNS

_LOOKS = re.compile(
    r"\\(?P<name>math(?:rm|bf|it|sf|tt|normal|bfit)|text(?:rm|bf|it|sf|tt|normal|up)?|mbox|hbox|operatorname\*?"
    r"|bold(?:symbol)?|bm|emph)\s*\{(?P<inside>[^{}]*)\}"
)
_FUNCTIONS = re.compile(r"(?:a|ar|arc)?(?:sin|cos|tan|csc|sec|cot)h?|log|ln|lg|exp|gcd|lcm|det|max|min")
_UNIT_LETTERS = frozenset("mgshlLJNWVKC")
_FUNCTION_OR_UNIT = ("min", "sec")
_UNIT_NAME = r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}\s*(?:\^\s*(?:\{-?\d\}|\d))?"
_PLACED = (
    (re.compile(r"\\([ij])math(?![A-Za-z])"), r"\1"),
    (
        re.compile(
            r"\\(math(?:bf|rm|bb|cal|frak|scr)|boldsymbol|bm|vec|(?:wide)?(?:hat|tilde)|bar|d?dot)(?:\s+([A-Za-z])|\s*(\\[A-Za-z]+))"
        ),
        r"\\\1{\2\3}",
    ),
    (re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])\s*\.?|\\displaystyle|\\!"), ""),
    (re.compile(r",?\s*\\(?:text|mbox|mathrm)\s*\{[\s~]*(?:and|or)[\s~]*\}"), ", "),
    (re.compile(r"\\f?boxed\s*(?=[^\s{])"), ""),
    (re.compile(r"(?<![A-Za-z\\])[Ii]nfinity(?![A-Za-z])"), r"\\infty "),
    (re.compile(r"\\langle(?![A-Za-z])"), "("),
    (re.compile(r"\\rangle(?![A-Za-z])"), ")"),
    (re.compile(r"\\q?quad(?![A-Za-z])|~|(?<!\\)\\ "), " "),
    (
        re.compile(rf"(?<=[\d}})!])(\s*)\\[dt]?frac\s*\{{\s*({_UNIT_NAME})\s*\}}\s*\{{\s*({_UNIT_NAME})\s*\}}"),
        r"\1\2/\3",
    ),
    (re.compile(r"(?<=\d)\s*\^?\s*(\{?)\s*\\(?:text|mathrm|mbox)\s*\{(?:st|nd|rd|th)\}\s*(?(1)\})"), " "),
    (re.compile(r"\\(text|mathrm|mbox)\s*\{\s*per\s?cent(?![A-Za-z])"), r"\\%\\\1{"),
    (re.compile(r"(?<=[\d})])\s+per\s?cent(?![A-Za-z])"), r"\\%"),
    (re.compile(r"\\([dtc]?)frac\s*(\d)\s+(\d)(?!\d)"), r"\\frac{\2}{\3}"),
    (re.compile(r"(?<![\d^_}])(-?)(\d{1,9})\s+(\d{1,9})/(\d{1,9})(?!\d)"), r"\1\2\\frac{\3}{\4}"),
    (re.compile(r"(?<![\d\w.])\.(?=\d)"), "0."),
)
_SPOKEN = str.maketrans(
    {
        "\u00d7": r"\times ",
        "\u00f7": r"\div ",
        "\u00b7": r"\cdot ",
        "\u03c0": r"\pi ",
        "\u221e": r"\infty ",
        "\u2264": r"\le ",
        "\u2265": r"\ge ",
        "\u2032": "'",
        "\u2019": "'",
        "\u2033": "''",
        '"': "''",
    }
)
_SCIENTIFIC = re.compile(
    r"(?<![\w.])(?:(\d{1,30}\.\d{1,30})[eE]([+-]?\d{1,3})|(\d{1,30})[eE](\d{1,3}|[+-]\d{2,3}))(?![\w.])"
)
"""A number such as `1.6e-19`. `2e-3` is none: it is a difference with the name e."""
_COUNTED = re.compile(r"(\\(?:text|mathrm|mbox)\s*)\{\s*(-?\d[\d.,]*)(?=[\s~]*[A-Za-z]{2})([^{}\d]*)\}(?![_^])")
"""A number within the words behind it, as in `\\text{5 apples}`."""
_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3})((?:(?:\\[,;:]|\{,\}|\s)\d{3}){1,30})(?!\d)")
_REPEATING = re.compile(r"(\d{0,20})\.(\d{0,20})\\(?:overline|bar|dot)\s*\{(\d{1,20})\}")


def plain_names(text: str) -> str:
    r"""A text with plain names: `\mathrm{e}` is e, `\operatorname{arctan}` is `\arctan`, words are `\text{...}`."""

    def named(m: re.Match) -> str:
        inside = m["inside"].replace("~", " ")
        name = inside.strip()
        if not re.search(r"[A-Za-z]", name):
            return f" {name} "
        ahead = re.sub(r"(?:\s|\\[,;: ])+$", "", text[max(0, m.start() - 20) : m.start()])
        measured = name in _FUNCTION_OR_UNIT and m["name"][:8] != "operator" and re.search(r"[\d})/]$", ahead)
        if _FUNCTIONS.fullmatch(name) and not measured:
            return rf"\{name} "
        unit = name in _UNIT_LETTERS and m["name"] in ("text", "mathrm") and re.search(r"[\d}/]$", ahead)
        if len(name) == 1 and not unit and inside == name:
            return name
        words = name.rstrip(" ,;")  # `red, `
        return rf"\text{{ {words}}}{name[len(words) :].strip()} "

    return _LOOKS.sub(named, text)


def _repeated(m: re.Match) -> str:
    whole, fixed, repeated = m[1] or "0", m[2], m[3]
    below = (10 ** len(repeated) - 1) * 10 ** len(fixed)
    above = int(whole + fixed + repeated) - int(whole + fixed)
    return rf"\frac{{{above}}}{{{below}}}"


def plain(text: str) -> str:
    """Return an answer without LaTeX that only formats."""
    text = CURRENCY.sub("", text.translate(SIGNS).translate(_SPOKEN))
    for pattern, instead in _PLACED:
        text = pattern.sub(instead, text)
    text = _SCIENTIFIC.sub(lambda m: rf"{m[1] or m[3]}\times10^{{{int(m[2] or m[4])}}}", crossed(text))
    text = _COUNTED.sub(r"\2 \1{\3}", text)
    text = _THOUSANDS.sub(lambda m: m[1] + re.sub(r"\D", "", m[2]), text)
    text = _REPEATING.sub(_repeated, text)
    for _ in range(3):  # they stand in one another
        text = plain_names(text)
    return text.strip().rstrip(".").strip()
