"""The program in a response: in a fenced block, the response itself, or the continuation of a program in the prompt."""

import re

_FENCE = re.compile(
    r"(?P<quote>(?:[ ]{0,3}>){0,9})(?P<indent>[ \t]*)"
    r"(?P<item>(?:(?:[-*+]|\d{1,9}[.)])[ \t]{1,9}){0,9})(?P<mark>`{3,}|~{3,})"
    r"[ \t]*(?P<language>[\w+-]{0,20})"
)
"""A line that opens or closes a block, also in an item of a list and in a quote."""
BEGINNINGS = ("def ", "async def ", "class ", "import ", "from ", "@", "#", '"""')
"""Beginnings of a program that has the function itself."""
_PYTHON = ("python", "python3", "py")


def program_of(text: str) -> tuple[str, bool]:
    """Return the program in a response and whether it stands in a fenced block.

    The last block that says Python, else the last block without a language, else the text itself.
    """
    blocks = fenced_blocks(text)
    for wanted in (_PYTHON, ("",)):
        found = [body for language, body in blocks if language in wanted]
        if found:
            return found[-1], True
    return ("", False) if blocks else (text, False)


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """Return language and content of each fenced block; the last one may lack its end.

    As in CommonMark (https://spec.commonmark.org, fenced code blocks), a block opened by tildes is not closed by
    backticks or by fewer tildes, and its lines lose the indentation of the line that opened it. A block in a quote ends
    with it.
    """
    blocks: list[tuple[str, list[str]]] = []
    mark, indent, quotes = "", 0, 0
    for line in text.splitlines(keepends=True):
        if mark and quotes:
            quoted = re.match(rf"(?:[ ]{{0,3}}>){{{quotes}}}", line)
            mark, line = (mark, line[quoted.end() :]) if quoted else ("", line)
        fence = _FENCE.match(line)
        if mark and fence and (fence["quote"] or fence["item"] or not fence["mark"].startswith(mark)):
            fence = None
        if fence is None:
            if mark:
                blocks[-1][1].append(re.sub(rf"^[ \t]{{0,{indent}}}", "", line))
        elif mark and not fence["language"]:
            mark = ""
        elif line.endswith("\n"):
            blocks.append((fence["language"].lower(), []))
            mark, indent = fence["mark"], len(fence["indent"] + fence["item"])
            quotes = fence["quote"].count(">")
    return [(language, "".join(lines)) for language, lines in blocks]


def completed(prompt: str, name: str, text: str) -> str:
    """Return the program of a response to a prompt that begins a function.

    A response with the function itself gets the imports and helpers before it in the prompt. Another one goes on where
    the prompt ends (it may be inside of a fence), and ends at a fence or at the next line that begins at the margin, as
    HumanEval's completions do.

    prompt: Python that ends in the middle of the function. name: of the function. text: the response.
    """
    source, fenced = program_of(text)
    if defines(source, name) and (fenced or source.lstrip().startswith(BEGINNINGS)):
        return f"{before_function(prompt, name)}\n{source}"
    before, *fence = re.split(r"```|~~~", text, maxsplit=1)
    lines = (source if fence and not before.strip() else before).splitlines(keepends=True)
    ends = next((i for i, line in enumerate(lines) if i and line[:1].strip()), len(lines))
    return prompt + "".join(lines[:ends])


def before_function(prompt: str, name: str) -> str:
    """Return what precedes a function in a prompt that begins it: imports and helpers."""
    return re.split(rf"^[ \t]*def[ \t]+{re.escape(name)}\b", prompt, maxsplit=1, flags=re.MULTILINE)[0]


def defines(source: str, name: str) -> bool:
    """Tell whether a program, or the beginning of one, defines a function of the name."""
    return bool(name) and bool(re.search(rf"^[ \t]*def[ \t]+{re.escape(name)}\b", source, re.MULTILINE))
