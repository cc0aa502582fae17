"""Checks whether a run can start here: `python -m spmdrl.tools.doctor`.

Each line is ok, warn or fail, with the fix; the exit code is 1 where any fails. Under torchrun every node reports
through rank 0, and all-reduce and all-to-all run between all ranks instead of two of this machine.

    --quick        under ten seconds and no network beyond this machine: no hub, a smaller write to the disk
    --json FILE    the findings as JSON, `-` for stdout (the lines then go to stderr)
    --dir FOLDER   the folder for checkpoints; else the run folder of --config, else runs
    --config FILE  settings of a run: models, prompts, files, packages and GPUs that they need must be there
"""

import argparse
import errno
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from spmdrl.config.fields import ConfigError
from spmdrl.config.load import from_command_line
from spmdrl.config.paths import run_folder
from spmdrl.session.environ import prepare
from spmdrl.tools import doctor_folder, doctor_gpus, doctor_machine, doctor_ranks, doctor_settings, doctor_software
from spmdrl.tools.doctor_findings import FAIL, Finding, fail, ok, warn
from spmdrl.tools.doctor_python import python
from spmdrl.tools.preflight import parse_rounds, port_of

PROG = "python -m spmdrl.tools.doctor"
SKEW = 1.0
"""Seconds between two nodes' clocks above which logs of ranks cannot be put in order."""
JOIN = 60.0
"""Seconds that ranks wait for each other under torchrun."""
PAIR = 25.0
"""Seconds for one round of pairs, the start of its processes and the wait for a late partner included."""


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    words = argparse.ArgumentParser(PROG, description=(__doc__ or "").splitlines()[0])
    words.add_argument("--quick", action="store_true", help="under ten seconds, no network beyond this machine")
    words.add_argument("--json", default="", metavar="FILE", help="write the findings as JSON; - for stdout")
    words.add_argument("--dir", default="", metavar="FOLDER", help="folder for checkpoints")
    words.add_argument(
        "--config", default="", metavar="FILE", help="settings of a run; all that they need must be there"
    )
    # The preflight of launch/node.sh and slurm/job.sh gives these.
    words.add_argument("--node", default=os.uname().nodename, help=argparse.SUPPRESS)
    words.add_argument("--reports", default="", help=argparse.SUPPRESS)
    words.add_argument("--pairs", default="", help=argparse.SUPPRESS)
    words.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    words.add_argument("--only-pairs", action="store_true", help=argparse.SUPPRESS)
    asked = words.parse_args(argv)
    if asked.reports:
        asked.quick, asked.dir, asked.json = True, asked.reports, f"{asked.reports}/{asked.node}.json"
    return asked


def main(argv: list[str] | None = None) -> None:
    """Prints the findings and exits with 0, 1 (something fails) or 2 (a mistake in the command line)."""
    asked = arguments(argv)
    prepare()
    ranked = doctor_machine.under_torchrun() and os.environ["WORLD_SIZE"] != "1"
    first = not ranked or os.environ["RANK"] == "0"
    try:
        if first and asked.json not in ("", "-"):
            _writable(Path(asked.json))
        if asked.dir:
            _folder(asked.dir)
        reports = everyone(asked) if ranked else [one_node(asked, False)]
    except (ConfigError, doctor_folder.FolderError) as error:
        if first:
            print(f"{PROG}: {error}", file=sys.stderr)
        sys.exit(2)
    bad = any(found["level"] == FAIL for report in reports for found in report["findings"])
    if first:
        show(reports, sys.stderr if asked.json == "-" else sys.stdout)
        text = json.dumps({"ok": not bad, "nodes": reports}, indent=1)
        if asked.json == "-":
            print(text)
        elif asked.json:
            part = _writable(Path(asked.json))
            part.write_text(text + "\n")
            os.replace(part, asked.json)
    sys.stdout.flush()
    sys.stderr.flush()
    # Groups of ranks that may be gone, and libraries with threads, have nothing more to do.
    os._exit(int(bad))


