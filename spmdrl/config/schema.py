"""All settings of a run, one dataclass for each section; the text under a field is its `--help`.

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
    """General settings of the run."""

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
    """Seconds that a collective may wait for a missing rank before all ranks are ended."""
    grace: float = setting(60.0, POSITIVE, free=Free.WATCHED)
    """Seconds after SIGUSR1 (or SIGTERM) within which the job finishes or abandons the step, saves and exits."""
    deterministic: bool = setting(False, free=Free.WATCHED)
    """Two runs on the same layout are equal to the last bit (also `--deterministic`): torch's deterministic algorithms,
    the static assignment, batch-invariant kernels in vLLM and SGLang on GPU. Slower."""
    lockstep_debug: bool = setting(False, free=Free.WATCHED)
    """Compare (call site, op, shape) of every collective across ranks before it runs: slow, but the error names the
    rank that differs."""
    fresh: bool = setting(False, free=Free.WATCHED, unread_by=(Job.EVALUATE,))
    """Start over if the run folder exists: the old one is renamed to `<dir>.old-1`, `.old-2`, ... This applies once to
    a job: if torchrun or SLURM restarts the job, it continues."""
    allow_changes: bool = setting(False, free=Free.WATCHED, unread_by=(Job.EVALUATE,))
    """Continue in a run folder whose settings differ in ways that change results; off: such a job is refused."""
    spike_factor: float = setting(
        20.0,
        Rule(lambda x: x == 0 or 1 < x < math.inf, "must be above 1, or 0 for off"),
        free=Free.WATCHED,
        unread_by=(Job.EVALUATE,),
    )
    """Save the batch of an optimizer step whose gradient norm is above this many times the median of the last 32 steps,
    for `python -m spmdrl.tools.replay`. A run saves at most 3 such batches, and at most 3 whose norm is not finite. 0:
    save only batches whose norm is not finite."""


@dataclass
class ModelConfig:
    """The model that is trained."""

    path: str = "tiny"
    """HF folder, hub name, `ms:<name>` (ModelScope), a `.gguf` file, `package:<name>` (GGUF in an installed package),
    or `tiny` (comes with spmdrl)."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Type of forward and backward, and of the engine. Master weights and optimizer are float32 (or float64). float16
    has a dynamic loss scale (docs/policy.md)."""
    trust_remote_code: bool = setting(False, free=Free.LIMIT)
    """Run Python code that comes with the model. Off: models that need it are refused."""
    self_check: bool = setting(True, free=Free.COMPUTED)
    """At the start, compare logp of packed sequences with logp of each sequence alone in plain transformers; after the
    first push, compare the engine's logp with the trainer's (docs/policy.md)."""


@dataclass
class ParallelConfig:
    """Roles of the ranks, and how the training ranks divide the policy.

    The sizes of dp_replicate, dp_shard, sp, cp, tp and pp multiply to the number of training ranks.
    """

    FREE: ClassVar[str] = Free.LAYOUT

    placement: Literal["colocated", "split"] = setting("colocated", unread_by=(Job.SUPERVISED,))
    """`colocated`: every rank trains and samples in turn (sleep and wake). `split`: the last ranks sample while the
    others train."""
    rollout_ranks: int = setting(0, NOT_NEGATIVE, unread_by=(Job.SUPERVISED,))
    """Ranks that sample under `split`."""
    scoring_ranks: int = setting(0, NOT_NEGATIVE, unread_by=(Job.SUPERVISED,))
    """Ranks that hold the frozen models (reference or teacher, reward model) under `split`. 0: the training ranks hold
    them. Megatron's axes divide these models, too."""

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
    """Megatron: divide the tokens over the tp ranks between the tensor-parallel parts of a layer."""
    pp: int = setting(1, COUNT)
    """Megatron: stages of the pipeline, which divide the layers."""
    first_stage_layers: int = setting(0, NOT_NEGATIVE)
    """Megatron: layers of the first stage; the other stages divide the remaining layers. 0: as many as the others."""
    last_stage_layers: int = setting(0, NOT_NEGATIVE)
    """Megatron: layers of the last stage; the other stages divide the remaining layers. 0: as many as the others."""
    virtual_stages: int = setting(1, COUNT)
    """Megatron: parts of the model on each rank of the pipeline (interleaved schedule)."""
    ep: int = setting(1, COUNT)
    """Megatron: ranks that divide the experts; they are taken from the ranks of one pipeline stage."""
    etp: int = setting(1, COUNT)
    """Megatron: ranks that divide every expert's matrices."""


