"""Settings of a reinforcement learning run, and those that all training jobs share: one dataclass for each section.

The sections of the learning method are in `learning.py`. The text under a field is its `--help`; the module imports
nothing heavy, so that `--help` answers at once. `checks.py` applies the rules between settings; `load.py` makes a
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
    """The run as a whole: its folder, length, seed, device, and time limits."""

    dir: str = setting("", free=Free.WATCHED)
    """Run folder, for the resolved config, metrics, samples, logs and checkpoints. Empty: `runs/<name>`."""
    name: str = setting("demo", free=Free.WATCHED)
    """Name of the run in trackers, and of its default folder."""
    steps: int = setting(60, COUNT, free=Free.WATCHED, unread_by=(Job.EVALUATE,))
    """Number of training steps. A step samples experience once and makes optimizer updates with it."""
    seed: int = setting(0, NOT_NEGATIVE)
    """Seed of all random draws. The draws of a sample depend only on (seed, step, prompt, sample, turn), so the number
    of ranks does not change them."""
    device: Literal["auto", "cpu", "cuda"] = setting("auto", free=Free.WATCHED)
    """Device to run on. `auto`: GPUs if torch sees one for each local rank, else the CPU."""
    timeout: float = setting(600.0, POSITIVE, free=Free.WATCHED)
    """Maximum number of seconds that a collective waits for a missing rank; after this time all ranks are ended."""
    grace: float = setting(60.0, POSITIVE, free=Free.WATCHED)
    """Maximum number of seconds that the job takes after SIGUSR1 (or SIGTERM) to finish or abandon the step, save and
    exit."""
    deterministic: bool = setting(False, free=Free.WATCHED)
    """Make two runs on the same layout equal to the last bit (also `--deterministic`). This takes more time: torch's
    deterministic algorithms, a static assignment, and on GPUs batch-invariant kernels in vLLM and SGLang are used."""
    lockstep_debug: bool = setting(False, free=Free.WATCHED)
    """Compare the call site, operation and shape of every collective between ranks before it runs. This is slow, but
    the error names the rank that differs."""
    fresh: bool = setting(False, free=Free.WATCHED, unread_by=(Job.EVALUATE,))
    """Start over if the run folder exists: the old folder is renamed to `<dir>.old-1`, `.old-2`, ... A job does this
    only once: if torchrun or SLURM restarts the job, it continues in its folder."""
    allow_changes: bool = setting(False, free=Free.WATCHED, unread_by=(Job.EVALUATE,))
    """Continue in a run folder even if its settings differ from the job's in ways that change results. Off: the job is
    refused."""
    spike_factor: float = setting(
        20.0,
        Rule(lambda x: x == 0 or 1 < x < math.inf, "must be above 1, or 0 for off"),
        free=Free.WATCHED,
        unread_by=(Job.EVALUATE,),
    )
    """Save the batch of an optimizer step whose gradient norm exceeds this factor times the median norm of the last 32
    steps, for `python -m spmdrl.tools.replay`. A run saves at most 3 of these batches, and at most 3 whose norm is not
    finite. 0: save only batches whose norm is not finite."""


@dataclass
class ModelConfig:
    """The model that is trained."""

    path: str = "tiny"
    """The starting model: an HF folder, a hub name, `ms:<name>` (ModelScope), a `.gguf` file, `package:<name>` (GGUF in
    an installed package), or `tiny` (comes with spmdrl)."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Number type of forward and backward, and of the engine. Master weights and optimizer are float32 (with float64:
    float64). float16 has a dynamic loss scale (docs/policy.md)."""
    trust_remote_code: bool = setting(False, free=Free.LIMIT)
    """Run Python code that comes with the model. Off: models that need such code are refused."""
    self_check: bool = setting(True, free=Free.COMPUTED)
    """At the start, compare logp of packed sequences with logp of each sequence alone in plain transformers. After the
    first push, compare the engine's logp with the trainer's (docs/policy.md)."""


@dataclass
class ParallelConfig:
    """Roles of the ranks, and how the training ranks divide the policy.

    The product of the sizes of dp_replicate, dp_shard, sp, cp, tp and pp is the number of training ranks.
    """

    FREE: ClassVar[str] = Free.LAYOUT

    placement: Literal["colocated", "split"] = setting("colocated", unread_by=(Job.SUPERVISED,))
    """How training and sampling are divided over the ranks. `colocated`: every rank does both in turn (the engine
    sleeps and wakes). `split`: the last ranks only sample, and the others train or score."""
    rollout_ranks: int = setting(0, NOT_NEGATIVE, unread_by=(Job.SUPERVISED,))
    """Number of ranks that sample under `split`."""
    scoring_ranks: int = setting(0, NOT_NEGATIVE, unread_by=(Job.SUPERVISED,))
    """Number of ranks that hold the frozen models (reference or teachers, reward model, cost model) under `split`. 0:
    the training ranks hold them. Megatron's axes divide these models, too."""

    dp_replicate: int = setting(1, COUNT)
    """Number of copies of the sharded model (HSDP)."""
    dp_shard: int = setting(
        -1, Rule(lambda x: x == -1 or x >= 1, "must be at least 1, or -1 for all ranks the other axes leave")
    )
    """FSDP: number of ranks over which parameters are sharded. Megatron: number of data-parallel ranks, over which
    AdamW's state is sharded. -1: all training ranks that the other axes leave."""
    sp: int = setting(1, COUNT)
    """FSDP: number of ranks that divide the tokens of a micro-batch (Ulysses). It must divide the number of the model's
    attention heads."""
    cp: int = setting(1, COUNT)
    """Megatron: number of ranks that divide the tokens of each sequence (context parallelism)."""
    tp: int = setting(1, COUNT)
    """Megatron: number of ranks that divide the vocabulary and the matrices of attention and dense MLPs (for experts
    see `etp`, for the engine `--rollout.tp`)."""
    sequence_parallel: bool = True
    """Megatron: outside the tensor-parallel parts of a layer, divide the tokens over the tp ranks."""
    pp: int = setting(1, COUNT)
    """Megatron: number of pipeline stages, which divide the layers."""
    first_stage_layers: int = setting(0, NOT_NEGATIVE)
    """Megatron: number of layers in the first pipeline stage; the other stages divide the remaining layers. 0: as many
    as in the other stages."""
    last_stage_layers: int = setting(0, NOT_NEGATIVE)
    """Megatron: number of layers in the last pipeline stage; the other stages divide the remaining layers. 0: as many
    as in the other stages."""
    virtual_stages: int = setting(1, COUNT)
    """Megatron: number of separate parts of the model on each pipeline rank (interleaved schedule)."""
    ep: int = setting(1, COUNT)
    """Megatron: number of ranks, all of one pipeline stage, that divide the experts."""
    etp: int = setting(1, COUNT)
    """Megatron: number of ranks that divide the matrices of every expert."""


