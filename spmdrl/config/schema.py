"""Settings for reinforcement learning runs, plus those shared by all training jobs, with one dataclass per section.

The sections of the learning method are in `learning.py`. The docstring below a field is its `--help` text. This module
avoids heavy imports so that `--help` is fast. `checks.py` validates settings against each other, and `load.py` builds a
`Config` from YAML files and flags.
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
    """General run settings: folder, length, seed, device and time limits."""

    dir: str = setting("", free=Free.WATCHED)
    """Folder for the resolved config, metrics, samples, logs and checkpoints. Empty: `runs/<name>`."""
    name: str = setting("demo", free=Free.WATCHED)
    """Run name, used by trackers and for the default run folder."""
    steps: int = setting(60, COUNT, free=Free.WATCHED, unread_by=(Job.EVALUATE,))
    """Number of training steps. Each step samples experience once and runs one or more optimizer updates on it."""
    seed: int = setting(0, NOT_NEGATIVE)
    """Random seed. The random numbers for a sample depend only on (seed, step, prompt, sample, turn), not on the number
    of ranks."""
    device: Literal["auto", "cpu", "cuda"] = setting("auto", free=Free.WATCHED)
    """Device to run on. `auto`: GPUs if torch finds one per local rank, otherwise the CPU."""
    timeout: float = setting(600.0, POSITIVE, free=Free.WATCHED)
    """Seconds that a collective waits for a missing rank before all ranks are terminated."""
    grace: float = setting(60.0, POSITIVE, free=Free.WATCHED)
    """Grace period in seconds after SIGUSR1 or SIGTERM to finish or abandon the current step, save a checkpoint and
    exit."""
    deterministic: bool = setting(False, free=Free.WATCHED)
    """Make runs with the same layout bitwise reproducible (also `--deterministic`). This is slower: it uses torch's
    deterministic algorithms, static prompt assignment and, on GPUs, batch-invariant kernels in vLLM and SGLang."""
    lockstep_debug: bool = setting(False, free=Free.WATCHED)
    """Before each collective, check that its call site, operation and shape match on all ranks. This is slow, but the
    error names the rank that differs."""
    fresh: bool = setting(False, free=Free.WATCHED, unread_by=(Job.EVALUATE,))
    """Start over if the run folder exists, after renaming it to `<dir>.old-1`, `.old-2`, ... This happens only once per
    job: if torchrun or SLURM restarts the job, it resumes in its new folder."""
    allow_changes: bool = setting(False, free=Free.WATCHED, unread_by=(Job.EVALUATE,))
    """Resume even if settings that affect results differ from those in the run folder. Off: refuse to resume in that
    case."""
    spike_factor: float = setting(
        20.0,
        Rule(lambda x: x == 0 or 1 < x < math.inf, "must be above 1, or 0 for off"),
        free=Free.WATCHED,
        unread_by=(Job.EVALUATE,),
    )
    """Save the batch of an optimizer step if its gradient norm exceeds this factor times the median norm of the last 32
    steps, for `python -m spmdrl.tools.replay`. A run saves at most 3 such batches, plus at most 3 with a non-finite
    norm. 0: save only batches with a non-finite norm."""


@dataclass
class ModelConfig:
    """The model to train."""

    path: str = "tiny"
    """Model to start from: an HF folder, a hub name, `ms:<name>` (ModelScope), a `.gguf` file, `package:<name>` (a GGUF
    file in an installed package), or `tiny` (bundled with spmdrl)."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Dtype of the forward and backward passes and of the engine. Master weights and optimizer states are float32, or
    float64 if this is float64. float16 uses dynamic loss scaling (docs/policy.md)."""
    trust_remote_code: bool = setting(False, free=Free.LIMIT)
    """Allow Python code shipped with the model to run. Off: refuse models that need such code."""
    freeze: tuple[Literal["vision", "projector"], ...] = setting((), unread_by=(Job.EVALUATE,))
    """Parts of a vision-language model that are not trained. `vision`: the vision tower. `projector`: the layers that
    map its features to embeddings. Empty: all weights are trained. LoRA always freezes both."""
    self_check: bool = setting(True, free=Free.COMPUTED)
    """At startup, compare the logp of packed sequences with the logp of each sequence run alone in plain transformers.
    After weights are first sent to the engine, compare its logp with the trainer's (docs/policy.md)."""


