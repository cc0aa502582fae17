"""Search as a tool: over a corpus on this machine, or by a server that keeps one."""

import json
import time
import urllib.request
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from spmdrl.config.dump import redact_text
from spmdrl.env.base import BrokenError, Stateless
from spmdrl.env.corpus import CACHE, Corpus, Passage, open_corpus, passage_of

MOST_BYTES = 8 << 20
"""Bytes of the longest answer of a server that is read."""


class SearchError(BrokenError):
    """The server of a search is at fault; the message says why, without what is secret in an address."""


class Search(Stateless):
    """A tool that searches a corpus on this machine (needs bm25s) or asks a server, `search`. It keeps nothing."""

    def __init__(
        self,
        corpus: str = "",
        url: str = "",
        results: int = 3,
        longest: int = 2_000,
        timeout: float = 20.0,
        cache: str = CACHE,
    ) -> None:
        """Open a corpus, or take the address of a server.

        Args:
            corpus: a .jsonl file with a passage in each row, or a .txt file with one in each paragraph, which empty
                lines divide: lines that follow each other are one passage (`Corpus`).
            url: of a server in the place of a corpus, which answers as that of Search-R1 does.
            results: passages of an answer.
            longest: characters of a passage that are shown.
            timeout: seconds in which the server has to answer.
            cache: folder for indexes of corpora.
        """
        if bool(corpus) == bool(url):
            raise ValueError("the tool search needs either `corpus`, a file, or `url`, a server")
        if url and urlsplit(url).scheme not in ("http", "https"):
            raise ValueError(f"the tool search: `url` is an http address, not {redact_text(url)!r}")
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
    """Return passages as numbered text, each with its title in the line before it."""
    parts = []
    for number, each in enumerate(found, 1):
        text = each.text if len(each.text) <= longest else f"{each.text[:longest]} ..."
        parts.append(f"[{number}] {each.title}\n{text}" if each.title else f"[{number}] {text}")
    return "\n\n".join(parts) or "Nothing was found."


def ask(url: str, query: str, most: int, seconds: float) -> list[Passage]:
    """Return the passages that a server finds, the best first.

    The server takes `{"queries": [text], "topk": number, "return_scores": true}` and answers with
    `{"result": [[{"document": {"contents": ...}, "score": ...}]]}`, as that of
    https://github.com/PeterGriffinJin/Search-R1 does. seconds: for all of the answer.

    Raises:
        TimeoutError: the answer did not come in time.
        SearchError: there is no answer, or one of another form.
    """
    where = f"the search server at {urlsplit(url).hostname}"
    body = json.dumps({"queries": [query], "topk": most, "return_scores": True}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", "User-Agent": "spmdrl"})
    until, data = time.monotonic() + seconds, b""
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            # A time-out of a socket is one of each read: an answer that comes in drops would have no end.
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
        raise SearchError(f"{where} sent an answer of another form: {data[:80]!r}") from None
    return [each for each in found if each is not None][:most]