def _writable(file: Path) -> Path:
    """Checks that a file can be written; returns the one that is renamed to it once it is whole.

    Raises:
        FolderError: it cannot.
    """
    try:
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        part = file.with_name(f"{file.name}.part")
        part.touch()
        part.unlink()
    except OSError as error:
        raise doctor_folder.FolderError(f"--json {file}: it cannot be written: {error.strerror}") from error
    return part


def _folder(name: str) -> None:
    """Checks a folder by its path alone, before anything that takes time.

    Raises:
        FolderError: it cannot be written.
    """
    try:
        doctor_folder.nearest(Path(name))
    except doctor_folder.FolderError as error:
        raise doctor_folder.FolderError(f"--dir {error}") from error


def show(reports: list[dict], out) -> None:
    """Prints the lines of each node, and how many there are of each kind."""
    levels = {}
    for report in reports:
        if len(reports) > 1:
            print(f"{report['node']}:", file=out)
        found = [Finding(**each) for each in report["findings"]]
        for each in found:
            print(each.line(max(len(other.name) for other in found)), file=out)
            levels[each.level] = levels.get(each.level, 0) + 1
    print(", ".join(f"{levels[level]} {level}" for level in ("ok", "warn", "fail") if level in levels), file=out)


def one_node(asked: argparse.Namespace, ranked: bool) -> dict[str, Any]:
    """Makes the report of this node. ranked: torchrun started this process among others.

    Raises:
        ConfigError: --config cannot be read.
        FolderError: --dir cannot be written.
    """
    found: list[Finding] = []
    gpus = doctor_gpus.count()
    if not asked.only_pairs:
        found = local(asked, ranked, gpus)
    began = time.monotonic()
    pairs = []
    for number, partners in enumerate(parse_rounds(asked.pairs)):
        for pair in partners:
            if asked.node in pair:
                # Rounds have a deadline in common, however long the ones before waited for a partner that is gone.
                limit = max(3.0, began + PAIR * (number + 1) - time.monotonic())
                pairs.append(_with_partner(asked, number, pair, gpus, limit))
    return {"node": asked.node, "gpus": gpus, "findings": [each._asdict() for each in found], "pairs": pairs}


def local(asked: argparse.Namespace, ranked: bool, gpus: int) -> list[Finding]:
    """Runs all checks that this node can do alone."""
    config = from_command_line(["--config", asked.config], PROG).config if asked.config else None
    engine = config.rollout.engine if config else ""
    found = [python(), doctor_software.requirements(), doctor_software.torch_version()]
    # Without torch, the lines that ask it are left out.
    torch_imports = doctor_gpus.torch_imports()
    found += [doctor_gpus.build(), *doctor_gpus.gpus(gpus)] if torch_imports else []
    found += doctor_software.engines(engine, gpus)
    found.append(doctor_software.megatron(config is not None and config.policy.backend == "megatron"))
    found += [doctor_software.triton(gpus), doctor_machine.shared_memory(gpus > 1), *doctor_machine.limits()]
    found += [doctor_machine.leftovers(ranked), doctor_machine.threads(ranked, gpus), doctor_machine.own_name()]
    found.append(doctor_machine.sandbox())
    found += doctor_settings.settings(config, gpus, asked.quick) if config and torch_imports else []
    if not asked.quick:
        found += [doctor_software.flash_attention(), doctor_machine.hub()]
    folder = Path(asked.dir) if asked.dir else run_folder(config) if config else Path("runs")
    try:
        found += doctor_folder.folder(folder, 8 if asked.quick else 128)
    except doctor_folder.FolderError as error:
        if asked.dir:
            raise doctor_folder.FolderError(f"--dir {error}") from error
        found.append(fail("disk", str(error), "give a --run.dir (here --dir) that can be written"))
    return found if ranked or not torch_imports else [*found, two_ranks(gpus, asked.quick)]