@dataclass
class ParallelConfig:
    """Rank roles, and how the policy is parallelised over the training ranks.

    The product of dp_replicate, dp_shard, sp, cp, tp and pp is the number of training ranks.
    """

    FREE: ClassVar[str] = Free.LAYOUT

    placement: Literal["colocated", "split"] = setting("colocated", unread_by=(Job.SUPERVISED,))
    """How training and sampling are placed on the ranks. `colocated`: every rank alternates between the two (the engine
    sleeps while the rank trains). `split`: the last ranks only sample, and the others train or score."""
    rollout_ranks: int = setting(0, NOT_NEGATIVE, unread_by=(Job.SUPERVISED,))
    """Number of sampling ranks under `split`."""
    scoring_ranks: int = setting(0, NOT_NEGATIVE, unread_by=(Job.SUPERVISED,))
    """Number of ranks that hold the frozen models (reference or teachers, reward model, cost model) under `split`. 0:
    the training ranks hold them. Megatron's parallel sizes apply to these models, too."""

    dp_replicate: int = setting(1, COUNT)
    """Number of replicas of the sharded model (HSDP)."""
    dp_shard: int = setting(
        -1, Rule(lambda x: x == -1 or x >= 1, "must be at least 1, or -1 for all ranks the other axes leave")
    )
    """FSDP: number of ranks over which parameters are sharded. Megatron: data-parallel size, over which AdamW's state
    is sharded. -1: all remaining training ranks."""
    sp: int = setting(1, COUNT)
    """FSDP: number of ranks that split the tokens of a micro-batch (Ulysses). It must divide the number of attention
    heads."""
    cp: int = setting(1, COUNT)
    """Megatron: number of ranks that split the tokens of each sequence (context parallelism)."""
    tp: int = setting(1, COUNT)
    """Megatron: tensor-parallel size for the vocabulary, attention and dense MLPs (for experts see `etp`, for the
    engine `--rollout.tp`)."""
    sequence_parallel: bool = True
    """Megatron: split the tokens over the tp ranks outside the tensor-parallel parts of a layer."""
    pp: int = setting(1, COUNT)
    """Megatron: number of pipeline stages into which the layers are split."""
    first_stage_layers: int = setting(0, NOT_NEGATIVE)
    """Megatron: number of layers in the first pipeline stage; the other stages share the remaining layers. 0: the same
    number as in the other stages."""
    last_stage_layers: int = setting(0, NOT_NEGATIVE)
    """Megatron: number of layers in the last pipeline stage; the other stages share the remaining layers. 0: the same
    number as in the other stages."""
    virtual_stages: int = setting(1, COUNT)
    """Megatron: number of model chunks per pipeline rank (interleaved schedule)."""
    ep: int = setting(1, COUNT)
    """Megatron: expert-parallel size. The ranks that share the experts belong to the same pipeline stage."""
    etp: int = setting(1, COUNT)
    """Megatron: tensor-parallel size of each expert."""


@dataclass
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = setting(2e-4, NOT_NEGATIVE)
    """Peak learning rate of AdamW. The default shown is for the bundled model; for other models it is 1e-6 in
    reinforcement learning, and ten times that with LoRA."""
    betas: tuple[float, float] = setting(
        (0.9, 0.99), Rule(lambda x: all(0 <= beta < 1 for beta in x), "must be two numbers from 0 up to, but not, 1")
    )
    """AdamW's betas: decay rates of the moving averages of the gradient and the squared gradient."""
    eps: float = setting(1e-8, POSITIVE)
    """AdamW's epsilon, which is added to the denominator of an update."""
    weight_decay: float = setting(0.0, NOT_NEGATIVE)
    """AdamW's decoupled weight decay."""
    clip_grad_norm: float = setting(1.0, NOT_NEGATIVE)
    """Maximum global gradient norm; larger gradients are scaled down to it. 0: no clipping."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule after warm-up, over all optimizer steps of the run, including skipped ones."""
    warmup_steps: int = setting(0, NOT_NEGATIVE)
    """Number of optimizer steps over which the learning rate rises linearly to its peak."""
    min_lr_ratio: float = setting(0.0, UNIT, only_with=lambda c: c.optimizer.schedule != "constant")
    """Final learning rate as a fraction of the peak (linear, cosine)."""
    decay_share: ClassVar[float] = 1.0
    """Fraction of the steps after warm-up over which the learning rate decays; only some jobs can set it
    (supervised.py)."""
    bad_steps: int = setting(3, NOT_NEGATIVE, free=Free.LIMIT)
    """Skip optimizer steps whose loss or gradient is not finite, and end the job after this many in a row. 0: end the
    job at the first one."""