@dataclass
class OptimizerConfig:
    """AdamW and the schedule of its learning rate."""

    lr: float = setting(2e-4, NOT_NEGATIVE)
    """Peak learning rate of AdamW. The default shown is for the model that comes with spmdrl. For other models it is
    1e-6 in reinforcement learning, and ten times as much with LoRA."""
    betas: tuple[float, float] = setting(
        (0.9, 0.99), Rule(lambda x: all(0 <= beta < 1 for beta in x), "must be two numbers from 0 up to, but not, 1")
    )
    """AdamW's betas: how slowly the moving averages of the gradient and of its square change."""
    eps: float = setting(1e-8, POSITIVE)
    """AdamW's epsilon, which is added to the denominator of an update."""
    weight_decay: float = setting(0.0, NOT_NEGATIVE)
    """AdamW's decoupled weight decay."""
    clip_grad_norm: float = setting(1.0, NOT_NEGATIVE)
    """Largest norm of the gradient over all parameters; a larger gradient is scaled down to it. 0: no limit."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate changes after warm-up, over all optimizer steps of the run, including skipped ones."""
    warmup_steps: int = setting(0, NOT_NEGATIVE)
    """Number of optimizer steps in which the learning rate rises linearly to its peak."""
    min_lr_ratio: float = setting(0.0, UNIT, only_with=lambda c: c.optimizer.schedule != "constant")
    """Final learning rate as a share of the peak (linear, cosine)."""
    decay_share: ClassVar[float] = 1.0
    """Share of the steps after warm-up in which the learning rate falls; only some jobs can set it (supervised.py)."""
    bad_steps: int = setting(3, NOT_NEGATIVE, free=Free.LIMIT)
    """The job ends after this many consecutive optimizer steps whose loss or gradient is not finite; until then, such
    steps are skipped. 0: the first one ends the job."""


