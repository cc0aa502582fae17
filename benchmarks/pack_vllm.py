"""Packs vLLM for a machine with an H100 and no network, to which one transfer carries at most 64 MiB.

    python benchmarks/pack_vllm.py [--out .vllm] [--wheels FOLDER] [--only NAME ...] [--original NAME ...]
    python benchmarks/pack_vllm.py --unpack .vllm TARGET     there; then PYTHONPATH=TARGET
    python benchmarks/pack_vllm.py --check                   there, with that PYTHONPATH: imports the engine's modules

Packing downloads vLLM's CUDA wheel and the wheels that a machine with torch, transformers and the usual packages lacks
(WHEELS), about 300 MB, or takes them from `--wheels`. It keeps vLLM's Python files and four libraries. These keep
machine code for one architecture only (`_fatbin.py`), so kernels without such code, as those for 4-bit weights, do not
run. Flash-attention 2 is left out, because an H100 runs version 3. The same wheels give the same bytes. The folder has
a manifest with the checksum of every packed and every unpacked file.

`--original` takes libraries unchanged and `--only` packs some parts alone, for a machine on which a changed library
does not load. What does not fit into one transfer goes into further folders (.vllm-2); unpack each into the same
target. Unpacking needs Python's standard library alone.
"""

import argparse
import ast
import hashlib
import importlib
import importlib.metadata
import io
import json
import lzma
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks._fatbin import pruned  # noqa: E402

