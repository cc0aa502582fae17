"""Chat-completions client that raises a different exception for each kind of failure.

The API key is sent only in the request header. It is removed from server responses and errors that are quoted in
messages. Redirects are not followed, because they could leak the key to another host.
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
"""Maximum response size in bytes."""
LONGEST_WAIT = 120.0
"""Maximum number of seconds to wait, even if a `Retry-After` header asks for more."""
UNKNOWN_FORM = (400, 422)
"""HTTP status codes that a server returns if it does not support the `response_format` or rejects the request text."""
_PASSING = {408, 409, 425, 429}
_FIX = {
    401: "set the API key in the environment variable that the judge's key_env names ({key_env}, which is {is_set})",
    402: "the account of the API key is used up",
    403: "the API key in {key_env} (the judge's key_env; it is {is_set}) may not use the judge's model",
    404: "there is no such address or model: change the judge's url (without /chat/completions, often ending in /v1) "
    "or its model",
}


class TryAgainError(Exception):
    """Raised for a temporary failure, after which the request should be retried."""

    def __init__(self, why: str, after: float | None = None):
        """after: seconds to wait before the next attempt, if the server specified them."""
        super().__init__(why)
        self.after = after


class UnknownFormError(Exception):
    """Raised when the server rejects the request format with status 400 or 422. The message quotes the server."""


class Client:
    """Client for a chat-completions server. Thread-safe."""

    def __init__(self, url: str, key: str, key_env: str, timeout: float):
        """Create a client. Raises ValueError if the key cannot be sent in a header.

        timeout: seconds from the start of a request to the last byte of the response.
        """
        if not re.fullmatch(r"[!-~]*", key := key.strip()):
            raise ValueError(
                f"the judge's key_env {key_env}: the variable has characters that an API key cannot have; set it again"
            )
        self.key_env, self.timeout = key_env, timeout
        self._key, self._parts = key, urlsplit(url)
        port = f":{self._parts.port}" if self._parts.port else ""
        self._address = f"{self._parts.scheme}://{self._parts.hostname}{port}"  # without login or query
        path = self._parts.path.rstrip("/")
        self._target = (path if path.endswith(PATH) else path + PATH) + ("?" * bool(self._parts.query))
        self._target += self._parts.query
        self._tls = ssl.create_default_context() if self._parts.scheme == "https" else None
        self._lock = threading.Lock()
        self._under_way: set[socket.socket] = set()
        self._closed = False

    def ask(self, body: dict[str, Any]) -> bytes:
        """Send a request and return the response body.

        Raises TryAgainError for rate limits, timeouts, and server or network errors. Raises UnknownFormError if the
        server rejects the request format, and UngradedError if the request is too long. Raises RewardError if no
        request can succeed; the message names the setting to change.
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
            raise UngradedError(f"the server answered 413{text}; lower the judge's max_chars to shorten responses")
        fix = _FIX.get(status, "this may not be a chat-completions server: change the judge's url")
        if 300 <= status < 400:
            fix = "it redirects to another address, where the key is not sent: change the judge's url to that address"
        fix = fix.format(key_env=self.key_env, is_set="set" if self._key else "not set")
        raise RewardError(f"the judge at {self._address} answered {status}{text}: {fix}")

    def close(self) -> None:
        """Abort running requests. Can be called repeatedly."""
        with self._lock:
            self._closed = True
            for sock in self._under_way:
                _cut(sock)

    def without_key(self, text: str) -> str:
        """Return the text with the API key, and anything else that looks like a secret, masked."""
        return redact_text(text.replace(self._key, REDACTED) if self._key else text)

    def _exchange(self, body: bytes) -> tuple[int, str, bytes]:
        """Send a request and return the response's status, `Retry-After` and body. Raises TryAgainError."""
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "spmdrl"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        connection, until = self._connection(), time.monotonic() + self.timeout
        late = f"the server did not answer within the judge's timeout of {self.timeout:g} s"
        sock: socket.socket | None = None
        clock: threading.Timer | None = None
        try:
            connection.connect()
            # Keep a reference to the socket: if the server closes the connection after its response, http.client drops
            # its own reference before the response is read.
            sock = connection.sock
            assert sock is not None, "connected above"
            with self._lock:
                if self._closed:
                    raise TryAgainError("the judge was closed")
                self._under_way.add(sock)
            # A timer is needed because the socket timeout restarts with every byte received.
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
            # The part of the response received before the timer cut the connection may look complete.
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
        """Format the server's response as one line without the key, for quoting in messages."""
        # JSON may escape a slash as \/, which would hide a key that contains a slash from `without_key`.
        text = answer.decode("utf-8", "replace").replace("\\/", "/")
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            text = str(json.loads(text)["error"]["message"])
        # Remove the key before truncating the text, so that no part of the key is left.
        text = " ".join("".join(c if c.isprintable() else " " for c in self.without_key(text)).split())
        return f" ({text[:300]})" if text else ""


def _cut(sock: socket.socket) -> None:
    """Shut down a connection that another thread is reading from."""
    with suppress(OSError):
        # Call the plain socket's method, because the TLS socket's method would modify an object that the other thread
        # is using.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def seconds_of(after: str) -> float | None:
    """Convert a `Retry-After` header (a number or a date) to seconds, at most LONGEST_WAIT. Return None if invalid."""
    if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", after.strip()):
        return min(float(after), LONGEST_WAIT)
    with suppress(ValueError, TypeError):
        moment = email.utils.parsedate_to_datetime(after).timestamp()
        return min(max(moment - time.time(), 0.0), LONGEST_WAIT)
    return None
