"""Law 2 for every preset: the layout of one batch does not change what any model learns from it.

Gradients and weights of every model that trains are compared in float64, to 1e-10, with those of one rank and one
micro-batch. A preset joins by standing in PRESETS; a setting beside them by a line in VARIANTS. One group of ranks for
each world size goes through all that was asked for; each comparison is a test of its own.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from unittest import mock

import pytest
import torch

from spmdrl.algos.aggregate import AGGREGATIONS
from spmdrl.algos.correction import CORRECTIONS
from spmdrl.algos.covariance_losses import Selecting, kl_cov, select_kl_cov
from spmdrl.algos.estimators import ADVANTAGES
from spmdrl.algos.kl import KL_KINDS
from spmdrl.algos.losses import LOSSES, LossInputs, ppo
from spmdrl.config.classifier import scores_steps
from spmdrl.config.presets import PRESETS
from spmdrl.config.schema import Config, OptimizerConfig, ParallelConfig
from spmdrl.data.batch import Batch
from spmdrl.data.episode import Episode, episode_of
from spmdrl.data.microbatch import microbatch_count, microbatches
from spmdrl.policy.fsdp.policy import FsdpPolicy
from spmdrl.policy.models import Models
from spmdrl.policy.objectives.reinforcement import PolicyObjective
from spmdrl.rl.compose import compose
from spmdrl.rl.reading import Scores
from spmdrl.spmd.exchange import all_gather_rows
from spmdrl.spmd.mesh import world_from_group
from spmdrl.spmd.seeds import generator_for
from spmdrl.spmd.world import World
from tests.ranks.cases import (
    Rewind,
    config,
    float64_softmax,
    full_weights,
    gradients_of_all,
    group_of,
    packed,
    relative,
    scored_batch,
    small_model,
    synthetic_batch,
    update_models,
)
from tests.ranks.harness import run_ranks

EXACT, EXACT_METRIC = 1e-10, 1e-9
TEMPERATURE = 0.8
WHOLE = 1 << 20
"""A token budget that holds everything."""


@dataclass(frozen=True)
class Layout:
    """A way to cut a batch."""

    ranks: int = 1
    micro: int = 1
    """Micro-batches of every optimizer step on every rank."""
    shuffled: bool = False
    """True if sequences stand in another order in each rank's pack."""
    sp: int = 1
    copies: int = 1
    """Value of dp_replicate."""
    lopsided: bool = False
    """True if one data position has all sequences of an optimizer step, and another one those of the next."""

    def __str__(self):
        parts = [f"{self.ranks} rank{'s' * (self.ranks > 1)}", f"sp {self.sp}" * (self.sp > 1)]
        parts += [f"{self.copies} copies" * (self.copies > 1), f"{self.micro} micro-batch{'es' * (self.micro > 1)}"]
        return ", ".join(p for p in [*parts, "shuffled" * self.shuffled, "lopsided" * self.lopsided] if p)


ONE = Layout()
LAYOUTS = (
    Layout(micro=3, shuffled=True),
    Layout(micro=7),
    Layout(2, micro=1, lopsided=True),
    Layout(2, micro=3, sp=2),
    Layout(2, micro=7, shuffled=True),
    Layout(4, micro=1, shuffled=True),
    Layout(4, micro=3, sp=2, shuffled=True),
)
"""Layouts of every preset. tests/long takes them all through EVERY_LAYOUT, as CROSSED goes through it here."""
EVERY_LAYOUT = tuple(
    Layout(ranks, micro, shuffled, sp)
    for ranks, micro, shuffled, sp in itertools.product((1, 2, 4), (1, 3, 7), (False, True), (1, 2))
    if sp <= ranks and Layout(ranks, micro, shuffled, sp) != ONE
) + (Layout(4, micro=3, lopsided=True), Layout(4, micro=1, copies=2), Layout(4, micro=1, sp=2, copies=2))
FEW = (Layout(micro=7, shuffled=True), Layout(2, micro=1, shuffled=True))
"""Layouts of the variants, which change what is done with a sequence and not how ranks work together."""
MORE = {"zero advantages skipped": (Layout(4, micro=1, lopsided=True), Layout(4, micro=1, copies=2))}
"""Further layouts of single variants."""

