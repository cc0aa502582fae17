"""Lines of JSON between the zygote and its caller. Standard library only: it runs inside the sandbox."""

import json
import os


class Talk:
    """The zygote's end: its own standard input and output."""

    def __init__(self):
        # Programs get pipes of their own; what a library prints here must not stand between the lines.
        self.stdin, self.stdout = os.dup(0), os.dup(1)
        os.dup2(2, 1)
        self.buffer = bytearray()

    def hear(self) -> dict | None:
        """Return the next line, or None at the end."""
        while b"\n" not in self.buffer:
            data = os.read(self.stdin, 1 << 16)
            if not data:
                return None
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        return json.loads(line)

    def say(self, message: dict) -> None:
        """Send a line."""
        data = (json.dumps(message) + "\n").encode()
        while data:
            data = data[os.write(self.stdout, data) :]
