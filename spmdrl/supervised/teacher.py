"""Writes a teacher's most likely tokens to files, so that a student can be distilled without running the teacher."""

import hashlib
import json
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spmdrl.config.dump import to_dict
from spmdrl.config.fields import flag
from spmdrl.config.resume import flat
from spmdrl.config.sft import SFTConfig
from spmdrl.config.template import DATE, template_kwargs
from spmdrl.data.batch import Batch
from spmdrl.data.chat import Today, template_text
from spmdrl.health.preempt import PreemptedError
from spmdrl.hub.resolve import named, resolve
from spmdrl.policy.objectives.distillation import build_reader
from spmdrl.session.session import Session
from spmdrl.spmd.exchange import all_reduce
from spmdrl.supervised.build import Start, digest, frozen
from spmdrl.supervised.rows import open_mixture, pack
from spmdrl.supervised.stored import MANIFEST, Stored, indexed, read_manifest, wait, write

NEEDED = ("ids", "logp")
NOT_OF_ROWS = (
    *("data.rows_per_step", "data.epochs", "data.shuffle", "data.eval", "data.max_refused", "data.chat_template"),
)
"""`--data` settings that `identity` omits because they do not affect the tokens of a row. The exception is
`data.chat_template`, for which `identity` stores a hash of the template text instead."""
PART = 2**12
"""Maximum number of bytes to hash from the start of each tensor, and again from its middle."""


@dataclass
class Written:
    """A job without steps, returned once the teacher's files are written."""

    def steps(self) -> tuple[()]:
        """Return no steps."""
        return ()

    def finish(self) -> None:
        """Do nothing, because there is nothing to save."""

    def leave(self, left: PreemptedError) -> None:
        """Do nothing, because there is nothing to save."""

    def close(self) -> None:
        """Do nothing, because there is nothing to close."""


def write_teacher(session: Session[SFTConfig], begun: Start) -> Written:
    """Write the teacher's most likely tokens to `--teacher.write`, unless they are already there. Collective.

    Raises:
        ValueError: teacher and student have different tokenizers; or the folder was written by another teacher, or for
            other rows or settings.
    """
    cfg, world, path = session.cfg, session.world, session.cfg.teacher.path
    folder, trust = Path(cfg.teacher.write).expanduser(), cfg.model.trust_remote_code
    with named("--teacher.path"):
        reader = build_reader(cfg.teacher, "teacher", [cfg.model.path, path], cfg.model)
        facts = identity(cfg, begun) | {"weights": weights_digest(resolve(path, trust))}
    facts |= {"top_k": reader.top_k, "temperature": cfg.teacher.temperature, "vocab": reader.vocab}
    there = torch.tensor([int((folder / MANIFEST).is_file())])
    if all_reduce(there, "max", world.host_group).item():
        found = read_manifest(folder, "--teacher.write")
        if odd := [name for name, value in facts.items() if found.get(name) != value]:
            raise ValueError(
                f"--teacher.write {folder}: it was written with other values of {', '.join(odd)}: use another "
                "folder, or delete it"
            )
        session.note(f"{folder} is written already")
        return Written()
    if world.is_first:
        folder.mkdir(parents=True, exist_ok=True)
    wait(world)
    teacher = frozen(session, path, "--teacher.path")
    sources = indexed(open_mixture(cfg))
    session.note(f"number of rows that the teacher reads: {sum(map(len, sources))}")

    def numbers(batch: Batch) -> dict[str, torch.Tensor]:
        found = teacher.read(batch, cfg.teacher.temperature, reader) or reader.empty
        return dict(zip(("ids", "logp", "rest"), found, strict=True))

    packed = partial(pack, placeholder=begun.placeholder)
    write(session, sources, begun.encode, packed, numbers, folder, facts | {"teacher": path}, cfg.data.max_refused)
    if world.is_first:
        manifest = read_manifest(folder, "--teacher.write")
        Stored(folder, manifest, "--teacher.write", NEEDED)
        count = sum(manifest["files"].values())
        session.note(f"{folder} holds the teacher's most likely tokens ({reader.top_k} a position; sequences: {count})")
    wait(world)
    return Written()


def identity(cfg: SFTConfig, begun: Start) -> dict[str, Any]:
    """Return the hashes and settings that determine the rows' tokens, as JSON values."""
    template = template_text(cfg.data.chat_template) or getattr(begun.tokenizer, "chat_template", None)
    values = {name: value for name, value in flat(to_dict(cfg)).items() if name.startswith("data.")}
    values = {flag(name): value for name, value in values.items() if name not in NOT_OF_ROWS}
    values |= {flag("sft.train_on"): cfg.sft.train_on, flag("data.chat_template"): _hash(template)}
    if DATE in str(template):
        day = template_kwargs(cfg.data).get(DATE) or (Today.first or date.today()).isoformat()
        values[f"the date in the chat template ({flag('data.template_kwargs')} {DATE})"] = day
    return {
        "tokenizer": _hash(sorted(begun.tokenizer.get_vocab().items())),
        # This hash covers the tokenization rules and the length to which rows are truncated.
        "reading": _hash([_rules(begun.tokenizer), begun.tokenizer.eos_token_id, begun.longest]),
        "sources": digest(cfg),
        "settings": json.loads(json.dumps(values)),
    }


def _rules(tokenizer: Any) -> str:
    """Return the rules of a fast tokenizer as text, or the class name of any other tokenizer."""
    rules = getattr(tokenizer, "backend_tokenizer", None)
    return rules.to_str() if rules is not None else type(tokenizer).__name__


def _hash(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def weights_digest(folder: Path) -> str:
    """Return a hash of a model's config and of some bytes of each tensor.

    Raises:
        ValueError: a file is not valid safetensors.
    """
    found = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            try:
                data = 8 + int.from_bytes(file.read(8), "little")
                if data > path.stat().st_size:
                    raise ValueError("its header is longer than the file")
                tensors = json.loads(file.read(data - 8))
                tensors.pop("__metadata__", None)
                for name, tensor in sorted(tensors.items()):
                    found.update(f"{name} {tensor['dtype']} {tensor['shape']}".encode())
                    begin, end = tensor["data_offsets"]
                    for place in (begin, (begin + end) // 2):
                        file.seek(data + place)
                        found.update(file.read(min(PART, end - place)))
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                raise ValueError(f"{path} is not a safetensors file ({type(error).__name__}: {error})") from error
    return found.hexdigest()[:16]
