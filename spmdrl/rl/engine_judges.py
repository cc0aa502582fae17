"""Judges on the run's own engine: the questions of a rollout's graders as requests, and the engine's words as answers.

A frozen judge's weights take the place of the policy's when a rollout has nothing left to sample, and the policy's come
back before anything is sampled again. All ranks of an engine ask alike; engines work on their own.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from spmdrl.config.judge import POLICY, JudgeConfig, engine_judges
from spmdrl.config.schema import Config
from spmdrl.data.chat import chosen_template, variables
from spmdrl.engines.build import stop_tokens
from spmdrl.engines.engine import Engine, Key, Request, longest_sequence
from spmdrl.health.status import tick
from spmdrl.hub.folder import plain_errors, read_config
from spmdrl.hub.quantized import fp8_blocks
from spmdrl.hub.resolve import named, resolve
from spmdrl.hub.tokenizer import BROKEN, check_same_tokens, control_words, has_tokenizer, load_tokenizer
from spmdrl.policy.contract import Policy
from spmdrl.rewards.base import Grader
from spmdrl.rewards.judge import Judge
from spmdrl.rewards.judge_engine import Ask, EngineAsker, JudgeReply
from spmdrl.rewards.judge_pairs import Pairs
from spmdrl.rewards.load import on_engine
from spmdrl.rl.rollout_plan import RolloutPlan
from spmdrl.session.device_table import Memory
from spmdrl.spmd.exchange import all_reduce
from spmdrl.spmd.seeds import seed_for
from spmdrl.spmd.world import World
from spmdrl.weights.folder import Tensors

ASK_EVERY = 16
"""Steps of an engine of several ranks between two questions whether to abandon the rollout: they answer together."""
UNSEEN = frozenset(
    {
        *("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "auto_map"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "max_position_embeddings"),
        *("attention_dropout", "max_window_layers", "quantization_config", "id2label", "label2id"),
    }
)
"""Settings of a model's config on which the engine's forward does not depend."""
ALIKE = "a judge on the run's engine has the policy's architecture: take another, or a judge at a url"
PROBE = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]


class Voice:
    """A judge's tokens: how it is asked and how its words are read."""

    def __init__(self, file: str, judge: JudgeConfig, cfg: Config, tokenizer: Any):
        """tokenizer: the policy's, which is taken where the judge's folder has none.

        Raises:
            ValueError: the judge reads other tokens, or there is no chat template that renders a question.
        """
        trust = cfg.model.trust_remote_code
        self.tokenizer = tokenizer
        with named(f"{file}: engine"):
            self.folder: Path = resolve(cfg.model.path if judge.engine == POLICY else judge.engine, trust)
            if judge.engine != POLICY:
                check_same_tokens(judge.engine, cfg.model.path, f"{file}: engine", trust)
                if has_tokenizer(self.folder):
                    self.tokenizer = load_tokenizer(self.folder, trust)
            self.stop = stop_tokens(self.folder, self.tokenizer, chosen_template(self.tokenizer))
        self.control = control_words(self.tokenizer)
        self.joined = False
        """True where the template takes no system message, which the first user message then begins with."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(
                f"{file}: engine {judge.engine}: the tokenizer in {self.folder} has no chat template, by which a judge "
                "is asked; take a chat model, or a judge at a url"
            )
        try:
            self.render(PROBE)
        except Exception:  # templates raise any
            self.joined = True
            try:
                self.render(PROBE)
            except Exception as error:
                raise ValueError(
                    f"{file}: engine {judge.engine}: the chat template in {self.folder} could not render a question "
                    f"({type(error).__name__}: {error})"
                ) from error

    def render(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the tokens of a question, with nothing in it that is a special token of the tokenizer."""
        messages = [message | {"content": self.control.sub(BROKEN, message["content"])} for message in messages]
        if self.joined:
            messages = [{"role": "user", "content": "\n\n".join(message["content"] for message in messages)}]
        # Templates that let a model think first are told not to: only a verdict alone counts.
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **variables({"enable_thinking": False})
        )
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def words(self, tokens: list[int], prompt: int) -> JudgeReply:
        """Return what the engine's tokens say up to the judge's end. prompt: tokens of the question."""
        end = next((i for i, token in enumerate(tokens) if token in self.stop), None)
        text = self.tokenizer.decode(tokens[:end], skip_special_tokens=True)
        why = "its answer did not end within the judge's max_new_tokens" if end is None else ""
        return JudgeReply(text, why, prompt_tokens=prompt, completion_tokens=len(tokens))