# ── what is compared ─────────────────────────────────────────────────────────

NEEDED: dict[str, dict] = {
    # A few of the tokens here, where the papers select 2 of 10,000: a selection of one would hide a wrong order.
    "kl_cov": {"algo": {"cov_ratio": 0.1}},
    # Covariances on this batch are mostly below the paper's lower bound of 1.
    "clip_cov": {"algo": {"cov_ratio": 0.1, "cov_low": -0.5, "cov_high": 1.5}},
    # Clips of a few 1e-4 are for updates much smaller than this one: nothing would be left inside.
    "gspo": {"algo": {"clip_low": 0.05, "clip_high": 0.1}},
    "gspo_token": {"algo": {"clip_low": 0.05, "clip_high": 0.1}},
    # Probabilities here are around 1/47, and move by less than the papers' thresholds.
    "dppo_tv": {"algo": {"clip_low": 0.005, "clip_high": 0.005}},
    "dppo_kl": {"algo": {"clip_low": 0.0005, "clip_high": 0.0005}},
    # Lambda is 0 below 1 / alpha sampled tokens, and no response here has the paper's 20.
    "vapo": {"algo": {"length_adaptive": 0.4}},
    "gdpo": {"algo": {"part_weights": ("answer=2", "format=0.5", "cost=-0.25")}},
    # The reward is known to 2 digits here: process rewards of the paper's size would not show beside it.
    "prime": {"process_reward": {"beta": 0.5}},
    "safe_rlhf": {"safety": {"multiplier": 0.7}},
}
"""Settings that a preset needs so that all of it takes part on this batch."""

STEP_SCORES = str(Path(__file__).parent / "step_scores.yaml")
VARIANTS: dict[str, dict] = {
    **{f"aggregation {a}": {"algo": {"aggregation": a, "preset": "cispo"}} for a in AGGREGATIONS},
    **{f"kl in loss, {k}": {"algo": {"kl_coef": 0.1, "kl_estimator": k}} for k in KL_KINDS},
    **{
        f"kl in reward, {k}": {"algo": {"preset": "rloo", "kl_coef": 0.1, "kl_in": "reward", "kl_estimator": k}}
        for k in KL_KINDS
        if not k.endswith("+")
    },
    **{f"correction {k}": {"correction": {"kind": k}} for k in CORRECTIONS if k != "none"},
    "correction mis_token, low": {"correction": {"kind": "mis_token", "low": 0.7, "high": 1.5}},
    "correction of a sequence loss": {"algo": {"preset": "gmpo"}, "correction": {"kind": "tis_token"}},
    "rejected sequences": {"correction": {"reject_low": 0.9, "reject_high": 1.2}},
    "rejected sequences, tis": {"correction": {"kind": "tis_token", "reject_high": 1.1}},
    "entropy": {"algo": {"preset": "dapo", "entropy_coef": 0.1}},
    "positive": {"algo": {"preset": "dapo", "positive_coef": 0.5}},
    "dual clip": {"algo": {"clip_low": 0.02, "clip_high": 0.05, "dual_clip": 1.1}},
    "one update": {"algo": {"updates_per_step": 1}},
    "one update, correction": {"algo": {"updates_per_step": 1}, "correction": {"kind": "tis_sequence"}},
    "old logp of the engine": {"algo": {"old_logp": "rollout"}},
    "old logp of the engine, kl_cov": {"algo": {"preset": "kl_cov", "old_logp": "rollout", "cov_ratio": 0.1}},
    "clipped gradient": {"optimizer": {"clip_grad_norm": 0.01}},
    "zero advantages skipped": {"algo": {"skip_zero_advantage": True}},
    "cut responses masked": {"shaping": {"mask_cut": True}},
    "overlong": {"shaping": {"overlong_buffer": 8, "overlong_factor": 0.5}},
    "length penalty, linear": {"shaping": {"length_penalty": "linear", "length_coef": 0.3}},
    "length penalty, group": {"shaping": {"length_penalty": "group", "length_coef": 0.3}},
    "rewards clipped": {"shaping": {"clip_low": 0.2, "clip_high": 0.7}},
    "rewards normalized, batch": {"algo": {"preset": "reinforce"}, "shaping": {"normalize": "batch"}},
    "rewards normalized, running": {"algo": {"preset": "reinforce"}, "shaping": {"normalize": "running"}},
    "no value clip, critic's own lambda": {
        "algo": {"preset": "ppo", "gamma": 0.9, "critic_lam": 0.5},
        "critic": {"clip": None},
    },
    "reward and cost models": {
        "algo": {"preset": "safe_rlhf"},
        "reward": {"model": "reward", "model_coef": 0.5},
        "safety": {"cost": "", "cost_model": "cost"},
    },
    "leave-one-out by turn": {"algo": {"preset": "rloo", "advantage": "turn_rloo", "gamma": 0.9}},
    "GAE by turn": {"algo": {"preset": "ppo", "advantage": "turn_gae", "gamma": 0.9, "critic_lam": 0.5}},
    "process supervision": {"algo": {"advantage": "grpo_process"}, "reward": {"model": STEP_SCORES}},
    "prime with scores of steps": {"algo": {"preset": "prime"}, "reward": {"model": STEP_SCORES, "model_coef": 0.1}},
    "reference of the step before": {"algo": {"kl_coef": 0.1}, "reference": {"refresh_every": 1}},
}
"""Settings beside the presets, on top of GRPO unless another one is named."""