def two_ranks(gpus: int, quick: bool) -> Finding:
    """Measures between two ranks of this machine, over NCCL where there are two GPUs, else over gloo."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    before = {name: os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME",)}
    # The loopback is always there, whatever address the machine's own name has.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        mine = gpus if gpus >= 2 else 0
        found = doctor_ranks.together(0, 2, 2, ("127.0.0.1", port), mine, 4 if quick else 64, 20.0 if quick else 60.0)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return bandwidth("two ranks", found)


def bandwidth(name: str, found: doctor_ranks.Measured) -> Finding:
    """Makes the finding for what ranks measured."""
    if found.error:
        fix = "NCCL_DEBUG=INFO (GPUs) or TORCH_DISTRIBUTED_DEBUG=DETAIL says more; look at the lines above first"
        return fail(name, found.error, fix)
    said = f"all-reduce {found.all_reduce:.2f} GB/s, all-to-all {found.all_to_all:.2f} GB/s"
    return ok(name, f"{said} over {found.backend}, {found.ranks} ranks, numbers right")


def clocks(found: doctor_ranks.Measured) -> Finding:
    """Makes the finding for the clocks of several nodes."""
    said = f"at most {found.clock:.2f} s apart"
    fix = "run chrony or ntpd on every node: times in the logs of ranks cannot be compared"
    return warn("clocks", said, fix) if found.clock > SKEW else ok("clocks", said)


# ── several nodes ────────────────────────────────────────────────────────────


def everyone(asked: argparse.Namespace) -> list[dict]:
    """Returns the reports of all nodes on every rank; the first rank of each looks at its node. Collective.

    Raises:
        FolderError, ConfigError: as `one_node`, on every rank.
    """
    import torch
    import torch.distributed as dist

    from spmdrl.spmd.exchange import all_gather_text
    from spmdrl.spmd.network import choose_interface

    chosen = choose_interface()
    local_rank, problem, report = int(os.environ["LOCAL_RANK"]), "", {}
    try:
        report = one_node(asked, True) if local_rank == 0 else {}
    except (ConfigError, doctor_folder.FolderError) as error:
        problem = str(error)
    gpus = doctor_gpus.count()
    cuda = gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", timeout=timedelta(seconds=JOIN))
    told = [json.loads(text) for text in all_gather_text(json.dumps([report, problem, cuda]), dist.group.WORLD)]
    if wrong := next((each[1] for each in told if each[1]), ""):
        raise doctor_folder.FolderError(wrong)
    alike = all(each[2] for each in told)
    group = dist.new_group(backend="nccl") if alike else dist.group.WORLD
    found = doctor_ranks.measure(group, device if alike else torch.device("cpu"), 4 if asked.quick else 64)
    reports = [each[0] for each in told if each[0]]
    shared = [bandwidth("all ranks", found), clocks(found)]
    if chosen:
        shared.append(ok("network", chosen.removeprefix("network: ")))
    reports[0]["findings"] += [each._asdict() for each in shared]
    return reports


def _with_partner(asked: argparse.Namespace, number: int, pair: tuple[str, str], gpus: int, limit: float) -> dict:
    """Measures between this node and another one of the preflight."""
    from spmdrl.spmd.network import NAMES, choose_interface

    here = int(os.environ.get("NPROC") or max(1, gpus))
    given = {name: os.environ.get(name) for name in NAMES}
    os.environ |= {"WORLD_SIZE": str(2 * here), "LOCAL_WORLD_SIZE": str(here)}
    other = pair[1 - pair.index(asked.node)]
    os.environ["MASTER_ADDR"] = other
    where = (pair[0], port_of(asked.port, asked.pairs, number, pair))
    try:
        network = choose_interface()
        mine = pair.index(asked.node) * here
        found = doctor_ranks.together(mine, here, 2 * here, where, gpus, 16 if gpus == 0 else 256, limit)
    except ValueError as error:
        network, found = "", doctor_ranks.Measured(2 * here, "", error=str(error))
    finally:
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
            os.environ.pop(name, None)
        for name, value in given.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    return found.as_json() | {"with": other, "round": number, "network": network}
