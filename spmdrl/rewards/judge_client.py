"""One request to a server of chat completions, and what its failures mean.

The API key is in the header of a request and nowhere else: messages show texts of servers and of errors without it, and
no redirection is followed, which would take the key elsewhere.
"""

import email.utils
import http.client
import json
import re
import socket
import ssl
import threading
import time
import urllib.request
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from spmdrl.config.dump import REDACTED, redact_text
from spmdrl.rewards.base import RewardError, UngradedError

PATH = "/chat/completions"
LONGEST_ANSWER = 4 << 20
"""Bytes of the longest answer that is read."""
LONGEST_WAIT = 120.0
"""Seconds of the longest `Retry-After` that is followed."""
UNKNOWN_FORM = (400, 422)
"""Status of a server that does not know a way to ask for JSON, or that cannot take the text."""
_PASSING = {408, 409, 425, 429}
_FIX = {
    401: "set the API key in the environment variable that the judge's key_env names ({key_env}, which is {is_set})",
    402: "the account of the API key is used up",
    403: "the API key in {key_env} (the judge's key_env; it is {is_set}) may not use its model",
    404: "there is no such address or model: change the judge's url (it ends before /chat/completions, often in /v1) "
    "or its model",
}


class TryAgainError(Exception):
    """A failure that may pass."""

    def __init__(self, why: str, after: float | None = None):
        """after: seconds after which the server wants to be asked again."""
        super().__init__(why)
        self.after = after


class UnknownFormError(Exception):
    """The server answered 400 or 422; the message is its own."""


class Client:
    """A server of chat completions. May be called from several threads."""

    def __init__(self, url: str, key: str, key_env: str, timeout: float):
        """timeout: seconds of a request, to its last byte. Raises ValueError for a key that cannot be sent."""
        if not re.fullmatch(r"[!-~]*", key := key.strip()):
            raise ValueError(
                f"the judge's key_env {key_env}: its value has characters that no API key has; set it anew"
            )
        self.key_env, self.timeout = key_env, timeout
        self._key, self._parts = key, urlsplit(url)
        port = f":{self._parts.port}" if self._parts.port else ""
        self._address = f"{self._parts.scheme}://{self._parts.hostname}{port}"  # without a login or a query
        path = self._parts.path.rstrip("/")
        self._target = (path if path.endswith(PATH) else path + PATH) + ("?" * bool(self._parts.query))
        self._target += self._parts.query
        self._tls = ssl.create_default_context() if self._parts.scheme == "https" else None
        self._lock = threading.Lock()
        self._under_way: set[socket.socket] = set()
        self._closed = False

    def ask(self, body: dict[str, Any]) -> bytes:
        """Return the body of the server's answer.

        Raises TryAgainError for a rate limit, a time-out, or a fault of the server or the network; UnknownFormError and
        UngradedError if the server does not take the form of the request, or its length; RewardError, with the setting
        to change, if no request can succeed.
        """
        status, after, answer = self._exchange(json.dumps(body).encode())
        if status == 200:
            return answer
        text = self._shown(answer)
        if status in _PASSING or status >= 500:
            raise TryAgainError(f"the server answered {status}{text}", seconds_of(after))
        if status in UNKNOWN_FORM:
            raise UnknownFormError(f"the server answered {status}{text}")
        if status == 413:
            raise UngradedError(f"the server answered 413{text}; the judge's max_chars bounds the response")
        fix = _FIX.get(status, "is that a server of chat completions? Change the judge's url")
        if 300 <= status < 400:
            fix = "it points to another address, where no key is sent: change the judge's url to that"
        fix = fix.format(key_env=self.key_env, is_set="set" if self._key else "not set")
        raise RewardError(f"the judge at {self._address} answered {status}{text}: {fix}")

    def close(self) -> None:
        """Cut the requests that are under way. May be called twice."""
        with self._lock:
            self._closed = True
            for sock in self._under_way:
                _cut(sock)

    def without_key(self, text: str) -> str:
        """Return text without the key and whatever else looks like a secret."""
        return redact_text(text.replace(self._key, REDACTED) if self._key else text)

    def _exchange(self, body: bytes) -> tuple[int, str, bytes]:
        """Return status, `Retry-After` and body of the answer. Raises TryAgainError."""
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "spmdrl"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        connection, until = self._connection(), time.monotonic() + self.timeout
        late = f"the server did not answer within the judge's timeout of {self.timeout:g} s"
        sock: socket.socket | None = None
        clock: threading.Timer | None = None
        try:
            connection.connect()
            # The connection drops its socket if the server closes after the answer, while the answer is read.
            sock = connection.sock
            assert sock is not None, "it is connected"
            with self._lock:
                if self._closed:
                    raise TryAgainError("the judge was closed")
                self._under_way.add(sock)
            # A socket's own time-out begins anew with every byte that comes.
            clock = threading.Timer(max(0.0, until - time.monotonic()), _cut, [sock])
            clock.daemon = True
            clock.start()
            connection.request("POST", self._target, body, headers)
            response = connection.getresponse()
            answer = response.read(LONGEST_ANSWER + 1)
            after = response.getheader("Retry-After") or ""
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, TimeoutError) or time.monotonic() >= until:
                raise TryAgainError(late) from None
            why = self.without_key(str(error) or type(error).__name__)[:200]
            raise TryAgainError(f"the connection to {self._address} failed: {why}") from None
        finally:
            if clock:
                clock.cancel()
            if sock:
                with self._lock:
                    self._under_way.discard(sock)
            connection.close()
        if time.monotonic() >= until:
            # A part that came before the cut may look whole.
            raise TryAgainError(late)
        if len(answer) > LONGEST_ANSWER:
            raise TryAgainError(f"the server's answer has more than {LONGEST_ANSWER:,} bytes")
        return response.status, after, answer

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._tls is None:
            return http.client.HTTPConnection(host, port, timeout=self.timeout)
        proxy = urllib.request.getproxies().get("https", "")
        if not proxy or urllib.request.proxy_bypass(host):
            return http.client.HTTPSConnection(host, port, timeout=self.timeout, context=self._tls)
        by = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        connection = http.client.HTTPSConnection(by.hostname or "", by.port, timeout=self.timeout, context=self._tls)
        connection.set_tunnel(host, port)
        return connection

    def _shown(self, answer: bytes) -> str:
        """Return the server's own words for a message, in one line."""
        # JSON may write a slash as \/, and so a key with one.
        text = answer.decode("utf-8", "replace").replace("\\/", "/")
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            text = str(json.loads(text)["error"]["message"])
        # Before it is cut, so that no part of a key is left.
        text = " ".join("".join(c if c.isprintable() else " " for c in self.without_key(text)).split())
        return f" ({text[:300]})" if text else ""


def _cut(sock: socket.socket) -> None:
    """End a connection that another thread waits for."""
    with suppress(OSError):
        # The method of the plain socket: that of TLS would first change the object that the other thread reads from.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def seconds_of(after: str) -> float | None:
    """Return the seconds of a `Retry-After`, a number or a date, within LONGEST_WAIT; None if there is none."""
    if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", after.strip()):
        return min(float(after), LONGEST_WAIT)
    with suppress(ValueError, TypeError):
        moment = email.utils.parsedate_to_datetime(after).timestamp()
        return min(max(moment - time.time(), 0.0), LONGEST_WAIT)
    return None