BROKEN: dict[str, dict] = {
    "divided by its micro-batch": {"algo": {"loss": f"{__file__}:divided_by_its_microbatch"}},
    "selected in its micro-batch": {"algo": {"loss": f"{__file__}:selected_in_its_microbatch"}},
}
"""Losses that break the law, to show that the comparison sees it."""

CROSSED = ("kl_cov",)
"""Presets that go through every layout: one that looks at all tokens of an optimizer step at once."""

CASES = {
    name: NEEDED.get(name, {}) | {"algo": {"preset": name} | NEEDED.get(name, {}).get("algo", {})} for name in PRESETS
}
CASES |= VARIANTS | BROKEN


def divided_by_its_microbatch(x: LossInputs):
    """Computes a mean over the tokens at hand, which is wrong: other micro-batches have more or fewer."""
    loss_T, stats = ppo(x)
    return 30 * loss_T / x.mask.sum().clamp(min=1), stats


def selected_in_its_microbatch(x: LossInputs):
    """Selects KL-Cov among the tokens at hand, which is wrong."""
    columns = (v.detach().double() for v in (x.logp, x.old_logp, x.advantages))
    selecting = Selecting(*columns, x.mask, x.seq, int(x.seq.max()) + 1 if len(x.seq) else 0)
    return kl_cov(dataclasses.replace(x, selected=select_kl_cov(selecting, cov_ratio=0.1)))


def settings(name: str, world: World, folder: str) -> Config:
    """Config of a case."""
    base = {
        "model": {"path": folder, "dtype": "float64"},
        "rollout": {"temperature": TEMPERATURE},
        "optimizer": {"lr": 3e-3},
        "algo": {"updates_per_step": 2},
        "critic": {"lr": 1e-2},
        "process_reward": {"lr": 1e-2},
        "parallel": {"dp_replicate": world.mesh["dp_replicate"].size(), "sp": world.sp_size},
    }
    return config(**{s: base.get(s, {}) | CASES[name].get(s, {}) for s in base.keys() | CASES[name].keys()})


