"""A stand-in for the server of a judge: it listens on a port of this machine and answers as a test tells it to."""

import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from spmdrl.config.schema import RewardConfig, SandboxConfig
from spmdrl.rewards import judge_server
from spmdrl.rewards.base import Grader, Reward, RewardInput
from spmdrl.rewards.judge import Judge
from spmdrl.rewards.load import load_reward

KEY = "sk-test-key-that-nobody-may-see-4711"
VARIABLE = "JUDGE_OF_THE_TESTS"
"""Not a name by which logs know a secret, so that only the judge itself can keep it out."""


@dataclass
class Answer:
    """What the stand-in answers."""

    content: object = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: str | None = None
    """Instead of a chat completion with the content."""
    seconds: float = 0.0
    """Before it answers."""
    drip: float = 0.0
    """Seconds between two bytes of the body."""


class StandIn:
    """A server of chat completions that answers by a function of the number of a request and its content."""

    def __init__(self, answer: Callable[[int, dict], Answer]):
        self.requests: list[dict] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.at_once = self.most_at_once = 0
        self.lock, self.over = threading.Lock(), threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format, *args):
                pass

            def do_CONNECT(self):
                self.paths_of("CONNECT " + self.path)
                self.send_error(502)

            def paths_of(self, path):
                with outer.lock:
                    outer.paths.append(path)

            def do_POST(self):
                self.paths_of(self.path)
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    number = len(outer.requests)
                    outer.requests.append(asked)
                    outer.headers.append(dict(self.headers))
                    outer.at_once += 1
                    outer.most_at_once = max(outer.most_at_once, outer.at_once)
                try:
                    with contextlib.suppress(OSError):
                        self.reply(answer(number, asked))
                finally:
                    with outer.lock:
                        outer.at_once -= 1

            def reply(self, told: Answer):
                outer.over.wait(told.seconds)
                choice = {"message": {"role": "assistant", "content": told.content}}
                usage = {"prompt_tokens": 100, "completion_tokens": 7}
                body = told.body if told.body is not None else json.dumps({"choices": [choice], "usage": usage})
                with outer.lock:
                    # Counted as long as the caller can know that it waits.
                    outer.at_once -= 1
                try:
                    self.send_response(told.status)
                    for name, value in told.headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(body.encode())))
                    self.end_headers()
                    for byte in body if told.drip else [body]:
                        self.wfile.write(byte.encode())
                        outer.over.wait(told.drip)
                finally:
                    with outer.lock:
                        outer.at_once += 1

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/v1"

    def close(self) -> None:
        self.over.set()
        self.server.shutdown()
        self.server.server_close()


def verdict(grade: object, reason: str = "so it is") -> str:
    return json.dumps({"reason": reason, "grade": grade})


def graded(grade: object) -> Callable[[int, dict], Answer]:
    return lambda number, asked: Answer(verdict(grade))


def in_turn(*answers: Answer) -> Callable[[int, dict], Answer]:
    """The last one is for all that follow."""
    return lambda number, asked: answers[min(number, len(answers) - 1)]


def item(solution: str = "It is 4.", truth: object = "4", prompt: str | list = "2 + 2 = ?") -> RewardInput:
    return RewardInput("src", solution, truth, {}, prompt)


def written(folder: Path, **settings) -> str:
    """Writes a judge's file."""
    file = folder / "judge.yaml"
    file.write_text(yaml.safe_dump(settings))
    return str(file)


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Starts stand-ins and judges that ask them, and closes all at the end of the test."""
    monkeypatch.setattr(judge_server, "FIRST_PAUSE", 0.01)
    monkeypatch.setenv(VARIABLE, KEY)
    open_now: list = []

    def begin(answer: Callable[[int, dict], Answer], **settings) -> tuple:
        server = StandIn(answer)
        open_now.append(server)
        given = {"url": server.url, "model": "the-judge", "key_env": VARIABLE, "timeout": 20.0} | settings
        grader = load_reward(RewardConfig(function=written(tmp_path, **given)), SandboxConfig())
        assert isinstance(grader, Judge)
        open_now.append(grader)
        return grader, server

    yield begin
    for each in reversed(open_now):
        each.close()


def grade(grader: Grader, *items: RewardInput) -> list[Reward]:
    for i, one in enumerate(items):
        grader.submit((i, 0, i), one)
    back = dict(grader.drain())
    return [back[i, 0, i] for i in range(len(items))]