@dataclass
class PolicyConfig:
    """How the policy is trained: backend, micro-batches, memory and attention."""

    backend: Literal["fsdp", "megatron"] = "fsdp"
    """Training backend. `fsdp`: any HF transformer under FSDP2. `megatron`: the model families in docs/megatron.md,
    with tensor, pipeline, context and expert parallelism."""
    max_tokens_per_microbatch: int = setting(8192, COUNT, free=Free.COMPUTED)
    """Maximum number of tokens packed into one forward pass, on one rank or across all sp ranks. Affects speed and
    memory, but never the result."""
    activation_checkpointing: Literal["none", "full", "selective"] = setting("none", free=Free.COMPUTED)
    """Activations that are recomputed in the backward pass to save memory. `full`: entire layers. The forward and
    backward passes together then take up to a third longer. `selective` (Megatron): only the core attention, between
    the projections."""
    host_optimizer: bool = setting(False, free=Free.COMPUTED)
    """Megatron: run AdamW on the host, and keep its moments and the float32 weights there."""
    moe_aux_loss: float = setting(0.0, NOT_NEGATIVE)
    """Megatron, mixture of experts: weight of an auxiliary loss that balances expert usage within each sequence. 0: no
    auxiliary loss."""
    moe_bias_rate: float = setting(0.0, NOT_NEGATIVE)
    """Megatron, routers with a bias (DeepSeek-V3): amount that each update adds to the bias of experts with
    below-average load and subtracts from the bias of the others. 0: the bias is constant."""
    mtp: Literal["skip", "keep"] = setting("skip", free=Free.KEPT)
    """How to save the multi-token-prediction heads of the starting checkpoint, which are never trained: `skip` omits
    them from saved models, `keep` copies them unchanged."""
    gather: Literal["auto", "whole", "once", "layers"] = setting("auto", free=Free.COMPUTED)
    """When FSDP all-gathers the sharded weights. `layers`: each layer before its forward pass and again before its
    backward pass, freeing it after each pass, which needs the least memory. `once`: each layer before its first forward
    pass, keeping it until the last micro-batch of an update or of a pass without gradients. `whole`: like `once`, but
    all layers together, which is fastest for small models. `auto`: `whole` for models of up to 2 GiB in the dtype of
    the forward pass, `once` for models of up to 8 GiB, otherwise `layers`."""
    reduce_gradients: Literal["last", "each"] = setting("last", free=Free.COMPUTED)
    """When FSDP reduces gradients across ranks. `last`: after the last micro-batch of an update; until then each rank
    holds gradients for the whole model (4 bytes per parameter). `each`: after every micro-batch; a rank then holds only
    its shard of the gradients, but communicates more."""
    attention: Literal["auto", "flash", "varlen", "padded", "eager"] = setting("auto", free=Free.COMPUTED)
    """Attention implementation for packed sequences. `flash`: flash-attn's kernel. `varlen`: torch's variable-length
    kernel. `padded`: causal SDPA per sequence. `eager`: plain softmax. `auto`: for each layer, the first of `flash` and
    `varlen` that is installed and supports the layer (both need a GPU and a 16-bit dtype), otherwise `padded`."""
    chunked_loss: bool = setting(True, free=Free.COMPUTED)
    """FSDP: compute per-token losses in chunks of tokens, together with the output head. If a micro-batch spans several
    chunks (on a GPU, 1,900 tokens each with 152k bfloat16 logits per token), this saves a quarter of the output head's
    compute, but needs memory for a float32 copy of the head's gradient on top of the activations. Losses that are not
    independent per token, and all losses if this is off, are computed from the logp of the whole micro-batch."""
    liger: Literal["auto", "on", "off"] = setting("auto", free=Free.COMPUTED)
    """FSDP on GPUs: whether to use Liger kernels (`pip install liger-kernel`) for RMSNorm, rotary embeddings and
    SwiGLU. `auto`: use them if they are installed, for 16-bit Llama, Mistral, Qwen2, Qwen3 and SmolLM3 models without
    `compile_layers`."""
    compile_layers: bool = setting(False, free=Free.COMPUTED)
    """FSDP: compile everything in the layers except attention with `torch.compile`, which takes a minute at startup.
    Models with experts or recurrent layers are refused."""
    share_prompts: bool = setting(True, free=Free.COMPUTED)
    """Run the prompt that the samples of a group share through the forward and backward passes only once. Affects
    speed and memory, but never the result."""
    offload: Literal["none", "host", "disk"] = setting("none", free=Free.COMPUTED)
    """Location of the parameters and optimizer states of all trained models during rollout. `none`: on the device.
    `host`: in pinned host memory (no-op on a CPU). `disk`: in a temporary file in $TMPDIR or /var/tmp."""


