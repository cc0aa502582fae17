"""Reads a teacher's most likely tokens from files, so that the teacher does not have to run.

T: tokens in a batch; L: tokens in a sequence; M: trained tokens in a sequence; K: most likely tokens per position.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from spmdrl.config import fields
from spmdrl.config.sft import SFTConfig
from spmdrl.data.batch import Batch
from spmdrl.data.mixture import Key, Mixture
from spmdrl.data.placeholders import COLUMN, distinct_tokens
from spmdrl.health.status import tick
from spmdrl.hub.resolve import resolve
from spmdrl.policy.objectives.distillation import TargetReader, build_reader
from spmdrl.session.session import Session
from spmdrl.spmd.exchange import all_reduce
from spmdrl.supervised.build import Start
from spmdrl.supervised.rows import encoded, first_lines
from spmdrl.supervised.stored import NoNumbersError, Stored, indexed, read_manifest, row_parts, tokens_of
from spmdrl.supervised.teacher import NEEDED, identity, weights_digest
from spmdrl_kernels.divergence import LEAST_REST, log_of_rest

SUM = 1e-2
"""Maximum accepted log of the sum of K probabilities. It exceeds 0 to allow for bfloat16 rounding."""


class StoredTeacher:
    """The teacher's log p from the files of `--teacher.read`. Implements `Precomputed`; `fill` only checks the rows."""

    def __init__(self, session: Session[SFTConfig], begun: Start):
        """Open the files.

        Raises:
            ValueError: the files are damaged, do not match the `--teacher` settings, or were written by another teacher
                or for another tokenizer.
        """
        cfg, self.session, self.begun = session.cfg, session, begun
        self.folder = Path(cfg.teacher.read).expanduser()
        self.name = f"--teacher.read {self.folder}"
        self.manifest = read_manifest(self.folder, "--teacher.read")
        self.stored = Stored(self.folder, self.manifest, "--teacher.read", NEEDED)
        for name, kind in (("temperature", int | float), ("vocab", int)):
            if not isinstance(self.manifest.get(name, 1), kind):
                raise ValueError(f"{self.name}: its manifest.json has {name} {self.manifest[name]!r}; write a number")
        reader = build_reader(cfg.teacher, "teacher", [cfg.model.path], cfg.model)
        self.reader = replace(reader, vocab=min(reader.vocab, self.manifest.get("vocab", reader.vocab)))
        self._check()

    def _check(self) -> None:
        cfg, found = self.session.cfg, self.manifest
        chosen, shape = cfg.teacher, self.stored.shape("logp")
        if len(shape) != 2 or self.stored.shape("ids") != shape:
            raise ValueError(
                f"{self.name}: ids and logp must have the same shape [tokens, K], but have {self.stored.shape('ids')} "
                f"and {shape}"
            )
        if chosen.top_k > shape[1]:
            raise ValueError(
                f"--teacher.top-k {chosen.top_k}: {self.folder} has fewer tokens for each position, {shape[1]}; use "
                f"{shape[1]} or fewer, or write the folder again with more"
            )
        if (temperature := found.get("temperature", 1.0)) != chosen.temperature:
            raise ValueError(
                f"--teacher.temperature {chosen.temperature:g}: {self.folder} was written at {temperature:g}; "
                "use that temperature, or write the folder again"
            )
        tokenizer = identity(cfg, self.begun)["tokenizer"]
        if found.get("tokenizer", tokenizer) != tokenizer:
            raise ValueError(
                f"{self.name}: it was written for another tokenizer than that of --model.path {cfg.model.path}, so "
                "its token ids mean other tokens; write it with this --model.path"
            )
        if chosen.path and found.get("weights") != weights_digest(resolve(chosen.path, cfg.model.trust_remote_code)):
            raise ValueError(
                f"--teacher.path {chosen.path}: {self.folder} was written by another teacher "
                f"({found.get('teacher', 'of unknown name')}); leave --teacher.path out, or write the folder again"
            )

    def fill(self, mixture: Mixture, held_out: Any) -> None:
        """Check that the files have values for all rows of `--data.train`. Collective.

        The check is skipped if, according to the manifest, the files were written for exactly these rows.

        Raises:
            ValueError: the files lack values for some rows, or contain values that are not log-probabilities.
        """
        here = identity(self.session.cfg, self.begun)
        if all(self.manifest.get(name) == value for name, value in here.items()):
            return
        lacking, total, lines = 0, 0, list[str]()
        for drawn, places in row_parts(self.session, indexed(mixture)):
            tick()
            for place in places:
                found = encoded(drawn, range(place, place + 1), self.begun.encode).sequences
                total += len(found) > 0
                try:
                    for *_, sequence in found:
                        self._columns(distinct_tokens(sequence.tokens, sequence.columns.get(COLUMN)), sequence.mask)
                except NoNumbersError as error:
                    lacking += 1
                    lines.append(f"{drawn[place].where}: {error}")
                except ValueError as error:
                    raise ValueError(
                        f"{self.name}: numbers of {drawn[place].where}: {error}; write the folder again"
                    ) from error
        counts = all_reduce(torch.tensor([lacking, total]), "sum", self.session.world.host_group).tolist()
        if not counts[0]:
            return
        shown = first_lines(lines, self.session.world)
        raise ValueError(
            f"{self.name}: it lacks the teacher's log-probabilities for some or all trained tokens in {counts[0]} of "
            f"the {counts[1]} usable rows of --data.train. {self._why(here)}:\n  " + "\n  ".join(shown)
        )

    def _why(self, here: dict[str, Any]) -> str:
        there, other = self.manifest.get("settings", {}), []
        for name, value in here["settings"].items():
            if name in there and there[name] != value:
                both = f"{fields.shown(there[name])}, here {fields.shown(value)}"
                other.append(f"{name}: {'another text' if name == fields.flag('data.chat_template') else both}")
        if other:
            return f"It was written with {'; '.join(other)}: use the same, or write the folder again for these rows"
        return "Write the folder for these rows, or train on the rows that it was written for"

    def attach(self, key: Key, sequences: list[Any]) -> None:
        """No-op, because `read` looks up the values for a whole batch."""

    def read(self, batch: Batch, temperature: float, reader: TargetReader) -> tuple[torch.Tensor, ...]:
        """Return a batch's ids, logp and log remaining probability, like the `read` method of a teacher model.

        Raises:
            ValueError: the files lack values for a sequence, or contain values that are not log-probabilities.
        """
        assert temperature == self.session.cfg.teacher.temperature and reader == self.reader
        tick()
        lengths, columns = batch.lengths.tolist(), [self.reader.empty]
        rows = zip(tokens_of(batch), batch.token["mask"].split(lengths), strict=True)
        try:
            columns += [self._columns(tokens_L, mask_L) for tokens_L, mask_L in rows]
        except NoNumbersError as error:
            raise ValueError(
                f"{self.name}: a row of --data.train has changed since the folder was written, or is now truncated or "
                f"tokenized differently ({error}); write the folder again"
            ) from error
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}; write the folder again") from error
        return tuple(torch.cat(each) for each in zip(*columns, strict=True))

    def _columns(self, tokens_L: torch.Tensor, mask_L: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return a sequence's ids [L, K], logp [L, K] and log of the total probability of all other tokens [L].

        All values are 0 where the mask is False.
        """
        names = (*NEEDED, "rest") if "rest" in self.stored.names else NEEDED
        ids_LK, logp_LK, *rest = self.stored.columns(tokens_L, mask_L, names)
        none = self.reader.empty
        ids_MK, logp_MK = ids_LK[mask_L].to(none[0].dtype), logp_LK[mask_L].to(none[1].dtype)
        rest_M = rest[0][mask_L].to(none[2].dtype) if rest else None
        self._check_numbers(ids_MK, logp_MK, rest_M)
        if bool((logp_MK[:, 1:] > logp_MK[:, :-1]).any()):
            logp_MK, order_MK = torch.sort(logp_MK, dim=1, descending=True, stable=True)
            ids_MK = ids_MK.gather(1, order_MK)
        k = self.reader.top_k
        if rest_M is None:
            rest_M = log_of_rest(logp_MK[:, :k])
        else:
            # If the K tokens have all the probability mass, the remaining probability is 0 and its log is -inf, but the
            # divergences need a finite number.
            rest_M = rest_M.clamp(min=math.log(-math.expm1(LEAST_REST)))
            rest_M = torch.logsumexp(torch.cat([logp_MK[:, k:], rest_M[:, None]], 1), 1)
        out = []
        for value_M, like in zip((ids_MK[:, :k], logp_MK[:, :k], rest_M), none, strict=True):
            column = like.new_zeros(len(tokens_L), *like.shape[1:])
            column[mask_L] = value_M
            out.append(column)
        return tuple(out)

    def _check_numbers(self, ids_MK: torch.Tensor, logp_MK: torch.Tensor, rest_M: torch.Tensor | None) -> None:
        if not ids_MK.numel():
            return
        vocab, ordered_MK = self.reader.vocab, ids_MK.sort(1).values
        problem = ""
        if int(ordered_MK.min()) < 0 or int(ordered_MK.max()) >= vocab:
            problem = (
                f"ids go from {int(ids_MK.min())} to {int(ids_MK.max())}, but the tokens that both models share go "
                f"from 0 to {vocab - 1}"
            )
        elif bool((ordered_MK[:, 1:] == ordered_MK[:, :-1]).any()):
            problem = "ids has a token twice at the same position"
        elif not bool(logp_MK.isfinite().all()) or float(logp_MK.logsumexp(1).max()) > SUM:
            problem = "logp are not natural logarithms of probabilities that sum to at most 1"
        elif rest_M is not None and not float(torch.logaddexp(logp_MK.logsumexp(1), rest_M).max()) <= SUM:
            problem = "rest is not the log of the remaining probability: together with logp it sums to more than 1"
        if problem:
            raise ValueError(problem)