@dataclass
class PolicyConfig:
    """How the policy trains: backend, micro-batches, memory, attention."""

    backend: Literal["fsdp", "megatron"] = "fsdp"
    """Backend that trains the model. `fsdp`: any HF transformer under FSDP2. `megatron`: the model families of
    docs/megatron.md, with tensor, pipeline, context and expert parallelism."""
    max_tokens_per_microbatch: int = setting(8192, COUNT, free=Free.COMPUTED)
    """Maximum number of tokens that are packed into one forward, on one rank or on all sp ranks together. This changes
    speed and memory, and never the result."""
    activation_checkpointing: Literal["none", "full", "selective"] = setting("none", free=Free.COMPUTED)
    """Activations that the backward pass recomputes to save memory. `full`: those of complete layers, in up to a third
    more time. `selective` (Megatron): those inside the attention, between its projections."""
    host_optimizer: bool = setting(False, free=Free.COMPUTED)
    """Megatron: run AdamW on the host, where its moments and the float32 weights stay."""
    moe_aux_loss: float = setting(0.0, NOT_NEGATIVE)
    """Megatron, mixture of experts: weight of a loss that balances the use of the experts in every sequence. 0: this
    loss is off."""
    moe_bias_rate: float = setting(0.0, NOT_NEGATIVE)
    """Megatron, routers with a bias (DeepSeek-V3): the amount that an update adds to the bias of experts with less than
    the mean load and subtracts from the bias of the others. 0: the bias is constant."""
    mtp: Literal["skip", "keep"] = setting("skip", free=Free.KEPT)
    """Multi-token-prediction heads of the starting checkpoint, which are never trained: `skip` leaves them out of saved
    models, `keep` copies them unchanged."""
    gather: Literal["auto", "whole", "once", "layers"] = setting("auto", free=Free.COMPUTED)
    """FSDP: when a rank gathers the weights that are divided over the ranks. `layers`: each layer before its forward
    and again before its backward; after both it is freed, which needs the least memory. `once`: each layer before its
    first forward; it is kept until the last micro-batch of an update, or of a pass without gradients. `whole`: as
    `once`, but all layers together, which takes the least time in small models. `auto`: `whole` for models of up to 2
    GiB in the type of the forward, `once` for models of up to 8 GiB, else `layers`."""
    reduce_gradients: Literal["last", "each"] = setting("last", free=Free.COMPUTED)
    """FSDP: when gradients are summed over the ranks. `last`: after the last micro-batch of an update; until then each
    rank holds gradients of the complete model (4 bytes a parameter). `each`: after each micro-batch; a rank then holds
    only its shard of the gradients, and communicates more."""
    attention: Literal["auto", "flash", "varlen", "padded", "eager"] = setting("auto", free=Free.COMPUTED)
    """Attention over packed sequences. `flash`: flash-attn's kernel. `varlen`: torch's kernel. `padded`: causal SDPA
    for each sequence. `eager`: plain softmax. `auto`: for each layer the first of `flash` and `varlen` that is
    installed and supports it, which needs a GPU and 16 bits; if neither does, `padded`."""
    chunked_loss: bool = setting(True, free=Free.COMPUTED)
    """FSDP: compute a loss that is independent for each token in chunks of tokens, together with the output head. If a
    micro-batch has several chunks (on a GPU a chunk has 1,900 tokens for 152k bfloat16 logits a token), this saves a
    quarter of the head's work, but needs memory for a float32 copy of the head's gradient in addition to the
    activations. Other losses, and with False all losses, read logp of the complete micro-batch."""
    liger: Literal["auto", "on", "off"] = setting("auto", free=Free.COMPUTED)
    """FSDP on GPUs: whether Liger's kernels (`pip install liger-kernel`) compute RMSNorm, rotary embedding and SwiGLU.
    `auto`: in 16 bits, if they are installed, for Llama, Mistral, Qwen2, Qwen3 and SmolLM3 without `compile_layers`."""
    compile_layers: bool = setting(False, free=Free.COMPUTED)
    """FSDP: compile the layers by `torch.compile`, except for their attention, which takes a minute at the start of a
    run. Models with experts or recurrent layers are refused."""
    share_prompts: bool = setting(True, free=Free.COMPUTED)
    """Compute the prompt that the samples of a group share only once, in forward and backward. This changes speed and
    memory, and never the result."""
    offload: Literal["none", "host", "disk"] = setting("none", free=Free.COMPUTED)
    """Place of the parameters and optimizer states of all models that train while the engine samples. `none`: on the
    device. `host`: in pinned host memory (on a CPU they are not moved). `disk`: in a temporary file in $TMPDIR or
    /var/tmp."""


