r"""Rewrites an answer's LaTeX into a form that math-verify's grammar parses correctly.

`spelled` normalises notation, such as `\mathrm{e}` to e and `\left(` to (. `named` replaces each name that the grammar
would misread with a single symbol. The grammar drops primes and transposes (`y'` becomes y, and `2^T` becomes 2), and
parses names such as `\angle ABC` and `HHT` as products of their letters, `I` as the imaginary unit, `E` as e, `\Gamma`
as Euler's constant, `\mathcal{A}` as `\mathbb{A}`, and a cross product of vectors as a product of numbers.
"""

import re

from spmdrl.rewards.text import CURRENCY, SIGNS

_LOOKS = re.compile(
    r"\\(?P<name>math(?:rm|bf|it|sf|tt|normal|bfit)|text(?:rm|bf|it|sf|tt|normal|up)?|mbox|hbox|operatorname\*?"
    r"|bold(?:symbol)?|bm|emph)\s*\{(?P<inside>[^{}]*)\}"
)
_FUNCTIONS = re.compile(r"(?:a|ar|arc)?(?:sin|cos|tan|csc|sec|cot)h?|log|ln|lg|exp|gcd|lcm|det|max|min")
_UNIT_LETTERS = frozenset("mgshlLJNWVKC")
_FUNCTION_OR_UNIT = ("min", "sec")
_UNIT_NAME = r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}\s*(?:\^\s*(?:\{-?\d\}|\d))?"
_SPELLINGS = tuple(
    (re.compile(pattern), instead)
    for pattern, instead in (
        (r"\\([ij])math(?![A-Za-z])", r"\1"),
        (
            r"\\(math(?:bf|rm|bb|cal|frak|scr)|boldsymbol|bm|vec|(?:wide)?(?:hat|tilde)|bar|d?dot)(?:\s+([A-Za-z])|\s*(\\[A-Za-z]+))",
            r"\\\1{\2\3}",
        ),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])\s*\.?|\\displaystyle|\\!", ""),
        (r",?\s*\\(?:text|mbox|mathrm)\s*\{[\s~]*(?:and|or)[\s~]*\}", ", "),
        (r"\\f?boxed\s*(?=[^\s{])", ""),
        (r"(?<![A-Za-z\\])[Ii]nfinity(?![A-Za-z])", r"\\infty "),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"\\q?quad(?![A-Za-z])|~|(?<!\\)\\ ", " "),
        (rf"(?<=[\d}})!])(\s*)\\[dt]?frac\s*\{{\s*({_UNIT_NAME})\s*\}}\s*\{{\s*({_UNIT_NAME})\s*\}}", r"\1\2/\3"),
        (r"(?<=\d)\s*\^?\s*(\{?)\s*\\(?:text|mathrm|mbox)\s*\{(?:st|nd|rd|th)\}\s*(?(1)\})", " "),
        (r"\\(text|mathrm|mbox)\s*\{\s*per\s?cent(?![A-Za-z])", r"\\%\\\1{"),
        (r"(?<=[\d})])\s+per\s?cent(?![A-Za-z])", r"\\%"),
        (r"\\([dtc]?)frac\s*(\d)\s+(\d)(?!\d)", r"\\frac{\2}{\3}"),
        (r"(?<![\d^_}])(-?)(\d{1,9})\s+(\d{1,9})/(\d{1,9})(?!\d)", r"\1\2\\frac{\3}{\4}"),
        (r"(?<![\d\w.])\.(?=\d)", "0."),
    )
)
_COMMANDS = (r"\times ", r"\div ", r"\cdot ", r"\pi ", r"\infty ", r"\le ", r"\ge ", "'", "'", "''", "''")
_AS_LATEX = str.maketrans(
    dict(zip('\u00d7\u00f7\u00b7\u03c0\u221e\u2264\u2265\u2032\u2019\u2033"', _COMMANDS, strict=True))
)
_SCIENTIFIC = re.compile(
    r"(?<![\w.])(?:(\d{1,30}\.\d{1,30})[eE]([+-]?\d{1,3})|(\d{1,30})[eE](\d{1,3}|[+-]\d{2,3}))(?![\w.])"
)
"""A number such as `1.6e-19`, but not `2e-3`, which means 2 * e - 3."""
_COUNTED = re.compile(r"(\\(?:text|mathrm|mbox)\s*)\{\s*(-?\d[\d.,]*)(?=[\s~]*[A-Za-z]{2})([^{}\d]*)\}(?![_^])")
"""A number inside its unit's text command, as in `\\text{5 apples}`."""
_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3})((?:(?:\\[,;:]|\{,\}|\s)\d{3}){1,30})(?!\d)")
_REPEATING = re.compile(r"(\d{0,20})\.(\d{0,20})\\(?:overline|bar|dot)\s*\{(\d{1,20})\}")
_INDEX = r"_(?:\{[^{}]*\}|[A-Za-z0-9])"
_ACCENT = r"\\(?:bar|overline|vec|overrightarrow|(?:wide)?(?:hat|tilde)|d?dot|math(?:bb|cal|frak|scr))\s*\{[^{}]*\}"
_GREEK = (
    r"\\(?:alpha|beta|[gG]amma|[dD]elta|(?:var)?epsilon|zeta|eta|(?:var)?[tT]heta|iota|kappa|[lL]ambda|mu|nu|[xX]i"
    r"|(?:var)?[pP]i|(?:var)?rho|(?:var)?[sS]igma|tau|[uU]psilon|(?:var)?[pP]hi|chi|[pP]si|[oO]mega|ell)(?![A-Za-z])"
)
_PRIMES = r"'|\^\s*\{(?:\s*(?:\\prime|')){1,9}\s*\}|\^\s*\\prime(?![A-Za-z])"
_TRANSPOSE = r"\^\s*(?:\{\s*(?:T|\\top|\\intercal)\s*\}|T|\\(?:top|intercal)(?![A-Za-z]))"
_NAME = re.compile(
    r"(?P<figure>\\(?:angle|triangle|measuredangle|sphericalangle|square|odot)\s*\{?\s*(?:[A-Z]'{0,9}){1,20}(?:\s*\})?)"
    r"|(?P<points>(?<![A-Za-z])(?:[A-Z]'{0,9}){3,200}(?![A-Za-z]))"
    rf"|(?P<letter>{_ACCENT}|{_GREEK}|[A-Za-df-z])(?:\s*(?P<index>{_INDEX}))?"
    rf"(?P<marks>(?:\s*(?:{_PRIMES}|{_TRANSPOSE})){{1,9}})?(?(marks)(?:\s*(?P<later>{_INDEX}))?)"
    rf"|(?P<power>{_TRANSPOSE})"
    r"|\\(?:begin|end|text)\s*\{[^{}]*\}|\\[A-Za-z]+"
)
_ODD = re.compile(r"[IE]|\\Gamma|\\math(?:cal|scr).*")
_VECTOR = rf"(?:\\(?:math(?:bf|bfit)|bold(?:symbol)?|bm|vec|overrightarrow|hat)\s*\{{[^{{}}]*\}}(?:{_INDEX})?|\\nabla)"
_OPERAND = rf"(?:{_VECTOR}|(?:{_GREEK}|(?<![A-Za-z\\])[A-Za-z](?![A-Za-z]))(?:{_INDEX})?)"
_CROSS = re.compile(rf"{_OPERAND}(?:\s*\\times\s*{_OPERAND}){{1,9}}")
_VECTORS = re.compile(_VECTOR)
_CROSSED = re.compile(rf"(?<![\d.\s])\s*\\times\s*{_VECTOR}|{_VECTOR}\s*\\times\s*(?![\d.\s])")