@dataclass
class LoraConfig:
    """Low-rank adapters (LoRA) for the policy. Only the adapters are trained.

    The KL reference is the model without the adapters, unless `--reference.path` names another model.
    """

    rank: int = setting(0, NOT_NEGATIVE)
    """LoRA rank. 0: no adapters; all weights are trained."""
    alpha: int = setting(16, COUNT, only_with=lambda c: c.lora.rank)
    """LoRA alpha: the adapter output is scaled by alpha / rank."""
    targets: tuple[str, ...] = setting(("all-linear",), only_with=lambda c: c.lora.rank)
    """Linear layers of the decoder that get an adapter, such as `q_proj v_proj`. `all-linear`: all of them."""
    push: Literal["adapter", "merged"] = setting("adapter", free=Free.COMPUTED, only_with=lambda c: c.lora.rank)
    """Weights that a weight update sends to the engines. `adapter`: the base model once, and then only the adapters.
    `merged`: the full model with the adapters merged into its weights; every engine supports this, and sglang needs
    it."""


@dataclass
class ReferenceConfig:
    """The reference model for the KL term: the starting model, a teacher, or an earlier policy."""

    enabled: Literal["auto", "on", "off"] = setting("auto", unread_by=(Job.DISTILL, Job.ONLINE))
    """Whether to use a frozen reference model for the KL. `auto`: only if the KL coefficient is not 0."""
    path: str = setting("", only_with=lambda c: c.has_reference)
    """The reference model (the teacher in distillation), in any form that `--model.path` accepts. Empty: the starting
    model."""
    refresh_every: int = setting(0, NOT_NEGATIVE, only_with=lambda c: c.has_reference)
    """Number of steps between updates of the reference from the policy's weights. 0: the reference never changes."""
    offload: Literal["none", "host", "disk"] = setting("none", free=Free.COMPUTED)
    """Location of the frozen models during rollout; the values are those of `--policy.offload`."""


def is_average(reference: Any) -> bool:
    """Return True if the reference is a moving average of the policy (`refresh_every`, `mix`)."""
    return bool(reference.refresh_every) and getattr(reference, "mix", 1.0) != 1