@dataclass
class LoraConfig:
    """Low-rank adapters (LoRA) on the policy. Only the adapters train.

    The KL's reference is the model without the adapters, unless `--reference.path` names another model.
    """

    rank: int = setting(0, NOT_NEGATIVE)
    """Rank of the adapters. 0: no adapters, and every weight trains."""
    alpha: int = setting(16, COUNT, only_with=lambda c: c.lora.rank)
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    targets: tuple[str, ...] = setting(("all-linear",), only_with=lambda c: c.lora.rank)
    """Linear layers of the decoder that get an adapter, such as `q_proj v_proj`. `all-linear`: all linear layers."""
    push: Literal["adapter", "merged"] = setting("adapter", free=Free.COMPUTED, only_with=lambda c: c.lora.rank)
    """Weights that are pushed to engines. `adapter`: once the model without adapters, and then only the adapters.
    `merged`: the full model with the adapters added to its weights; every engine supports this, and sglang needs it."""


@dataclass
class ReferenceConfig:
    """The model of the KL term: the starting model, a teacher, or an earlier policy."""

    enabled: Literal["auto", "on", "off"] = setting("auto", unread_by=(Job.DISTILL, Job.ONLINE))
    """Whether there is a frozen reference model for the KL. `auto`: if the coefficient of the KL is not 0."""
    path: str = setting("", only_with=lambda c: c.has_reference)
    """The reference model, in a form that `--model.path` takes; in distillation the teacher. Empty: the starting
    model."""
    refresh_every: int = setting(0, NOT_NEGATIVE, only_with=lambda c: c.has_reference)
    """Number of steps between copies of the policy's weights into the reference. 0: the reference never changes."""
    offload: Literal["none", "host", "disk"] = setting("none", free=Free.COMPUTED)
    """Place of the frozen models while the engine samples; values as for `--policy.offload`."""


def is_average(reference: Any) -> bool:
    """Return True if the reference is a moving average of the policy (`refresh_every`, `mix`)."""
    return bool(reference.refresh_every) and getattr(reference, "mix", 1.0) != 1