@torch.no_grad()
def experience(folder: str) -> list[Episode]:
    """Makes eight groups of seven, with all that a preset may look at; the engine's logp is near that of the policy."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    out = []
    for t in synthetic_batch(8, 7):
        rng = generator_for(12, t.position, t.sample)
        with float64_softmax():
            logits = model(input_ids=t.tokens[None]).logits[0, :-1] / TEMPERATURE
        logp = torch.log_softmax(logits, -1).gather(1, t.tokens[1:, None])[:, 0]
        logp = torch.cat([torch.zeros(1), logp + torch.tensor([rng.gauss(0.0, 0.5) for _ in logp])]) * t.mask
        # Groups that agree stay as they are; the others have rewards of 0, of 1, and others, some of them negative.
        reward = t.reward if t.position % 3 == 2 else (0.0, 1.0, round(rng.uniform(-0.3, 1.0), 2))[rng.randrange(3)]
        out.append(
            episode_of(
                t.prompt,
                t.sample,
                t.position,
                t.tokens,
                t.mask,
                logp.float(),
                reward=reward,
                parts={
                    "answer": reward,
                    "format": float(rng.randrange(2)),
                    "cost": round(rng.gauss(0.2, 1.0), 2),
                },
                baseline=round(rng.uniform(0.0, 1.0), 2),
                finish="length" if len(t.tokens) == 31 else "stop",
            )
        )
    return out


# ── on the ranks ─────────────────────────────────────────────────────────────


@dataclass
class Answer:
    """Result of one case in one layout; tensors on rank 0 alone, laid end to end."""

    metrics: dict[str, float]
    gradients: dict[str, list[torch.Tensor]] = dataclasses.field(default_factory=dict)
    """Model -> gradients of its optimizer steps, one tensor for each."""
    weights: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    sizes: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    """Model -> name of a parameter -> its elements."""


class EveryThird:
    """Reads a reward model at every third sampled token, as if a step ended there, and at the last one."""

    names = ()

    def read(self, batch: Batch, model: FsdpPolicy) -> Scores:
        score_T, mask_T = model.values(batch), batch.token["mask"]
        before_B = torch.cumsum(batch.sampled_per_seq, 0) - batch.sampled_per_seq
        count_T = torch.cumsum(mask_T, 0) - batch.per_token(before_B)
        ends_T = mask_T & ((count_T % 3 == 0) | (count_T == batch.per_token(batch.sampled_per_seq)))
        process_T = torch.where(ends_T, score_T, 0.0).double()
        steps_B = batch.sum_tokens(ends_T.double())
        return Scores(batch.sum_tokens(process_T) / steps_B, {}, steps_B, process_T, ends_T.double())


class Cast:
    """Every model that a case may need, built once for a mesh; a case gets its models as they were built."""

    def __init__(self, world: World, folders: dict[str, str]):
        cfg = settings("grpo", world, folders["policy"])

        def build(name: str, head: str = "lm", lr: float = 0.0) -> FsdpPolicy:
            own = OptimizerConfig(lr=lr, clip_grad_norm=0.0)
            return FsdpPolicy(cfg, world, 100, lr > 0, folders[name], head, own)

        self.models = Models(
            policy=build("policy", lr=cfg.optimizer.lr),
            reference=build("reference"),
            critic=build("critic", "value", cfg.critic.lr),
            cost_critic=build("cost critic", "value", cfg.critic.lr),
            process=build("process", lr=cfg.process_reward.lr),
            process_reference=build("reference"),
            reward_model=build("cost critic", "score"),
            cost_model=build("critic", "score"),
        )
        self.rewinds = {name: Rewind(model) for name, model in self.models.named()}

    def __call__(self, cfg: Config) -> Models:
        needed = set(compose(cfg).needs) | {"policy"}
        needed |= {"process_reference"} if "process" in needed else set()
        needed |= {"reward_model"} if cfg.reward.model else set()
        needed |= {"cost_model"} if cfg.safety.cost_model else set()
        models = Models(**{name: rewind(cfg) for name, rewind in self.rewinds.items() if name in needed})
        models.policy.settings = cfg.optimizer
        models.reading = EveryThird() if scores_steps(cfg.reward.model) else None
        return models


def lopsided(work_N: torch.Tensor, share_N: torch.Tensor, positions: int) -> torch.Tensor:
    """Replaces `assign_balanced`: the first optimizer step's sequences go to the last position, and so on."""
    return (positions - 1 - share_N) % positions


@lru_cache(maxsize=256)
def budget_for(shares: tuple[tuple[int, ...], ...], micro: int) -> int:
    """Returns the least token budget that packs each share (lengths of a rank in an optimizer step) into so many.

    `compare` wants exactly as many.
    """
    if micro == 1:
        return WHOLE
    longest = max(map(max, filter(None, shares)))

    def most(budget: int) -> int:
        return max(microbatch_count(torch.tensor(lengths), budget) for lengths in shares)

    return next(budget for budget in range(longest, WHOLE) if most(budget) <= micro)


