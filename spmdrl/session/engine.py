"""Starts a job's engine on this rank."""

from spmdrl.config.engines import pushed_parts, sleep_level
from spmdrl.config.schema import Config
from spmdrl.engines.build import build_engine
from spmdrl.engines.engine import Engine
from spmdrl.policy.models import Models
from spmdrl.session.device_table import room_for_engine
from spmdrl.session.environ import keep_what_started
from spmdrl.session.session import Session


def sleeping_engine(session: Session[Config], models: Models, stop: set[int]) -> Engine:
    """Start this rank's engine, and put it to sleep if models need the memory before the rollout.

    stop: ids of the tokens that end a response.
    """
    cfg, world = session.cfg, session.world
    # vLLM runs full garbage collections while it starts. Excluding existing objects makes these collections fast.
    keep_what_started(done=False)
    with room_for_engine(models, cfg):
        engine = build_engine(cfg, world, stop)
        on_cpu = world.device.type == "cpu"
        level = sleep_level(cfg, on_cpu)
        if level == 2 and len(pushed_parts(cfg)) > 1:
            held = engine.bytes_by_owner().get("engine weights", 0) / 2**30
            session.warn(
                f"--rollout.sleep-level 2 with --lora.push adapter: the {held:.2f} GiB of the base model are sent to "
                "every engine rank at every step; --rollout.sleep-level 1 keeps them in host memory"
            )
        if models.policy is not None and not (on_cpu and cfg.policy.offload == "none"):
            engine.sleep(level)
    return engine