@dataclass
class RolloutConfig:
    """Sampling: the number and length of samples, and the engine."""

    engine: Literal["auto", "vllm", "sglang", "hf"] = "auto"
    """Engine that samples. `auto`: vLLM if it is installed for the run's device and supports `--model.dtype`, else the
    HF engine. `sglang` needs `launch/install.sh --sglang`."""
    tp: int = setting(1, COUNT, free=Free.DRAWN)
    """Number of ranks that divide an engine's matrices. tp x dp ranks share one engine; this product must divide the
    number of ranks that sample."""
    dp: int = setting(1, COUNT, free=Free.DRAWN)
    """Mixture of experts: number of copies of the attention in one engine (vllm, sglang). Each copy runs different
    requests, while all tp x dp ranks divide the experts."""
    ep: int = setting(1, COUNT, free=Free.DRAWN)
    """Mixture of experts: number of ranks of an engine over which complete experts are distributed (vllm, sglang). It
    must be tp x dp or 1. With 1, each rank holds a slice of every expert."""
    prompts_per_step: int = setting(32, COUNT, unread_by=(Job.EVALUATE,))
    """Number of prompts in one step, over all ranks."""
    samples_per_prompt: int = setting(8, COUNT, unread_by=(Job.EVALUATE,))
    """Number of samples of each prompt; they form a group."""
    max_prompt_tokens: int = setting(512, COUNT)
    """Maximum number of tokens of a prompt. Longer prompts are dropped when the data is read; the log shows how many
    were dropped."""
    max_new_tokens: int = setting(8, COUNT)
    """Maximum number of tokens of a response; with `--env`, of all tokens after an episode's prompt. The default shown
    is for the demo. For another model on your own rows it is 1024, or half of the model's context if that is less."""
    temperature: float = setting(1.0, POSITIVE, unread_by=(Job.EVALUATE,))
    """Sampling temperature. Engine and trainer also compute logp at this temperature."""
    top_p: float = setting(1.0, SHARE, unread_by=(Job.EVALUATE,))
    """Share of the probability from which tokens are sampled (nucleus sampling). Training needs 1, because an engine
    computes logp over the nucleus and the trainer over the complete vocabulary. For evaluation set `--eval.top-p`."""
    assignment: Literal["queue", "static"] = setting("queue", free=Free.DRAWN)
    """How prompts are given to engines. `queue`: from a common queue, so that a rank that finishes early takes more.
    `static`: by their index, for bit-exact runs."""
    oversample: float = setting(1.0, at_least(1), unread_by=(Job.EVALUATE,))
    """Factor on the number of prompts that a step starts: sampling stops when prompts_per_step groups are complete, and
    unfinished groups are cut. Prompts that no engine has started by then are left for the next step."""
    partial_steps: int = setting(0, NOT_NEGATIVE, unread_by=(Job.EVALUATE,))
    """Maximum number of steps in which a cut group continues; after them the run waits until the group is complete. 0:
    cut groups are dropped, and so are prompts that a static assignment did not start (metric rollout/unbegun_prompts).
    Checkpoints include unfinished groups."""
    max_sequences: int = setting(64, COUNT, free=Free.DRAWN)
    """Maximum number of sequences that one engine runs at the same time."""
    kv_cache_gib: float = setting(0.0, NOT_NEGATIVE, free=Free.DRAWN)
    """Size of the KV cache of vLLM or SGLang on one rank, in GiB. 0: on a CPU what the sequences need, at most 0.25
    GiB; on a GPU what gpu_memory_utilization leaves for it."""
    gpu_memory_utilization: float = setting(0.5, SHARE, free=Free.DRAWN)
    """Largest share of a GPU's memory that vLLM or SGLang takes while it is awake."""
    staleness: int = setting(0, NOT_NEGATIVE, unread_by=(Job.EVALUATE,))
    """Under `split`: number of steps that sampling runs ahead of training. It bounds the age of the weights that
    sample. 1: the experience of step k+1 is sampled while step k trains, with the weights from the start of step k.
    Larger values only even out single slow steps, because all ranks end every step together."""
    routing_replay: bool = setting(False, unread_by=(Job.EVALUATE,))
    """Mixture of experts: train every token with the experts that the engine chose for it (R3). SGLang, and vLLM on a
    CPU, do not support this."""
    sleep_level: Literal["auto", 0, 1, 2] = setting("auto", free=Free.DRAWN)
    """Memory that an engine frees between rollouts. 0: none. 1: the KV cache; on a GPU, weights move to host memory. 2:
    KV cache and weights, so that every wake needs a push. `auto`: 1 on a CPU or if only adapters are pushed, else 2."""
    deterministic: bool = setting(False, free=Free.DRAWN)
    """Make a sample independent of the other sequences in its batch: with batch-invariant kernels in vLLM and SGLang
    (only on GPUs, slower), and with one sequence at a time in the HF engine."""
    quantization: Literal["none", "int8", "fp8"] = "none"
    """Type of 8-bit weights in the engine: `fp8` in vLLM and SGLang (only on GPUs), `fp8` or `int8` in the HF
    engine."""
    logp_diff_warn: float | None = setting(
        None,
        Rule(lambda x: 0 <= x < math.inf, "must be 0 or more, or None"),
        free=Free.LIMIT,
        unread_by=(Job.EVALUATE,),
    )
    """Mean difference of a step between the engine's and the trainer's logp above which the run warns. 0: never. None:
    0.001 if the settings let both compute the same values, as in float32 with the newest weights, else 0.1."""
    logp_diff_stop: float = setting(1.0, NOT_NEGATIVE, free=Free.LIMIT, unread_by=(Job.EVALUATE,))
    """Mean difference of a step between the engine's and the trainer's logp above which the job ends, because engine
    and trainer do not hold the same model. 0: never."""
    push_bucket_mib: int = setting(256, COUNT, free=Free.DRAWN)
    """Maximum size, in MiB, of the weights that are pushed to the engine at once (a bucket)."""
    enforce_eager: bool = setting(False, free=Free.DRAWN)
    """Run vLLM or SGLang without CUDA graphs."""
    sglang_push: Literal["memory", "broadcast"] = setting("memory", free=Free.DRAWN)
    """How weights reach SGLang's processes. `memory`: by memory that they share with the rank. `broadcast`: by a
    broadcast from the rank, with gloo on a CPU and with NCCL for engines on separate GPUs."""