def cut(cfg: Config, world: World, layout: Layout, everyone: list[Episode]) -> tuple[Config, Batch]:
    """Cuts this rank's share of the batch, and gives the config the token budget of the layout's micro-batches."""
    unbalanced = mock.patch("spmdrl.data.distribute.assign_balanced", lopsided) if layout.lopsided else nullcontext()
    with unbalanced:
        batch = packed(cfg, world, everyone)
    rows = all_gather_rows(torch.stack([batch.seq["update"], batch.lengths], 1), group_of(world))
    shares = [part[part[:, 0] == share, 1] for part in rows for share in range(cfg.algo.updates_per_step)]
    budget = budget_for(tuple(tuple(lengths.tolist()) for lengths in shares), layout.micro)
    if layout.shuffled:
        # Ranks of one position hold one pack.
        position = int(torch.nonzero(world.holders == world.rank)[0, 0])
        order = list(range(len(batch)))
        generator_for(5, position).shuffle(order)
        batch = batch.select(torch.tensor(order, dtype=torch.int64))
    return dataclasses.replace(cfg, policy=dataclasses.replace(cfg.policy, max_tokens_per_microbatch=budget)), batch


def answer(name: str, layout: Layout, world: World, cast: Cast, everyone: list[Episode], folder: str) -> Answer:
    """Runs one case in one layout. Collective."""
    cfg, batch = cut(settings(name, world, folder), world, layout, everyone)
    models, metrics = cast(cfg), {}
    trained = {"policy": models.policy, **models.trained()}
    seen = gradients_of_all(trained, lambda: metrics.update(update_models(cfg, world, models, everyone, batch)))
    after = {model: full_weights(policy) for model, policy in trained.items()}
    if models.reference is not None and cfg.reference.refresh_every:
        after["reference"] = full_weights(models.reference)
    if world.rank:
        return Answer(metrics)

    def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([x.flatten() for x in tensors.values()])

    return Answer(
        metrics,
        {model: [flat(step) for step in steps] for model, steps in seen.items()},
        {model: flat(weights) for model, weights in after.items()},
        {model: {n: x.numel() for n, x in weights.items()} for model, weights in after.items()},
    )


def sweep(world, folders, everyone, todo) -> dict:
    """Returns (case, layout) -> Answer, for all that this number of ranks runs."""
    out = {}
    for sp, copies in sorted({(layout.sp, layout.copies) for _, layout in todo}):
        axes = ParallelConfig(dp_replicate=copies, sp=sp)
        # The same ranks under other axes.
        part = world_from_group(axes, 1, world.device, world.rank)
        cast = Cast(part, folders)
        for name, layout in todo:
            if (layout.sp, layout.copies) == (sp, copies):
                out[name, layout] = answer(name, layout, part, cast, everyone, folders["policy"])
    return out


# ── the comparison ───────────────────────────────────────────────────────────


def differences(want: Answer, got: Answer) -> Iterator[str]:
    """Differences in words."""

    def error(model: str, a: torch.Tensor, b: torch.Tensor) -> float:
        sizes = want.sizes[model]
        a, b = (dict(zip(sizes, x.split(list(sizes.values())), strict=True)) for x in (a, b))
        return relative(a, b)

    for model, steps in want.gradients.items():
        if len(got.gradients[model]) != len(steps):
            yield f"{model}: {len(got.gradients[model])} optimizer steps instead of {len(steps)}"
            return
        for i, (a, b) in enumerate(zip(steps, got.gradients[model], strict=True)):
            if not (e := error(model, a, b)) < EXACT:
                yield f"gradient {i} of {model}: {e:.1e}"
    for model, weights in want.weights.items():
        if not (e := error(model, weights, got.weights[model])) < EXACT:
            yield f"weights of {model}: {e:.1e}"
    if want.metrics.keys() != got.metrics.keys():
        yield f"names of metrics: {sorted(want.metrics.keys() ^ got.metrics.keys())}"
    for name in want.metrics.keys() & got.metrics.keys():
        a, b = want.metrics[name], got.metrics[name]
        if "microbatches" not in name and not abs(a - b) < EXACT_METRIC * max(1.0, abs(a)):
            yield f"{name}: {b} instead of {a}"


