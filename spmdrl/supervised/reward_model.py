"""Builds reward-model training, for outcome or process rewards: its rows, model and loss."""

from functools import partial
from typing import Any

from spmdrl.config.reward_model import RewardModelConfig
from spmdrl.data.batch import Batch
from spmdrl.data.row_columns import RowError
from spmdrl.data.steps import StepColumns, has_steps
from spmdrl.hub.build import sees_images
from spmdrl.hub.folder import read_config
from spmdrl.hub.resolve import resolve
from spmdrl.hub.scorers import GENERATES, SCORERS
from spmdrl.policy.labels import check_head
from spmdrl.policy.models import Models, backend
from spmdrl.policy.objectives.scores import ScoreObjective, StepObjective, report
from spmdrl.policy.self_check import choose_form
from spmdrl.session.image_reader import ImageReader
from spmdrl.session.session import Session
from spmdrl.supervised.build import Start, assemble, begin
from spmdrl.supervised.encoder import Encoded
from spmdrl.supervised.pair_encoder import PairEncoder, pack_pair_sides
from spmdrl.supervised.rows import Placed
from spmdrl.supervised.run import SupervisedRun
from spmdrl.supervised.steps import StepEncoder, pack_steps

SEQUENCES, TOKENS = SCORERS
"""Class name suffixes of saved reward models: outcome reward models first, then process reward models."""
STEP_LABELS = ("wrong", "right")
"""Labels of a process reward model. A step's score is the probability of the second label."""


class ScoredEncoder:
    """Encodes pairs for a reward model. Each sequence gets the index of the score that its pair trains."""

    beside = False

    def __init__(self, cfg: RewardModelConfig, tokenizer: Any, longest: int, images: ImageReader | None = None):
        """Read the settings.

        longest: maximum number of tokens per sequence. images: reads the images of rows; None if the model reads text
        only.
        """
        self.sides = PairEncoder(cfg.data, tokenizer, longest, pairs=True, images=images)
        self.outputs, self.column = cfg.reward_model.outputs, cfg.data.output_column
        self.columns = StepColumns(steps=cfg.data.steps_column, labels=cfg.data.labels_column)
        self.chosen = cfg.data.chosen_column

    def __call__(self, row: dict, before: dict | None = None) -> Encoded:
        """Implements `Encode.__call__`."""
        if row.get(self.chosen) is None and has_steps(row, self.columns):
            raise RowError(
                f"it holds labelled steps ({self.columns.steps}, {self.columns.labels}), and --reward-model.rows pairs "
                "learns from pairs: put rows with steps into another file, and train on it with "
                "--reward-model.rows steps"
            )
        out, number = self.sides(row), 0
        if len(self.outputs) > 1:
            name = row.get(self.column)
            if name not in self.outputs:
                known = ", ".join(self.outputs)
                raise RowError(f"its {self.column} is {name!r}; it must name one of --reward-model.outputs {known}")
            number = self.outputs.index(name)
        for sequence in out.sequences:
            sequence.numbers["output"] = float(number)
        return out


def begin_reward_model(cfg: RewardModelConfig) -> Start:
    """Load the tokenizer and build the row encoder."""
    folder = resolve(cfg.model.path, cfg.model.trust_remote_code)
    kind = StepEncoder if cfg.reward_model.rows == "steps" else ScoredEncoder
    return begin(cfg, folder, lambda tokenizer, longest, images: kind(cfg, tokenizer, longest, images))


def build_reward_model(session: Session[RewardModelConfig]) -> SupervisedRun:
    """Set up reward-model training. Collective over all ranks."""
    cfg, begun = session.cfg, begin_reward_model(session.cfg)
    chosen, peers = cfg.reward_model, session.world.data_peers
    models = lambda: Models(scorer(session, begun))  # noqa: E731
    if chosen.rows == "steps":
        packed = partial(pack_steps, placeholder=begun.placeholder)
        run = assemble(session, begun, models, lambda models: StepObjective(peers), packed)
    else:
        packed = partial(pack_pairs, placeholder=begun.placeholder)
        objective = ScoreObjective(chosen.outputs, chosen.centre, peers)
        run = assemble(session, begun, models, lambda models: objective, packed)
    run.report = report
    return run