@dataclass
class DataConfig:
    """Source of the prompts, and how they are rendered."""

    RENDERS_MESSAGES: ClassVar[bool] = False
    """True if rows of messages are always rendered by the chat template, whatever the value of `chat`."""

    train: str = setting("builtin:reverse", unread_by=(Job.EVALUATE,))
    """Source of the training prompts: `builtin:<task>`, a .jsonl file, a .parquet file in verl's form,
    `hf:<dataset>[:config[:split]]`, `ms:<dataset>` (ModelScope), or `reasoning-gym:<task>`."""
    eval: str = setting("builtin:reverse:eval", free=Free.KEPT)
    """Source of the evaluation's prompts, in a form that `train` takes. Empty: no evaluation, which is the default if
    `train` names your own rows."""
    prompt_column: str = "prompt"
    """Column with the prompt (text or a list of chat messages)."""
    answer_column: str = "answer"
    """Column with the ground truth. Empty: the reward needs no ground truth."""
    template: str = ""
    """Text around the prompt; `{prompt}` in it is replaced by the prompt. Empty: only the prompt."""
    system: str = ""
    """System message before the prompt. Empty: no system message is added."""
    prefill: str = ""
    """Start of the assistant's reply, which the model continues; `{column}` in it inserts a column of the row."""
    chat: Literal["auto", "on", "off"] = "auto"
    """Whether prompts are rendered by the chat template. `auto`: if the tokenizer has one."""
    chat_template: str = ""
    """Chat template in place of the tokenizer's: `chatml` (which adds no system message), a `.jinja` file, or the text
    of a template."""
    template_kwargs: str = ""
    """JSON object with values of variables of the chat template, such as {"enable_thinking": false}; a row may override
    them."""
    limit: int = setting(0, NOT_NEGATIVE, unread_by=(Job.EVALUATE,))
    """Maximum number of training prompts to read. 0: all."""
    shuffle: bool = setting(True, unread_by=(Job.EVALUATE,))
    """Shuffle the prompts anew in every epoch, by `--run.seed`. Off: prompts keep the order of the file, as a
    curriculum needs."""


