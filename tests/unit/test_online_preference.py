"""Which of a run's own samples are compared, by hand; settings that nothing reads."""

from types import SimpleNamespace

import pytest
import torch

from spmdrl.config.fields import ConfigError
from spmdrl.config.load import from_command_line
from spmdrl.config.online_preference import OnlineMethod, OnlinePreferenceConfig
from spmdrl.config.use import check_use
from spmdrl.data.batch import Batch
from spmdrl.rl.online_preference import OnlinePreference


def sides(groups: list[list[float]], said: str = "", **chosen) -> list[int]:
    """Places of the samples to learn from. said: a letter for each sample, the same for the same response."""
    rewards = [reward for group in groups for reward in group]
    tokens = list(map(ord, said)) if said else list(range(len(rewards)))
    positions = [position for position, group in enumerate(groups) for _ in group]
    batch = Batch(torch.ones(len(rewards), dtype=torch.int64), {"tokens": torch.tensor(tokens)})
    batch.seq["position"] = torch.tensor(positions)
    run = SimpleNamespace(cfg=OnlinePreferenceConfig(preference=OnlineMethod(**chosen)))
    method = OnlinePreference(run)  # type: ignore[arg-type]
    return method.extremes(batch, torch.tensor(rewards, dtype=torch.float64)).tolist()


@pytest.mark.parametrize(
    "groups, chosen, found",
    [
        ([[0.0, 1.0, 0.5], [1.0, 0.2]], {}, [1, 0, 3, 4]),
        # Among equals the first one drawn.
        ([[1.0, 0.0, 1.0, 0.0]], {}, [0, 1]),
        ([[0.5, 0.5], [0.0, 1.0]], {}, [3, 2]),
        # Rewards that differ by rounding alone are equal.
        ([[0.3, 0.1 + 0.2], [0.73123456, 0.7312345]], {}, []),
        # Each of these is 0.2, in floats a little more or less.
        ([[1.0, 0.8], [0.8, 0.6], [0.6, 0.4]], {"gap": 0.2}, []),
        ([[1.0, 0.6], [0.6, 0.4]], {"gap": 0.2}, [0, 1]),
        ([[1e6, 1e6 - 0.5], [1e6, 1e6 - 2]], {}, [2, 3]),
        ([[0.0, 1.0], [0.0, 0.5]], {"least_reward": 1.0}, [1, 0]),
        ([[0.0, 1.0, 1.0], [0.2, 0.2], [-1.0, -2.0]], {"method": "raft"}, [1, 3, 5]),
        ([[0.0, 1.0], [0.2, 0.2]], {"method": "raft", "least_reward": 0.5}, [1]),
        ([], {}, []),
    ],
)
def test_extremes_of_each_prompt_are_the_pair(groups, chosen, found):
    assert sides(groups, **chosen) == found


def test_two_samples_that_are_the_same_tokens_are_no_pair():
    """As judges that compare neighbours may rank them, or a reward model in another micro-batch."""
    assert sides([[0.75, 0.25, 0.5], [0.75, 0.25, 0.5]], "aabaab") == []
    assert sides([[0.75, 0.25, 0.5]], "abb") == [0, 1]
    assert sides([[0.75, 0.25]], "aa", method="raft") == [0]


@pytest.mark.parametrize(
    "flags",
    [
        "--filter.low 0.3",
        "--filter.metric score",
        "--shaping.overlong-factor 0.5",
        "--shaping.length-coef 0.5",
        "--reward.model-coef 2",
        "--lora.alpha 32",
        "--eval.samples 4 --eval.every 0",
    ],
)
def test_settings_that_nothing_reads_are_refused(flags):
    loaded = from_command_line(flags.split(), schema=OnlinePreferenceConfig)
    with pytest.raises(ConfigError) as error:
        check_use(loaded)
    assert flags.split()[0] in str(error.value)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--preference.method raft",
        "--filter.keep accuracy_range --filter.low 0.3",
        "--shaping.overlong-buffer 2 --shaping.overlong-factor 0.5 --shaping.length-penalty group",
        "--reference.refresh-every 3 --reference.mix 0.5 --preference.loss sppo_hard sft=0.5 --preference.weighted",
        "--preference.loss aot --reference.path tiny --optimizer.schedule linear --optimizer.warmup-steps 3",
    ],
)
def test_settings_that_are_read_may_stand(flags):
    assert check_use(from_command_line(flags.split(), schema=OnlinePreferenceConfig)) == []