class EngineJudges:
    """The judges of a run on this rank's engine."""

    def __init__(self, cfg: Config, world: World, tokenizer: Any, grader: Grader):
        """Check all of them before models are built. grader: the run's.

        Raises:
            ValueError: a judge that the engine cannot be, with the setting to change.
        """
        self.world = world
        self.judges = [judge for _, judge in engine_judges(cfg)]
        self.voices = {judge.engine: Voice(file, judge, cfg, tokenizer) for file, judge in engine_judges(cfg)}
        longest, trust = longest_sequence(cfg), cfg.model.trust_remote_code
        self.frozen: dict[str, Tensors] = {}
        self.files = {judge.engine: file for file, judge in engine_judges(cfg)}
        for file, judge in engine_judges(cfg):
            if judge.max_prompt_tokens + judge.max_new_tokens > longest:
                raise ValueError(
                    f"{file}: max_prompt_tokens {judge.max_prompt_tokens}, max_new_tokens {judge.max_new_tokens}: "
                    f"{cfg.model.path} takes {longest} tokens in all; lower them"
                )
            if judge.engine != POLICY and judge.engine not in self.frozen:
                folder = self.voices[judge.engine].folder
                check_same_model(folder, resolve(cfg.model.path, trust), f"{file}: engine {judge.engine}", trust)
                with named(f"{file}: engine"), plain_errors(folder):
                    self.frozen[judge.engine] = Tensors(folder, fp8_blocks(folder))
        self.versions = {engine: -2 - i for i, engine in enumerate(self.frozen)}
        """Versions of frozen judges, which no policy has."""
        for asker in askers(grader):
            asker.run, asker.quiet = self.answer, world.engine_tp_rank > 0
        self.engine: Engine | None = None
        self.memory: Memory | None = None
        self.plan: RolloutPlan | None = None

    def check_policy(self, policy: Policy) -> None:
        """Check that frozen judges have the policy's tensors.

        Raises:
            ValueError: one lacks some, or has them in another shape.
        """
        for engine, tensors in self.frozen.items():
            check_same_tensors(tensors, policy, f"{self.files[engine]}: engine {engine}", ALIKE)

    def begin(self, plan: RolloutPlan) -> None:
        """Bring the policy back into engines that hold a judge. Collective over those who sample."""
        self.plan = plan
        if self.frozen and self.memory:
            self.memory.restore()

    def answer(
        self, judge: JudgeConfig, asks: list[Ask], meanwhile: Callable[[], bool] | None
    ) -> list[JudgeReply] | None:
        """Return the judge's words on each question; None where the rollout was abandoned. Collective over the engine.

        meanwhile: called between two steps of the engine.
        """
        engine, plan, voice = self.engine, self.plan, self.voices[judge.engine]
        assert engine and plan
        version = self._hold(judge.engine, plan)
        out: list[JudgeReply] = [JudgeReply()] * len(asks)
        running: dict[Key, tuple[int, int]] = {}
        for i, ask in enumerate(asks):
            prompt = voice.render(ask.question.messages(ask.nonce(plan.key)))
            if len(prompt) > judge.max_prompt_tokens:
                out[i] = JudgeReply(why=too_long(len(prompt), judge.max_prompt_tokens), final=True)
                continue
            key = (i, ask.attempt, ask.vote)
            seed = seed_for(*plan.key, int(ask.digest[:16], 16), ask.attempt)
            engine.submit(Request(key, prompt, seed, version, judge.max_new_tokens, judge.temperature))
            running[key] = i, len(prompt)
        polls = 0
        while running:
            tick()
            for completion in engine.poll():
                i, prompt = running.pop(completion.key)
                assert completion.version == version
                out[i] = voice.words(completion.tokens, prompt)
            polls += 1
            if meanwhile:
                meanwhile()
            if is_abandoned(plan, self.world, polls):
                engine.abort(list(running))
                return None
        return out

    def _hold(self, engine: str, plan: RolloutPlan) -> int:
        """Have the engine hold a judge's weights; returns their version."""
        assert self.engine
        if engine == POLICY:
            assert self.engine.version == plan.version, "judges that are the policy come before frozen ones"
            return plan.version
        assert self.memory
        version = self.versions[engine]
        if self.engine.version != version:
            self.memory.lend(self.frozen[engine], version, "judge")
        return version


def too_long(tokens: int, most: int) -> str:
    """Tell why a question is not asked."""
    return f"the question has {tokens:,} tokens, more than the judge's max_prompt_tokens {most:,}; max_chars bounds it"


def askers(grader: Grader) -> list[EngineAsker]:
    """Return what asks the engine in a grader."""
    found = [one.asker for one in on_engine(grader) if isinstance(one, Judge | Pairs)]
    return [asker for asker in found if isinstance(asker, EngineAsker)]


def is_abandoned(plan: RolloutPlan, world: World, polls: int) -> bool:
    """Tells whether to leave a rollout, alike on all ranks of an engine. Collective over them.

    polls: steps of the engine so far.
    """
    if plan.may_end is None:
        return False
    if world.engine_group is None:
        return plan.may_end()
    if polls % ASK_EVERY:
        return False
    flag = torch.tensor([int(plan.may_end())], device=world.device)
    return bool(all_reduce(flag, "max", world.engine_group).item())


def check_same_tensors(tensors: Tensors, policy: Policy, what: str, advice: str) -> None:
    """Raise ValueError unless a folder has the policy's tensors. what: names its model. advice: what to do."""
    pieces = policy.pieces()
    with plain_errors(tensors.folder):
        odd = [p.name for p in pieces if p.name not in tensors or tensors.shape(p.name) != tuple(p.shape)]
    if odd:
        raise ValueError(
            f"{what}: {len(odd)} of the policy's tensors are not in it or have another shape (such as {odd[0]}); "
            f"{advice}"
        )


def check_same_model(folder: Path, policy: Path, what: str, trust: bool, advice: str = ALIKE) -> None:
    """Raise ValueError unless the configs of two folders describe the same forward.

    what: names the other model. advice: what to do.
    """
    mine, theirs = (
        {k: v for k, v in read_config(f, trust).to_dict().items() if k not in UNSEEN} for f in (folder, policy)
    )
    if odd := sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)):
        raise ValueError(
            f"{what}: its config.json has {odd[0]} {mine.get(odd[0])!r}, the policy's {theirs.get(odd[0])!r}; {advice}"
        )