@dataclass
class RewardConfig:
    """How samples are scored."""

    function: str = "exact_match"
    """The reward: a built-in one, such as `exact_match`, `gsm8k`, `math` (symbolic), `code` (tests of a program),
    `auto` (by the row's data_source), `environment` (rewards of the environment) or `none` (0); `judge.yaml` (a judge:
    docs/judge.md); or `path/to/file.py[:function]` in a form of verl or TRL. docs/rewards.md lists all of them."""
    more: tuple[str, ...] = ()
    """Further rewards whose scores are added, each as `function=weight`. A missing weight is 1, which is also the
    weight of the reward `function`."""
    gate: tuple[str, ...] = ()
    """Parts of rewards, such as `format`, that must all be above 0; if one is not, a positive score becomes 0."""
    kwargs: str = ""
    """JSON object with further arguments for reward functions in files (verl's reward_kwargs)."""
    workers: int = setting(1, COUNT, free=Free.LIMIT)
    """Number of grading processes on each rank, for rewards that may take long."""
    timeout: float = setting(5.0, POSITIVE, free=Free.LIMIT)
    """Maximum number of seconds that one grading in a grading process may take; after this time the process is killed.
    A grading that runs tests of a program has the limits of `--sandbox` instead."""
    on_timeout: Literal["auto", "error", "zero"] = setting("auto", free=Free.LIMIT)
    """Consequence of a grading that was killed. `error`: the job ends. `zero`: the score and all its parts are 0, and
    `reward/timeouts` counts it. `auto`: `error` for functions in files, else `zero`. A killed grading that ran tests of
    a program always leaves its sample out (`max_ungraded`)."""
    max_ungraded: float = setting(0.05, UNIT, free=Free.LIMIT)
    """Largest share of a step's samples that may have no score, because the tests of their rows cannot be read, or the
    sandbox or the judge failed repeatedly. These samples are left out; if there are more, the job ends."""
    model: str = setting("", only_with=lambda c: c.is_evaluated or c.learns_from_rewards)
    """Reward model whose score is added to the reward: an HF sequence classifier with one label, in a form that
    `--model.path` takes, or `rm.yaml`, a file that describes a model with several labels, other tokens or scores of
    steps (docs/rewards.md). Empty: no reward model."""
    model_coef: float = setting(
        1.0, FINITE, only_with=lambda c: c.reward.model and (c.is_evaluated or c.learns_from_rewards)
    )
    """Factor on the score of `model`."""


@dataclass
class SandboxConfig:
    """The sandbox of programs that a model writes (docs/sandbox.md). It is started for rewards that run programs."""

    FREE: ClassVar[str] = Free.LIMIT

    provider: str = "auto"
    """Sandbox that isolates the programs: `bubblewrap`, `sandlock`, `docker:IMAGE`, `apptainer:IMAGE`, the URL of a
    SandboxFusion service, or `none`, for programs that you trust. `auto`: the first of bubblewrap and sandlock that
    confines a test program; the job ends if neither does."""
    seconds: float = setting(5.0, POSITIVE)
    """Maximum number of seconds that a program may take for one test."""
    total_seconds: float = setting(30.0, POSITIVE)
    """Maximum number of seconds that a program may take for all tests of a sample together; tests that it has not
    reached then fail."""
    memory_mib: int = setting(512, at_least(64))
    """Maximum memory, in MiB, of all processes of a program together."""


