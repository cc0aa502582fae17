"""Computes which part of each checkpoint tensor a vLLM, SGLang or HF engine rank holds.

The rules follow the source code of vLLM 0.32 and SGLang 0.5.23 (`model_executor/models`, `layers/linear.py`,
`layers/fused_moe`, `layers/vocab_parallel_embedding.py`); `tests/engines/test_paper_engine.py` compares them with real
engines. Attention is sharded over the tp ranks of each data-parallel (dp) replica. Without expert parallelism (ep),
each expert is sharded over all tp x dp ranks. With ep, each rank holds some experts in full.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal

from spmdrl.engines.build import tp_problem
from spmdrl.engines.hf.start import plan_of
from spmdrl.hub.build import sees_images
from spmdrl.hub.vision import read_vision
from spmdrl.weights.boxes import Box

Kind = Literal["vllm", "sglang", "hf"]
Span = tuple[int, int]
VOCAB_PADDING = 64
"""vLLM and SGLang pad the embedding and the head to a multiple of this many rows before sharding."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Config fields that hold the number of experts per layer; models use different names."""
ROWS = ("q_proj", "q_b_proj", "kv_b_proj", "sinks")
"""Attention modules and tensors whose rows are sharded by head over the tp ranks."""
WHOLE = (
    *("q_a_proj", "kv_a_proj_with_mqa", "indexer", "gate", "router", "shared_expert_gate"),
    *("e_score_correction_bias", "expert_bias", "score"),
)
"""Modules and tensors, besides norms, that are replicated on every rank."""
VOCAB = ("embed_tokens", "lm_head")
TOWER_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1", "linear_fc1")
"""Linear layers of a vision tower whose outputs are sharded over the tp ranks."""
TOWER_ROWS = ("proj", "out_proj", "down_proj", "fc2", "linear_fc2")
"""Linear layers of a vision tower whose inputs are sharded over the tp ranks."""
MERGER = {"mlp.0": "fc1", "mlp.2": "fc2"}
"""Layers without names in the projectors of Qwen2-VL and Qwen2.5-VL, and the tower's layers that are sharded alike."""


def experts_of(config: Any) -> int:
    """Return the number of experts per layer from a text config, or 0 for a dense model."""
    return next((n for name in EXPERTS if (n := getattr(config, name, None))), 0)


@dataclass(frozen=True)
class Cut:
    """The part of one tensor that a rank holds."""

    boxes: list[Box]
    """Slices of the tensor, or an empty list if the rank holds none of it."""
    group: Literal["vocabulary", "linear", "expert", "table", "whole", "unknown"] = "whole"
    """The layer type, which determines padding and quantization. `table` is an embedding of positions. `unknown` means
    that no rule matches the name and the full tensor is counted."""


