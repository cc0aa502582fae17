"""Sandboxes in containers (docker, apptainer). Each container runs a zygote without network or privileges.

The image provides the system and Python 3.11 or later. Programs see no files of this machine except those of the
package `spmdrl_sandbox`. The container isolates a program and limits its resources. A container does not isolate the
programs inside it from each other, so each program runs in a separate container. An engine is used only if the user
names it.
"""

import os
import shutil
from pathlib import Path

from spmdrl_sandbox.base import SandboxError, Start
from spmdrl_sandbox.places import ENVIRONMENT, FLAGS, HERE, USER, ZYGOTE

IMAGE = "python:3.12-slim"
"""Default image, from Docker Hub. apptainer loads it as `docker://IMAGE` and also accepts the path of an image."""
PIDS = 64
"""Maximum number of processes in a container."""
MEMORY_MIB = 4096
"""Memory limit of a container in MiB."""
INSIDE = "/sandbox/spmdrl_sandbox"
FOLDER = "/tmp"
"""Working folder of programs, an in-memory file system."""
_KEPT = ("PATH", "HOME", "DOCKER_HOST", "DOCKER_CONFIG", "XDG_RUNTIME_DIR", "APPTAINER_CACHEDIR", "APPTAINER_TMPDIR")
"""Environment variables that are passed to the engines' clients, which need them, but not to containers."""


def docker(image: str = IMAGE) -> Start:
    """Return the command that starts a zygote with docker, or with podman if it is installed as `docker`.

    Raises:
        SandboxError: docker is not installed.
    """
    words = docker_words(_found("docker"), image)
    return Start(words, f"docker ({image})", "start the docker daemon, and pull the image", once=True)


def apptainer(image: str = IMAGE) -> Start:
    """Return the command that starts a zygote with apptainer.

    Raises:
        SandboxError: apptainer is not installed.
    """
    words = apptainer_words(_found("apptainer"), image)
    fix = "pull the image, and allow user namespaces or install apptainer set-user-ID"
    return Start(words, f"apptainer ({image})", fix, once=True)


def docker_words(program: str, image: str) -> list[str]:
    """Return the words of the command that starts a zygote with docker."""
    words = [*_client(), program, "run", "--rm", "--interactive", "--network", "none", "--read-only"]
    words += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--pids-limit", str(PIDS)]
    words += ["--memory", f"{MEMORY_MIB}m", "--memory-swap", f"{MEMORY_MIB}m", "--user", f"{USER}:{USER}", "--init"]
    words += ["--tmpfs", f"{FOLDER}:rw,nosuid,nodev,size=256m,mode=1777", "--workdir", FOLDER, "--hostname", "sandbox"]
    words += ["--volume", f"{HERE}:{INSIDE}:ro", "--entrypoint", "python3"]
    for name, value in _inside().items():
        words += ["--env", f"{name}={value}"]
    return [*words, image, *_zygote()]


def apptainer_words(program: str, image: str) -> list[str]:
    """Return the words of the command that starts a zygote with apptainer. Its containers are read-only by default."""
    source = image if os.path.exists(image) or "://" in image else f"docker://{image}"
    words = [
        *_client(),
        program,
        "exec",
        "--containall",
        "--cleanenv",
        "--no-home",
        "--no-privs",
        "--no-mount",
        "hostfs",
    ]
    words += ["--net", "--network", "none", "--pids-limit", str(PIDS), "--memory", f"{MEMORY_MIB}M"]
    words += ["--hostname", "sandbox", "--bind", f"{HERE}:{INSIDE}:ro", "--pwd", FOLDER]
    for name, value in _inside().items():
        words += ["--env", f"{name}={value}"]
    return [*words, source, "python3", *_zygote()]


def _found(name: str) -> str:
    program = shutil.which(name)
    if program is None:
        raise SandboxError(f"no {name} here", f"install {name}, or leave the choice to provider='auto'")
    return str(Path(program))


def _client() -> list[str]:
    return ["env", *(f"{name}={os.environ[name]}" for name in _KEPT if name in os.environ)]


def _inside() -> dict[str, str]:
    return ENVIRONMENT | {"PYTHONPATH": "/sandbox"}


def _zygote() -> list[str]:
    return [*FLAGS, "-m", ZYGOTE, "plain", "0"]