def _plain_names(text: str) -> str:
    r"""Write `\mathrm{e}` as e, `\operatorname{arctan}` as `\arctan`, and words as `\text{...}`."""

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
        words = name.rstrip(" ,;")  # the comma in `red, ` is not part of the words
        return rf"\text{{ {words}}}{name[len(words) :].strip()} "

    return _LOOKS.sub(named, text)


def _repeated(m: re.Match) -> str:
    whole, fixed, repeated = m[1] or "0", m[2], m[3]
    below = (10 ** len(repeated) - 1) * 10 ** len(fixed)
    above = int(whole + fixed + repeated) - int(whole + fixed)
    return rf"\frac{{{above}}}{{{below}}}"


def spelled(text: str) -> str:
    """Return an answer in normalised notation, without LaTeX commands that only affect its appearance."""
    text = CURRENCY.sub("", text.translate(SIGNS).translate(_AS_LATEX))
    for pattern, instead in _SPELLINGS:
        text = pattern.sub(instead, text)
    text = _SCIENTIFIC.sub(lambda m: rf"{m[1] or m[3]}\times10^{{{int(m[2] or m[4])}}}", _crossed(text))
    text = _COUNTED.sub(r"\2 \1{\3}", text)
    text = _THOUSANDS.sub(lambda m: m[1] + re.sub(r"\D", "", m[2]), text)
    text = _REPEATING.sub(_repeated, text)
    for _ in range(3):  # commands may be nested
        text = _plain_names(text)
    return text.strip().rstrip(".").strip()


def _symbol(name: str) -> str:
    return rf" \mathfrak{{{re.sub(r'[^A-Za-z0-9.]', '', name)}}} "


def _crossed(text: str) -> str:
    r"""Write each cross product of letters as a single symbol, and make the grammar reject all other cross products.

    Vectors are recognised by commands such as `\mathbf`, so this must run before `_plain_names` removes these commands.
    """
    if r"\times" not in text:
        return text
    text = _CROSS.sub(lambda m: _symbol(m[0].replace(r"\times", ".x.")) if _VECTORS.search(m[0]) else m[0], text)
    return _CROSSED.sub(r"\\cross ", text)


def named(text: str) -> str:
    """Replace names, and letters with primes or transposes, by symbols. Other primes are kept."""

    def written(m: re.Match) -> str:
        if m["figure"] or m["points"]:
            return _symbol(m[0].replace("'", ".p"))
        if m["power"]:
            matrix = re.search(r"\\end\s*\{[^{}]*\}[\s)\]]*$", text[: m.start()])
            return m[0] if matrix else "^{(T)}"
        letter, index, marks = m["letter"] or "", m["index"] or "", m["marks"] or ""
        if marks:
            primes = marks.count("'") + marks.count("prime")
            transposed = len(re.findall(_TRANSPOSE, marks))
            return _symbol(f"{letter}{index}{m['later'] or ''}{'.p' * primes}{'.t' * transposed}")
        if letter == r"\Gamma" and re.match(r"\s*\(", text[m.end() :]):
            return m[0]  # `\Gamma(x)` is the gamma function, not a name
        return _symbol(letter) + index if _ODD.fullmatch(letter) else m[0]

    return _NAME.sub(written, text)
