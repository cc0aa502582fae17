"""Scores responses with a reward model: prepares its input, locates the scored tokens, computes the scores.

Dimensions: n is the number of positions where scores are read (ends of steps or responses), and L is the number of
scores per position.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from spmdrl.algos.samples import last_sampled
from spmdrl.config.classifier import FLAG, ClassifierConfig, read_classifier
from spmdrl.config.schema import Config
from spmdrl.data.batch import Batch
from spmdrl.data.prompts import Prompt, PromptSet
from spmdrl.data.steps import step_ends, tokens_of_ends
from spmdrl.data.tree import prompt_lengths
from spmdrl.hub.folder import read_config
from spmdrl.hub.resolve import named, resolve
from spmdrl.hub.tokenizer import load_tokenizer
from spmdrl.policy.contract import Policy
from spmdrl.policy.labels import Labels, positions_of
from spmdrl.rl.retokenize import Rewriter


@dataclass
class Scores:
    """Reward-model scores for a batch's responses, all float64. Sequences without sampled tokens have score 0."""

    response_B: torch.Tensor
    """The score that enters the reward."""
    labels: dict[str, torch.Tensor] = field(default_factory=dict)
    """Maps the name of each of the model's scores to its values [B]. If steps are scored, each value is the mean over
    the response's steps."""
    steps_B: torch.Tensor | None = None
    """Number of steps per response, or None if responses are not scored per step."""
    process_T: torch.Tensor | None = None
    """Step scores, each at the last sampled token of its step; 0 elsewhere."""
    ends_T: torch.Tensor | None = None
    """1 at the last sampled token of each step, 0 elsewhere."""


@dataclass
class AtLast:
    """Reads the score at the last sampled token, or the mean score if the model gives several scores per token.

    This class is used if `--reward.model` is a model path rather than a YAML file, for cost models, and by memory
    planning (`spmdrl.plan`).
    """

    prefix: str = "the reward model"
    """Start of error messages: the flag and the path."""
    positions: int = 0
    """Maximum sequence length of the model, or 0 if unknown."""
    steps: bool = False
    """True to also return the score as a step score, with the whole response as one step."""
    names: tuple[str, ...] = ()

    def of(self, prompts: PromptSet) -> "AtLast":
        """Return an object that scores responses to other prompts, with the same settings."""
        return self

    def read(self, batch: Batch, model: Policy) -> Scores:
        """Score the responses of a batch. Collective over the model's ranks. Raises the errors of `Reading.read`."""
        check_length(batch, self.positions, self.prefix)
        last_B = last_sampled(batch.token["mask"], batch.seq_index, len(batch))
        mask_T = torch.zeros(batch.n_tokens, dtype=torch.bool)
        mask_T[last_B[last_B >= 0]] = True
        at_last = Batch(batch.lengths, dict(batch.token, mask=mask_T), batch.seq, batch.images)
        score_T = model.values(at_last)
        score_T = finite(at_last, score_T if score_T.ndim == 1 else score_T.mean(1), self.prefix, FROZEN)
        scores = Scores(at_last.sum_tokens(score_T))
        if self.steps:
            scores.process_T, scores.ends_T = torch.where(mask_T, score_T.double(), 0.0), mask_T.double()
        return scores


