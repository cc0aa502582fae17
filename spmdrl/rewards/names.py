r"""Names that the grammar of math-verify would read as something else, each written as one symbol.

The grammar drops primes and transposes (`y'` is y to it, and `2^T` is 2), multiplies the letters of `\angle ABC` and
`HHT`, reads `I` as the imaginary unit, `E` as e, `\Gamma` as Euler's constant and `\mathcal{A}` as `\mathbb{A}`, and
takes a cross product of vectors for one of numbers.
"""

import re

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


def _symbol(name: str) -> str:
    return rf" \mathfrak{{{re.sub(r'[^A-Za-z0-9.]', '', name)}}} "


def crossed(text: str) -> str:
    r"""A text whose cross products of letters are one symbol each, while vectors still look like vectors.

    Another one is a command that the grammar refuses.
    """
    if r"\times" not in text:
        return text
    text = _CROSS.sub(lambda m: _symbol(m[0].replace(r"\times", ".x.")) if _VECTORS.search(m[0]) else m[0], text)
    return _CROSSED.sub(r"\\cross ", text)


def named(text: str) -> str:
    """A text whose names and marked letters are symbols. Primes that it keeps stand behind something else."""

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
            return m[0]  # the function
        return _symbol(letter) + index if _ODD.fullmatch(letter) else m[0]

    return _NAME.sub(written, text)