@dataclass
class OptimizerConfig:
    """AdamW and its schedule."""

    lr: float = setting(2e-4, NOT_NEGATIVE)
    """Peak learning rate of AdamW. This default is for the model that comes with spmdrl; for other models it is 1e-6
    under reinforcement learning, and ten times as much with LoRA."""
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
    """Schedule of the learning rate after warm-up, over all optimizer steps of the run, including skipped ones."""
    warmup_steps: int = setting(0, NOT_NEGATIVE)
    """Optimizer steps of linear warm-up."""
    min_lr_ratio: float = setting(0.0, UNIT, only_with=lambda c: c.optimizer.schedule != "constant")
    """Final learning rate as a share of the peak (linear, cosine)."""
    decay_share: ClassVar[float] = 1.0
    """A setting only in jobs on given rows (config/supervised.py)."""
    bad_steps: int = setting(3, NOT_NEGATIVE, free=Free.LIMIT)
    """Number of consecutive optimizer steps with a loss or gradient that is not finite after which the job ends; until
    then such steps are skipped. 0: the first one ends the job."""


@dataclass
class PolicyConfig:
    """How the policy trains: backend, micro-batches, memory, attention."""

    backend: Literal["fsdp", "megatron"] = "fsdp"
    """Backend that trains the model: `fsdp`, any HF transformer under FSDP2; `megatron`, the families of
    docs/megatron.md over tensor, pipeline, context and expert parallelism."""
    max_tokens_per_microbatch: int = setting(8192, COUNT, free=Free.COMPUTED)
    """Packing budget of one forward, on one rank or sp ranks together; changes speed and memory, never the result."""
    activation_checkpointing: Literal["none", "full", "selective"] = setting("none", free=Free.COMPUTED)
    """Activations that the backward pass recomputes to save memory. `full`: those of complete layers, which takes up to
    a third more time. `selective` (Megatron): those of the attention between its projections."""
    host_optimizer: bool = setting(False, free=Free.COMPUTED)
    """Megatron: run AdamW on the host, where its moments and the float32 weights stay."""
    moe_aux_loss: float = setting(0.0, NOT_NEGATIVE)
    """Megatron, mixture of experts: weight of a loss that balances the use of the experts in every sequence. 0:
    none."""
    moe_bias_rate: float = setting(0.0, NOT_NEGATIVE)
    """Megatron, routers with a bias (DeepSeek-V3): the amount that an update adds to the bias of experts with less than
    the mean load and subtracts from the bias of the others. 0: the bias is constant."""
    mtp: Literal["skip", "keep"] = setting("skip", free=Free.KEPT)
    """Multi-token-prediction heads of the starting checkpoint, which are never trained: `skip` leaves them out of saved
    models, `keep` copies them unchanged."""
    reshard_after_forward: bool = setting(True, free=Free.COMPUTED)
    """Free gathered parameters between forward and backward: less memory, one more all-gather. Models of up to 64 MiB
    are gathered completely, once for both passes."""
    reduce_gradients: Literal["last", "each"] = setting("last", free=Free.COMPUTED)
    """FSDP: when to sum gradients over the ranks. `last`: after an update's last micro-batch; until then each rank
    holds gradients of the complete model (4 bytes a parameter). `each`: after each micro-batch; a rank then holds only
    its shard of the gradients, and communicates more."""
    attention: Literal["auto", "flash", "varlen", "padded", "eager"] = setting("auto", free=Free.COMPUTED)
    """Attention over packed sequences. `auto`: on a GPU in 16 bits, flash-attn's kernel if it is installed (`flash`),
    else torch's kernel (`varlen`); otherwise causal SDPA for each sequence (`padded`). `eager`: plain softmax."""
    chunked_loss: bool = setting(True, free=Free.COMPUTED)
    """FSDP: compute losses that are independent for each token in chunks of tokens, together with the output head. If a
    micro-batch takes several chunks (on a GPU, 1,900 tokens each for 152k bfloat16 logits), this saves a quarter of the
    head's work, but needs memory for a float32 copy of the head's gradient in addition to the activations. Other
    losses, and all losses with False, read logp of the complete micro-batch."""
    liger: bool = setting(False, free=Free.COMPUTED)
    """FSDP on GPUs: RMSNorm, rotary embedding and SwiGLU by Liger's kernels (`pip install liger-kernel`)."""
    share_prompts: bool = setting(True, free=Free.COMPUTED)
    """Compute the common prompt of a group's samples only once, in forward and backward; changes speed and memory,
    never the result."""
    offload: Literal["none", "host", "disk"] = setting("none", free=Free.COMPUTED)
    """Place of parameters and optimizer (the critic's too) while the engine samples: `none` leaves them on the device,
    `host` moves them to pinned host memory (on a CPU: no move), `disk` to a temporary file in $TMPDIR or /var/tmp."""


