"""Every setting of a run: one section, one dataclass; the text under a field is its `--help`.

The module imports nothing heavy, so that `--help` answers at once. Rules for several settings are in `checks.py`;
`load.py` makes a `Config` of YAML and flags.
"""

import math
import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from spmdrl.config import learning
from spmdrl.config.declare import (
    COUNT,
    FINITE,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    UNIT,
    Free,
    Job,
    Rule,
    at_least,
    section,
    setting,
)


@dataclass
class RunConfig:
    """The run as a whole."""

    dir: str = setting("", free=Free.WATCHED)
    """Run folder (resolved config, metrics, samples, logs, checkpoints). Empty: `runs/<name>`."""
    name: str = setting("demo", free=Free.WATCHED)
    """Name shown in trackers and used for the default run folder."""
    steps: int = setting(60, COUNT, free=Free.WATCHED, unread_by=(Job.EVALUATE,))
    """Steps to train: each is one round of experience and its optimizer updates."""
    seed: int = setting(0, NOT_NEGATIVE)
    """Every draw is keyed by (seed, step, prompt, sample, turn), so the world size does not change it."""
    device: Literal["auto", "cpu", "cuda"] = setting("auto", free=Free.WATCHED)
    """`auto` takes the GPUs when torch sees one for each local rank."""
    timeout: float = setting(600.0, POSITIVE, free=Free.WATCHED)
    """Seconds a collective may wait for a missing rank before the whole job ends."""
    grace: float = setting(60.0, POSITIVE, free=Free.WATCHED)
    """Seconds after SIGUSR1 (or SIGTERM) within which the step is finished or abandoned, saved, and the job gone."""
    deterministic: bool = setting(False, free=Free.WATCHED)
    """Two runs on the same layout are equal to the last bit (also `--deterministic`): torch's deterministic algorithms,
    the static assignment, batch-invariant kernels in vLLM and SGLang on GPU. Slower."""
    lockstep_debug: bool = setting(False, free=Free.WATCHED)
    """Compare (call site, op, shape) of every collective across ranks before it runs: slow, but names the rank."""
    fresh: bool = setting(False, free=Free.WATCHED, unread_by=(Job.EVALUATE,))
    """Start over in a run folder that is there: it moves to `<dir>.old-1`, `.old-2`, ... Once for a job: what
    torchrun or SLURM starts again goes on."""
    allow_changes: bool = setting(False, free=Free.WATCHED, unread_by=(Job.EVALUATE,))
    """Go on in a run folder that was begun with settings which change the answer; without it they are refused."""
    spike_factor: float = setting(
        20.0,
        Rule(lambda x: x == 0 or 1 < x < math.inf, "must be above 1, or 0 for off"),
        free=Free.WATCHED,
        unread_by=(Job.EVALUATE,),
    )
    """Keep the batch of an optimizer step whose gradient norm is above so many times the median of the last 32, for
    `python -m spmdrl.tools.replay`; of a run the first 3, and 3 that are not finite. 0: only those."""


@dataclass
class ModelConfig:
    """The model that is trained."""

    path: str = "tiny"
    """HF folder, hub name, `ms:<name>` (ModelScope), a `.gguf` file, `package:<name>` (GGUF in an installed package),
    or `tiny` (ships here)."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Type of forward and backward, and of the engine. Master weights and optimizer are float32 (or float64). float16
    has a dynamic loss scale (docs/policy.md)."""
    trust_remote_code: bool = setting(False, free=Free.LIMIT)
    """Run Python code that comes with the model. Off: models that need it are refused."""
    self_check: bool = setting(True, free=Free.COMPUTED)
    """At start, compare packed sequences with each one alone in plain transformers, and after the first push the
    engine's log p with the trainer's (docs/policy.md)."""