@dataclass
class Reading:
    """Scores responses as configured by the YAML file in `--reward.model`."""

    classifier: ClassifierConfig
    labels: Labels
    prefix: str
    """Start of error messages: the flag and the file."""
    tokenizer: Any
    """The policy's tokenizer."""
    rewriter: Rewriter | None
    """Converts responses to the reward model's tokens, or None if the model reads the policy's tokens."""
    prompts: dict[int, Prompt]
    """Prompts by index, used only if the reward model does not read the policy's tokens."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model's scores; each score becomes a reward part with that name."""
        return self.labels.names

    def of(self, prompts: PromptSet) -> "Reading":
        """Return an object that scores responses to other prompts, with the same settings."""
        if self.rewriter is not None:
            self.rewriter.check(prompts.prompts)
        return replace(self, prompts={prompt.index: prompt for prompt in prompts.prompts})

    def read(self, batch: Batch, model: Policy) -> Scores:
        """Score the responses of a batch. Collective over the ranks of the model.

        Raises:
            ValueError: a response is longer than the model can read, or a score is not finite.
        """
        seq_n, token_n, inputs, read_n = self.places(batch)
        check_length(inputs, self.labels.positions, self.prefix)
        mask_T = torch.zeros(inputs.n_tokens, dtype=torch.bool)
        mask_T[read_n] = True
        inputs = Batch(inputs.lengths, dict(inputs.token, mask=mask_T), inputs.seq, inputs.images)
        score_TL = model.values(inputs).reshape(inputs.n_tokens, self.labels.outputs)
        for score_T in score_TL.unbind(1):
            finite(inputs, score_T, self.prefix, FROZEN)
        score_nL = score_TL[read_n].double()
        if self.labels.probability:
            score_nL = torch.softmax(score_nL, 1)[:, 1:]
        score_n = score_nL @ torch.tensor(self.labels.weights, dtype=torch.float64)
        count_B = torch.bincount(seq_n, minlength=len(batch))
        mean_BL = torch.zeros(len(batch), score_nL.shape[1], dtype=torch.float64).index_add_(0, seq_n, score_nL)
        mean_BL /= count_B.clamp(min=1)[:, None]
        labels = dict(zip(self.names, mean_BL.unbind(1), strict=True))
        if not self.classifier.steps:
            whole_B = torch.zeros(len(batch), dtype=torch.float64).index_add_(0, seq_n, score_n)
            return Scores(whole_B, labels)
        process_T, ends_T = torch.zeros(2, batch.n_tokens, dtype=torch.float64)
        process_T[token_n], ends_T[token_n] = score_n, 1.0
        return Scores(
            reduced(score_n, seq_n, count_B, self.classifier.reduce), labels, count_B.double(), process_T, ends_T
        )

    def places(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, Batch, torch.Tensor]:
        """Locate the ends of steps in the policy's tokens and in the reward model's tokens.

        A response that is not scored by steps counts as one step.

        Returns:
            The index of each step's sequence in the batch, int64 [n], ascending.
            The index of each step's last sampled token in the batch, int64 [n].
            The model's input, which is the batch itself or the same responses in the model's tokens.
            The index of each step's last token in the model's input, int64 [n]. The model scores the step at this
                token.
        """
        tokens, starts = batch.token["tokens"].tolist(), (torch.cumsum(batch.lengths, 0) - batch.lengths).tolist()
        first_B = prompt_lengths(batch.lengths, batch.token["mask"]).tolist()
        last_B = last_sampled(batch.token["mask"], batch.seq_index, len(batch)).tolist()
        sampled = batch.token["mask"].tolist()
        seq_n, token_n, read_n = [], [], []
        written: list[list[int]] = []
        offset = 0
        for i, (start, first, last) in enumerate(zip(starts, first_B, last_B, strict=True)):
            if last < 0:
                # A sequence without sampled tokens becomes one dummy token, because a batch cannot have empty
                # sequences.
                written.append([0])
                offset += 1
                continue
            begin = start + first
            at, text, ends = self._steps(tokens[begin : last + 1], sampled[begin : last + 1])
            seq_n += [i] * len(at)
            token_n += [begin + place for place, _ in at]
            if self.rewriter is None:
                read_n += [begin + place for _, place in at]
                continue
            prompt = self.prompts[int(batch.seq["prompt"][i])]
            if not prompt.chat and begin > start:
                lead = self._lead(tokens[begin - 1], tokens[begin : last + 1], text)
                text, ends = lead + text, [end + len(lead) for end in ends]
            if self.classifier.steps:
                made, read = self.rewriter.stepwise(prompt, text, ends)
            else:
                made, place = self.rewriter.whole(prompt, text)
                read = [place]
            written.append(made)
            read_n += [offset + place for place in read]
            offset += len(made)
        ends = [torch.tensor(x, dtype=torch.int64) for x in (seq_n, token_n, read_n)]
        if self.rewriter is None:
            return ends[0], ends[1], batch, ends[2]
        assert not any(batch.images or ()), "`Rewriter.check` refuses prompts with images"
        lengths = torch.tensor([len(made) for made in written], dtype=torch.int64)
        flat = torch.tensor([x for made in written for x in made], dtype=torch.int64)
        seq = batch.identity | {"prompt": batch.seq["prompt"]}
        return ends[0], ends[1], Batch(lengths, {"tokens": flat}, seq), ends[2]

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _lead(self, before: int, tokens: list[int], text: str) -> str:
        """Return the leading blank of a response, which some tokenizers drop when they decode the response alone.

        before: the last token of the prompt. text: the text of `tokens`, decoded alone.
        """
        prompt, both = self._decode([before]), self._decode([before, *tokens])
        rest = both.removeprefix(prompt)
        return rest.removesuffix(text) if both.startswith(prompt) and rest.endswith(text) else ""

    def _steps(self, tokens: list[int], sampled: list[bool]) -> tuple[list[tuple[int, int]], str, list[int]]:
        """Divide a response into steps.

        Steps that end within the same token are merged.

        tokens: the response from its first sampled token to its last.

        Returns:
            For each step, the indices in `tokens` of its last sampled token and of the token that contains its last
                character.
            The text of the response.
            The character offset in the text where each step ends.
        """
        last = len(tokens) - 1
        if not self.classifier.steps:
            return [(last, last)], self._decode(tokens) if self.rewriter else "", []
        text = self._decode(tokens)
        if not text:
            return [(last, last)], text, [0]
        ends = step_ends(text, self.classifier.steps)
        holding = tokens_of_ends(self._decode, tokens, ends)
        # The end token belongs to the last step. A step must end at a token that the policy sampled.
        sampled_at = [*holding[:-1], last]
        sampled_at = [next((t for t in range(place, -1, -1) if sampled[t]), 0) for place in sampled_at]
        kept = [i for i in range(len(ends)) if i == len(ends) - 1 or sampled_at[i] != sampled_at[i + 1]]
        return [(sampled_at[i], holding[i]) for i in kept], text, [ends[i] for i in kept]


