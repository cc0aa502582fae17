"""Rules for the ranks that train: axes of the mesh, and what each policy backend can do."""

import importlib.util
from math import lcm

from spmdrl.config.fields import flag
from spmdrl.config.placement import how_to_have_more, shown
from spmdrl.config.schema import Config


def axis_product(config: Config) -> int:
    """Ranks taken by all axes but dp_shard (ep lies inside dp_shard)."""
    axes = config.parallel
    return axes.dp_replicate * axes.sp * axes.cp * axes.tp * axes.pp


def backend_problems(config: Config, world_size: int) -> list[str]:
    """One line for each setting to change. world_size: ranks that train."""
    axes, problems = config.parallel, []
    if config.policy.backend == "fsdp":
        problems = [
            f"--parallel.{axis.replace('_', '-')} {getattr(axes, axis)}: must be 1; the fsdp backend takes "
            "dp_replicate, dp_shard and sp (--policy.backend megatron has the others)"
            for axis in ("tp", "pp", "ep", "cp", "etp", "virtual_stages")
            if getattr(axes, axis) > 1
        ]
        problems += [
            f"{flag('policy.' + name)} {getattr(config.policy, name)}: needs --policy.backend megatron; take {plain}"
            for name, plain in (
                ("host_optimizer", False),
                ("moe_aux_loss", 0.0),
                ("moe_bias_rate", 0.0),
            )
            if getattr(config.policy, name) != plain
        ]
        if config.policy.activation_checkpointing == "selective":
            problems.append(
                "--policy.activation-checkpointing selective: needs --policy.backend megatron; take full or none"
            )
        if config.policy.liger and importlib.util.find_spec("liger_kernel") is None:
            problems.append("--policy.liger True: Liger is not installed; pip install liger-kernel, or leave it out")
        problems += [
            f"{flag('parallel.' + name)} {getattr(axes, name)}: is of megatron's backend; take 0"
            for name in ("first_stage_layers", "last_stage_layers")
            if getattr(axes, name)
        ]
    else:
        problems = _megatron_problems(config, world_size)
    if problems:
        return problems
    rest = axis_product(config)
    if axes.dp_shard == -1:
        if world_size % rest:
            axis = max(("dp_replicate", "sp", "cp", "tp", "pp"), key=lambda name: getattr(axes, name))
            problems.append(
                f"--parallel.{axis.replace('_', '-')} {getattr(axes, axis)}: the axes but dp_shard multiply to {rest}, "
                f"which must divide {shown(config, world_size, 'train')}"
            )
        return problems
    if rest * axes.dp_shard != world_size:
        fits = f"{world_size // rest} or -1" if world_size % rest == 0 else "-1 with axes that divide the ranks"
        problems.append(
            f"--parallel.dp-shard {axes.dp_shard}: the axes multiply to {rest * axes.dp_shard} "
            f"but {'the job has' if config.parallel.placement == 'colocated' else 'there train'} {world_size} ranks; "
            f"dp-shard could be {fits}"
        )
    return problems


def _megatron_problems(config: Config, world_size: int) -> list[str]:
    """Settings that Megatron does not support; `policy/megatron/layout.py` checks that it can divide the model."""
    axes, problems = config.parallel, []
    if importlib.util.find_spec("megatron") is None:
        problems.append(
            "--policy.backend megatron: megatron-core is not installed: "
            './launch/install.sh, or pip install "megatron-core>=0.16.1,<0.18" einops'
        )
    if axes.sp > 1:
        problems.append(f"--parallel.sp {axes.sp}: is of the fsdp backend; --parallel.cp divides sequences in megatron")
    if config.policy.liger:
        problems.append("--policy.liger True: is of the fsdp backend; Megatron has kernels of its own")
    if config.policy.reduce_gradients != "last":
        problems.append(
            f"--policy.reduce-gradients {config.policy.reduce_gradients}: is of the fsdp backend; Megatron holds the "
            "gradients of all parameters of a rank, take last"
        )
    if config.policy.attention != "auto":
        problems.append(f"--policy.attention {config.policy.attention}: is of the fsdp backend; leave it out")
    if config.lora.rank:
        problems.append(f"--lora.rank {config.lora.rank}: adapters are of the fsdp backend; take 0")
    if config.model.dtype == "float64":
        problems.append("--model.dtype float64: Megatron's optimizer has none; take float32")
    if config.model.dtype == "float16":
        problems.append("--model.dtype float16: its loss scale is of the fsdp backend; take bfloat16")
    rest = axes.pp * axes.etp * axes.ep
    if world_size and world_size % rest:
        stage = world_size // axes.pp
        fits = ", ".join(str(n) for n in range(1, stage + 1) if stage % (n * axes.etp) == 0)
        problems.append(
            f"--parallel.ep {axes.ep}: pp x etp x ep = {rest} must divide {world_size} ranks"
            + how_to_have_more(world_size)
            + (f"; --parallel.ep may be {fits}" if fits else f"; lower --parallel.etp {axes.etp}")
        )
    if axes.virtual_stages > 1 and axes.pp == 1:
        problems.append(f"--parallel.virtual-stages {axes.virtual_stages}: needs --parallel.pp of at least 2")
    dense, frozen = axes.tp * axes.cp * axes.pp, axes.scoring_ranks
    if frozen % dense or frozen % rest:
        problems.append(
            f"--parallel.scoring-ranks {frozen}: frozen models are divided as the policy is, so tp x cp x pp = {dense} "
            f"and pp x etp x ep = {rest} must divide these ranks; take a multiple of {lcm(dense, rest)}, or 0"
        )
    problems += [
        f"{flag('parallel.' + name)} {getattr(axes, name)}: needs --parallel.pp of at least 2"
        for name in ("first_stage_layers", "last_stage_layers")
        if getattr(axes, name) and axes.pp == 1
    ]
    return problems