@dataclass
class ParallelConfig:
    """Roles of the ranks, and how the ranks that train divide the policy; all sizes but ep multiply to their number."""

    FREE: ClassVar[str] = Free.LAYOUT

    placement: Literal["colocated", "split"] = setting("colocated", unread_by=(Job.SUPERVISED,))
    """`colocated`: every rank trains and samples in turn (sleep and wake). `split`: the last ranks sample while the
    others train."""
    rollout_ranks: int = setting(0, NOT_NEGATIVE, unread_by=(Job.SUPERVISED,))
    """Ranks that sample under `split`."""
    scoring_ranks: int = setting(0, NOT_NEGATIVE, unread_by=(Job.SUPERVISED,))
    """Ranks that hold the frozen models (reference or teacher, reward model) under `split`. 0: the trainers do.
    Megatron's axes divide them too."""

    dp_replicate: int = setting(1, COUNT)
    """HSDP: copies of the sharded model."""
    dp_shard: int = setting(
        -1, Rule(lambda x: x == -1 or x >= 1, "must be at least 1, or -1 for all ranks the other axes leave")
    )
    """FSDP: ranks over which parameters are sharded. -1: all that the other axes leave."""
    sp: int = setting(1, COUNT)
    """FSDP: ranks that divide the tokens of a micro-batch (Ulysses); must divide the model's attention heads."""
    cp: int = setting(1, COUNT)
    """Megatron: ranks that divide the tokens of each sequence (context parallelism)."""
    tp: int = setting(1, COUNT)
    """Megatron: ranks that divide every matrix and the vocabulary (the engine's own is `--rollout.tp`)."""
    sequence_parallel: bool = True
    """Megatron: between the divided parts of a layer, its tokens are divided over tp."""
    pp: int = setting(1, COUNT)
    """Megatron: stages of the pipeline, which divide the layers."""
    first_stage_layers: int = setting(0, NOT_NEGATIVE)
    """Megatron: layers of the first stage, while the others divide the rest. 0: as many as each of these."""
    last_stage_layers: int = setting(0, NOT_NEGATIVE)
    """Megatron: layers of the last stage, while the others divide the rest. 0: as many as each of these."""
    virtual_stages: int = setting(1, COUNT)
    """Megatron: parts of the model on a rank of the pipeline, in turn with other ranks' (an interleaved schedule)."""
    ep: int = setting(1, COUNT)
    """Megatron: ranks that divide the experts; they lie inside the other axes but pp."""
    etp: int = setting(1, COUNT)
    """Megatron: ranks that divide every expert's matrices."""


@dataclass
class OptimizerConfig:
    """AdamW and its schedule."""

    lr: float = setting(2e-4, NOT_NEGATIVE)
    """Peak learning rate of AdamW, this one for the model that ships. Another begins with 1e-6 under reinforcement
    learning, and with LoRA with ten times that of all weights."""
    betas: tuple[float, float] = setting(
        (0.9, 0.99), Rule(lambda x: all(0 <= beta < 1 for beta in x), "must be two numbers from 0 up to, but not, 1")
    )
    """AdamW betas."""
    eps: float = setting(1e-8, POSITIVE)
    """AdamW epsilon."""
    weight_decay: float = setting(0.0, NOT_NEGATIVE)
    """Decoupled weight decay."""
    clip_grad_norm: float = setting(1.0, NOT_NEGATIVE)
    """Largest global gradient norm; 0 turns clipping off."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up, over all optimizer steps of the run, left out ones too."""
    warmup_steps: int = setting(0, NOT_NEGATIVE)
    """Optimizer steps of linear warm-up."""
    min_lr_ratio: float = setting(0.0, UNIT, only_with=lambda c: c.optimizer.schedule != "constant")
    """Final learning rate as a share of the peak (linear, cosine)."""
    decay_share: ClassVar[float] = 1.0
    """A setting of jobs on given rows alone (config/supervised.py)."""
    bad_steps: int = setting(3, NOT_NEGATIVE, free=Free.LIMIT)
    """Optimizer steps in a row whose loss or gradient is not finite that end the job; until then such a step is left
    out. 0: the first one does."""