@dataclass
class LoraConfig:
    """Low-rank adapters (LoRA) on the policy. Only they train; the reference of the KL is the model without them."""

    rank: int = setting(0, NOT_NEGATIVE)
    """Rank of the adapters. 0: none, every weight trains."""
    alpha: int = setting(16, COUNT, only_with=lambda c: c.lora.rank)
    """The adapters' output is multiplied by alpha / rank."""
    targets: tuple[str, ...] = setting(("all-linear",), only_with=lambda c: c.lora.rank)
    """Linear layers of the decoder that get an adapter, such as `q_proj v_proj`; `all-linear`: all of them."""
    push: Literal["adapter", "merged"] = setting("adapter", free=Free.COMPUTED, only_with=lambda c: c.lora.rank)
    """Weights that are pushed to engines. `adapter`: the model without adapters once, then only the adapters. `merged`:
    the full model with the adapters added to its weights; every engine supports this, and sglang needs it."""


@dataclass
class ReferenceConfig:
    """The model of the KL term: the starting model, a teacher, or an earlier policy."""

    enabled: Literal["auto", "on", "off"] = setting("auto", unread_by=(Job.DISTILL, Job.ONLINE))
    """Frozen model for KL. `auto`: on when a KL coefficient is not zero."""
    path: str = setting("", only_with=lambda c: c.has_reference)
    """The model, as `--model.path`; a teacher, for distillation. Empty: the starting model."""
    refresh_every: int = setting(0, NOT_NEGATIVE, only_with=lambda c: c.has_reference)
    """Copy the policy's weights into the reference every N steps. 0: never."""
    offload: Literal["none", "host", "disk"] = setting("none", free=Free.COMPUTED)
    """Place of frozen models while the engine samples, as `--policy.offload`."""


def is_average(reference: Any) -> bool:
    """Return True if the reference is a moving average of the policy (`refresh_every`, `mix`)."""
    return bool(reference.refresh_every) and getattr(reference, "mix", 1.0) != 1


