"""Checks whether a run can start on this machine: `python -m spmdrl.tools.doctor`.

Each line starts with ok, warn or fail; warn and fail lines end with the fix. The exit code is 1 if a check fails. Under
torchrun, rank 0 prints the reports of all nodes, and all-reduce and all-to-all are measured across all ranks instead of
two ranks on this machine.

    --quick        take less than ten seconds and use no network: do not query the hub, write less to the disk
    --json FILE    write the findings as JSON, `-` for stdout (the lines are then printed on stderr)
    --dir FOLDER   the folder for checkpoints (default: the run folder of --config, or runs)
    --config FILE  settings of a run; check that the models, prompts, files, packages and GPUs that they need exist
"""

import argparse
import errno
import json
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from spmdrl.config.fields import ConfigError
from spmdrl.config.load import from_command_line
from spmdrl.config.paths import run_folder
from spmdrl.session.environ import prepare
from spmdrl.tools import doctor_gpus, doctor_machine, doctor_ranks, doctor_settings, doctor_software
from spmdrl.tools.doctor_findings import FAIL, Finding, either, fail, ok, python
from spmdrl.tools.doctor_machine import FolderError
from spmdrl.tools.preflight import parse_rounds, port_of

PROG = "python -m spmdrl.tools.doctor"
SKEW = 1.0
"""Maximum allowed clock difference between two nodes, in seconds. If it is larger, the nodes' logs cannot be put in
order."""
JOIN = 60.0
"""How long ranks started by torchrun wait for each other, in seconds."""
PAIR = 25.0
"""Timeout in seconds for one round of the pairwise network test, including process startup and waiting for a late
partner."""


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(PROG, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="take less than ten seconds and use no network")
    parser.add_argument("--json", default="", metavar="FILE", help="write the findings as JSON; - for stdout")
    parser.add_argument("--dir", default="", metavar="FOLDER", help="folder for checkpoints")
    parser.add_argument(
        "--config", default="", metavar="FILE", help="settings of a run; everything that they need must exist"
    )
    # Only the preflight of launch/node.sh and slurm/job.sh passes the options below.
    parser.add_argument("--node", default=os.uname().nodename, help=argparse.SUPPRESS)
    parser.add_argument("--reports", default="", help=argparse.SUPPRESS)
    parser.add_argument("--pairs", default="", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--only-pairs", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.reports:
        options.quick, options.dir, options.json = True, options.reports, f"{options.reports}/{options.node}.json"
    return options


def main(argv: list[str] | None = None) -> None:
    """Print the findings and exit with 0, 1 (a check failed) or 2 (invalid command line)."""
    options = _arguments(argv)
    prepare()
    ranked = doctor_machine.under_torchrun() and os.environ["WORLD_SIZE"] != "1"
    first = not ranked or os.environ["RANK"] == "0"
    try:
        if first and options.json not in ("", "-"):
            _writable(Path(options.json))
        if options.dir:
            with _of_flag():
                doctor_machine.nearest(Path(options.dir))
        reports = _all_nodes(options) if ranked else [_one_node(options, False)]
    except (ConfigError, FolderError) as error:
        if first:
            print(f"{PROG}: {error}", file=sys.stderr)
        sys.exit(2)
    bad = any(found["level"] == FAIL for report in reports for found in report["findings"])
    if first:
        _show(reports, sys.stderr if options.json == "-" else sys.stdout)
        text = json.dumps({"ok": not bad, "nodes": reports}, indent=1)
        if options.json == "-":
            print(text)
        elif options.json:
            part = _writable(Path(options.json))
            part.write_text(text + "\n")
            os.replace(part, options.json)
    sys.stdout.flush()
    sys.stderr.flush()
    # A regular exit would wait for process groups whose ranks may be gone, and for library threads.
    os._exit(int(bad))


def _writable(file: Path) -> Path:
    """Check that a file can be written, and return the path of a temporary file to write first and then rename.

    Raises:
        FolderError: the file cannot be written.
    """
    try:
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        part = file.with_name(f"{file.name}.part")
        part.touch()
        part.unlink()
    except OSError as error:
        raise FolderError(f"--json {file}: the file cannot be written: {error.strerror}") from error
    return part


@contextmanager
def _of_flag() -> Iterator[None]:
    """Prefix the messages of FolderErrors raised inside this context with the flag `--dir`."""
    try:
        yield
    except FolderError as error:
        raise FolderError(f"--dir {error}") from error


def _show(reports: list[dict], out) -> None:
    """Print the findings of each node, and the number of findings per level."""
    levels = Counter()
    for report in reports:
        if len(reports) > 1:
            print(f"{report['node']}:", file=out)
        found = [Finding(**each) for each in report["findings"]]
        width = max((len(each.name) for each in found), default=0)
        for each in found:
            print(each.line(width), file=out)
            levels[each.level] += 1
    print(", ".join(f"{levels[level]} {level}" for level in ("ok", "warn", "fail") if level in levels), file=out)


def _one_node(options: argparse.Namespace, ranked: bool) -> dict[str, Any]:
    """Return this node's report. ranked: whether torchrun started several ranks.

    Raises:
        ConfigError: --config cannot be read.
        FolderError: --dir cannot be written to.
    """
    gpus = doctor_gpus.count()
    found = [] if options.only_pairs else _local(options, ranked, gpus)
    began = time.monotonic()
    pairs = []
    for number, partners in enumerate(parse_rounds(options.pairs)):
        for pair in partners:
            if options.node in pair:
                # A round's deadline does not depend on how long earlier rounds waited for a partner.
                limit = max(3.0, began + PAIR * (number + 1) - time.monotonic())
                pairs.append(_with_partner(options, number, pair, gpus, limit))
    return {"node": options.node, "gpus": gpus, "findings": [each._asdict() for each in found], "pairs": pairs}


def _local(options: argparse.Namespace, ranked: bool, gpus: int) -> list[Finding]:
    """Run all checks that do not involve other nodes."""
    config = from_command_line(["--config", options.config], PROG).config if options.config else None
    engine = config.rollout.engine if config else ""
    found = [python(), doctor_software.requirements(), doctor_software.torch_version()]
    # Without torch, the checks that import it are skipped.
    torch_imports = doctor_gpus.torch_imports()
    found += [doctor_gpus.build(), *doctor_gpus.gpus(gpus)] if torch_imports else []
    found += doctor_software.engines(engine, gpus)
    found.append(doctor_software.megatron(config is not None and config.policy.backend == "megatron"))
    found += [doctor_software.triton(gpus), doctor_machine.shared_memory(gpus > 1), *doctor_machine.limits()]
    found += [doctor_machine.leftovers(ranked), doctor_machine.threads(ranked, gpus), doctor_machine.own_name()]
    found.append(doctor_machine.sandbox())
    found += doctor_settings.settings(config, gpus, options.quick) if config and torch_imports else []
    if not options.quick:
        found += [doctor_software.flash_attention(), doctor_machine.hub()]
    mib = 8 if options.quick else 128
    if options.dir:
        with _of_flag():
            found += doctor_machine.folder(Path(options.dir), mib)
    else:
        try:
            found += doctor_machine.folder(run_folder(config) if config else Path("runs"), mib)
        except FolderError as error:
            found.append(fail("disk", str(error), "give a --run.dir (here --dir) that can be written to"))
    return found if ranked or not torch_imports else [*found, _two_ranks(gpus, options.quick)]


@contextmanager
def _variables(**values: str) -> Iterator[None]:
    """Set environment variables inside this context, and restore the environment on exit."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _two_ranks(gpus: int, quick: bool) -> Finding:
    """Measure bandwidth between two ranks on this machine, with NCCL if there are two GPUs and gloo otherwise."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mine = gpus if gpus >= 2 else 0
    # Gloo uses the loopback interface, which works even if the host name has no usable address.
    with _variables(GLOO_SOCKET_IFNAME="lo"):
        found = doctor_ranks.together(0, 2, 2, ("127.0.0.1", port), mine, 4 if quick else 64, 20.0 if quick else 60.0)
    return bandwidth("two ranks", found)


def bandwidth(name: str, found: doctor_ranks.Measured) -> Finding:
    """Return a finding that reports a rank group's bandwidth and correct results, or why the measurement failed."""
    if found.error:
        fix = "fix the lines above first; NCCL_DEBUG=INFO (GPUs) or TORCH_DISTRIBUTED_DEBUG=DETAIL prints details"
        return fail(name, found.error, fix)
    state = f"all-reduce {found.all_reduce:.2f} GB/s, all-to-all {found.all_to_all:.2f} GB/s"
    return ok(name, f"{state} over {found.backend}, {found.ranks} ranks, results correct")


def clocks(found: doctor_ranks.Measured) -> Finding:
    """Return the finding about the clock difference between nodes."""
    fix = "run chrony or ntpd on every node: times in the logs of ranks cannot be compared"
    return either(found.clock > SKEW, False, "clocks", f"at most {found.clock:.2f} s apart", fix)


# ── several nodes ────────────────────────────────────────────────────────────


def _all_nodes(options: argparse.Namespace) -> list[dict]:
    """Return the reports of all nodes, on every rank. The first rank on each node runs that node's checks. Collective.

    Raises:
        FolderError: on all ranks, if --config cannot be read or --dir cannot be written to on any node.
    """
    import torch
    import torch.distributed as dist

    from spmdrl.spmd.exchange import all_gather_text
    from spmdrl.spmd.network import choose_interface

    chosen = choose_interface()
    local_rank, problem, report = int(os.environ["LOCAL_RANK"]), "", {}
    try:
        report = _one_node(options, True) if local_rank == 0 else {}
    except (ConfigError, FolderError) as error:
        problem = str(error)
    cuda = doctor_gpus.count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", timeout=timedelta(seconds=JOIN))
    texts = all_gather_text(json.dumps([report, problem, cuda]), dist.group.WORLD)
    reports, problems, on_gpus = zip(*map(json.loads, texts), strict=True)
    if wrong := next(filter(None, problems), ""):
        raise FolderError(wrong)
    group = dist.new_group(backend="nccl") if all(on_gpus) else dist.group.WORLD
    found = doctor_ranks.measure(group, device if all(on_gpus) else torch.device("cpu"), 4 if options.quick else 64)
    reports = [each for each in reports if each]
    shared = [bandwidth("all ranks", found), clocks(found)]
    if chosen:
        shared.append(ok("network", chosen.removeprefix("network: ")))
    reports[0]["findings"] += [each._asdict() for each in shared]
    return reports


def _with_partner(options: argparse.Namespace, number: int, pair: tuple[str, str], gpus: int, limit: float) -> dict:
    """Measure bandwidth between this node and its partner in a preflight pair."""
    from spmdrl.spmd.network import choose_interface

    here, place = int(os.environ.get("NPROC") or max(1, gpus)), pair.index(options.node)
    other, where = pair[1 - place], (pair[0], port_of(options.port, options.pairs, number, pair))
    with _variables(WORLD_SIZE=str(2 * here), LOCAL_WORLD_SIZE=str(here), MASTER_ADDR=other):
        try:
            network, mib = choose_interface(), 16 if gpus == 0 else 256
            found = doctor_ranks.together(place * here, here, 2 * here, where, gpus, mib, limit)
        except ValueError as error:
            network, found = "", doctor_ranks.Measured(2 * here, "", error=str(error))
    return asdict(found) | {"with": other, "round": number, "network": network}