def compare(want: Answer, got: Answer, name: str, layout: Layout) -> None:
    """Fails with the differences, or if the layout is not as declared."""
    wrong = list(differences(want, got))
    assert not wrong, "\n".join(wrong)
    if not CASES[name].get("algo", {}).get("skip_zero_advantage"):
        steps = len(want.gradients["policy"])
        most, made = steps * layout.micro, got.metrics["microbatches"]
        assert want.metrics["microbatches"] == steps
        # What PF-PPO draws is not spread evenly over the two optimizer steps, which share a token budget.
        assert steps < made <= most if name == "pf_ppo" and layout.micro > 1 else made == most


def layouts_of(name: str) -> tuple[Layout, ...]:
    """Layouts in which a case is compared, besides ONE."""
    if name in CROSSED:
        return tuple(dict.fromkeys(LAYOUTS + EVERY_LAYOUT))
    return FEW + MORE.get(name, ()) if name in VARIANTS else LAYOUTS


PAIRS = [
    pytest.param(name, layout, id=f"{name}, {layout}") for name in [*PRESETS, *VARIANTS] for layout in layouts_of(name)
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    scalar = {"policy": False, "reference": False, "process": False, "critic": True, "cost critic": True}
    # Without a padding token: its embedding starts as zeros, and an RMS norm of nearly nothing has a large gradient.
    changes = dict(num_hidden_layers=1, pad_token_id=None)
    return {n: small_model(root / n, i, scalar[n], **changes) for i, n in enumerate(scalar)}


@pytest.fixture(scope="module")
def everyone(folders):
    return experience(folders["policy"])


@pytest.fixture(scope="module")
def answers(request, folders, everyone):
    """Returns (case, layout) -> Answer. The first request starts a group of ranks, which runs all selected (`-k`)."""
    mine = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    asked = {(p["name"], layout) for p in mine if p.get("name") in CASES for layout in (ONE, p.get("layout", ONE))}
    done, failed = {}, set()

    def of(name: str, layout: Layout = ONE) -> Answer:
        if (name, layout) not in done:
            assert layout.ranks not in failed, f"an earlier test has shown why {layout.ranks} ranks have no answers"
            failed.add(layout.ranks)
            pairs = asked if (name, layout) in asked else {(other, layout) for other in CASES}
            todo = sorted((pair for pair in pairs if pair[1].ranks == layout.ranks), key=str)
            results = run_ranks(sweep, layout.ranks, folders, everyone, todo, limit=120.0 + len(todo))
            done.update(results[0])
            # Every rank has to log, and steer by, the same numbers.
            alike = all(results[0][key].metrics == other[key].metrics for other in results for key in todo)
            assert alike, "ranks hold different metrics"
            failed.remove(layout.ranks)
        return done[name, layout]

    return of


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_layout_changes_nothing(answers, name, layout):
    compare(answers(name), answers(name, layout), name, layout)


ALIKE = {
    "gspo_token": "gspo",  # with one advantage for all tokens of a sequence
    "aggregation token-mean": "cispo",
    "kl in loss, k1+": "kl in loss, k2",  # straight-through
    "kl in loss, k3+": "kl in loss, k2",
    "zero advantages skipped": "grpo",
    "rewards normalized, running": "rewards normalized, batch",  # as this is the first step of the run
    "reference of the step before": "kl in loss, k3",  # its gradient; what it adds is compared by the weights
}
"""Cases whose gradient intentionally is that of another one."""


@pytest.mark.parametrize("name", [*PRESETS, *VARIANTS])
def test_layout_cases_have_something_to_compare(answers, name):
    """Every optimizer step of every model has a gradient, and the part that a setting adds contributes to it."""
    want = answers(name)
    assert len(want.gradients["policy"]) == (1 if name.startswith("one update") else 2)
    for model, steps in want.gradients.items():
        assert all(0.005 < g.norm() < 100 for g in steps), (model, [g.norm() for g in steps])
    for metric, value in want.metrics.items():
        if metric.endswith(("clip_fraction", "selected_fraction")) and not name.startswith("one update"):
            assert 0 < value < 1, (metric, value)
    assert abs(want.metrics.get("kl/mean", 1.0)) > 0.01 and want.metrics["logp_diff/mean"] > 0.1


def test_layout_cases_differ_from_each_other(answers):
    """No case equals another one by mistake, such as by a setting that nobody reads."""
    seen = {}
    for name in [n for n in CASES if n not in ALIKE]:
        norms = tuple(round(g.norm().item(), 9) for g in answers(name).gradients["policy"])
        assert seen.setdefault(norms, name) == name


@pytest.mark.parametrize("name", ALIKE)
def test_layout_cases_that_are_alike(answers, name):
    for a, b in zip(answers(name).gradients["policy"], answers(ALIKE[name]).gradients["policy"], strict=True):
        assert (a - b).abs().max() < EXACT * b.abs().max()


def test_layout_sequences_without_advantage_are_left_out(answers):
    layout = FEW[0]
    made = answers("zero advantages skipped", layout).metrics["microbatches"]
    assert 2 < made < 2 * layout.micro == answers("overlong", layout).metrics["microbatches"]


def test_layout_every_loss_and_estimator_is_in_a_case():
    configs = [config(**{s: v for s, v in CASES[name].items() if s == "algo"}).algo for name in [*PRESETS, *VARIANTS]]
    assert {cfg.loss for cfg in configs} == set(LOSSES) and {cfg.advantage for cfg in configs} == set(ADVANTAGES)


@pytest.mark.parametrize("layout", [Layout(micro=7)], ids=str)
@pytest.mark.parametrize(("name", "step"), [("divided by its micro-batch", 0), ("selected in its micro-batch", 1)])
def test_layout_comparison_sees_a_loss_that_breaks_the_law(answers, name, step, layout):
    """In the first step of KL-Cov logp is old_logp, so that what it selects has no weight."""
    want, got = answers(name), answers(name, layout)
    wrong = list(differences(want, got))
    assert any(line.startswith(f"gradient {step} of policy") for line in wrong)
    assert relative({"": want.gradients["policy"][step]}, {"": got.gradients["policy"][step]}) > 0.01


def selections(world, folders, everyone):
    """Tokens of the first optimizer step that KL-Cov selects: all at once, written out, and in each micro-batch."""
    cfg, batch = cut(settings("kl_cov", world, folders["policy"]), world, Layout(micro=7), everyone)
    models = Cast(world, folders)(cfg)
    algo, batch, _ = scored_batch(cfg, world, models, everyone, batch)
    share = batch.select(torch.nonzero(batch.seq["update"] == 0).flatten())
    PolicyObjective(algo, models.policy, TEMPERATURE, world.data_peers).prepare(share, 0)
    mask, logp, advantage = (share.token[k] for k in ("mask", "old_logp", "advantages"))
    covariance = (advantage - advantage[mask].mean()) * (logp - logp[mask].mean())
    best = torch.where(mask, covariance, -torch.inf).topk(int(0.1 * int(mask.sum()))).indices
    apart = torch.zeros_like(mask)
    token = dict(share.token, place=torch.arange(share.n_tokens))
    lengths = share.lengths.tolist()
    count, budget = microbatch_count(share.lengths, cfg.policy.max_tokens_per_microbatch), max(lengths) * len(lengths)
    for micro in microbatches(Batch(share.lengths, token, share.seq), count, budget):
        columns = (micro.token[k] for k in ("old_logp", "old_logp", "advantages", "mask"))
        apart[micro.token["place"]] = select_kl_cov(Selecting(*columns, micro.seq_index, len(micro)), cov_ratio=0.1)
    return share.token["selected"], best, apart, count


def test_layout_kl_cov_selects_over_all_micro_batches(folders, everyone):
    selected, best, apart, count = run_ranks(selections, 1, folders, everyone)[0]
    assert count == 7
    assert torch.equal(torch.nonzero(selected).flatten(), best.sort().values) and len(best) > 10
    # Selecting in each micro-batch takes other tokens, so the tests above would see it.
    assert int((selected & apart).sum()) < 0.9 * len(best) and int(apart.sum()) > 0.5 * len(best)