@dataclass
class RolloutConfig:
    """Sampling: the number and length of samples, and the engine."""

    engine: Literal["auto", "vllm", "sglang", "hf"] = "auto"
    """Engine that samples. `auto`: vLLM when installed for the run's device, else the HF engine. `sglang` needs
    `launch/install.sh --sglang`."""
    tp: int = setting(1, COUNT, free=Free.DRAWN)
    """Ranks that divide an engine's matrices. tp x dp ranks share one engine; this product must divide the number of
    ranks that sample."""
    dp: int = setting(1, COUNT, free=Free.DRAWN)
    """Mixture of experts: copies of the attention in one engine (vllm, sglang). Each copy runs different requests,
    while all tp x dp ranks divide the experts."""
    ep: int = setting(1, COUNT, free=Free.DRAWN)
    """Mixture of experts: ranks of an engine over which complete experts are distributed (vllm, sglang): tp x dp, or 1
    for a slice of every expert on each rank."""
    prompts_per_step: int = setting(32, COUNT, unread_by=(Job.EVALUATE,))
    """Prompts in one step over all ranks."""
    samples_per_prompt: int = setting(8, COUNT, unread_by=(Job.EVALUATE,))
    """Group size: samples of one prompt."""
    max_prompt_tokens: int = setting(512, COUNT)
    """Longest prompt, in tokens. Longer prompts are dropped when the prompts are read, and counted."""
    max_new_tokens: int = setting(8, COUNT)
    """Longest response, in tokens. This default is for the demo; for another model on your own rows it is 1024, or half
    of the model's context if that is less."""
    temperature: float = setting(1.0, POSITIVE, unread_by=(Job.EVALUATE,))
    """Sampling temperature; logp is computed at the same temperature everywhere."""
    top_p: float = setting(1.0, SHARE, unread_by=(Job.EVALUATE,))
    """Nucleus sampling. Training needs 1, because an engine computes logp over the nucleus and the trainer over the
    complete vocabulary. For evaluation set `--eval.top-p`."""
    assignment: Literal["queue", "static"] = setting("queue", free=Free.DRAWN)
    """How prompts are handed to engines: by an atomic queue (a rank that finishes early takes more), or fixed by index
    (for bit-exact runs)."""
    oversample: float = setting(1.0, at_least(1), unread_by=(Job.EVALUATE,))
    """Start this many times prompts_per_step prompts, and stop when prompts_per_step groups are complete: the slowest
    are cut. Prompts that no engine has started by then are left for the next step."""
    partial_steps: int = setting(0, NOT_NEGATIVE, unread_by=(Job.EVALUATE,))
    """Largest number of steps for which cut groups continue; after these the run waits for them. 0: cut groups are
    dropped, and so are prompts that a static assignment did not start (rollout/unbegun_prompts). Checkpoints include
    unfinished groups."""
    max_sequences: int = setting(64, COUNT, free=Free.DRAWN)
    """Largest number of sequences that one engine runs at a time."""
    kv_cache_gib: float = setting(0.0, NOT_NEGATIVE, free=Free.DRAWN)
    """Size of the KV cache of vLLM or SGLang on one rank, in GiB. 0: on a CPU, what the sequences need, up to 0.25 GiB;
    on a GPU, by gpu_memory_utilization."""
    gpu_memory_utilization: float = setting(0.5, SHARE, free=Free.DRAWN)
    """Share of a GPU that vLLM or SGLang may take while awake."""
    staleness: int = setting(0, NOT_NEGATIVE, unread_by=(Job.EVALUATE,))
    """Under `split`: number of steps that sampling runs ahead of training, which bounds the age of its weights. 1: the
    experience of step k+1 is sampled while step k trains, with the weights from the start of step k. Larger values only
    even out single slow steps, because all ranks end every step together."""
    routing_replay: bool = setting(False, unread_by=(Job.EVALUATE,))
    """Mixture of experts: train every token with the experts that the engine sent it to (R3); not with sglang, nor with
    vLLM on a CPU."""
    sleep_level: Literal["auto", 0, 1, 2] = setting("auto", free=Free.DRAWN)
    """Memory that an engine frees between rollouts. 0: none. 1: the KV cache; on a GPU, weights move to host memory. 2:
    KV cache and weights, so that every wake needs a push. `auto`: 1 on a CPU or if only adapters are pushed, else 2."""
    deterministic: bool = setting(False, free=Free.DRAWN)
    """Make a sample independent of the other sequences in its batch: batch-invariant kernels in vLLM and SGLang (GPU;
    slower), one sequence at a time in the HF engine."""
    quantization: Literal["none", "int8", "fp8"] = "none"
    """8-bit weights in the engine: `fp8` in vLLM and SGLang (GPU), either one in the HF engine."""
    logp_diff_warn: float | None = setting(
        None,
        Rule(lambda x: 0 <= x < math.inf, "must be 0 or more, or None"),
        free=Free.LIMIT,
        unread_by=(Job.EVALUATE,),
    )
    """Warn if the mean difference between the engine's and the trainer's logp in a step is larger. 0: never. None:
    0.001 if the settings let both compute the same values, as in float32 with the newest weights, else 0.1."""
    logp_diff_stop: float = setting(1.0, NOT_NEGATIVE, free=Free.LIMIT, unread_by=(Job.EVALUATE,))
    """End the job if the mean difference between the engine's and the trainer's logp is larger, because they then do
    not hold the same model. 0: never."""
    push_bucket_mib: int = setting(256, COUNT, free=Free.DRAWN)
    """Largest bucket of a weight push, in MiB."""
    enforce_eager: bool = setting(False, free=Free.DRAWN)
    """Run vLLM or SGLang without CUDA graphs."""
    sglang_push: Literal["memory", "broadcast"] = setting("memory", free=Free.DRAWN)
    """How weights reach SGLang's processes: memory they share with the rank, or a broadcast from it (gloo on CPU; NCCL
    on GPU, for engines on separate GPUs)."""


@dataclass
class DataConfig:
    """Prompts."""

    RENDERS_MESSAGES: ClassVar[bool] = False
    """True if rows of messages are always rendered by the chat template, whatever the value of `chat`."""

    train: str = setting("builtin:reverse", unread_by=(Job.EVALUATE,))
    """`builtin:<task>`, a .jsonl or verl .parquet path, `hf:<dataset>[:config[:split]]`, `ms:<dataset>` (ModelScope),
    or `reasoning-gym:<task>`."""
    eval: str = setting("builtin:reverse:eval", free=Free.KEPT)
    """Prompts of the evaluation, in a form that `train` takes. Empty: no evaluation, which is the default if `train`
    names your own rows."""
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
    """JSON object of variables of the chat template, such as {"enable_thinking": false}; variables in a row override
    them."""
    limit: int = setting(0, NOT_NEGATIVE, unread_by=(Job.EVALUATE,))
    """Largest number of training prompts to read; 0: all."""
    shuffle: bool = setting(True, unread_by=(Job.EVALUATE,))
    """Shuffle the prompts anew in every epoch, by `--run.seed`. Off: the order of the file, as for a curriculum."""


