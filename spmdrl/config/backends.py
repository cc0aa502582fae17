"""Rules for the mesh axes and for each policy backend."""

import importlib.util
from math import lcm

from spmdrl.config.fields import Problems, get
from spmdrl.config.placement import how_to_have_more, shown
from spmdrl.config.schema import Config

AXIS = "must be 1; the fsdp backend takes dp_replicate, dp_shard and sp (--policy.backend megatron has the others)"
OF_MEGATRON = {
    **{f"parallel.{axis}": AXIS for axis in ("tp", "pp", "ep", "cp", "etp", "virtual_stages")},
    "policy.host_optimizer": "needs --policy.backend megatron; take False",
    "policy.moe_aux_loss": "needs --policy.backend megatron; take 0.0",
    "policy.moe_bias_rate": "needs --policy.backend megatron; take 0.0",
    "parallel.first_stage_layers": "needs --policy.backend megatron; take 0",
    "parallel.last_stage_layers": "needs --policy.backend megatron; take 0",
}
OF_FSDP = {
    "parallel.sp": "needs --policy.backend fsdp; in megatron --parallel.cp divides sequences",
    "policy.liger": "needs --policy.backend fsdp; Megatron has other kernels",
    "policy.gather": "needs --policy.backend fsdp; leave it out",
    "policy.compile_layers": "needs --policy.backend fsdp; leave it out",
    "policy.reduce_gradients": "needs --policy.backend fsdp; Megatron holds the gradients of all parameters of a rank, "
    "take last",
    "policy.attention": "needs --policy.backend fsdp; leave it out",
    "lora.rank": "adapters need --policy.backend fsdp; take 0",
}
"""Setting that only Megatron (`OF_MEGATRON`) or only FSDP (`OF_FSDP`) supports -> advice if the other backend is
chosen."""
NO_DTYPE = {
    "float64": "Megatron's optimizer does not support it; take float32",
    "float16": "only the fsdp backend has a loss scale; take bfloat16",
}
"""Model dtype that Megatron does not support -> advice."""

GATHERED = {"whole": 2 << 30, "once": 8 << 30}
"""Value of `PolicyConfig.gather` -> maximum model size in bytes; `auto` selects the first value that fits."""


def way_to_gather(choice: str, size: int) -> str:
    """Return how FSDP gathers a model's weights: `whole`, `once` or `layers`.

    choice: the value of `--policy.gather`. size: total parameter size in bytes, in the dtype of the forward pass.
    """
    if choice != "auto":
        return choice
    return next((way for way, most in GATHERED.items() if size <= most), "layers")


def axis_product(config: Config) -> int:
    """Return the product of all axis sizes except dp_shard, and except ep and etp, which reuse the same ranks."""
    axes = config.parallel
    return axes.dp_replicate * axes.sp * axes.cp * axes.tp * axes.pp


def backend_problems(config: Config, world_size: int) -> list[str]:
    """Return a line for each setting that the backend refuses. world_size: number of training ranks."""
    axes, problems, default = config.parallel, Problems(config), type(config)()
    of_other = OF_MEGATRON if config.policy.backend == "fsdp" else OF_FSDP
    for name, advice in of_other.items():
        if get(config, name) != get(default, name):
            problems.add(name, advice)
    if config.policy.backend == "megatron":
        _check_megatron(problems, world_size)
    else:
        if config.policy.activation_checkpointing == "selective":
            problems.add("policy.activation_checkpointing", "needs --policy.backend megatron; take full or none")
        if config.policy.liger == "on" and importlib.util.find_spec("liger_kernel") is None:
            problems.add("policy.liger", "Liger is not installed; pip install liger-kernel, or leave it out")
        if config.policy.liger == "on" and config.policy.compile_layers:
            problems.add("policy.compile_layers", "compiled layers do not take Liger's kernels: --policy.liger off")
    if problems:
        return problems
    rest = axis_product(config)
    if axes.dp_shard == -1:
        if world_size % rest:
            axis = max(("dp_replicate", "sp", "cp", "tp", "pp"), key=lambda name: getattr(axes, name))
            ranks = shown(config, world_size, "train")
            problems.add(f"parallel.{axis}", f"the axes but dp_shard multiply to {rest}, which must divide {ranks}")
    elif rest * axes.dp_shard != world_size:
        fits = f"{world_size // rest} or -1" if world_size % rest == 0 else "-1 with axes that divide the ranks"
        who = "the job has" if axes.placement == "colocated" else "training has"
        have = f"{who} {world_size} {'rank' if world_size == 1 else 'ranks'}"
        problems.add(
            "parallel.dp_shard",
            f"the axes multiply to {rest * axes.dp_shard} but {have}; dp-shard could be {fits}",
        )
    return problems


def _check_megatron(problems: Problems, world_size: int) -> None:
    """Report settings that Megatron refuses for any model; `policy/megatron/layout.py` checks the model itself."""
    config = problems.config
    axes = config.parallel
    if importlib.util.find_spec("megatron") is None:
        install = './launch/install.sh, or pip install "megatron-core>=0.16.1,<0.18" einops'
        problems.add("policy.backend", f"megatron-core is not installed: {install}")
    if config.model.dtype in NO_DTYPE:
        problems.add("model.dtype", NO_DTYPE[config.model.dtype])
    rest = axes.pp * axes.etp * axes.ep
    if world_size and world_size % rest:
        stage = world_size // axes.pp
        fits = ", ".join(str(n) for n in range(1, stage + 1) if stage % (n * axes.etp) == 0)
        advice = f"--parallel.ep may be {fits}" if fits else f"lower --parallel.etp {axes.etp}"
        more = how_to_have_more(world_size)
        ranks = f"{world_size} {'rank' if world_size == 1 else 'ranks'}"
        problems.add("parallel.ep", f"pp x etp x ep = {rest} must divide {ranks}{more}; {advice}")
    if axes.virtual_stages > 1 and axes.pp == 1:
        problems.add("parallel.virtual_stages", "needs --parallel.pp of at least 2")
    dense, frozen = axes.tp * axes.cp * axes.pp, axes.scoring_ranks
    if frozen % dense or frozen % rest:
        problems.add(
            "parallel.scoring_ranks",
            f"frozen models are divided as the policy is, so tp x cp x pp = {dense} and pp x etp x ep = {rest} must "
            f"divide these ranks; take a multiple of {lcm(dense, rest)}, or 0",
        )
    for name in ("first_stage_layers", "last_stage_layers"):
        if getattr(axes, name) and axes.pp == 1:
            problems.add(f"parallel.{name}", "needs --parallel.pp of at least 2")
