"""A search tool over a local corpus or a search server.

A local corpus is searched with BM25. The index is built once, by bm25s (Lù 2024, https://arxiv.org/abs/2407.03618), and
saved in a folder.
"""

import hashlib
import json
import os
import shutil
import threading
import time
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from spmdrl.config.dump import redact_text
from spmdrl.data.rowfiles import Lines
from spmdrl.env.base import BrokenError, Stateless

MOST_BYTES = 8 << 20
"""Maximum number of bytes in a server's answer."""
CACHE = "~/.cache/spmdrl/search"
KEYS = ("text", "contents", "passage")
"""Columns of a .jsonl file that may hold a passage. The first one that a row has is used."""
_open: dict[Path, "Corpus"] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class Passage:
    """A passage of a corpus: the unit that a search returns."""

    title: str
    text: str


class Corpus:
    """The passages of a file, with a word index. The class is thread-safe."""

    def __init__(self, path: Path, folder: Path):
        """Open a file as described in `open_corpus`. folder: folder of the index, which is built if it is missing."""
        try:
            import bm25s
        except ImportError:
            raise ValueError("search over a local corpus needs the package bm25s: pip install bm25s") from None
        self.path, self.bm25s, self.lock = path, bm25s, threading.Lock()
        self.passages: Any = _paragraphs(path) if path.suffix == ".txt" else Lines(path)
        if not len(self.passages):
            raise ValueError(f"the corpus {path} contains no passages")
        if not (folder / "complete").exists():
            self._build(folder)
        self.index = bm25s.BM25.load(str(folder), mmap=True, show_progress=False)

    def _build(self, folder: Path) -> None:
        from filelock import FileLock

        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if (folder / "complete").exists():
                return
            texts = [f"{each.title} {each.text}" for each in map(self.passage, range(len(self.passages)))]
            words = self.bm25s.tokenize(texts, stopwords="en", show_progress=False)
            if not any(map(len, words.ids)):
                raise ValueError(f"the corpus {self.path} contains no words that can be searched for")
            index = self.bm25s.BM25()
            index.index(words, show_progress=False)
            part = folder.with_name(f"{folder.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            index.save(str(part), show_progress=False)
            (part / "complete").touch()
            shutil.rmtree(folder, ignore_errors=True)
            part.rename(folder)

    def passage(self, number: int) -> Passage:
        """Return the passage with this number, counted from 0. Raises ValueError if its row has no text."""
        with self.lock:
            row = self.passages[number]
        if isinstance(row, str):
            return Passage("", row)
        found = passage_of(row)
        if found is None:
            raise ValueError(
                f"{self.passages.where(number)} has no text: each row needs one of the columns {', '.join(KEYS)}"
            )
        return found

    def search(self, query: str, most: int) -> list[Passage]:
        """Return up to `most` passages that share words with a query, best first. Ties are sorted by passage number."""
        import numpy as np

        words = self.bm25s.tokenize([query], stopwords="en", show_progress=False, return_ids=False)[0]
        if not (known := [word for word in words if word in self.index.vocab_dict]):
            return []
        scores = np.asarray(self.index.get_scores(known))
        least = np.partition(scores, -most)[-most] if most < len(scores) else 0.0
        found = np.flatnonzero((scores >= least) & (scores > 0))
        order = np.argsort(-scores[found], kind="stable")[:most]
        return [self.passage(int(number)) for number in found[order]]


def passage_of(row: Any) -> Passage | None:
    """Return a row's passage, or None if it has no text.

    The title is in the column `title`, or in quotes in the first line of the text, as in the corpora of
    https://github.com/PeterGriffinJin/Search-R1.
    """
    text = next((row[key] for key in KEYS if isinstance(row.get(key), str)), None) if isinstance(row, dict) else None
    if text is None:
        return None
    title = row.get("title")
    first, _, rest = text.partition("\n")
    if not isinstance(title, str):
        title = ""
        if rest and len(first) > 2 and first[0] == first[-1] == '"':
            title, text = first[1:-1], rest
    return Passage(title.strip(), text.strip())


def open_corpus(path: str, cache: str = CACHE) -> Corpus:
    """Return the corpus of a file. A process opens each file once; a file that has changed gets a new index.

    path: a .jsonl file whose rows have one of the columns `KEYS` and optionally `title`, or a .txt file with one
    passage per paragraph. Empty lines separate paragraphs. cache: folder for the indexes.

    Raises:
        ValueError: the file cannot be read, or bm25s is not installed.
    """
    file = Path(path).expanduser().resolve()
    if file.suffix not in (".jsonl", ".txt"):
        raise ValueError(f"the corpus {path!r} is neither a .jsonl nor a .txt file")
    try:
        about = os.stat(file)
    except OSError as error:
        raise ValueError(f"cannot read the corpus {path!r} ({error.strerror})") from None
    facts = json.dumps([str(file), about.st_size, about.st_mtime_ns])
    folder = Path(cache).expanduser() / f"{file.stem}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"
    with _lock:
        if folder not in _open:
            _open[folder] = Corpus(file, folder)
        return _open[folder]


def _paragraphs(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ValueError(f"cannot read the corpus {path} ({error})") from None
    return [part.strip() for part in text.split("\n\n") if part.strip()]


class SearchError(BrokenError):
    """A search server failed. The message names only its host, because the rest of the address may contain secrets."""


class Search(Stateless):
    """The tool `search`, over a corpus on this machine (needs bm25s) or a search server. It has no state."""

    def __init__(
        self,
        corpus: str = "",
        url: str = "",
        results: int = 3,
        longest: int = 2_000,
        timeout: float = 20.0,
        cache: str = CACHE,
    ) -> None:
        """Open a corpus, or store a server's address.

        Args:
            corpus: a .jsonl file with one passage per row, or a .txt file with one passage per paragraph; empty lines
                separate paragraphs.
            url: URL of a search server with the API of Search-R1's server, used instead of a corpus.
            results: maximum number of passages that a search returns.
            longest: maximum number of characters in a passage; longer passages are cut.
            timeout: time limit for the server's answer, in seconds.
            cache: folder for the indexes of corpora.
        """
        if bool(corpus) == bool(url):
            raise ValueError("the tool search needs either `corpus`, a file, or `url`, a server")
        if url and urlsplit(url).scheme not in ("http", "https"):
            raise ValueError(f"the tool search: `url` must be an http or https address, not {redact_text(url)!r}")
        self.results, self.longest, self.timeout = results, longest, timeout
        self.timeout_s = timeout + 5.0
        self.url = url
        self.corpus: Corpus | None = open_corpus(corpus, cache) if corpus else None

    def search(self, query: str) -> str:
        """Search for passages about a subject.

        Args:
            query: Words to look for.
        """
        if not query.strip():
            raise ValueError("the query is empty")
        if self.corpus is not None:
            found = self.corpus.search(query, self.results)
        else:
            found = ask(self.url, query, self.results, self.timeout)
        return shown(found, self.longest)


def shown(found: list[Passage], longest: int) -> str:
    """Return passages as numbered text, each with its title on the line before the text."""
    parts = []
    for number, each in enumerate(found, 1):
        text = each.text if len(each.text) <= longest else f"{each.text[:longest]} ..."
        parts.append(f"[{number}] {each.title}\n{text}" if each.title else f"[{number}] {text}")
    return "\n\n".join(parts) or "Nothing was found."


def ask(url: str, query: str, most: int, seconds: float) -> list[Passage]:
    """Return up to `most` passages that a server finds, best first.

    The server takes `{"queries": [text], "topk": number, "return_scores": true}` and answers with
    `{"result": [[{"document": {"contents": ...}, "score": ...}]]}`, like the server of
    https://github.com/PeterGriffinJin/Search-R1. seconds: time limit for the complete answer.

    Raises:
        TimeoutError: the answer did not arrive in time.
        SearchError: the server did not answer, or its answer has a different format.
    """
    where = f"the search server at {urlsplit(url).hostname}"
    body = json.dumps({"queries": [query], "topk": most, "return_scores": True}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", "User-Agent": "spmdrl"})
    until, data = time.monotonic() + seconds, b""
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            # A socket's time-out applies to each read separately, so a slow answer in many parts would not exceed it.
            while part := answer.read1(1 << 16):
                data += part
                if time.monotonic() > until:
                    raise TimeoutError
                if len(data) > MOST_BYTES:
                    raise SearchError(f"{where} sent more than {MOST_BYTES >> 20} MiB")
    except HTTPError as error:
        raise SearchError(f"{where} answered {error.code} {error.reason}") from None
    except (OSError, HTTPException) as error:
        cause = error.reason if isinstance(error, URLError) else error
        if isinstance(cause, TimeoutError):
            raise TimeoutError(f"{where} did not answer within {seconds:g} s") from None
        raise SearchError(f"{where} cannot be reached ({type(cause).__name__})") from None
    try:
        rows: Any = json.loads(data)["result"][0]
        found = [passage_of(row.get("document", row)) for row in rows]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise SearchError(f"{where} sent an answer of an unknown form: {data[:80]!r}") from None
    return [each for each in found if each is not None][:most]