@dataclass
class PolicyConfig:
    """How the policy trains: backend, micro-batches, memory, attention."""

    backend: Literal["fsdp", "megatron"] = "fsdp"
    """Backend that trains the model: `fsdp`, any HF transformer under FSDP2; `megatron`, the families of
    docs/megatron.md over tensor, pipeline, context and expert parallelism."""
    max_tokens_per_microbatch: int = setting(8192, COUNT, free=Free.COMPUTED)
    """Packing budget of one forward, on one rank or sp ranks together; changes speed and memory, never the result."""
    activation_checkpointing: Literal["none", "full", "selective"] = setting("none", free=Free.COMPUTED)
    """Activations that backward recomputes, for less memory: `full`, those of whole layers, in up to a third more time;
    `selective` (Megatron), those of the attention between its projections."""
    host_optimizer: bool = setting(False, free=Free.COMPUTED)
    """Megatron: AdamW runs on the host, where its moments and the float32 weights stay."""
    moe_aux_loss: float = setting(0.0, NOT_NEGATIVE)
    """Megatron, mixture of experts: weight of a loss for evenly used experts in every sequence. 0: none."""
    moe_bias_rate: float = setting(0.0, NOT_NEGATIVE)
    """Megatron, routers with a bias (DeepSeek-V3): what an update adds to the bias of experts with less than the mean
    load, and takes from the others'. 0: it stays."""
    mtp: Literal["skip", "keep"] = setting("skip", free=Free.KEPT)
    """Heads of the checkpoint that predict further tokens, which nothing here trains: left out of what is saved, or
    copied into it as they are."""
    reshard_after_forward: bool = setting(True, free=Free.COMPUTED)
    """Free gathered parameters between forward and backward: less memory, one more all-gather. Models of up to 64 MiB
    are gathered whole, once for both."""
    reduce_gradients: Literal["last", "each"] = setting("last", free=Free.COMPUTED)
    """FSDP: sum gradients over the ranks after an update's last micro-batch, until when each rank holds those of the
    whole model (4 bytes a parameter), or after each one: a rank then holds its shard of them, and sends more."""
    attention: Literal["auto", "flash", "varlen", "padded", "eager"] = setting("auto", free=Free.COMPUTED)
    """Packed attention. `auto`: on a GPU in 16 bits flash-attn's kernel where installed (`flash`), else torch's own
    (`varlen`); otherwise causal SDPA per sequence (`padded`). `eager`: plain softmax."""
    chunked_loss: bool = setting(True, free=Free.COMPUTED)
    """FSDP: losses in which no token depends on another are taken chunk by chunk within the output head: a quarter of
    its work less, for a float32 copy of the head's gradient while the activations stand, where a micro-batch takes
    several chunks (on a GPU 1,900 tokens of 152k bfloat16 logits each). Others, and all with False, see logp of the
    whole micro-batch."""
    liger: bool = setting(False, free=Free.COMPUTED)
    """FSDP on GPUs: RMSNorm, rotary embedding and SwiGLU by Liger's kernels (`pip install liger-kernel`)."""
    share_prompts: bool = setting(True, free=Free.COMPUTED)
    """Run the prompt of a group's samples once, in forward and backward; changes speed and memory, never the result."""
    offload: Literal["none", "host", "disk"] = setting("none", free=Free.COMPUTED)
    """Place of parameters and optimizer (the critic's too) while the engine samples: `none` leaves them on the device,
    `host` is pinned host memory (on a CPU: no move), `disk` a temporary file in $TMPDIR or /var/tmp."""


@dataclass
class LoraConfig:
    """Low-rank adapters on the policy, which then train alone; a KL's reference is the model without them."""

    rank: int = setting(0, NOT_NEGATIVE)
    """Rank of the adapters. 0: none, every weight trains."""
    alpha: int = setting(16, COUNT, only_with=lambda c: c.lora.rank)
    """The adapters' output is multiplied by alpha / rank."""
    targets: tuple[str, ...] = setting(("all-linear",), only_with=lambda c: c.lora.rank)
    """Linear layers of the decoder that get one, such as `q_proj v_proj`; `all-linear`: all of them."""
    push: Literal["adapter", "merged"] = setting("adapter", free=Free.COMPUTED, only_with=lambda c: c.lora.rank)
    """Weights that engines get: the adapters alone, beside weights that are pushed once, or the full model with them
    added in (any engine, and the only way for sglang)."""


@dataclass
class ReferenceConfig:
    """The model of the KL term: the start, a teacher, or the policy of some steps ago."""

    enabled: Literal["auto", "on", "off"] = setting("auto", unread_by=(Job.DISTILL, Job.ONLINE))
    """Frozen model for KL. `auto`: on when a KL coefficient is not zero."""
    path: str = setting("", only_with=lambda c: c.has_reference)
    """The model, as `--model.path`; a teacher, for distillation. Empty: the starting model."""
    refresh_every: int = setting(0, NOT_NEGATIVE, only_with=lambda c: c.has_reference)
    """Take over the policy's weights every N steps. 0: never."""
    offload: Literal["none", "host", "disk"] = setting("none", free=Free.COMPUTED)
    """Place of frozen models while the engine samples, as `--policy.offload`."""


