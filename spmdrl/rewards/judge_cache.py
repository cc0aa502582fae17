"""Answers of a judge in a folder, by a hash of what was asked, so that no question is paid for twice.

Ranks and jobs may share a folder: a file appears whole or not at all. A file holds the judge's own words, which are
read as strictly as when they came.
"""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from spmdrl.rewards.judge_verdict import BadVerdictError, Verdict, parse_verdict

LONGEST = 1 << 20
"""Bytes of the longest file that is read."""


class Cache:
    """A folder of answers. May be called from several threads."""

    def __init__(self, folder: str, scale: int):
        """Raises ValueError for a folder that cannot be made or written."""
        self._folder, self._scale = Path(folder).expanduser(), scale
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder):
                pass
        except OSError as error:
            raise ValueError(
                f"the judge's cache {folder}: cannot be written ({error.strerror}); name another"
            ) from None

    def read(self, place: str) -> Verdict | None:
        """Return the verdict of a question that was answered before; a file that holds none counts as absent."""
        with suppress(OSError, UnicodeDecodeError, BadVerdictError), open(self._file(place), "rb") as file:
            return parse_verdict(file.read(LONGEST).decode(), self._scale)
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
