"""The client of SandboxFusion against a stand-in: a server of this file that speaks the service's words.

It is no SandboxFusion: it answers what a test tells it to, or runs the code by a plain Python.
"""

import base64
import contextlib
import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from spmdrl.config.schema import SandboxConfig
from spmdrl.rewards.base import RewardInput, UngradedError
from spmdrl.rewards.code import CodeGrader
from spmdrl_sandbox.base import Limits, Program, SandboxError
from spmdrl_sandbox.fusion import Fusion
from spmdrl_sandbox.session import Session

LIMITS = Limits(seconds=2.0, memory_mib=128, output_kib=1)


def execute(asked: dict) -> dict:
    """Runs a program as the service's Python does, and answers in its words."""
    try:
        ended = subprocess.run(
            [sys.executable, "-c", asked["code"]],
            input=asked["stdin"],
            capture_output=True,
            text=True,
            timeout=asked["run_timeout"],
        )
    except subprocess.TimeoutExpired:
        result = {"status": "TimeLimitExceeded", "execution_time": asked["run_timeout"], "return_code": None}
        return {"status": "Failed", "message": "", "run_result": result | {"stdout": "", "stderr": ""}}
    result = {"status": "Finished", "execution_time": 0.1, "return_code": ended.returncode}
    result |= {"stdout": ended.stdout, "stderr": ended.stderr}
    return {"status": "Failed" if ended.returncode else "Success", "message": "", "run_result": result}