def is_average(reference: Any) -> bool:
    """Return True for a frozen model that takes a share of the policy when it moves (`refresh_every`, `mix`)."""
    return bool(reference.refresh_every) and getattr(reference, "mix", 1.0) != 1


@dataclass
class RolloutConfig:
    """Sampling: how many, how long, by which engine."""

    engine: Literal["auto", "vllm", "sglang", "hf"] = "auto"
    """Sampler. `auto`: vLLM when installed for the run's device, else the HF engine. `sglang`: after
    `launch/install.sh --sglang`."""
    tp: int = setting(1, COUNT, free=Free.DRAWN)
    """Ranks that divide an engine's matrices; tp x dp ranks share one engine, and must divide the ranks that sample."""
    dp: int = setting(1, COUNT, free=Free.DRAWN)
    """Mixture of experts: copies of the attention in one engine (vllm, sglang). Each runs requests of its own, while
    all tp x dp ranks divide the experts."""
    ep: int = setting(1, COUNT, free=Free.DRAWN)
    """Mixture of experts: ranks of an engine over which whole experts are spread (vllm, sglang): tp x dp, or 1 for a
    slice of every expert on each rank."""
    prompts_per_step: int = setting(32, COUNT, unread_by=(Job.EVALUATE,))
    """Prompts in one step over all ranks."""
    samples_per_prompt: int = setting(8, COUNT, unread_by=(Job.EVALUATE,))
    """Group size: samples of one prompt."""
    max_prompt_tokens: int = setting(512, COUNT)
    """Longer prompts are dropped when the prompts are read, and counted."""
    max_new_tokens: int = setting(8, COUNT)
    """Longest response, as the demo needs it. Another model on rows of your own: 1024."""
    temperature: float = setting(1.0, POSITIVE, unread_by=(Job.EVALUATE,))
    """Sampling temperature; logp is taken at the same temperature everywhere."""
    top_p: float = setting(1.0, SHARE, unread_by=(Job.EVALUATE,))
    """Nucleus sampling. Training takes 1 only: an engine's logp is of the set that it sampled from, the trainer's of
    the whole vocabulary. Evaluation has `--eval.top-p`."""
    assignment: Literal["queue", "static"] = setting("queue", free=Free.DRAWN)
    """How prompts are handed to engines: by an atomic queue (a rank that ends early takes more), or fixed by index (for
    bit-exact runs)."""
    oversample: float = setting(1.0, at_least(1), unread_by=(Job.EVALUATE,))
    """Sample so many times prompts_per_step and stop when prompts_per_step groups are complete: the slowest are cut.
    Prompts that no engine has begun by then are left for the next step."""
    partial_steps: int = setting(0, NOT_NEGATIVE, unread_by=(Job.EVALUATE,))
    """Groups that were cut short continue in the next step, for at most so many steps; then the run waits for them.
    0: they are dropped, and so are prompts that a static assignment did not begin (rollout/unbegun_prompts).
    Checkpoints hold them."""
    max_sequences: int = setting(64, COUNT, free=Free.DRAWN)
    """Sequences one engine runs at a time."""
    kv_cache_gib: float = setting(0.0, NOT_NEGATIVE, free=Free.DRAWN)
    """KV cache of vLLM or SGLang, on one rank. 0: what the sequences need, up to 0.25 GiB, on CPU;
    gpu_memory_utilization on GPU."""
    gpu_memory_utilization: float = setting(0.5, SHARE, free=Free.DRAWN)
    """Share of a GPU that vLLM or SGLang may take while awake."""
    staleness: int = setting(0, NOT_NEGATIVE, unread_by=(Job.EVALUATE,))
    """Under `split`: steps that sampling runs ahead, which bounds the age of its weights. 1: the experience of step k+1
    is sampled while step k trains, by the weights that step k began with. More evens out
    single slow steps only: all ranks end every step together."""
    routing_replay: bool = setting(False, unread_by=(Job.EVALUATE,))
    """Mixture of experts: train every token with the experts that the engine sent it to (R3); not with sglang, nor with
    vLLM on a CPU."""
    sleep_level: Literal["auto", 0, 1, 2] = setting("auto", free=Free.DRAWN)
    """Between rollouts: 0 stays awake, 1 gives back the KV cache (and parks weights in host memory on GPU), 2 gives
    back both, so that every wake needs a push. `auto` is 1 on a CPU and where adapters alone are pushed, else 2."""
    deterministic: bool = setting(False, free=Free.DRAWN)
    """Samples do not depend on what runs beside them: batch-invariant kernels in vLLM and SGLang (GPU; slower), one
    sequence at a time in the HF engine."""
    quantization: Literal["none", "int8", "fp8"] = "none"
    """8-bit weights in the engine: `fp8` in vLLM and SGLang (GPU), either one in the HF engine."""
    logp_diff_warn: float | None = setting(
        None,
        Rule(lambda x: 0 <= x < math.inf, "must be 0 or more, or None"),
        free=Free.LIMIT,
        unread_by=(Job.EVALUATE,),
    )
    """Warn when the engine's logp is off the trainer's by more, in the mean of a step. 0: never; None: 0.001 where no
    setting sets them apart, as in float32 with the newest weights, and 0.1 elsewhere."""
    logp_diff_stop: float = setting(1.0, NOT_NEGATIVE, free=Free.LIMIT, unread_by=(Job.EVALUATE,))
    """End the job when it is off by more: engine and trainer do not hold the same model. 0: never."""
    push_bucket_mib: int = setting(256, COUNT, free=Free.DRAWN)
    """Largest bucket of a weight push."""
    enforce_eager: bool = setting(False, free=Free.DRAWN)
    """Run vLLM or SGLang without CUDA graphs."""
    sglang_push: Literal["memory", "broadcast"] = setting("memory", free=Free.DRAWN)
    """How weights reach SGLang's processes: memory they share with the rank, or a broadcast from it (gloo on CPU; NCCL
    on GPU, for engines that have GPUs of their own)."""


