r"""Splits off the unit of an answer, such as `540 \text{ cm}`, `5\,\mathrm{m}/\mathrm{s}^2` or `12 square feet`.

If one answer has no unit, only the numbers are compared. Answers with different units differ if both units are known,
such as `5\text{ cm}` and `5\text{ km}`, or if both are unknown, such as `5\text{ red}` and `5\text{ blue}`. Units are
not converted.
"""

import re

from spmdrl.rewards.text import CURRENCY

_NAMES = (
    "m meter metre|cm centimeter centimetre|mm millimeter millimetre|km kilometer kilometre|nm nanometer nanometre"
    "|in inch|ft foot feet|yd yard|mi mile|s sec second|ms millisecond|min minute|h hr hour|day|week|month|yr year"
    "|g gm gram|kg kilogram|mg milligram|lb pound|oz ounce|ton tonne|l liter litre|ml milliliter millilitre|gal gallon"
    "|acre|hectare|hz hertz|khz|mhz|n newton|j joule|kj kilojoule|w watt|kw kilowatt|v volt|amp ampere"
    "|ohm|pa pascal|k kelvin|degree deg|rad radian|mol mole|prime|doubleprime|dollar usd|cent"
    "|euro eur|sterling gbp|yen jpy|celsius|fahrenheit"
)
_UNITS = {name: names.split()[0] for names in _NAMES.split("|") for name in names.split()}
"""Unit name in lower case and singular -> canonical name of the unit."""
_SPEEDS = re.compile(r"\b(?:(mph)|kph|kmph|kmh)\b")
_SIGN_OF = {"degree1": "celsius1 fahrenheit1", "prime1": "ft1 min1", "doubleprime1": "in1 s1", "sterling1": "lb1"}
"""Normal form of a sign -> units that it can stand for. For example, a prime can mean feet or minutes."""
_CHANGING = re.compile(
    r"^[^A-Za-z]*(?:squared|cubed|factorial|root)(?![A-Za-z])"
    r"|(?<![A-Za-z\\])(?:hundred|thousand|million|billion|trillion|dozen|below|above"
    r"|or (?:less|more|fewer|under|over)|hal(?:f|ves)|third|fourth|quarter|fifth|sixth"
    r"|seventh|eighth|ninth|tenth|hundredth|thousandth|millionth|plus|minus)s?(?![A-Za-z])",
    re.IGNORECASE,
)
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "squared": 2, "cubed": 3}
_TOKEN = re.compile(r"[a-z]+|\u00b0(?:[cf](?![a-z]))?|/|\^\{?-?\d\}?|\d+")
_WORDED = r"\\text\{[^{}]*\}\s*(?:\^(?:\{-?\d\}|-?\d))?"
_TEXT_RUN = re.compile(rf"(?:(?:\s|\\[,;:! ]|~|\\cdot|[/*.])*{_WORDED})+[\s.]*$")
_PLAIN_RUN = re.compile(
    r"(?<=[\d})!])(\s*)([A-Za-z]+(?:\^\{?\d\}?)?(?:(?:\s+|\s*[/*]\s*)[A-Za-z]+(?:\^\{?\d\}?)?){0,5})[\s.]*$"
)
_DEGREES = re.compile(
    r"(?<=[\d})])(?:\s|\\[,;:! ])*(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\u00b0|\\degree\b)"
    r"\s*(?:\\text\s*\{\s*([CF]|[Cc]elsius|[Ff]ahrenheit)\s*\}|([CF]))?\s*$"
)
_PRIMES = re.compile(r"(-?[\d.,]+)\s*(?:\^\s*)?\{?\s*(?:('')|'|(\\prime\s*\\prime)|\\prime)\s*\}?\s*")
_NO_OPERATOR = re.compile(r"[\w})\]!'%]\s*(?:\\[,;:! ]\s*)*$")
_LISTED = re.compile(r"\s*[,;]\s+(?![^()\[\]]*[)\]])")
"""A comma or semicolon between list entries, outside brackets."""
_LONE = frozenset("mgshL")
_SIGNS = {"\u00b0": "degree", "\u00b0c": "celsius", "\u00b0f": "fahrenheit", "c": "celsius", "f": "fahrenheit"}
_MONEY = {
    "$": "dollar",
    "\u20ac": "euro",
    "\u00a3": "sterling",
    "pounds": "sterling",
    "\u00a5": "yen",
    "\u00a2": "cent",
}
_NO_UNITS = {"infinity", "percent", "percentage", "sqrt"}


def changes_value(words: str) -> bool:
    """Return whether words after a number change its value, as in `5 million` and `3 squared`."""
    return _CHANGING.search(re.sub(r"\\(?:text|mathrm)", " ", words)) is not None


