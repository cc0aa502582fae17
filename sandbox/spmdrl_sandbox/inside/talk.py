"""Exchange of JSON lines between the zygote and its caller. It needs only the standard library."""

import json
import os
import select


class Talk:
    """The zygote's end of the connection: its standard input and output."""

    def __init__(self):
        # Redirect prints of libraries in this process to stderr, as they would disturb the lines of JSON.
        self.stdin, self.stdout = os.dup(0), os.dup(1)
        os.dup2(2, 1)
        # Writes must not block, as the watcher has to check limits even if the caller does not read.
        os.set_blocking(self.stdout, False)
        self.buffer, self.unsent = bytearray(), bytearray()

    def receive(self) -> dict | None:
        """Return the next message, or None at the end of stdin."""
        while b"\n" not in self.buffer:
            data = os.read(self.stdin, 1 << 16)
            if not data:
                return None
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        return json.loads(line)

    def send(self, message: dict, wait: bool = True) -> None:
        """Send a message. wait: True to block until it is sent, False to keep bytes in `unsent` if stdout is full."""
        self.unsent += (json.dumps(message) + "\n").encode()
        self.flush(wait)

    def flush(self, wait: bool = False) -> None:
        """Send the bytes in `unsent`. wait: True to block until all of them are sent."""
        while self.unsent:
            try:
                del self.unsent[: os.write(self.stdout, self.unsent)]
            except BlockingIOError:
                if not wait:
                    return
                select.select([], [self.stdout], [])