@dataclass
class DataConfig:
    """Prompts."""

    RENDERS_MESSAGES: ClassVar[bool] = False
    """Rows of messages are rendered by the chat template whatever `chat` says."""

    train: str = setting("builtin:reverse", unread_by=(Job.EVALUATE,))
    """`builtin:<task>`, a .jsonl or verl .parquet path, `hf:<dataset>[:config[:split]]`, `ms:<dataset>` (ModelScope),
    or `reasoning-gym:<task>`."""
    eval: str = setting("builtin:reverse:eval", free=Free.KEPT)
    """The same, for evaluation. Empty: none, as for rows of your own until they are given."""
    prompt_column: str = "prompt"
    """Column with the prompt (text or a list of chat messages)."""
    answer_column: str = "answer"
    """Column with the ground truth. Empty: the reward needs none."""
    template: str = ""
    """Text around the prompt, with `{prompt}` in it."""
    system: str = ""
    """System message. Empty: none."""
    prefill: str = ""
    """Start of the assistant's reply, given with the prompt (columns may be used as `{column}`)."""
    chat: Literal["auto", "on", "off"] = "auto"
    """Use the tokenizer's chat template. `auto`: when it has one."""
    chat_template: str = ""
    """Chat template instead of the tokenizer's: `chatml` (adds no system message of its own), a `.jinja` file, or the
    text."""
    template_kwargs: str = ""
    """JSON object of variables of the chat template, such as {"enable_thinking": false}; those of a row go first."""
    limit: int = setting(0, NOT_NEGATIVE, unread_by=(Job.EVALUATE,))
    """Read at most so many training prompts; 0: all."""
    shuffle: bool = setting(True, unread_by=(Job.EVALUATE,))
    """Every epoch has an order of its own, by `--run.seed`. Off: the order of the file, as for a curriculum."""


