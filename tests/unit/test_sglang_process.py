"""A rank's reaction to messages of its SGLang process, and to its end; the process here is a small one of our own."""

import ast
import re
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from spmdrl.engines.sglang import process as sglang_process
from spmdrl.engines.sglang.engine import SGLangEngine
from spmdrl.engines.sglang.process import EngineDiedError, Process, lines_of
from spmdrl.engines.sglang.transport import SharedMemory
from spmdrl.weights.reshard import CorruptWeightsError

SERVER = """
import json, os, signal, sys

def say(**line):
    print(json.dumps(line), flush=True)

say(answer=[1, 7])
for line in sys.stdin:
    command = json.loads(line)
    if command["do"] == "generate":
        name = command["requests"][0]["id"]
        say(failed=name, error=f"request {name}: KeyError: 3")
    elif command["do"] == "die":
        sys.stderr.write(command["words"])
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    elif command["do"] == "load":
        say(error="RuntimeError: w arrived with other bytes than were sent")
    else:
        say(answer=command["do"])
"""
BAR = "\rLoading safetensors checkpoint shards:  50% Completed | 1/2 [00:00<00:00,  3.21it/s]"


@pytest.fixture
def process(tmp_path, monkeypatch):
    server = tmp_path / "server.py"
    server.write_text(SERVER)
    monkeypatch.setattr(sglang_process, "GRACE_SECONDS", 1000.0)  # or the watching thread ends this process
    monkeypatch.setattr(sglang_process.Path, "with_name", lambda *_: server)
    process = Process(Path(sys.executable), {"options": {"device": "cpu", "tp_size": 1}}, 20)
    yield process
    process.close()


def test_a_failed_request_is_no_answer_to_another_command(process):
    process.send("generate", requests=[{"id": "3.0."}])
    assert process.call("release") == "release" and process.call("resume") == "resume"
    assert process.failed == ["request 3.0.: KeyError: 3"] and process.take(0) is None
    engine = engine_of(process)
    engine.running = {"3.0.": (3, 0)}
    with pytest.raises(RuntimeError, match="SGLang: request 3.0.: KeyError: 3"):
        engine.poll()


def engine_of(process) -> SGLangEngine:
    """Makes the engine around it, without a model: `load` and `poll` need no more."""
    engine = cast(Any, SGLangEngine.__new__(SGLangEngine))
    vars(engine).update(
        process=process, group=None, running={}, backlog=[], version=0, transport=SharedMemory(), parts={"w": []}
    )
    engine.wave = []
    return engine


def test_stale_what_the_engine_refuses_is_corrupt_and_an_engine_that_died_is_not(process):
    engine, bucket = engine_of(process), {"w": torch.ones(4)}
    with pytest.raises(CorruptWeightsError, match="SGLang: .*w arrived with other bytes .* will not sample"):
        engine.load([bucket], 1)
    assert engine.version is None
    call = process.call
    process.call = lambda do, **what: call("die", words=BAR) if do == "load" else call(do)
    with pytest.raises(EngineDiedError, match=r"^the SGLang engine \(process \d+\) was ended by SIGKILL$"):
        engine.load([bucket], 1)
    assert engine.version is None
    began = time.monotonic()
    with pytest.raises(EngineDiedError):
        process.answer()
    assert time.monotonic() - began < 5, "and says it again"


def test_killed_engine_says_its_last_words_without_bars(process):
    process.send("die", words=f"{BAR}{BAR}\nMemoryError: no more{BAR}\n\r 50%|###  | 1/2 [00:00<?, ?it/s]")
    with pytest.raises(EngineDiedError, match="log file: MemoryError: no more$"):
        process.answer()


def test_progress_bars_are_no_lines():
    text = f"one{BAR}\r100%|####| 2/2 [00:01<00:00, 1.50s/it]\ntwo\r\rthree\n\n 7it [00:00, 9.1it/s]\rLoading:  3%|\n"
    assert lines_of(text) == ["one", "two", "three"]
    assert lines_of("loss fell by 30% | all is well\n") == ["loss fell by 30% | all is well"]


def test_server_loads_only_files_that_its_interpreter_can_import():
    """SGLang's interpreter has torch and xxhash, but neither spmdrl nor its requirements."""
    room = Path(sglang_process.__file__).with_name("server")
    names = {file.stem for file in room.glob("*.py")}
    text = "".join(file.read_text() for file in room.glob("*.py"))
    loaded = [room.parents[2] / file for file in re.findall(r'shared\("([^"]+)"\)', text)]
    assert {file.stem for file in loaded} == {"seeds", "checksum", "needs"}
    for file in (*room.glob("*.py"), *loaded):
        usable = {*sys.stdlib_module_names, "torch", *(names | {"sglang"} if file.parent == room else {"xxhash"})}
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert not getattr(node, "level", 0), file
                found = [node.module or ""] if isinstance(node, ast.ImportFrom) else [n.name for n in node.names]
                assert {name.partition(".")[0] for name in found} <= usable, (file, found)


@pytest.mark.parametrize(
    ("device", "dtype", "precision"),
    [("cuda", "float32", "ieee"), ("cuda", "bfloat16", None), ("cpu", "float32", None)],
)
def test_triton_multiplies_float32_without_tf32_on_a_gpu(device, dtype, precision):
    config = {"options": {"device": device, "dtype": dtype, "tp_size": 1}}
    assert sglang_process.environment(config).get("TRITON_F32_DEFAULT") == precision
