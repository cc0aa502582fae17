"""LLM judges on the run's engine: the engine samples a verdict as the completion of a question."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from spmdrl.config.judge import POLICY, JudgeConfig, engine_judges
from spmdrl.config.schema import Config
from spmdrl.data.chat import chosen_template, variables
from spmdrl.engines.build import stop_tokens
from spmdrl.engines.engine import Engine, Key, Request, longest_sequence
from spmdrl.health.status import tick
from spmdrl.hub.resolve import named, resolve
from spmdrl.hub.tokenizer import BROKEN, control_words, has_tokenizer, load_tokenizer
from spmdrl.rewards.base import Grader
from spmdrl.rewards.judge import Judge
from spmdrl.rewards.judge_engine import Ask, EngineAsker, JudgeReply
from spmdrl.rewards.load import on_engine
from spmdrl.rl.engine_models import EngineModels
from spmdrl.rl.rollout_plan import RolloutPlan
from spmdrl.session.device_table import Memory
from spmdrl.spmd.seeds import seed_for
from spmdrl.spmd.world import World

PROBE = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]


class Voice:
    """Tokenizes the questions for a judge, and decodes its answers."""

    def __init__(self, file: str, judge: JudgeConfig, cfg: Config, tokenizer: Any):
        """tokenizer: the policy's tokenizer, used if the judge is the policy or the judge's folder has no tokenizer.

        Raises:
            ValueError: the tokenizer has no chat template, or the template cannot render a question.
        """
        trust = cfg.model.trust_remote_code
        self.tokenizer = tokenizer
        with named(f"{file}: engine"):
            self.folder: Path = resolve(cfg.model.path if judge.engine == POLICY else judge.engine, trust)
            if judge.engine != POLICY and has_tokenizer(self.folder):
                self.tokenizer = load_tokenizer(self.folder, trust)
            self.stop = stop_tokens(self.folder, self.tokenizer, chosen_template(self.tokenizer))
        self.control = control_words(self.tokenizer)
        self.joined = False
        """True if the template rejects system messages. The text of the system message is then prepended to the user
        message."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(
                f"{file}: engine {judge.engine}: the tokenizer in {self.folder} has no chat template to render "
                "questions; take a chat model, or a judge at a url"
            )
        try:
            self.render(PROBE)
        except Exception:  # templates may raise any exception
            self.joined = True
            try:
                self.render(PROBE)
            except Exception as error:
                raise ValueError(
                    f"{file}: engine {judge.engine}: the chat template in {self.folder} could not render a question "
                    f"({type(error).__name__}: {error})"
                ) from error

    def render(self, messages: list[dict[str, str]]) -> list[int]:
        """Tokenize a question. Special tokens in the question's messages are neutralized."""
        messages = [message | {"content": self.control.sub(BROKEN, message["content"])} for message in messages]
        if self.joined:
            messages = [{"role": "user", "content": "\n\n".join(message["content"] for message in messages)}]
        # `enable_thinking` is off, because a judge should answer with its verdict only.
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **variables({"enable_thinking": False})
        )
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def words(self, tokens: list[int], prompt: int) -> JudgeReply:
        """Decode the engine's tokens up to the judge's end token. prompt: number of prompt tokens."""
        end = next((i for i, token in enumerate(tokens) if token in self.stop), None)
        text = self.tokenizer.decode(tokens[:end], skip_special_tokens=True)
        why = "its answer did not end within the judge's max_new_tokens" if end is None else ""
        return JudgeReply(text, why, prompt_tokens=prompt, completion_tokens=len(tokens))


class EngineJudges:
    """Runs the judges on this rank's engine."""

    def __init__(self, cfg: Config, world: World, tokenizer: Any, grader: Grader):
        """Check all judges, before any model is built.

        grader: the run's grader, whose judges then use this rank's engine.

        Raises:
            ValueError: a judge cannot run on the engine; the message names the setting to change.
        """
        self.world = world
        advice = "a judge on the run's engine must have the policy's architecture: take another, or a judge at a url"
        self.frozen = EngineModels(cfg, -2, advice)
        self.voices: dict[str, Voice] = {}
        longest = longest_sequence(cfg)
        for file, judge in engine_judges(cfg):
            if judge.engine != POLICY and judge.engine not in self.frozen.folders:
                self.frozen.open(judge.engine, judge.engine, f"{file}: engine")
            self.voices[judge.engine] = Voice(file, judge, cfg, tokenizer)
            if judge.max_prompt_tokens + judge.max_new_tokens > longest:
                raise ValueError(
                    f"{file}: max_prompt_tokens {judge.max_prompt_tokens}, max_new_tokens {judge.max_new_tokens}: "
                    f"their sum exceeds the {longest} tokens that {cfg.model.path} can read; lower them"
                )
        for asker in askers(grader):
            asker.run, asker.quiet = self.answer, world.engine_tp_rank > 0
        self.engine: Engine | None = None
        self.memory: Memory | None = None
        self.plan: RolloutPlan | None = None

    def begin(self, plan: RolloutPlan) -> None:
        """Prepare a rollout: restore the policy's weights in engines that hold a judge's weights.

        Collective over the ranks that sample.
        """
        self.plan = plan
        if self.frozen.folders and self.memory:
            self.memory.restore()

    def answer(
        self, judge: JudgeConfig, asks: list[Ask], meanwhile: Callable[[], bool] | None
    ) -> list[JudgeReply] | None:
        """Return the judge's answer to each question, or None if the rollout was abandoned. Collective over the engine.

        meanwhile: function to call after each engine step.
        """
        engine, plan, voice = self.engine, self.plan, self.voices[judge.engine]
        assert engine and plan and self.memory
        if judge.engine == POLICY:
            version = plan.version
            assert engine.version == version, "judges that are the policy answer before frozen ones"
        else:
            version = self.frozen.load(judge.engine, self.memory, "judge")
        out: list[JudgeReply] = [JudgeReply()] * len(asks)
        running: dict[Key, tuple[int, int]] = {}
        for i, ask in enumerate(asks):
            prompt = voice.render(ask.question.messages(ask.nonce(plan.key)))
            if len(prompt) > judge.max_prompt_tokens:
                why = (
                    f"the question has {len(prompt):,} tokens, more than the judge's max_prompt_tokens "
                    f"{judge.max_prompt_tokens:,}; max_chars bounds it"
                )
                out[i] = JudgeReply(why=why, final=True)
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
            if plan.is_abandoned(self.world, polls):
                engine.abort(list(running))
                return None
        return out


def askers(grader: Grader) -> list[EngineAsker]:
    """Return the askers in a grader that send questions to the engine."""
    found = [one.asker for one in on_engine(grader) if isinstance(one, Judge)]
    return [asker for asker in found if isinstance(asker, EngineAsker)]
