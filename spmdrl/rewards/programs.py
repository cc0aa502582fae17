"""Extracts the program from a response: a fenced block, the entire response, or a continuation of the prompt."""

import re

_FENCE = re.compile(
    r"(?P<quote>(?:[ ]{0,3}>){0,9})(?P<indent>[ \t]*)"
    r"(?P<item>(?:(?:[-*+]|\d{1,9}[.)])[ \t]{1,9}){0,9})(?P<mark>`{3,}|~{3,})"
    r"[ \t]*(?P<language>[\w+-]{0,20})"
)
"""A line that opens or closes a fenced block, possibly inside a list item or a quote."""
BEGINNINGS = ("def ", "async def ", "class ", "import ", "from ", "@", "#", '"""')
"""A response without a code block is a complete program only if it defines the function and starts with one of these.
Otherwise it continues the prompt."""
_PYTHON = ("python", "python3", "py")


def program_of(text: str) -> tuple[str, bool]:
    """Return the program in a response and whether it is in a fenced block.

    The program is the last Python block, else the last block without a language. It is the entire text if there is no
    block, and empty if all blocks are in other languages.
    """
    blocks = fenced_blocks(text)
    for wanted in (_PYTHON, ("",)):
        found = [body for language, body in blocks if language in wanted]
        if found:
            return found[-1], True
    return ("", False) if blocks else (text, False)


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """Return the language and content of each fenced block; the last block may lack its closing fence.

    As in CommonMark (https://spec.commonmark.org, fenced code blocks), a block opened by tildes is not closed by
    backticks or by fewer tildes. The opening fence's indentation is removed from the block's lines. A block in a quote
    ends with the quote.
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
    """Return the program that a prompt starts and a response completes.

    If the response is a complete program (see BEGINNINGS), the prompt's imports and helper functions are prepended.
    Otherwise the response continues the prompt's text, possibly inside a fence. As with HumanEval completions, the
    continuation ends at a fence or at the next unindented line.

    prompt: Python code that stops inside the function. name: name of the function. text: the response.
    """
    source, fenced = program_of(text)
    if defines(source, name) and (fenced or source.lstrip().startswith(BEGINNINGS)):
        return f"{before_function(prompt, name)}\n{source}"
    before, *fence = re.split(r"```|~~~", text, maxsplit=1)
    lines = (source if fence and not before.strip() else before).splitlines(keepends=True)
    ends = next((i for i, line in enumerate(lines) if i and line[:1].strip()), len(lines))
    return prompt + "".join(lines[:ends])


def before_function(prompt: str, name: str) -> str:
    """Return the part of a prompt before the function `name`: imports and helper functions."""
    return re.split(rf"^[ \t]*def[ \t]+{re.escape(name)}\b", prompt, maxsplit=1, flags=re.MULTILINE)[0]


def defines(source: str, name: str) -> bool:
    """Return whether a complete or partial program defines the function `name`."""
    return bool(name) and bool(re.search(rf"^[ \t]*def[ \t]+{re.escape(name)}\b", source, re.MULTILINE))