@dataclass
class RewardConfig:
    """How samples are scored."""

    function: str = "exact_match"
    """A built-in reward, such as `exact_match`, `gsm8k`, `math` (symbolic), `code` (tests of a program), `auto` (by the
    row's data_source), `environment` (what `--env` gave) or `none` (0); `judge.yaml` (a judge: docs/judge.md); or
    `path/to/file.py[:function]` in a form of verl or TRL. docs/rewards.md lists all of them."""
    more: tuple[str, ...] = ()
    """Further rewards whose scores are added, each as `function=weight`; the weight is 1, as the first one's, where it
    is left out."""
    gate: tuple[str, ...] = ()
    """Parts of rewards that must be above 0, such as `format`; else the score is 0, or what it is below 0."""
    kwargs: str = ""
    """JSON object of further arguments for functions in files (verl's reward_kwargs)."""
    workers: int = setting(1, COUNT, free=Free.LIMIT)
    """Grading processes per rank (for rewards that run in the pool)."""
    timeout: float = setting(5.0, POSITIVE, free=Free.LIMIT)
    """Seconds one grading may take before its process is killed."""
    on_timeout: Literal["auto", "error", "zero"] = setting("auto", free=Free.LIMIT)
    """A killed grading ends the job (`error`), or scores 0, in every part too, and is counted (`zero`). `auto`: error
    for files, or zero."""
    max_ungraded: float = setting(0.05, UNIT, free=Free.LIMIT)
    """Largest share of a step's samples that may have no score, because their row's tests cannot be read or the sandbox
    or the judge failed again and again. They are left out; if there are more, the job ends."""
    model: str = setting("", only_with=lambda c: c.is_evaluated or c.learns_from_rewards)
    """HF sequence classifier with one label whose score is added to the reward, as `--model.path`; or `rm.yaml`, a file
    about a model with several labels, its own tokens or scores of steps (docs/rewards.md). Empty: none."""
    model_coef: float = setting(
        1.0, FINITE, only_with=lambda c: c.reward.model and (c.is_evaluated or c.learns_from_rewards)
    )
    """Factor on that score."""


@dataclass
class SandboxConfig:
    """The sandbox of programs that a model writes (docs/sandbox.md). It is started for rewards that run programs."""

    FREE: ClassVar[str] = Free.LIMIT

    provider: str = "auto"
    """`auto` (bubblewrap, else sandlock, whichever keeps a probe in, or the job ends), `bubblewrap`, `sandlock`,
    `docker:IMAGE`, `apptainer:IMAGE`, the URL of a SandboxFusion service, or `none`: no isolation, for programs that
    you trust."""
    seconds: float = setting(5.0, POSITIVE)
    """Time of a program for one test."""
    total_seconds: float = setting(30.0, POSITIVE)
    """Time of a program for all tests of a sample together; those that are left then fail."""
    memory_mib: int = setting(512, at_least(64))
    """Memory of a program, all of its processes together."""


@dataclass
class EvalConfig:
    """Evaluation during the run."""

    FREE: ClassVar[str] = Free.KEPT

    every: int = setting(20, NOT_NEGATIVE, unread_by=(Job.EVALUATE,))
    """Evaluate before the first step, every N steps, and at the end. 0: never."""
    prompts: int = setting(256, NOT_NEGATIVE, only_with=lambda c: c.is_evaluated)
    """Evaluation prompts; 0: all."""
    samples: int = setting(1, COUNT, only_with=lambda c: c.is_evaluated)
    """Samples per evaluation prompt (pass@k for every k that is a power of two up to it)."""
    temperature: float = setting(1.0, NOT_NEGATIVE, only_with=lambda c: c.is_evaluated)
    """Sampling temperature of evaluation; 0 is greedy."""
    top_p: float = setting(1.0, SHARE, only_with=lambda c: c.is_evaluated)
    """Nucleus sampling of evaluation: the smallest set of tokens whose probabilities add up to it."""


@dataclass
class CheckpointConfig:
    """When to save, and what to keep."""

    FREE: ClassVar[str] = Free.KEPT

    every: int = setting(0, NOT_NEGATIVE)
    """Save every N steps. 0: only at the end of the run."""
    keep: int = setting(2, COUNT)
    """Newest checkpoints kept. Older ones go only when the one just written reads back from the disk as it was made."""
    keep_every: int = setting(0, NOT_NEGATIVE)
    """Checkpoints of steps that are a multiple of this stay too. 0: none."""
    best: str = setting(
        "", Rule(lambda x: bool(re.fullmatch(r"(-?[A-Za-z][\w./@-]*)?", x)), "must be the name of a metric, or -name")
    )
    """Metric whose best checkpoint stays too, such as `eval/accuracy`: the highest value, or the lowest with a `-`
    before the name. Only values that were measured of a checkpoint's own weights count. Empty: none."""
    background: bool = False
    """FSDP: copy what is saved to host memory and write it while training goes on, one checkpoint at a time."""
    at_end: bool = True
    """Save when the last step is done."""