def money(text: str) -> str | None:
    """Return the normal form of the currencies whose signs appear in an answer, or None if there are none.

    Unescaped dollar signs count only if there is an odd number of them, because pairs are LaTeX delimiters.
    """
    marks = len(re.findall(r"(?<!\\)\$", text)) % 2 == 0
    signs = {
        m[0].lstrip("\\").removeprefix("text").rstrip("{}")
        for m in CURRENCY.finditer(text)
        if not (marks and m[0] == "$")
    }
    return " ".join(sorted(f"{_MONEY.get(sign, sign)}1" for sign in signs)) or None


def differ(a: str | None, b: str | None) -> bool:
    """Return whether two units from `split_unit` differ and are both known or both unknown.

    A sign does not differ from a unit that it can stand for (`_SIGN_OF`).
    """
    if a is None or b is None or a == b or a in _SIGN_OF.get(b, "").split() or b in _SIGN_OF.get(a, "").split():
        return False
    return known(a) == known(b)


def known(unit: str | None) -> bool:
    """Return whether a unit from `split_unit` consists of units in `_UNITS`, or False if there is no unit."""
    return unit is not None and not unit.startswith("?")


def unit_of(words: str, listed: bool = True) -> str | None:
    """Return the normal form of a unit such as `square meters`, `m^2` or `miles per hour`.

    Returns None if a word is not a known unit. listed: if False, accept unknown words as units.
    """
    words = _SPEEDS.sub(lambda m: "mi/h" if m[1] else "km/h", words.lower().replace("~", " "))
    parts: dict[str, int] = {}
    sign, power, last = 1, 1, ""
    for token in _TOKEN.findall(words):
        if token in ("/", "per"):
            sign = -1
        elif token in _POWERS and token not in ("squared", "cubed"):
            power = _POWERS[token]
        elif token in _POWERS or token[0] == "^" or token.isdigit():
            if not last:
                return None
            times = _POWERS.get(token) or int(token.strip("^{}"))
            parts[last] *= times
        else:
            token = _SIGNS.get(token, token)
            name = _UNITS.get(token) or _UNITS.get(token.removesuffix("s")) or _UNITS.get(token.removesuffix("es"))
            if name is None and listed:
                return None
            name = name or token.removesuffix("s").removesuffix("e")
            last = name
            parts[last] = parts.get(last, 0) + sign * power
            power = 1
    if parts.keys() & {"celsius", "fahrenheit"}:
        parts.pop("degree", None)
    return " ".join(f"{name}{exponent}" for name, exponent in sorted(parts.items())) or None


def split_unit(text: str) -> tuple[str, str | None]:
    r"""Split a trailing unit off an answer; return the rest and the unit's normal form.

    The normal form starts with `?` for an unknown unit and is None if there is no unit. Trailing words in `\text{...}`
    are a unit unless they change the value (`5\text{ million}`). The same holds for plain words of four or more letters
    after a number and a space. Shorter plain words are variables, as in `2ab`, unless they are a known unit. Single
    letters are variables, except m, g, s, h and L after a space. In a list such as `5\text{ red}, 4\text{ blue}`, words
    are a unit only if all entries have the same words or only the last entry has words.
    """
    entries = _LISTED.split(text)
    found = [_split(entry) for entry in entries]
    units = {words.strip() for _, words in found}
    if len(found) > 1 and len(units) > 1 and any(words for _, words in found[:-1]):
        return text, None
    words = found[-1][1].strip()
    unit = unit_of(words) or (f"?{unit_of(words, listed=False)}" if words else None)
    return ", ".join(rest for rest, _ in found), unit


def _split(text: str) -> tuple[str, str]:
    """Split a list entry into the text before its unit and the unit's words."""
    if m := _DEGREES.search(text):
        degree = (m[1] or m[2] or "").lower()
        return text[: m.start()], f"degree {_SIGNS.get(degree, degree)}"
    if m := _PRIMES.fullmatch(text):
        return m[1], "doubleprime" if m[2] or m[3] else "prime"
    m = _TEXT_RUN.search(text)
    if m and _NO_OPERATOR.search(text[: m.start()]):
        words = re.sub(r"\\text|\\cdot|\\.", " ", m.group())
        counts = unit_of(words) is not None or not changes_value(words)
        return (text[: m.start()].rstrip(), words) if counts else (text, "")
    m = _PLAIN_RUN.search(text)
    if m:
        words = re.findall(r"[A-Za-z]+", m[2])
        lone = len(words) == 1 and len(words[0]) == 1
        measured = unit_of(m[2]) is not None and (not lone or (m[1] != "" and words[0] in _LONE))
        counted = m[1] != "" and all(len(w) > 3 and w.lower() not in _NO_UNITS for w in words)
        if measured or (counted and not changes_value(m[2])):
            return text[: m.start()].rstrip(), m[2]
    return text, ""