def scorer(session: Session[RewardModelConfig], begun: Start) -> Any:
    """Build the trained model: an existing classifier, or a language model with a new head. Collective.

    Raises:
        ValueError: the model is neither a classifier nor a language model, a classifier's head is missing from its
            folder, or the number or names of its scores differ from the settings.
    """
    cfg, steps = session.cfg, session.cfg.reward_model.rows == "steps"
    count = 2 if steps else max(1, len(cfg.reward_model.outputs))
    wanted = "a process reward model has 2" if steps else f"--reward-model.outputs has {count}"
    config, kind = read_config(begun.folder, cfg.model.trust_remote_code), TOKENS if steps else SEQUENCES
    generator = generator_suffix(config)
    if any(name.endswith(kind) for name in config.architectures or []):
        check_head(begun.folder, f"--model.path {cfg.model.path}", count, wanted)
        check_names(config, f"--model.path {cfg.model.path}", cfg.reward_model.outputs)
        session.note(f"building reward model {cfg.model.path} ({cfg.model.dtype})")
    elif not any(name.endswith(generator) for name in config.architectures or []):
        raise ValueError(
            f"--model.path {cfg.model.path}: its config.json names {', '.join(config.architectures or ['no class'])}; "
            f"--reward-model.rows {cfg.reward_model.rows} needs a ...{generator} or a ...{kind}"
        )
    else:
        session.note(f"building reward model {cfg.model.path} ({cfg.model.dtype}), a language model with a new head")
    head = "steps" if steps else "score"
    model = backend(cfg.policy.backend)(
        cfg, session.world, cfg.run.steps, trainable=True, path=str(begun.folder), head=head, labels=count
    )
    choose_form(model, "reward model", f"--model.path {cfg.model.path}", session.note)
    describe(model.hf_config, begun.tokenizer, kind, STEP_LABELS if steps else cfg.reward_model.outputs)
    return model


def generator_suffix(config: Any) -> str:
    """Return the class name suffix of the models of a family that generate text."""
    return GENERATES if sees_images(config) else "ForCausalLM"


def check_names(config: Any, flag: str, outputs: tuple[str, ...]) -> None:
    """Check that the scores of a classifier have the names in `outputs`, in the same order.

    The check is skipped if there is only one output or the classifier has default names (LABEL_0, LABEL_1, ...).
    config: the transformers config of the classifier. flag: setting and path of the model, as a prefix for the message.

    Raises:
        ValueError: the names or their order do not match.
    """
    names = tuple(str(config.id2label[i]) for i in sorted(config.id2label))
    unnamed = all(name == f"LABEL_{i}" for i, name in enumerate(names))
    if len(outputs) > 1 and not unnamed and names != outputs:
        raise ValueError(
            f"{flag}: its scores are {', '.join(names)}; give --reward-model.outputs these names in this order, "
            "because a score is found by its place in the list"
        )


def describe(config: Any, tokenizer: Any, kind: str, outputs: tuple[str, ...]) -> None:
    """Set the class, labels and padding token in a transformers config, for programs that load the saved model."""
    generator = generator_suffix(config)
    config.architectures = [next(iter(config.architectures or [generator])).replace(generator, kind)]
    names = outputs or ("reward",)
    config.id2label, config.label2id = dict(enumerate(names)), {name: i for i, name in enumerate(names)}
    config.problem_type = None
    # transformers reads the score at the last token that is not padding, so an end-of-turn token is used as the padding
    # token only if there is no other candidate.
    ends = {tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|eot_id|>", "<end_of_turn>"])}
    known = [tokenizer.pad_token_id, tokenizer.unk_token_id, *tokenizer.all_special_ids]
    padding = next((i for i in known if i is not None and i not in ends), tokenizer.eos_token_id)
    # A model that reads images has a second config for its language model, from which transformers reads the padding.
    config.pad_token_id = config.get_text_config().pad_token_id = padding


def pack_pairs(sequences: Placed, step: int, placeholder: int | None = None) -> Batch:
    """Pack the sides of pairs. The mask is True only at each side's last trained token, where its score is read.

    placeholder: same as in `pack`.
    """
    numbers = {"margin": 0.0, "output": 0.0}
    batch = pack_pair_sides(sequences, pairs=True, share=False, numbers=numbers, placeholder=placeholder)
    mask_T = batch.token["mask"]
    places_T = mask_T.nonzero().flatten()
    seq_T = batch.seq_index[places_T]
    last = places_T.new_zeros(len(batch)).scatter_reduce(0, seq_T, places_T, "amax")
    batch.token["mask"] = mask_T.new_zeros(len(mask_T)).index_fill(0, last, True) if len(batch) else mask_T
    return batch