@dataclass
class RolloutConfig:
    """Sampling settings: number and length of samples, and the engine."""

    engine: Literal["auto", "vllm", "sglang", "hf"] = "auto"
    """Rollout engine. `auto`: vLLM if it is installed for the run's device and supports `--model.dtype`, otherwise the
    HF engine. `sglang` needs `launch/install.sh --sglang`."""
    tp: int = setting(1, COUNT, free=Free.DRAWN)
    """Tensor-parallel size of an engine. Each engine spans tp x dp ranks; this product must divide the number of
    sampling ranks."""
    dp: int = setting(1, COUNT, free=Free.DRAWN)
    """Mixture of experts: number of attention replicas in one engine (vllm, sglang). Each replica runs different
    requests, while the experts are sharded over all tp x dp ranks."""
    ep: int = setting(1, COUNT, free=Free.DRAWN)
    """Mixture of experts: number of an engine's ranks over which whole experts are distributed (vllm, sglang). It must
    be tp x dp or 1. With 1, each rank holds a slice of every expert."""
    prompts_per_step: int = setting(32, COUNT, unread_by=(Job.EVALUATE,))
    """Number of prompts per step, across all ranks."""
    samples_per_prompt: int = setting(8, COUNT, unread_by=(Job.EVALUATE,))
    """Number of samples per prompt; they form a group."""
    max_prompt_tokens: int = setting(512, COUNT)
    """Maximum prompt length in tokens. Longer prompts are dropped when the data is loaded, and the log reports how
    many."""
    max_new_tokens: int = setting(8, COUNT)
    """Maximum response length in tokens; with `--env`, the maximum number of tokens after an episode's prompt. The
    default shown is for the demo. For other models on your own rows it is 1024, or half of the model's context length
    if that is less."""
    temperature: float = setting(1.0, POSITIVE, unread_by=(Job.EVALUATE,))
    """Sampling temperature. Engine and trainer also compute logp at this temperature."""
    top_p: float = setting(1.0, SHARE, unread_by=(Job.EVALUATE,))
    """Nucleus sampling probability (top-p). Training needs 1, because the engine computes logp over the nucleus and the
    trainer over the full vocabulary. For evaluation, set `--eval.top-p`."""
    assignment: Literal["queue", "static"] = setting("queue", free=Free.DRAWN)
    """How prompts are assigned to engines. `queue`: from a shared queue, so that ranks that finish early take more.
    `static`: by index, for bitwise reproducible runs."""
    oversample: float = setting(1.0, at_least(1), unread_by=(Job.EVALUATE,))
    """Factor on the number of prompts that a step starts: sampling stops when prompts_per_step groups are complete, and
    unfinished groups are interrupted. Prompts that no engine has started by then are left for the next step."""
    partial_steps: int = setting(0, NOT_NEGATIVE, unread_by=(Job.EVALUATE,))
    """Maximum number of steps over which an interrupted group continues; after that, the run waits until the group is
    complete. 0: drop interrupted groups, as well as prompts that a static assignment did not start (metric
    rollout/unbegun_prompts). Checkpoints include unfinished groups."""
    max_sequences: int = setting(64, COUNT, free=Free.DRAWN)
    """Maximum number of sequences that one engine runs concurrently."""
    kv_cache_gib: float = setting(0.0, NOT_NEGATIVE, free=Free.DRAWN)
    """KV cache size per rank for vLLM or SGLang, in GiB. 0: on a CPU, as much as the sequences need, up to 0.25 GiB; on
    a GPU, as much as gpu_memory_utilization allows."""
    gpu_memory_utilization: float = setting(0.5, SHARE, free=Free.DRAWN)
    """Maximum fraction of GPU memory that vLLM or SGLang uses while it is awake."""
    staleness: int = setting(0, NOT_NEGATIVE, unread_by=(Job.EVALUATE,))
    """Under `split`: number of steps by which sampling runs ahead of training, which limits how old the sampling
    weights can be. 1: the experience for step k+1 is sampled while step k trains, with the weights from the start of
    step k. Larger values only smooth out single slow steps, because all ranks end every step together."""
    routing_replay: bool = setting(False, unread_by=(Job.EVALUATE,))
    """Mixture of experts: train each token with the experts that the engine chose for it (R3). Not supported by SGLang,
    nor by vLLM on a CPU."""
    sleep_level: Literal["auto", 0, 1, 2] = setting("auto", free=Free.DRAWN)
    """Memory that an engine frees between rollouts. 0: none. 1: the KV cache; on a GPU, the weights also move to host
    memory. 2: the KV cache and the weights; the weights must then be sent again at every wake-up. `auto`: 1 on a CPU
    or if only adapters are sent, otherwise 2."""
    deterministic: bool = setting(False, free=Free.DRAWN)
    """Make each sample independent of the other sequences in its batch: vLLM and SGLang use batch-invariant kernels
    (GPUs only, slower), and the HF engine runs one sequence at a time."""
    quantization: Literal["none", "int8", "fp8"] = "none"
    """8-bit weight format in the engine: `fp8` in vLLM and SGLang (GPUs only), `fp8` or `int8` in the HF engine."""
    logp_diff_warn: float | None = setting(
        None,
        Rule(lambda x: 0 <= x < math.inf, "must be 0 or more, or None"),
        free=Free.LIMIT,
        unread_by=(Job.EVALUATE,),
    )
    """Warn if the mean difference between the engine's and the trainer's logp in a step exceeds this value. 0: never.
    None: 0.001 if the settings allow both to compute the same values, as in float32 with the newest weights, otherwise
    0.1."""
    logp_diff_stop: float = setting(1.0, NOT_NEGATIVE, free=Free.LIMIT, unread_by=(Job.EVALUATE,))
    """End the job if the mean difference between the engine's and the trainer's logp in a step exceeds this value,
    which means that they do not hold the same model. 0: never."""
    push_bucket_mib: int = setting(256, COUNT, free=Free.DRAWN)
    """Maximum size, in MiB, of the weights sent to the engine at a time (a bucket)."""
    enforce_eager: bool = setting(False, free=Free.DRAWN)
    """Run vLLM or SGLang without CUDA graphs."""
    sglang_push: Literal["memory", "broadcast"] = setting("memory", free=Free.DRAWN)
    """How weights are sent to SGLang's processes. `memory`: through memory shared with the rank. `broadcast`: by a
    broadcast from the rank, with gloo on a CPU and with NCCL for engines on separate GPUs."""


