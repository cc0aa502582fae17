"""Plans a job before any GPU is used: `python -m spmdrl.plan --config FILE --world 512 --gpu h100`.

Options in addition to the job's settings:

    --job NAME       train (the default), distill or online_preference: the entry point to plan
    --world N        number of ranks in the job
    --gpu NAME|FILE  h100, h200, h20, b200, a100, or a file that describes another GPU (docs/scale.md)
    --json FILE      write the plan as JSON; `-` means standard output
    --picture FILE   draw the memory of each phase as an SVG
    --sweep          also plan the job with changed settings, and rank the plans
    --no-nearest     if the job does not fit, do not search for similar settings that fit

The exit code is 0 if the job fits, 1 if it does not, 2 if the settings are invalid, and 3 if the planner cannot
simulate the job.
"""

import argparse
import json
import os
import sys
import warnings
from pathlib import Path

from spmdrl.config.fields import ConfigError
from spmdrl.config.load import from_command_line
from spmdrl.session.job import Job, jobs


def _options(argv: list[str], kinds: dict[str, Job]) -> tuple[argparse.Namespace, list[str]]:
    """Separate the planner's options from the job's settings. kinds: jobs that can be planned, by name."""
    parser = argparse.ArgumentParser(
        prog="python -m spmdrl.plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--job", choices=kinds, default="train")
    parser.add_argument("--world", type=int, required=True, metavar="N")
    parser.add_argument("--gpu", required=True, metavar="NAME|FILE")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--picture", metavar="FILE")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--no-nearest", action="store_true")
    return parser.parse_known_args(argv)


def _check_writable(name: str, file: str | None) -> None:
    """Check that an output file can be written, before spending minutes on planning.

    Raises:
        ValueError: the file cannot be written; the message names the option.
    """
    if not file or (name == "json" and file == "-"):
        return
    folder = Path(file).parent
    if Path(file).is_dir() or not os.access(file if Path(file).exists() else folder, os.W_OK):
        raise ValueError(f"--{name} {file}: cannot be written; give a file in a folder that exists and is writable")


def main(argv: list[str] | None = None) -> int:
    """Plan the job given on the command line, print the plan, and return the exit code."""
    kinds = {module.rpartition(".")[2]: job for module, job in jobs().items() if job.method}
    own, settings = _options(sys.argv[1:] if argv is None else argv, kinds)
    job = kinds[own.job]
    warnings.simplefilter("ignore")
    try:
        if own.world < 1:
            raise ValueError(f"--world {own.world}: a job has at least one rank")
        for name in ("json", "picture"):
            _check_writable(name, getattr(own, name))
        from spmdrl.plan.gpus import gpu

        device = gpu(own.gpu)
        cfg = from_command_line(settings, job.prog, job.settings).config
        job.check(cfg, own.world, here=False)
        from spmdrl.plan.run import plan

        made = plan(cfg, own.world, device)
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1:]
        why = "the planner cannot simulate this job; the job itself may still run"
        way = f"{cfg.model.path} may not support --model.dtype {cfg.model.dtype} or another setting"
        print(f"error: {why}: {''.join(reason)}; {way}", file=sys.stderr)
        return 3
    from spmdrl.plan.report import facts_of, text_of

    facts = facts_of(made)
    if own.json != "-":
        print(text_of(made))
    if own.sweep or not (made.fits or own.no_nearest):
        from spmdrl.plan.sweep import nearest, sweep, sweep_lines

        tried = sweep(made) if own.sweep else nearest(made)
        facts["sweep" if own.sweep else "nearest"] = tried.facts()
        if own.json != "-":
            print("\n" + "\n".join(sweep_lines(tried)))
    if own.picture:
        from spmdrl.plan.report import picture

        Path(own.picture).write_text(picture(made), encoding="utf-8")
    if own.json == "-":
        print(json.dumps(facts, indent=1))
    elif own.json:
        Path(own.json).write_text(json.dumps(facts, indent=1), encoding="utf-8")
    return 0 if made.fits else 1


if __name__ == "__main__":
    sys.exit(main())
