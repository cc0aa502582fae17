"""Lines of JSON between the zygote and its caller. Standard library only: it runs inside the sandbox."""

import json
import os
import select


class Talk:
    """The zygote's end: its own standard input and output."""

    def __init__(self):
        # Programs get pipes of their own; prints of a library here must not come between the lines.
        self.stdin, self.stdout = os.dup(0), os.dup(1)
        os.dup2(2, 1)
        # A caller that does not read must not stop the watch of limits.
        os.set_blocking(self.stdout, False)
        self.buffer, self.unsent = bytearray(), bytearray()

    def receive(self) -> dict | None:
        """Return the next line, or None at the end."""
        while b"\n" not in self.buffer:
            data = os.read(self.stdin, 1 << 16)
            if not data:
                return None
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        return json.loads(line)

    def send(self, message: dict, wait: bool = True) -> None:
        """Send a line. wait: until it is sent; else the rest stays in `unsent` while the caller does not read."""
        self.unsent += (json.dumps(message) + "\n").encode()
        self.flush(wait)

    def flush(self, wait: bool = False) -> None:
        """Send what is left of lines. wait: until all of it is sent."""
        while self.unsent:
            try:
                del self.unsent[: os.write(self.stdout, self.unsent)]
            except BlockingIOError:
                if not wait:
                    return
                select.select([], [self.stdout], [])