class StandIn(BaseHTTPRequestHandler):
    """Answers the next of `server.says`: a status, a body, headers. With none left it runs the program."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, asked))
        status, body, headers = self.server.says.pop(0) if self.server.says else (200, execute(asked), {})
        if callable(body):
            return body(self)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Server": "stand-in, no SandboxFusion", "Content-Length": len(data), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def service():
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    server.asked, server.says, server.slept = [], [], []
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def client(service, **words) -> Fusion:
    return Fusion(f"http://127.0.0.1:{service.server_port}", sleep=service.slept.append, **words)


def answer(status="Success", message="", **result):
    whole = {"status": "Finished", "execution_time": 0.5, "return_code": 0, "stdout": "x", "stderr": ""} | result
    return {"status": status, "message": message, "compile_result": None, "run_result": whole, "files": {}}


GOOD = (200, answer(), {})


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("print(int(input()) + 1)", ("ok", 0, 0, "42\n", "")),
        ("import sys; print('out'); sys.exit(3)", ("error", 3, 0, "out\n", "exit code 3")),
        ("1 / 0", ("error", 1, 0, "", "ZeroDivisionError: division by zero")),
        ("import os; os.kill(os.getpid(), 11)", ("error", 0, 11, "", "signal 11")),
        ("raise MemoryError", ("memory", 1, 0, "", "memory")),
        ("while True: pass", ("timeout", 0, 0, "", "timeout")),
    ],
)
def test_a_program_ends(service, source, told):
    ended = client(service).run(Program(source, stdin="41"), Limits(seconds=1.0))
    assert (ended.verdict, ended.code, ended.signal, ended.stdout, ended.why) == told, ended
    assert len(service.asked) == 1 and service.slept == []


def test_the_request_is_that_of_the_services_interface(service):
    client(service, language="cpp").run(Program("code", stdin="in", files={"a/b": "ü"}), LIMITS)
    wanted = {"code": "code", "language": "cpp", "stdin": "in", "compile_timeout": 2.0, "run_timeout": 2.0}
    wanted |= {"memory_limit_MB": 128, "files": {"a/b": base64.b64encode("ü".encode()).decode()}, "fetch_files": []}
    assert service.asked == [("/run_code", wanted)]
    same = Fusion(f"http://127.0.0.1:{service.server_port}/run_code/")
    assert same.url == client(service).url and same.name == f"SandboxFusion ({same.url})"


def test_a_program_that_does_not_compile_is_at_fault(service):
    compiled = {"status": "Finished", "execution_time": 1.0, "return_code": 1, "stdout": "", "stderr": "a.c: no ;"}
    service.says = [(200, {"status": "Failed", "message": "", "compile_result": compiled, "run_result": None}, {})]
    ended = client(service).run(Program("code"), LIMITS)
    assert (ended.verdict, ended.code, ended.why) == ("error", 1, "a.c: no ;")


def test_output_is_cut_at_its_limit(service):
    service.says = [(200, answer(stdout="ü" * 5000), {})]
    assert client(service).run(Program(""), LIMITS).stdout == "ü" * 512


@pytest.mark.parametrize("status", [500, 502, 503, 504, 408, 429])
def test_a_service_that_fails_is_asked_again_with_longer_waits(service, status):
    service.says = [(status, {}, {})] * 3 + [GOOD]
    ended = client(service).run(Program(""), LIMITS)
    assert (ended.verdict, ended.stdout, len(service.asked), service.slept) == ("ok", "x", 4, [1.0, 2.0, 4.0])


def test_a_rate_limit_says_how_long_to_wait(service):
    service.says = [(429, {}, {"Retry-After": "7"}), (429, {}, {"Retry-After": "9999"})]
    service.says += [(429, {}, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}), GOOD]
    assert client(service).run(Program(""), LIMITS).verdict == "ok" and service.slept == [7.0, 30.0, 4.0]


def test_a_service_that_goes_on_failing_is_a_failure_and_no_error_of_the_program(service):
    service.says = [(503, {}, {})] * 4
    ended = client(service).run(Program(""), LIMITS)
    assert ended.verdict == "failure" and "HTTP 503" in ended.why and "SandboxFusion (http" in ended.why
    assert (len(service.asked), service.slept) == (4, [1.0, 2.0, 4.0])


@pytest.mark.parametrize("status", [302, 400, 404, 422])
def test_a_request_that_is_refused_is_not_sent_again(service, status):
    service.says = [(status, {}, {"Location": "http://127.0.0.1:1/"})]
    ended = client(service).run(Program(""), LIMITS)
    assert ended.verdict == "failure" and f"HTTP {status}" in ended.why and len(service.asked) == 1


@pytest.mark.parametrize(
    "body",
    [
        b"<html>nginx</html>",
        b"",
        b"[" * 100000,
        b"null",
        b"[1]",
        {},
        {"status": "Success"},
        {"status": "Success", "run_result": None, "compile_result": None},
        {"status": "Perhaps", "run_result": {}},
        answer("SandboxError", "no cgroup"),
        answer("Success", return_code=1),
        answer("Failed", return_code=0),
        answer(return_code="0"),
        answer(return_code=None),
        answer(return_code=True),
        answer(stdout=["x"]),
        answer(execution_time="soon"),
        answer(execution_time=float("nan")),
        answer(status="Success") | {"run_result": {"status": "Error", "stderr": "x"}},
        {"status": "Success", "run_result": None, "compile_result": answer()["run_result"]},
    ],
    ids=lambda body: str(body)[:60],
)
def test_an_answer_that_makes_no_sense_is_a_failure_of_the_service(service, body):
    service.says = [(200, body, {})] * 2
    ended = client(service, tries=2).run(Program(""), LIMITS)
    assert ended.verdict == "failure" and ended.stdout == "" and ended.why, ended
    assert len(service.asked) == 2
    service.says = [(200, body, {}), GOOD]
    assert client(service).run(Program(""), LIMITS).verdict == "ok"


def drips(handler) -> None:
    """Sends an answer that never ends, one byte at a time."""
    handler.send_response(200)
    handler.end_headers()
    with contextlib.suppress(OSError):
        for _ in range(100):
            handler.wfile.write(b" ")
            time.sleep(0.1)


@pytest.mark.parametrize("hang", [lambda _: time.sleep(10), drips], ids=["says nothing", "drips"])
def test_a_service_that_hangs_is_a_failure_in_time(service, monkeypatch, hang):
    monkeypatch.setattr("spmdrl_sandbox.fusion.GRACE", 0.3)
    service.says = [(200, hang, {})] * 2
    began = time.monotonic()
    ended = client(service, tries=2).run(Program(""), Limits(seconds=0.1))
    assert ended.verdict == "failure" and "no answer within 0.5 s" in ended.why, ended
    assert 0.9 < time.monotonic() - began < 5.0 and len(service.asked) == 2


def test_a_service_that_hangs_up_or_is_not_there_is_a_failure(service):
    service.says = [(200, lambda handler: handler.connection.close(), {}), GOOD]
    assert client(service).run(Program(""), LIMITS).verdict == "ok" and service.slept == [1.0]
    nobody = Fusion("http://127.0.0.1:9", tries=2, sleep=service.slept.append)
    ended = nobody.run(Program(""), LIMITS)
    assert ended.verdict == "failure" and "ConnectionRefusedError" in ended.why and service.slept[1:] == [1.0]


def test_what_the_service_does_not_do_is_said(service):
    with pytest.raises(SandboxError, match="no sessions"):
        Session(client(service), LIMITS)  # type: ignore[arg-type]
    with pytest.raises(SandboxError, match="not commands"):
        client(service).run(Program(argv=("ls",)), LIMITS)
    for url in ("localhost:8080", "file:///etc/passwd", "http://"):
        with pytest.raises(SandboxError, match="not the address of a service"):
            Fusion(url)
    assert service.asked == []


def test_the_reward_for_programs_asks_it_for_tests_of_standard_input_alone(service):
    grader = CodeGrader(SandboxConfig(provider=f"http://127.0.0.1:{service.server_port}/run_code"), True)
    pairs = {"inputs": ["1", "2"], "outputs": ["2", "4"]}
    assert grader(RewardInput("", "x = int(input())\nprint(2 * x if x < 2 else 0)", pairs)).score == 0.5
    for tests in (pairs | {"fn_name": "f"}, {"test_list": ["assert f(1)"]}):
        with pytest.raises(UngradedError, match="only run tests of standard input and output"):
            grader(RewardInput("", "def f(x): return 1", tests))
