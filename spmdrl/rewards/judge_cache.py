"""Answers of a judge in a folder, by a hash of what was asked, so that no question is paid for twice.

Ranks and jobs may share a folder: a file appears whole or not at all. A file holds the judge's own words, which are
read as strictly as when they came.
"""

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from spmdrl.rewards.judge_verdict import BadVerdictError, Verdict

LONGEST = 1 << 20
"""Bytes of the longest file that is read."""


class Cache:
    """A folder of answers. May be called from several threads."""

    def __init__(self, folder: str):
        """Raises ValueError for a folder that cannot be made or written."""
        self._folder = Path(folder).expanduser()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder):
                pass
        except OSError as error:
            raise ValueError(
                f"the judge's cache {folder}: cannot be written ({error.strerror}); name another"
            ) from None

    def read(self, place: str, parse: Callable[[str], Verdict]) -> Verdict | None:
        """Return the verdict of a question that was answered before; a file that holds none counts as absent.

        parse: reads an answer, and raises BadVerdictError for what is none.
        """
        with suppress(OSError, UnicodeDecodeError, BadVerdictError), open(self._file(place), "rb") as file:
            return parse(file.read(LONGEST).decode())
        return None

    def write(self, place: str, content: str) -> None:
        """Keep an answer. A full disk costs the cache alone."""
        file = self._file(place)
        with suppress(OSError):
            file.parent.mkdir(exist_ok=True)
            handle, part = tempfile.mkstemp(dir=file.parent, suffix=".part")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as out:
                    out.write(content)
                os.replace(part, file)
            except (OSError, UnicodeEncodeError):
                Path(part).unlink(missing_ok=True)

    def _file(self, place: str) -> Path:
        return self._folder / place[:2] / f"{place}.json"