@dataclass
class TrackingConfig:
    """Numbers and samples that a run shows and keeps."""

    FREE: ClassVar[str] = Free.KEPT

    trackers: tuple[str, ...] = setting(("jsonl", "tensorboard"), unread_by=(Job.EVALUATE,))
    """Any of `jsonl`, `tensorboard`, `wandb`."""
    project: str = setting("spmdrl", unread_by=(Job.EVALUATE,))
    """wandb project."""
    samples: int = setting(4, NOT_NEGATIVE, unread_by=(Job.EVALUATE,))
    """Sample completions shown and written to samples.jsonl each step."""
    console: Literal["auto", "live", "plain"] = "auto"
    """Live panel on a terminal, or one line a step."""


@dataclass
class TrainingConfig:
    """Sections of every job that trains a model. Each entry point adds its own."""

    run: RunConfig = section(RunConfig)
    model: ModelConfig = section(ModelConfig)
    parallel: ParallelConfig = section(ParallelConfig)
    optimizer: OptimizerConfig = section(OptimizerConfig)
    policy: PolicyConfig = section(PolicyConfig)
    lora: LoraConfig = section(LoraConfig, unread_by=(Job.REWARD_MODEL,))
    data: DataConfig = section(DataConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    tracking: TrackingConfig = section(TrackingConfig)

    @property
    def engine_ranks(self) -> int:
        """Ranks that share one engine; 1 where there is none."""
        return 1


@dataclass
class Config(TrainingConfig):
    """Reinforcement learning of a language model. Every rank runs this same program."""

    env: str = setting("", unread_by=(Job.DISTILL, Job.ONLINE))
    """The environment in which samples act over several turns: `file.py:Class`, `builtin:NAME`, `file.py:TOOLS` (a list
    of functions), `env.yaml` (with limits), verl's tool YAML, or `rows` (each row names its own): docs/agents.md.
    Empty: a sample is one response."""
    reference: ReferenceConfig = section(ReferenceConfig)
    rollout: RolloutConfig = section(RolloutConfig)
    algo: learning.AlgoConfig = section(learning.AlgoConfig, unread_by=(Job.DISTILL, Job.ONLINE))
    correction: learning.CorrectionConfig = section(learning.CorrectionConfig, unread_by=(Job.DISTILL, Job.ONLINE))
    shaping: learning.ShapingConfig = section(learning.ShapingConfig, unread_by=(Job.DISTILL,))
    filter: learning.FilterConfig = section(learning.FilterConfig, unread_by=(Job.DISTILL,))
    critic: learning.CriticConfig = section(learning.CriticConfig, unread_by=(Job.DISTILL, Job.ONLINE))
    process_reward: learning.ProcessRewardConfig = section(
        learning.ProcessRewardConfig, unread_by=(Job.DISTILL, Job.ONLINE)
    )
    safety: learning.SafetyConfig = section(learning.SafetyConfig, unread_by=(Job.DISTILL, Job.ONLINE))
    reward: RewardConfig = section(RewardConfig)
    sandbox: SandboxConfig = section(SandboxConfig)
    eval: EvalConfig = section(EvalConfig)

    @property
    def engine_ranks(self) -> int:
        """Ranks that share one engine."""
        return self.rollout.tp * self.rollout.dp

    @property
    def aligns_tokens(self) -> bool:
        """True if the reference may have another tokenizer than the policy."""
        return False

    def further_teachers(self) -> dict[str, Any]:
        """Return the teachers beside the reference by name (`distillation.FurtherTeacher`)."""
        return {}

    def engine_teachers(self) -> dict[str, str]:
        """Return paths of the teachers in the run's own engine by name, the first one first."""
        return {}

    @property
    def has_reference(self) -> bool:
        """True if the update reads log-probabilities of a frozen model."""
        enabled = self.reference.enabled
        return enabled == "on" or (enabled == "auto" and self.algo.kl_coef != 0)

    @property
    def is_evaluated(self) -> bool:
        """True if the run evaluates."""
        return bool(self.eval.every and self.data.eval)

    learns_from_rewards: ClassVar[bool] = True
    """False where rewards are for the log alone."""
    has_teacher: ClassVar[bool] = False
    """True where the reference is a teacher."""
    has_advantages: ClassVar[bool] = True
    """False where samples are compared without one."""