ARCH = 90
PYTHON, TORCH = "3.12", "2.11.0"
VLLM = "0.25.1"
WHEELS = {
    "vllm": VLLM,
    "annotated-types": "0.8.0",
    "apache-tvm-ffi": "0.1.15.post2",
    "cachetools": "8.0.2",
    "cbor2": "6.3.0",
    "compressed-tensors": "0.17.0",
    "distro": "1.9.0",
    "fastapi": "0.135.0",
    "llguidance": "1.7.6",
    "loguru": "0.7.3",
    "msgspec": "0.22.0",
    "openai": "2.44.0",
    "openai-harmony": "0.0.8",
    "partial-json-parser": "0.2.1.1.post7",
    "pybase64": "1.5.1",
    "pydantic": "2.14.4",
    "pydantic-core": "2.50.5",
    "pyzmq": "27.3.0",
    "sniffio": "1.3.1",
    "starlette": "1.10.0",
    "typing-extensions": "4.16.0",
    "typing-inspection": "0.4.5",
    "xgrammar": "0.2.8",
}
"""Package -> version. All but vLLM are what `import vllm` needs beyond the packages of a usual machine for PyTorch."""
LIBRARIES = {
    "_C_stable_libtorch": "vllm/_C_stable_libtorch.abi3.so",
    "_moe_C_stable_libtorch": "vllm/_moe_C_stable_libtorch.abi3.so",
    "_vllm_fa3_C": "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
    "cumem_allocator": "vllm/cumem_allocator.abi3.so",
}
SMALL = ("vllm/spinloop.abi3.so", "vllm/fs_io_C.abi3.so")
"""vLLM's libraries without device code that are packed with the Python files."""
KEPT = (".py", ".json", ".jinja", ".typed", "METADATA", "entry_points.txt")
PLATFORMS = ["manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in (17, 27, 28, 31, 34, 35))]
LIMIT, MARGIN = 64 << 20, 2 << 20
"""Bytes of one transfer, and of those the bytes that stay free."""
MANIFEST = "manifest.json"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# ── packing ──────────────────────────────────────────────────────────────────


def download(folder: Path) -> None:
    """Download the wheels that `folder` lacks."""
    for name, version in WHEELS.items():
        if wheel_of(folder, name, version):
            continue
        command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp"]
        command += [*(f"--platform={platform}" for platform in PLATFORMS), "-d", str(folder), f"{name}=={version}"]
        if subprocess.run(command, check=False).returncode:
            raise SystemExit(f"{name}=={version} could not be downloaded; put its wheel into a folder for --wheels")


def wheel_of(folder: Path, name: str, version: str) -> Path | None:
    return next(iter(sorted(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"))), None)


def wheels_in(folder: Path) -> dict[str, Path]:
    """Return the wheel of every package, downloaded if `folder` lacks it."""
    folder.mkdir(parents=True, exist_ok=True)
    download(folder)
    found = {name: wheel_of(folder, name, version) for name, version in WHEELS.items()}
    if lacking := [name for name, path in found.items() if path is None]:
        raise SystemExit(f"{folder} lacks wheels of {', '.join(lacking)}")
    return {name: path for name, path in found.items() if path}


def python_files(wheels: dict[str, Path]) -> dict[str, bytes]:
    """Return the files of the wheels by their paths; of vLLM only Python files, tables and small libraries."""
    files = {}
    for name, path in wheels.items():
        with zipfile.ZipFile(path) as wheel:
            for member in wheel.namelist():
                taken = member.endswith(KEPT) or member in SMALL if name == "vllm" else not member.endswith("/RECORD")
                if taken and not member.endswith("/"):
                    files[member] = wheel.read(member)
    return files


def tar_of(files: dict[str, bytes]) -> bytes:
    """Return a tar archive that depends on names and contents alone."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name in sorted(files):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(files[name]), 0o644
            tar.addfile(member, io.BytesIO(files[name]))
    return out.getvalue()


def room(repository: Path) -> int:
    """Return the bytes that one transfer has left beside the repository's own files and the wheels in `.whl`."""
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=repository, capture_output=True, check=True).stdout
    wheels = sum(path.stat().st_size for path in (repository / ".whl").glob("*"))
    print(f"{len(archive):>12,} bytes of the repository\n{wheels:>12,} bytes of the wheels in .whl")
    return LIMIT - MARGIN - len(archive) - wheels


def pieces(name: str, data: bytes, limit: int) -> dict[str, bytes]:
    """Cut a part that is larger than a transfer into equal pieces."""
    count = -(-len(data) // limit)
    step = -(-len(data) // max(count, 1))
    if count <= 1:
        return {name: data}
    return {f"{name}.{i + 1}-of-{count}": data[i * step : (i + 1) * step] for i in range(count)}


def divided(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Divide parts among as few transfers as a first fit of the largest gives."""
    out: list[list[str]] = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        fitting = [names for names in out if sum(sizes[n] for n in names) + sizes[name] <= limit]
        if not fitting:
            out.append([])
        (fitting or out[-1:])[0].append(name)
    return out


def write(folder: Path, parts: dict[str, tuple[bytes, dict[str, str]]]) -> None:
    """Write parts and manifest. parts: file name -> its packed bytes, and path -> checksum of each unpacked file."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    rows = {name: {"sha256": sha256(data), "files": files} for name, (data, files) in sorted(parts.items())}
    for name, (data, _) in parts.items():
        (folder / name).write_bytes(data)
    about = {"vllm": VLLM, "python": PYTHON, "torch": TORCH, "arch": ARCH, "parts": rows}
    text = json.dumps(about, indent=1, sort_keys=True) + "\n"
    (folder / MANIFEST).write_text(text)
    print(f"{folder}: sha256 of the manifest {sha256(text.encode())}")


def pack(out: Path, wheels: dict[str, Path], only: list[str], original: list[str], limit: int) -> list[Path]:
    """Pack the parts into `out` and, if one transfer cannot take all, into folders beside it; return the folders."""
    contents: dict[str, tuple[bytes, dict[str, str]]] = {}
    if not only or "python" in only:
        files = python_files(wheels)
        contents["python.tar.xz"] = tar_of(files), {name: sha256(data) for name, data in sorted(files.items())}
    for name, path in LIBRARIES.items():
        if only and name not in only:
            continue
        with zipfile.ZipFile(wheels["vllm"]) as wheel:
            data = wheel.read(path)
        if name not in original:
            found = pruned(data, ARCH)
            data = found.data
            print(f"{name}: {found.fat_binaries} fat binaries, of which {found.without} have no code for sm_{ARCH}")
        contents[f"{name}.xz"] = data, {path: sha256(data)}
    # The checksum of each stream is left out, because the manifest has one for every file.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        packed = pool.map(lambda part: lzma.compress(part[0], check=lzma.CHECK_NONE), contents.values())
        whole = dict(zip(contents, packed, strict=True))
    parts = {}
    for name, data in whole.items():
        print(f"{len(data):>12,} bytes of {name}, unpacked {len(contents[name][0]):,}")
        parts |= {piece: (bytes_, contents[name][1]) for piece, bytes_ in pieces(name, data, limit).items()}
    folders = []
    for i, names in enumerate(divided({name: len(data) for name, (data, _) in parts.items()}, limit)):
        folders.append(out if not i else out.with_name(f"{out.name}-{i + 1}"))
        write(folders[-1], {name: parts[name] for name in names})
    return folders


# ── unpacking ────────────────────────────────────────────────────────────────


def unpack(folder: Path, target: Path) -> list[str]:
    """Unpack one folder into `target`; return what is missing or corrupt, one line each."""
    if not (folder / MANIFEST).exists():
        return [f"{folder / MANIFEST} is missing; pack it with: python benchmarks/pack_vllm.py --out {folder}"]
    parts = _parts(folder / MANIFEST)
    if not parts:
        return [f"{folder / MANIFEST} is corrupt; carry it again"]
    with ThreadPoolExecutor(len(parts)) as pool:
        return sum(pool.map(lambda name: _part(folder / name, parts[name], target), parts), [])


def _parts(manifest: Path) -> dict[str, dict]:
    """Return the rows of a manifest by their file; none if it is not as `write` leaves it."""
    try:
        parts = json.loads(manifest.read_bytes())["parts"]
        whole = all(isinstance(row["sha256"], str) and isinstance(row["files"], dict) for row in parts.values())
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}
    return parts if whole else {}


def _part(path: Path, row: dict, target: Path) -> list[str]:
    if not path.exists():
        return [f"{path} is missing; carry it again"]
    data = path.read_bytes()
    if sha256(data) != row["sha256"]:
        return [f"{path} is corrupt: sha256 {sha256(data)} instead of {row['sha256']}; carry it again"]
    name, data = _joined(path.name, data, target / ".pieces")
    if data is None:
        print(f"{name} waits for its other pieces, which are in other folders")
        return []
    data = lzma.decompress(data)
    if name.endswith(".tar.xz"):
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            tar.extractall(target, filter="data")
    else:
        (file,) = row["files"]
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        (target / file).write_bytes(data)
    wrong = [file for file, known in row["files"].items() if sha256((target / file).read_bytes()) != known]
    return [f"{target / file} differs from the manifest; is the disk full?" for file in wrong]


def _joined(name: str, data: bytes, folder: Path) -> tuple[str, bytes | None]:
    """Return a part's name and bytes. A piece of one is put into `folder`; without all pieces the bytes are None."""
    found = re.fullmatch(r"(.+)\.\d+-of-(\d+)", name)
    if not found:
        return name, data
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    files = [folder / f"{found[1]}.{i + 1}-of-{found[2]}" for i in range(int(found[2]))]
    whole = b"".join(file.read_bytes() for file in files) if all(file.exists() for file in files) else None
    return found[1], whole


# ── checking ─────────────────────────────────────────────────────────────────


def engine_modules() -> list[str]:
    """Return the modules of vLLM that the engine imports on a GPU, and those that it reaches through them."""
    names = {
        *(f"vllm.{path.removeprefix('vllm/').split('.')[0].replace('/', '.')}" for path in LIBRARIES.values()),
        "vllm.v1.worker.gpu_worker",
        "vllm.v1.worker.gpu.model_runner",
        "vllm.v1.worker.gpu_model_runner",
        "vllm.v1.attention.backends.flash_attn",
        "vllm.device_allocator.cumem",
        "vllm.distributed.device_communicators.cuda_communicator",
        "vllm.compilation.backends",
        "vllm.model_executor.layers.quantization.fp8",
        "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
        "vllm.model_executor.models.llama",
        "vllm.model_executor.models.qwen2",
        "vllm.model_executor.models.qwen3_moe",
    }
    for path in (ROOT / "spmdrl" / "engines" / "vllm").glob("*.py"):
        if path.name != "cpu.py":
            tree = ast.walk(ast.parse(path.read_text()))
            imports = [node.module or "" for node in tree if isinstance(node, ast.ImportFrom)]
            names |= {name for name in imports if name.split(".")[0] == "vllm" and "cpu_communicator" not in name}
    return sorted(names)


def check() -> list[str]:
    """Import what the engine imports from vLLM; return one line for each failure."""
    wrong = []
    for name in engine_modules():
        try:
            importlib.import_module(name)
        except Exception as error:  # A library may fail in any way.
            wrong.append(f"{name}: {type(error).__name__}: {error}")
    if not wrong:
        from vllm import LLM
        from vllm.vllm_flash_attn.flash_attn_interface import FA3_AVAILABLE

        if not FA3_AVAILABLE:
            wrong.append("vllm.vllm_flash_attn: flash-attention 3 is not available")
        print(f"{LLM.__module__} and {len(engine_modules())} modules of vLLM {importlib.metadata.version('vllm')}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / ".vllm", help="folder of the packed files")
    parser.add_argument("--wheels", type=Path, help="folder of wheels; missing ones are downloaded into it")
    parser.add_argument("--only", nargs="+", default=[], choices=["python", *LIBRARIES], help="pack these parts alone")
    parser.add_argument("--original", nargs="+", default=[], choices=[*LIBRARIES], help="take these unchanged")
    parser.add_argument("--unpack", nargs=2, type=Path, metavar=("FOLDER", "TARGET"))
    parser.add_argument("--check", action="store_true", help="import vLLM's modules from PYTHONPATH")
    options = parser.parse_args()
    if options.unpack:
        folder, target = options.unpack
        wrong = unpack(folder, target)
        here = f"{sys.version_info.major}.{sys.version_info.minor}"
        if here != PYTHON:
            wrong.append(f"the packages are for Python {PYTHON}, and this is Python {here}")
        print(*(wrong or [f"export PYTHONPATH={target.resolve()}"]), sep="\n")
        return bool(wrong)
    if options.check:
        wrong = check()
        print(*wrong, sep="\n")
        return bool(wrong)
    with tempfile.TemporaryDirectory() as work:
        wheels, limit = wheels_in(options.wheels or Path(work)), room(ROOT)
        folders = pack(options.out, wheels, options.only, options.original, limit)
    for path in folders:
        nbytes = sum(file.stat().st_size for file in path.iterdir())
        print(f"{nbytes:>12,} bytes in {path}, of {limit:,} that one transfer has left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