@dataclass
class RewardConfig:
    """How samples are scored."""

    function: str = "exact_match"
    """A built-in reward, such as `exact_match`, `gsm8k`, `math` (symbolic), `code` (tests of a program), `auto` (by the
    row's data_source), `environment` (rewards of the environment) or `none` (0); `judge.yaml` (a judge: docs/judge.md);
    or `path/to/file.py[:function]` in a form of verl or TRL. docs/rewards.md lists all of them."""
    more: tuple[str, ...] = ()
    """Further rewards whose scores are added, each as `function=weight`; a weight that is left out is 1, which is also
    the weight of `function`."""
    gate: tuple[str, ...] = ()
    """Parts of rewards that must be above 0, such as `format`; otherwise a positive score becomes 0."""
    kwargs: str = ""
    """JSON object of further arguments for functions in files (verl's reward_kwargs)."""
    workers: int = setting(1, COUNT, free=Free.LIMIT)
    """Grading processes per rank (for rewards that run in the pool)."""
    timeout: float = setting(5.0, POSITIVE, free=Free.LIMIT)
    """Seconds one grading may take before its process is killed."""
    on_timeout: Literal["auto", "error", "zero"] = setting("auto", free=Free.LIMIT)
    """A grading that was killed ends the job (`error`), or scores 0, also in every part, and is counted (`zero`).
    `auto`: `error` for functions in files, else `zero`."""
    max_ungraded: float = setting(0.05, UNIT, free=Free.LIMIT)
    """Largest share of a step's samples that may have no score, because their row's tests cannot be read or the sandbox
    or the judge failed again and again. They are left out; if there are more, the job ends."""
    model: str = setting("", only_with=lambda c: c.is_evaluated or c.learns_from_rewards)
    """HF sequence classifier with one label whose score is added to the reward, as `--model.path`; or `rm.yaml`, a file
    that describes a model with several labels, other tokens or scores of steps (docs/rewards.md). Empty: none."""
    model_coef: float = setting(
        1.0, FINITE, only_with=lambda c: c.reward.model and (c.is_evaluated or c.learns_from_rewards)
    )
    """Factor on the score of `model`."""


@dataclass
class SandboxConfig:
    """The sandbox of programs that a model writes (docs/sandbox.md). It is started for rewards that run programs."""

    FREE: ClassVar[str] = Free.LIMIT

    provider: str = "auto"
    """`auto` (bubblewrap, else sandlock, whichever confines a test program; the job ends if neither does),
    `bubblewrap`, `sandlock`, `docker:IMAGE`, `apptainer:IMAGE`, the URL of a SandboxFusion service, or `none`: no
    isolation, for programs that you trust."""
    seconds: float = setting(5.0, POSITIVE)
    """Seconds that a program may take for one test."""
    total_seconds: float = setting(30.0, POSITIVE)
    """Seconds that a program may take for all tests of a sample together; tests that are left then fail."""
    memory_mib: int = setting(512, at_least(64))
    """Memory that a program may use, over all of its processes, in MiB."""


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
    """Number of newest checkpoints to keep. Older ones are removed only after the new one was read back from the disk
    and verified."""
    keep_every: int = setting(0, NOT_NEGATIVE)
    """Checkpoints of steps that are a multiple of this are kept too. 0: none."""
    best: str = setting(
        "", Rule(lambda x: bool(re.fullmatch(r"(-?[A-Za-z][\w./@-]*)?", x)), "must be the name of a metric, or -name")
    )
    """Metric whose best checkpoint is kept too, such as `eval/accuracy`: the highest value, or the lowest with a `-`
    before the name. Only values that were measured with a checkpoint's own weights count. Empty: none."""
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
    """`live`: a panel on a terminal. `plain`: one line for each step. `auto`: a panel if the output is a terminal."""


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
        """Ranks that share one engine; 1 if the job has no engine."""
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
        """Return name -> teacher for the teachers in addition to the reference (`distillation.FurtherTeacher`)."""
        return {}

    def engine_teachers(self) -> dict[str, str]:
        """Return name -> path of the teachers in the run's own engine, the first teacher first."""
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
    """False if rewards are only logged."""
    has_teacher: ClassVar[bool] = False
    """True if the reference is a teacher."""
    has_advantages: ClassVar[bool] = True
    """False if the job compares samples without computing advantages."""