@dataclass
class DataConfig:
    """Source of the prompts, and how they are rendered."""

    RENDERS_MESSAGES: ClassVar[bool] = False
    """True if rows with messages are always rendered with the chat template, whatever the value of `chat`."""

    train: str = setting("builtin:reverse", unread_by=(Job.EVALUATE,))
    """Source of the training prompts: `builtin:<task>`, a .jsonl file, a .parquet file in verl's format,
    `hf:<dataset>[:config[:split]]`, `ms:<dataset>` (ModelScope), or `reasoning-gym:<task>`."""
    eval: str = setting("builtin:reverse:eval", free=Free.KEPT)
    """Source of the evaluation prompts, in any form that `train` accepts. Empty: no evaluation, which is the default if
    `train` names your own rows."""
    prompt_column: str = "prompt"
    """Column with the prompt (text or a list of chat messages)."""
    answer_column: str = "answer"
    """Column with the ground truth. Empty: the reward needs no ground truth."""
    images_column: str = "images"
    """Column with a prompt's images, for models that read images. Messages mark their places by parts of type `image`
    or by `<image>`."""
    template: str = ""
    """Prompt template; `{prompt}` is replaced by the prompt. Empty: use the prompt as is."""
    system: str = ""
    """System message to add before the prompt. Empty: no system message is added."""
    prefill: str = ""
    """Start of the assistant's reply, which the model continues; `{column}` inserts a column of the row."""
    chat: Literal["auto", "on", "off"] = "auto"
    """Whether to render prompts with the chat template. `auto`: if the tokenizer has one."""
    chat_template: str = ""
    """Chat template to use instead of the tokenizer's: `chatml` (adds no system message), a `.jinja` file, or the text
    of a template."""
    template_kwargs: str = ""
    """JSON object with chat template variables, such as {"enable_thinking": false}; a row can override them."""
    max_refused: float = setting(0.05, UNIT, free=Free.LIMIT)
    """Maximum fraction of rows that can be refused, because an image or a text of theirs cannot be used. Refused rows
    are logged and omitted; if there are more, the job ends."""
    limit: int = setting(0, NOT_NEGATIVE, unread_by=(Job.EVALUATE,))
    """Maximum number of training prompts to read. 0: all."""
    shuffle: bool = setting(True, unread_by=(Job.EVALUATE,))
    """Reshuffle the prompts every epoch, seeded by `--run.seed`. Off: keep the order of the file, as a curriculum
    needs."""


