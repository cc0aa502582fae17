"""Scores that real vLLM gives by its pooling runner, on a CPU; `test_vllm_pooling.py` compares them.

    python -m tests.engines.pooling_probe jobs.json facts.json

jobs.json: name -> folder, task, and the tokens of sequences. vLLM gives one engine a process, so each job is a process
of its own, forked where the imports are done.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.engines.probe import preload


def scores(job: dict[str, Any]) -> list:
    """Raw numbers of each sequence: [labels], or [tokens, labels] where tokens are classified."""
    from vllm import LLM, PoolingParams

    llm = LLM(
        model=job["folder"],
        runner="pooling",
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        block_size=32,
        disable_log_stats=True,
    )
    # With its activation vLLM would give a sigmoid or a softmax of them.
    raw = PoolingParams(use_activation=False)
    asked: Any = [{"prompt_token_ids": tokens} for tokens in job["tokens"]]
    found = llm.encode(asked, raw, pooling_task=job["task"], use_tqdm=False)
    return [each.outputs.data.double().tolist() for each in found]


def main() -> None:
    jobs, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    preload()
    facts = {}
    for name, job in jobs.items():
        mine = out.with_suffix(f".{name}")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                mine.write_text(json.dumps(scores(job)))
                code = 0
            finally:
                sys.stdout.flush()
                os._exit(code)
        os.waitpid(child, 0)
        facts[name] = json.loads(mine.read_text())
    out.write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