@dataclass
class EvalConfig:
    """Evaluation of the policy on `--data.eval` during the run."""

    FREE: ClassVar[str] = Free.KEPT

    every: int = setting(20, NOT_NEGATIVE, unread_by=(Job.EVALUATE,))
    """Number of steps between evaluations; the run also evaluates before the first step and at the end. 0: never."""
    prompts: int = setting(256, NOT_NEGATIVE, only_with=lambda c: c.is_evaluated)
    """Maximum number of prompts to evaluate on. 0: all."""
    samples: int = setting(1, COUNT, only_with=lambda c: c.is_evaluated)
    """Number of samples of each evaluation prompt. pass@k is reported for every power of two k up to this number."""
    temperature: float = setting(1.0, NOT_NEGATIVE, only_with=lambda c: c.is_evaluated)
    """Sampling temperature of the evaluation. 0: the most likely token is always taken (greedy)."""
    top_p: float = setting(1.0, SHARE, only_with=lambda c: c.is_evaluated)
    """Nucleus sampling of the evaluation: it samples from the smallest set of tokens whose probabilities add up to this
    share."""


@dataclass
class CheckpointConfig:
    """When checkpoints are saved, and which of them are kept."""

    FREE: ClassVar[str] = Free.KEPT

    every: int = setting(0, NOT_NEGATIVE)
    """Number of steps between checkpoints. 0: a checkpoint is saved only when the run ends or is preempted."""
    keep: int = setting(2, COUNT)
    """Number of newest checkpoints to keep. Older ones are removed only after a new one was read back from the disk and
    verified."""
    keep_every: int = setting(0, NOT_NEGATIVE)
    """Every checkpoint whose step is a multiple of this number is kept, too. 0: off."""
    best: str = setting(
        "", Rule(lambda x: bool(re.fullmatch(r"(-?[A-Za-z][\w./@-]*)?", x)), "must be the name of a metric, or -name")
    )
    """Metric whose best checkpoint is kept, too, such as `eval/accuracy`; the highest value is best, or with a `-`
    before the name the lowest. Only values that were measured with the weights of a checkpoint count. Empty: off."""
    background: bool = False
    """FSDP: copy a checkpoint to host memory and write it while training continues, one checkpoint at a time."""
    at_end: bool = True
    """Save a checkpoint after the last step."""


@dataclass
class TrackingConfig:
    """Metrics and samples that a run shows and keeps."""

    FREE: ClassVar[str] = Free.KEPT

    trackers: tuple[str, ...] = setting(("jsonl", "tensorboard"), unread_by=(Job.EVALUATE,))
    """Trackers that record the metrics: any of `jsonl`, `tensorboard`, `wandb`."""
    project: str = setting("spmdrl", unread_by=(Job.EVALUATE,))
    """Project of the run in wandb."""
    samples: int = setting(4, NOT_NEGATIVE, unread_by=(Job.EVALUATE,))
    """Number of samples of each step that the console shows and samples.jsonl records."""
    console: Literal["auto", "live", "plain"] = "auto"
    """How the console shows a run. `live`: as a panel on a terminal. `plain`: as one line for each step. `auto`: as a
    panel if the output is a terminal."""


@dataclass
class TrainingConfig:
    """Sections of settings that every job that trains a model has. Each entry point adds further sections."""

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
        """Number of ranks that share one engine; 1 if the job has no engine."""
        return 1


@dataclass
class Config(TrainingConfig):
    """Reinforcement learning of a language model. Every rank runs this same program."""

    env: str = setting("", unread_by=(Job.DISTILL, Job.ONLINE))
    """The environment in which samples act over several turns (docs/agents.md): `file.py:Class`, `builtin:NAME`,
    `file.py:TOOLS` (a list of functions), `env.yaml` (an environment with limits), verl's tool YAML, or `rows` (each
    row names its environment). Empty: a sample is one response."""
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
        """True if the reference may have another tokenizer than the policy."""
        return False

    def further_teachers(self) -> dict[str, Any]:
        """Return name -> teacher for the teachers in addition to the reference (`distillation.FurtherTeacher`)."""
        return {}

    def engine_teachers(self) -> dict[str, str]:
        """Return name -> path of the teachers that run in the run's engine, the first teacher first."""
        return {}

    @property
    def has_reference(self) -> bool:
        """True if the run has a reference: a frozen model whose log-probabilities training reads."""
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