@dataclass
class RewardConfig:
    """How samples are scored."""

    function: str = "exact_match"
    """Reward function: a built-in such as `exact_match`, `gsm8k`, `math` (symbolic), `code` (runs a program's tests),
    `auto` (selected by the row's data_source), `environment` (the environment's own rewards) or `none` (0);
    `judge.yaml` (a judge: docs/judge.md); or `path/to/file.py[:function]` with verl's or TRL's signature.
    docs/rewards.md lists all of them."""
    more: tuple[str, ...] = ()
    """Additional rewards whose scores are added, each as `function=weight`. The weight defaults to 1, which is also the
    weight of `function`."""
    gate: tuple[str, ...] = ()
    """Reward parts, such as `format`, that must all be above 0; otherwise a positive score becomes 0."""
    kwargs: str = ""
    """JSON object with additional arguments for reward functions in files (verl's reward_kwargs)."""
    workers: int = setting(1, COUNT, free=Free.LIMIT)
    """Number of grading processes per rank, for rewards that can be slow."""
    timeout: float = setting(5.0, POSITIVE, free=Free.LIMIT)
    """Timeout in seconds for one grading call in a grading process, after which the process is killed. Grading that
    runs a program's tests uses the limits in `--sandbox` instead."""
    on_timeout: Literal["auto", "error", "zero"] = setting("auto", free=Free.LIMIT)
    """Response to a killed grading call. `error`: end the job. `zero`: set the score and all its parts to 0, and
    count the sample in `reward/timeouts`. `auto`: `error` for functions in files, otherwise `zero`. If the killed call
    was running a program's tests, its sample is always omitted (`max_ungraded`)."""
    max_ungraded: float = setting(0.05, UNIT, free=Free.LIMIT)
    """Maximum fraction of a step's samples that may go unscored, whether because the tests in their rows cannot be
    parsed or because the sandbox or the judge failed repeatedly. Such samples are dropped; if there are more, the job
    ends."""
    model: str = setting("", only_with=lambda c: c.is_evaluated or c.learns_from_rewards)
    """Reward model whose score is added to the reward: an HF sequence classifier with one label, in any form that
    `--model.path` accepts, or `rm.yaml`, a file that describes a model with several labels, its own tokenizer or step
    scores (docs/rewards.md). Empty: no reward model."""
    model_coef: float = setting(
        1.0, FINITE, only_with=lambda c: c.reward.model and (c.is_evaluated or c.learns_from_rewards)
    )
    """Weight of the score from `model`."""


@dataclass
class SandboxConfig:
    """The sandbox for model-written programs (docs/sandbox.md). It is started only for rewards that run programs."""

    FREE: ClassVar[str] = Free.LIMIT

    provider: str = "auto"
    """Sandbox that isolates the programs: `bubblewrap`, `sandlock`, `docker:IMAGE`, `apptainer:IMAGE`, the URL of a
    SandboxFusion service, or `none`, for programs that you trust. `auto`: the first of bubblewrap and sandlock that
    confines a test program; if neither does, the job ends."""
    seconds: float = setting(5.0, POSITIVE)
    """Time limit in seconds for each test of a program."""
    total_seconds: float = setting(30.0, POSITIVE)
    """Time limit in seconds for all tests of a sample; tests that have not run by then fail."""
    memory_mib: int = setting(512, at_least(64))
    """Memory limit in MiB for all processes of a program together."""


@dataclass
class EvalConfig:
    """Evaluation of the policy on `--data.eval` during the run."""

    FREE: ClassVar[str] = Free.KEPT

    every: int = setting(20, NOT_NEGATIVE, unread_by=(Job.EVALUATE,))
    """Number of steps between evaluations; the run also evaluates before the first step and at the end. 0: never."""
    prompts: int = setting(256, NOT_NEGATIVE, only_with=lambda c: c.is_evaluated)
    """Maximum number of evaluation prompts. 0: all."""
    samples: int = setting(1, COUNT, only_with=lambda c: c.is_evaluated)
    """Number of samples per evaluation prompt. pass@k is reported for every power of two k up to this number."""
    temperature: float = setting(1.0, NOT_NEGATIVE, only_with=lambda c: c.is_evaluated)
    """Sampling temperature for evaluation. 0: greedy decoding."""
    top_p: float = setting(1.0, SHARE, only_with=lambda c: c.is_evaluated)
    """Nucleus sampling probability (top-p) for evaluation: tokens are sampled from the smallest set whose probabilities
    add up to this value."""