class EngineLayout:
    """How one type of engine shards a model over its ranks."""

    def __init__(self, kind: Kind, config: Any, tp: int, dp: int = 1, ep: int = 1):
        """config: the model's transformers config. tp, dp, ep: values of `--rollout.tp`, `.dp` and `.ep`.

        Raises:
            ValueError: the HF engine cannot shard this model.
        """
        self.kind, self.tp, self.dp, self.ep = kind, tp, dp, ep
        self.config = config.get_text_config()
        self.heads = self.config.num_attention_heads
        self.kv_heads = getattr(self.config, "num_key_value_heads", None) or self.heads
        self.experts = experts_of(self.config)
        self.layers = self.config.num_hidden_layers
        self.plan = plan_of(config, tp) if kind == "hf" and tp > 1 else {}
        self.tower = read_vision(config).tower.rpartition(".")[2] if sees_images(config) else None
        self.whole_config = config

    def check(self) -> None:
        """Check, as vLLM and SGLang do, that tp divides the heads and, in a dense model, the MLP width.

        Raises:
            ValueError: tp does not divide them; the message names the flag and every value that works.
        """
        if self.kind != "hf" and (problem := tp_problem(self.config, self.kind, self.tp)):
            raise ValueError(problem)

    @property
    def ranks(self) -> int:
        """Number of ranks per engine."""
        return self.tp * self.dp

    def vocab_ranks(self, module: str) -> int:
        """Return how many ranks shard the embedding or the head. SGLang shards the head over all ranks of an engine."""
        return self.ranks if self.kind == "sglang" and module == "lm_head" else self.tp

    def vocab_rows(self, module: str, rows: int) -> int:
        """Return how many rows, including padding, a rank allocates for an embedding or head with `rows` rows."""
        if self.kind == "hf":
            return rows
        ranks, to = self.vocab_ranks(module), VOCAB_PADDING
        if self.kind == "sglang" and -(-rows // to) * to % ranks:
            to *= ranks
        return -(-(-(-rows // to) * to) // ranks)

    def cut(self, name: str, shape: tuple[int, ...], place: int) -> Cut:
        """Return the part of a checkpoint tensor that rank `place` (0 to tp x dp - 1) of an engine loads.

        name, shape: name and shape of the full tensor. place: rank within the engine; place % tp is its tp rank, and
        place // tp its data-parallel replica.
        """
        whole = [tuple((0, n) for n in shape)]
        if self.kind == "hf":
            return self._hf(name, shape, place)
        if "rotary_emb.inv_freq" in name or self._beyond(name):
            return Cut([])
        parts = name.split(".")
        bias = parts[-1] == "bias"
        module = parts[-2] if parts[-1] in ("weight", "bias") else parts[-1]
        tp = place % self.tp
        if self.tower in parts:
            return self._tower(name, shape, tp, bias)
        if "modality_projection" in parts:
            return Cut(whole, "linear")
        if module in VOCAB:
            ranks = self.vocab_ranks(module)
            rows = self.vocab_rows(module, shape[0])
            first = (place if ranks == self.ranks else tp) * rows
            # The last ranks may hold only padding, so they load nothing.
            return Cut([_rows(shape, first, min(first + rows, shape[0]))] if first < shape[0] else [], "vocabulary")
        if "experts" in parts:
            return self._expert(parts, module, shape, place)
        if any("norm" in part for part in parts[-2:]):
            return Cut(whole)
        if any(part in WHOLE for part in parts):
            group = "linear" if module in ("q_a_proj", "kv_a_proj_with_mqa") else "whole"
            return Cut(whole, group)
        if any("attn" in part or "attention" in part for part in parts):
            return self._attention(module, shape, tp, bias) or Cut(whole, "unknown")
        at, ranks = self._mlp_group(name, place)
        return self._mlp(module, shape, at, ranks, bias) or Cut(whole, "unknown")

    def _beyond(self, name: str) -> bool:
        """Return True for multi-token prediction layers, which engines skip, such as layer 61 of DeepSeek-V3."""
        found = re.search(r"\.layers\.(\d+)\.", name)
        return bool(found and int(found[1]) >= self.layers)

    def _attention(self, module: str, shape: tuple[int, ...], tp: int, bias: bool) -> Cut | None:
        if module in ROWS:
            return Cut([_part(shape, 0, tp, self.tp)], "linear")
        if module in ("k_proj", "v_proj"):
            return Cut([_rows(shape, *self._kv_rows(shape[0], tp))], "linear")
        if module == "qkv_proj":
            unit = shape[0] // (self.heads + 2 * self.kv_heads)
            queries, keys = self.heads * unit, self.kv_heads * unit
            step = queries // self.tp
            low, high = self._kv_rows(keys, tp)
            spans = [(tp * step, (tp + 1) * step), *((at + low, at + high) for at in (queries, queries + keys))]
            return Cut([_rows(shape, a, b) for a, b in spans], "linear")
        if module in ("o_proj", "dense"):
            return Cut([tuple((0, n) for n in shape) if bias else _part(shape, 1, tp, self.tp)], "linear")
        return None

    def _tower(self, name: str, shape: tuple[int, ...], tp: int, bias: bool) -> Cut:
        """Return the part of a vision tower's tensor, which vLLM and SGLang shard over the tp ranks of a replica."""
        whole: Box = tuple((0, n) for n in shape)
        layer = name.rpartition(".")[0]
        module = next((alike for end, alike in MERGER.items() if layer.endswith(end)), layer.rpartition(".")[2])
        if "embed" in name:
            return Cut([whole], "table" if len(shape) == 2 else "whole")
        if "norm" in module or module == "ln_q":
            return Cut([whole])
        if module == "qkv":
            third = shape[0] // 3
            step = third // self.tp
            starts = [at + tp * step for at in (0, third, 2 * third)]
            return Cut([_rows(shape, start, start + step) for start in starts], "linear")
        if module in TOWER_COLUMNS:
            return Cut([_part(shape, 0, tp, self.tp)], "linear")
        if module in TOWER_ROWS:
            return Cut([whole if bias else _part(shape, 1, tp, self.tp)], "linear")
        return Cut([whole], "unknown")

    def _kv_rows(self, rows: int, tp: int) -> Span:
        """Return a tp rank's range of key or value rows. If there are more ranks than heads, rows are replicated."""
        if self.tp <= self.kv_heads:
            return tp * rows // self.tp, (tp + 1) * rows // self.tp
        head, size = tp * self.kv_heads // self.tp, rows // self.kv_heads
        return head * size, (head + 1) * size

    def _mlp_group(self, name: str, place: int) -> tuple[int, int]:
        """Return this rank's index within the group that shards an MLP or shared experts, and the group size."""
        if self.kind == "sglang":
            return place, self.ranks
        # Under vLLM's `use_sequence_parallel_moe`, the tp ranks of a dp replica process different tokens, so DeepSeek's
        # shared experts are replicated on each rank.
        divides_tokens = self.ep > 1 and self.tp > 1 and self.dp > 1
        if divides_tokens and "shared_experts" in name and self.config.model_type.startswith(("deepseek", "kimi")):
            return 0, 1
        return place % self.tp, self.tp

    def _mlp(self, module: str, shape: tuple[int, ...], at: int, ranks: int, bias: bool) -> Cut | None:
        if module in ("gate_proj", "up_proj", "w1", "w3", "fc1"):
            return Cut([_part(shape, 0, at, ranks)], "linear")
        if module == "gate_up_proj":
            return Cut(_halves(shape, 0, at, ranks), "linear")
        if module in ("down_proj", "w2", "fc2"):
            return Cut([tuple((0, n) for n in shape) if bias else _part(shape, 1, at, ranks)], "linear")
        return None

    def _expert(self, parts: list[str], module: str, shape: tuple[int, ...], place: int) -> Cut:
        """Return the part of a single expert's tensor, or of a tensor that stacks all experts of a layer."""
        at, ranks = (0, 1) if self.ep > 1 else (place, self.ranks)
        number = parts[parts.index("experts") + 1]
        first, last = self._held(place)
        if number.isdigit():
            if not first <= int(number) < last:
                return Cut([], "expert")
            cut = self._mlp(module, shape, at, ranks, parts[-1] == "bias")
            return Cut(cut.boxes, "expert") if cut else Cut([tuple((0, n) for n in shape)], "unknown")
        # Stacked weights are [E, 2I, H] and [E, H, I], or transposed [E, H, 2I] and [E, I, H]; stacked biases are
        # [E, 2I] and [E, H]. E is the number of experts, I the expert intermediate size, H the hidden size.
        transposed = self.config.model_type in ("gpt_oss", "llama4_text") and len(shape) == 3
        inner = shape[1:]
        if "down_proj" in module:
            dim = None if "bias" in module else 0 if transposed else 1
            boxes = [_part(inner, dim, at, ranks) if dim is not None else tuple((0, n) for n in inner)]
        elif self.config.model_type == "gpt_oss":
            # GPT-OSS interleaves gate and up rows, so a single range covers both.
            boxes = [_part(inner, len(inner) - 1, at, ranks)]
        else:
            boxes = _halves(inner, 1 if transposed else 0, at, ranks)
        return Cut([((first, last), *box) for box in boxes] if first < last else [], "expert")

    def _held(self, place: int) -> Span:
        """Return a rank's range of experts. If ep does not divide the expert count, the first ranks get one more."""
        if self.ep == 1:
            return 0, max(self.experts, 1)
        base, more = divmod(self.experts, self.ep)
        place %= self.ep
        first = place * base + min(place, more)
        return first, first + base + (place < more)

    def _hf(self, name: str, shape: tuple[int, ...], place: int) -> Cut:
        """Return a tensor's part under the model's tensor-parallel plan in transformers (`engines/hf/start.py`)."""
        module, _, kind = name.rpartition(".")
        inside = module[at:] if (at := module.find("layers.")) >= 0 else module
        style = self.plan.get(re.sub(r"\.\d+(?=\.)", ".*", inside))
        if self.tower in module.split("."):
            style = None
        whole = tuple((0, n) for n in shape)
        group = "linear" if kind == "weight" and len(shape) == 2 and inside.startswith("layers.") else "whole"
        if style == "colwise":
            return Cut([_part(shape, 0, place, self.tp)], group)
        if style == "rowwise" and kind == "weight":
            return Cut([_part(shape, 1, place, self.tp)], group)
        return Cut([whole], group)


def _rows(shape: tuple[int, ...], first: int, last: int) -> Box:
    return ((first, last), *((0, n) for n in shape[1:]))


def _part(shape: tuple[int, ...], dim: int, at: int, ranks: int) -> Box:
    """Return the box of part `at` when a tensor is split into `ranks` equal parts along a dimension."""
    step = shape[dim] // ranks
    return tuple((at * step, (at + 1) * step) if d == dim else (0, n) for d, n in enumerate(shape))


def _halves(shape: tuple[int, ...], dim: int, at: int, ranks: int) -> list[Box]:
    """Split both halves of a dimension (gate rows, then up rows) into `ranks` parts; return the boxes of part `at`."""
    half = shape[dim] // 2
    step = half // ranks
    spans = [(start + at * step, start + (at + 1) * step) for start in (0, half)]
    return [tuple(span if d == dim else (0, n) for d, n in enumerate(shape)) for span in spans]
