"""Real engines beside the paper ones, measured; `test_paper_engine.py` compares them.

    python -m tests.engines.paper_probe /tmp/facts vllm:qwen2:tp1 vllm:qwen3_moe:tp2-ep2 hf:llama:tp2

A case is an engine, a model (of `MODELS`, or a family that reads images) and its layout. Each rank is a process of its
own, forked where the imports are done, and leaves a file of facts.
"""

import importlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks import _models
from spmdrl.config.schema import Config
from tests.engines.probe import replaced
from tests.unit import vision_models

SMALL = dict(
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
)
EXPERTS = dict(moe_intermediate_size=64, num_experts_per_tok=2, norm_topk_prob=True)
MODELS = {
    "qwen2": dict(family="Qwen2", tie_word_embeddings=True),
    "llama": dict(family="Llama", tie_word_embeddings=False, num_key_value_heads=1, head_dim=32),
    "qwen3_moe": dict(EXPERTS, family="Qwen3Moe", num_experts=8, head_dim=32, tie_word_embeddings=False),
    # Of the sizes of latent attention vLLM's CPU kernel takes these only.
    "deepseek_v3": dict(
        EXPERTS,
        family="DeepseekV3",
        num_key_value_heads=4,
        n_routed_experts=8,
        n_shared_experts=2,
        n_group=2,
        topk_group=1,
        topk_method="noaux_tc",
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        tie_word_embeddings=False,
    ),
}


LAYOUT = re.compile(r"(tp|dp|ep|lora)(\d+)")


def sizes(layout: str) -> dict[str, int]:
    """`tp2-ep2` as numbers."""
    return {name: int(size) for name, size in LAYOUT.findall(layout)}


def ranks_of(layout: str) -> int:
    """Ranks of a layout's engine."""
    return sizes(layout).get("tp", 1) * sizes(layout).get("dp", 1)


def settings(engine: str, folder: Path, layout: str) -> Config:
    """Settings of a case. `lora6` are adapters of rank 6 on some of the layers that vLLM fuses."""
    given = sizes(layout)
    rank = given.pop("lora", 0)
    lora = {"rank": rank, "targets": ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")} if rank else {}
    lengths = {"max_prompt_tokens": 48, "max_new_tokens": 30, "max_sequences": 5}
    return replaced(
        Config(),
        model={"path": str(folder)},
        run={"device": "cpu"},
        lora=lora,
        rollout={"engine": engine, **given, **lengths},
    )


def compared(cfg: Config, world, engine) -> dict:
    """Returns what a real engine holds and reads of a checkpoint, beside what the paper engine says of it."""
    from transformers import AutoConfig

    from spmdrl.engines.engine import Request
    from spmdrl.plan.engine import PaperEngine
    from spmdrl.plan.engine_bytes import model_of
    from spmdrl.weights.boxes import merged

    config = AutoConfig.from_pretrained(cfg.model.path)
    model = model_of(config)
    paper, facts = PaperEngine(cfg, world, config, None, model), {}
    for name, one in (("real", engine), ("paper", paper)):
        boxes: dict[str, list] = {entry.name: [] for entry in model.entries}
        for i, box in merged(one.needs(model.entries).boxes):
            boxes[model.entries[i].name].append([list(side) for side in box])
        facts[name] = {"boxes": {n: sorted(b) for n, b in boxes.items()}, "bytes": one.bytes_by_owner()}
        facts[name]["capacity"] = one.capacity
    facts["tokens"], facts["unknown"], facts["lack"] = paper.cache_tokens, paper.unknown, paper.lack
    if cfg.rollout.engine == "vllm" and world.size == 1:
        engine.version = 0
        engine.submit(Request((0, 0), [3, 4, 5], 7, 0, 2))
        while not engine.poll():
            pass
        facts["packed"] = [engine.packed.bytes, paper.packed_bytes]
    return facts


def measure(engine: str, folder: Path, layout: str, rank: int, store: Path) -> dict:
    """Build a case's engine on one of its ranks."""
    import torch.distributed as dist

    from spmdrl.engines.build import build_engine
    from spmdrl.spmd.mesh import world_from_group

    ranks = ranks_of(layout)
    os.environ |= {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
    os.environ |= {name: str(ranks) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    dist.init_process_group("gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks)
    cfg = settings(engine, folder, layout)
    world = world_from_group(cfg.parallel, ranks, torch.device("cpu"), rank)
    started = build_engine(cfg, world, {2})
    facts = compared(cfg, world, started)
    if engine == "sglang":
        started.close()
    return facts


def preload(engines: set[str]) -> None:
    """Import what the cases need, once."""
    names = ["transformers", "spmdrl.engines.build", "spmdrl.plan.engine"]
    if "vllm" in engines:
        from spmdrl.engines.vllm.options import set_environment

        set_environment(torch.device("cpu"), "float32")
        names += ["vllm.entrypoints.llm", "vllm.v1.worker.cpu_model_runner"]
        names += [f"vllm.model_executor.models.{name}" for name in ("qwen2", "llama", "qwen3_moe", "deepseek_v2")]
    for name in names:
        importlib.import_module(name)


def forked(work: Callable[[], None]) -> int:
    """Run a function in a child process; returns its id."""
    child = os.fork()
    if child == 0:
        work()
        sys.stdout.flush()
        os._exit(0)
    return child


def main() -> None:
    root, cases = Path(sys.argv[1]), [case.split(":") for case in sys.argv[2:]]
    root.mkdir(parents=True, exist_ok=True)
    folders = {}
    for name in {model for _, model, _ in cases}:
        if name in vision_models.FAMILIES:
            folders[name] = vision_models.saved(name, root / name)
        else:
            folders[name] = _models.random_model(root / name, seed=0, **SMALL | MODELS[name])
    preload({engine for engine, _, _ in cases})
    for engine, model, layout in cases:
        case = f"{engine}:{model}:{layout}"

        def of_rank(rank: int, case=case, engine=engine, model=model, layout=layout) -> None:
            try:
                facts = measure(engine, folders[model], layout, rank, root / f"{case}.store")
            except BaseException:
                facts = {"failed": traceback.format_exc()}
            (root / f"{case}:{rank}.json").write_text(json.dumps(facts))

        began = time.perf_counter()
        for child in [forked(partial(of_rank, rank)) for rank in range(ranks_of(layout))]:
            os.waitpid(child, 0)
        print(f"{case}: {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