@dataclass
class CheckpointConfig:
    """When to save checkpoints, and which ones to keep."""

    FREE: ClassVar[str] = Free.KEPT

    every: int = setting(0, NOT_NEGATIVE)
    """Number of steps between checkpoints. 0: save a checkpoint only when the run ends or is preempted."""
    keep: int = setting(2, COUNT)
    """Number of most recent checkpoints to keep. Older ones are deleted only after a new one has been read back from
    disk and verified."""
    keep_every: int = setting(0, NOT_NEGATIVE)
    """Also keep every checkpoint whose step is a multiple of this number. 0: off."""
    best: str = setting(
        "", Rule(lambda x: bool(re.fullmatch(r"(-?[A-Za-z][\w./@-]*)?", x)), "must be the name of a metric, or -name")
    )
    """Also keep the checkpoint with the best value of this metric, such as `eval/accuracy`. Higher is better; put a `-`
    before the name if lower is better. Only values measured with the weights of a checkpoint count. Empty: off."""
    background: bool = False
    """FSDP: copy a checkpoint to host memory and write it to disk while training continues, one checkpoint at a
    time."""
    at_end: bool = True
    """Save a checkpoint after the last step."""


@dataclass
class TrackingConfig:
    """How metrics and samples are displayed and recorded."""

    FREE: ClassVar[str] = Free.KEPT

    trackers: tuple[str, ...] = setting(("jsonl", "tensorboard"), unread_by=(Job.EVALUATE,))
    """Trackers to log metrics to: any of `jsonl`, `tensorboard`, `wandb`."""
    project: str = setting("spmdrl", unread_by=(Job.EVALUATE,))
    """Name of the wandb project."""
    samples: int = setting(4, NOT_NEGATIVE, unread_by=(Job.EVALUATE,))
    """Number of samples per step to show on the console and write to samples.jsonl."""
    console: Literal["auto", "live", "plain"] = "auto"
    """Console output. `live`: a panel on a terminal. `plain`: one line per step. `auto`: a panel if the output is a
    terminal, otherwise lines."""


@dataclass
class TrainingConfig:
    """Sections shared by all jobs that train a model. Each entry point adds its own sections."""

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
        """Number of ranks that share one engine, or 1 if the job has no engine."""
        return 1


@dataclass
class Config(TrainingConfig):
    """Reinforcement learning for language models. Every rank runs this same program."""

    env: str = setting("", unread_by=(Job.DISTILL, Job.ONLINE))
    """Environment for multi-turn samples (docs/agents.md): `file.py:Class`, `builtin:NAME`, `file.py:TOOLS` (a list of
    functions), `env.yaml` (an environment with limits), verl's tool YAML, or `rows` (each row names its environment).
    Empty: each sample is a single response."""
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
        """Number of ranks that share one engine: tp x dp."""
        return self.rollout.tp * self.rollout.dp

    @property
    def aligns_tokens(self) -> bool:
        """True if the reference can have a different tokenizer from the policy."""
        return False

    def further_teachers(self) -> dict[str, Any]:
        """Return name -> teacher for all teachers other than the reference (`distillation.FurtherTeacher`)."""
        return {}

    def engine_teachers(self) -> dict[str, str]:
        """Return name -> path for the teachers that run in the run's engine, starting with the first teacher."""
        return {}

    @property
    def has_reference(self) -> bool:
        """True if the run has a reference: a frozen model whose log-probabilities are used in training."""
        enabled = self.reference.enabled
        return enabled == "on" or (enabled == "auto" and self.algo.kl_coef != 0)

    @property
    def is_evaluated(self) -> bool:
        """True if the run evaluates the policy on `--data.eval`."""
        return bool(self.eval.every and self.data.eval)

    learns_from_rewards: ClassVar[bool] = True
    """True if the policy learns from rewards; False if rewards are only logged."""
    has_teacher: ClassVar[bool] = False
    """True if the reference is a teacher."""
    has_advantages: ClassVar[bool] = True
    """True if the job computes advantages; False if its loss compares samples without them."""