def reduced(score_n: torch.Tensor, seq_n: torch.Tensor, count_B: torch.Tensor, how: str) -> torch.Tensor:
    """Reduce each response's step scores to one score [B], or 0 for responses without steps.

    seq_n: index of each step's response, int64, ascending. count_B: number of steps per response. how: `min`, `mean`,
    `product` or `last`.
    """
    if how == "last":
        out_B = torch.zeros(len(count_B), dtype=torch.float64)
        out_B[count_B > 0] = score_n[(torch.cumsum(count_B, 0) - 1)[count_B > 0]]
        return out_B
    names = {"min": "amin", "mean": "mean", "product": "prod"}
    out_B = torch.zeros(len(count_B), dtype=torch.float64)
    return out_B.scatter_reduce(0, seq_n, score_n, names[how], include_self=False)


LEARNS = (
    "its weights or activations are not finite; look at grad_norm of the steps before, and resume from a checkpoint "
    "with a lower --optimizer.lr"
)
FROZEN = (
    "it does not learn, so its weights hold such numbers or are too large for --model.dtype: take bfloat16 or float32, "
    "copy its folder again, or name another model"
)


def check_length(batch: Batch, most: int, prefix: str) -> None:
    """Check that all sequences fit into a model's context length.

    most: maximum length in tokens, or 0 to skip the check. prefix: start of the error message.

    Raises:
        ValueError: a sequence is too long; the message names the longest sequence.
    """
    if most and len(batch) and int(batch.lengths.max()) > most:
        at = int(batch.lengths.argmax())
        raise ValueError(
            f"{prefix}: prompt {int(batch.seq['prompt'][at])}, sample {int(batch.seq['sample'][at])} has "
            f"{int(batch.lengths[at])} tokens for a model that reads {most} (max_position_embeddings): lower "
            "--rollout.max-new-tokens or --rollout.max-prompt-tokens, or name a model with more positions"
        )


def finite(batch: Batch, x_T: torch.Tensor, model: str, why: str = LEARNS) -> torch.Tensor:
    """Check that x_T is finite at the trained tokens, and return it. model, why: start and end of the error message.

    Raises:
        ValueError: a value is not finite; the message names model, prompt and sample.
    """
    bad = torch.nonzero(batch.token["mask"] & ~torch.isfinite(x_T)).flatten()
    if len(bad):
        at = int(batch.seq_index[bad[0]])
        raise ValueError(
            f"{model} gave {x_T[bad[0]].item()} for prompt {int(batch.seq['prompt'][at])}, sample "
            f"{int(batch.seq['sample'][at])}: {why}"
        )
    return x_T


def at_last(flag: str, path: str, trust_remote_code: bool) -> AtLast | None:
    """Return an `AtLast` for the classifier at `path` (a model without a YAML file), or None if `path` is empty."""
    if not path:
        return None
    config = read_config(resolve(path, trust_remote_code), trust_remote_code)
    return AtLast(f"{flag} {path}", positions_of(config))


def reading_of(cfg: Config, labels: Labels | None, tokenizer: Any, prompts: PromptSet) -> Reading | AtLast | None:
    """Return the reward model's scorer for responses to the prompts, or None without a reward model.

    Raises:
        ValueError: the reward model's tokenizer is missing or cannot render the prompts, or differs from the policy's
            in a run with an environment.
    """
    trust, prefix = cfg.model.trust_remote_code, f"{FLAG} {cfg.reward.model}"
    if labels is None:
        return at_last(FLAG, cfg.reward.model, trust)
    classifier, rewriter = read_classifier(cfg.reward.model), None
    if labels.own_tokens:
        if cfg.env:
            raise ValueError(
                f"{prefix}: this model has another tokenizer than the policy, and cannot read the conversations of "
                "--env; name a model with the policy's tokenizer, or grade the last turn by --reward.function or a "
                "judge"
            )
        with named(f"{prefix}: path"):
            rewriter = Rewriter(load_tokenizer(resolve(classifier.path, trust), trust), prefix, labels.pad)
    return Reading(classifier, labels, prefix, tokenizer, rewriter, {}).of(prompts)
