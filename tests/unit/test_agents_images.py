"""Conversations with environments that show images, of a policy that says what a list of texts says."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from spmdrl.config.environment import EnvironmentConfig
from spmdrl.config.schema import DataConfig
from spmdrl.data.conversation import Conversation
from spmdrl.data.episode import Episode
from spmdrl.data.prompts import load_prompts
from spmdrl.rl.agents import Agents
from spmdrl.rl.trees import Images, episode, episode_tree
from spmdrl.session.image_reader import image_reader
from tests.unit.test_agents import Played
from tests.unit.vision_models import chat_tokenizer, image_text, processor, saved

FAMILIES = ["qwen2_5_vl", "qwen3_5", "smolvlm"]
END = "<|im_end|>"
USER = '''
import numpy as np
from PIL import Image

from spmdrl.env import History, open_image


def picture(seed, size=(40, 56)):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))


def shown(seed):
    return {"type": "image", "image": picture(seed)}


class Slides:
    """Shows another picture after each turn."""

    made = 0

    def __init__(self, saves=False, changes=False, told="see"):
        self.saves, self.changes, self.told, self.turn = saves, changes, told, 0

    def reset(self, row, seed):
        Slides.made += self.changes
        return [{"role": "user", "content": ["one ", shown(Slides.made), self.told]}]

    def step(self, message):
        self.turn += 1
        return [{"role": "user", "content": [shown(self.turn), f"turn {self.turn}", shown(0)]}], 0.5, self.turn > 2

    def state(self):
        return {"turn": self.turn} if self.saves else None

    def restore(self, state):
        self.turn = state["turn"]


class Sums(Slides):
    """After a turn a summary takes the place of the conversation: with the same first picture, or another."""

    def step(self, message):
        self.turn += 1
        first = [{"role": "user", "content": ["one ", shown(0 if self.told == "same" else 9), self.told]}]
        then = [{"role": "assistant", "content": "sum"}, {"role": "user", "content": [shown(5), "on"]}]
        return History(first + then), 0.5, self.turn > 1


class Thin(Slides):
    """Its picture has a shape that the models do not take."""

    def step(self, message):
        return picture(0, (2, 1000)), 0.5, False


class Zoom:
    """Begins with the row's prompt; its tool shows a part of the row's picture."""

    def reset(self, row, seed):
        self.row = row

    def zoom(self, x: int, y: int):
        """Show a part.

        Args:
            x: left end
            y: upper end
        """
        return ["part", open_image(self.row["images"][0]).crop((x, y, x + 20, y + 20))]
'''


def picture(seed: int, size: tuple[int, int] = (40, 56)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("env") / "slides.py"
    path.write_text(USER)
    return str(path)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict:
    return {family: saved(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


@pytest.fixture
def make(file, folders):
    """Opens agents of a tiny vision model, closed at the end of the test."""
    opened = []

    def of(family: str, name: str = "Slides", longest: int = 2000, sees: bool = True, **limits) -> Agents:
        talk = Conversation(chat_tokenizer(family), "", limits.pop("history", "keep"))
        found = EnvironmentConfig(f"{file}:{name}", **limits)
        reader = image_reader(folders[family], talk.tokenizer, False) if sees else None
        ends = {talk.tokenizer.convert_tokens_to_ids(END)}
        opened.append(Agents(found, talk, ends, longest, "answer", 1.0, reader))
        return opened[-1]

    yield of
    for agents in opened:
        agents.close()


def said(text: str) -> str:
    return f"{text}{END}"


def reference(family: str, turns: list[tuple[str, str]], images: list[Image.Image]) -> list[int]:
    """Tokens of transformers' processor for the turns (role, text with {} for each image) and a generation prompt."""
    text = "".join(f"<|im_start|>{role}\n{words}{END}\n" for role, words in turns) + "<|im_start|>assistant\n"
    text = text.replace("{}", image_text(family))
    return processor(family)(text=[text], images=images, add_special_tokens=False).input_ids[0]


SLIDES = [("user", "one {}see"), ("assistant", "a"), ("user", "{}turn 1{}"), ("assistant", "b"), ("user", "{}turn 2{}")]


def check_slides(family: str, found: Episode) -> None:
    want = reference(family, SLIDES, [picture(seed) for seed in (0, 1, 0, 2, 0)])
    tail = chat_tokenizer(family)(said("c"), add_special_tokens=False).input_ids
    assert found.tokens.tolist() == [*want, *tail]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_image_is_expanded_once_as_the_processor_of_transformers_does(make, family):
    agents = make(family)
    played = Played(agents, [said(text) for text in "abc"], [said(text) for text in "abc"])
    one, other = played.play()
    check_slides(family, one)
    assert one.finish == "stop" and torch.equal(one.tokens, other.tokens)
    assert [len(s.images) for s in one.segments] == [1, 0, 2, 0, 2, 0]
    first, same = one.segments[0].images[0][1], one.segments[2].images[1][1]
    assert first is same and len({image.name for image in one.images}) == 3, "equal pictures are processed once"
    for s in one.segments:
        for at, _ in s.images:
            assert s.tokens[at] == agents.images.vision.image and (at == 0 or s.tokens[at - 1] != s.tokens[at])
    assert agents.take_counts()["failures"] == 0


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
@pytest.mark.parametrize("same", [True, False])
def test_a_fork_shares_the_common_prefix_up_to_the_first_image_that_differs(make, family, same):
    agents = make(family, "Sums", settings={"told": "same" if same else "other"})
    (found,) = Played(agents, [said("a"), said("b")]).play()
    word = "same" if same else "other"
    turns = [("user", "one {}" + word), ("assistant", "sum"), ("user", "{}on")]
    images = [picture(0 if same else 9), picture(5)]
    tail = chat_tokenizer(family)(said("b"), add_special_tokens=False).input_ids
    assert found.tokens.tolist() == [*reference(family, turns, images), *tail]
    assert [len(s.images) for s in found.segments] == ([1, 0, 1, 0] if same else [0, 1, 0, 2, 0])
    first, last = found.paths()
    shared = [i for i in first if i in last]
    both = [found.along(lambda s: s.tokens, path) for path in (first, last)]
    prefix = sum(len(found.segments[i]) for i in shared)
    if same:
        begun = reference(family, [("user", "one {}same")], [picture(0)])
        assert prefix == len(begun), "the prompt is shared whole, with its image"
    else:
        (at, _), *_ = found.segments[last[len(shared)]].images
        assert at == 0 and both[0][prefix] == both[1][prefix] == agents.images.vision.image


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("turns", [1, 2])
def test_resume_in_mid_episode_is_bit_equal(make, saves, turns):
    agents = make("qwen2_5_vl", settings={"saves": saves})
    played = Played(agents, [said(text) for text in "abc"])
    played.play(turns=turns)
    played.leave()
    kept = played.group.episodes[0]
    held = Images()
    tree = episode_tree(kept, held)
    assert "data:" not in json.dumps(tree["talk"]), "checkpoints hold names instead of images"
    again = episode(tree | {"talk": json.loads(json.dumps(tree["talk"]))}, held)
    again.phase = kept.phase
    played.group.episodes[0] = again
    (found,) = played.play()
    assert found.finish == "stop" and found.given == 1.5, played.why
    check_slides("qwen2_5_vl", found)


def test_an_environment_that_shows_another_image_when_it_is_replayed_fails_by_name(make):
    played = Played(make("qwen2_5_vl", settings={"changes": True}), [said(text) for text in "abc"])
    played.play(turns=1)
    played.leave()
    played.play()
    assert "it gave other messages when its turns were run again" in played.why[0]


def test_failures_by_name(make):
    agents = make("qwen2_5_vl", sees=False)
    played = Played(agents, [said("a")])
    (found,) = played.play()
    assert found.finish == "abort" and "shows an image, and this run reads text only" in played.why[0]
    assert agents.take_counts()["failures"] == 1
    agents = make("qwen2_5_vl", "Thin")
    played = Played(agents, [said("a")])
    (found,) = played.play()
    assert found.finish == "abort" and "Thin: image 1 cannot be processed for this model" in played.why[0]
    assert agents.take_counts()["failures"] == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_text_of_a_placeholder_is_text(make, family):
    told = "<|image_pad|><image><|vision_start|><|video_pad|>"
    agents = make(family, settings={"told": told})
    (found,) = Played(agents, [said(text) for text in "abc"]).play()
    tokenizer, ids = agents.renderer.tokenizer, found.segments[0].tokens.tolist()
    want = sum(image.tokens for _, image in found.segments[0].images)
    assert ids.count(agents.images.vision.image) == want and found.finish == "stop"
    assert tokenizer.decode(ids).count(told) == 1 if family != "smolvlm" else told in tokenizer.decode(ids)


def test_lengths_count_expanded_tokens_and_no_base64(make):
    size = len(reference("qwen2_5_vl", [("user", "one {}see")], [picture(0)]))
    played = Played(make("qwen2_5_vl", longest=size - 1), [said("a")])
    played.play()
    assert f"have {size} tokens; raise --rollout.max-prompt-tokens above {size - 1}" in played.why[0]
    (found,) = Played(make("qwen2_5_vl", longest=size), [said("a")], tokens=30).play()
    assert found.finish == "length" and not played.agents.episodes, "there is no room for the second image"


@pytest.mark.parametrize("parts", [True, False])
def test_the_images_of_a_row_reach_the_prompt_and_the_tools(make, tmp_path, parts):
    picture(3).save(tmp_path / "a.png")
    content = [{"type": "text", "text": "Is "}, {"type": "image"}, {"type": "text", "text": " red?"}]
    row = {"prompt": [{"role": "user", "content": content if parts else "Is <image> red?"}], "answer": "no"}
    row |= {"images": ["a.png"], "system": "Look."}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    agents = make("qwen3_5", "Zoom", calls="glm")
    tokenizer = agents.renderer.tokenizer
    prompts = load_prompts(
        str(tmp_path / "rows.jsonl"), DataConfig(prompt_column="prompt"), tokenizer, 9, begun=True, images=agents.images
    )
    (prompt,) = prompts.prompts
    assert prompt.text == "Is [image] red?" and prompt.tokens == [] and len(prompt.images) == 1
    call = "<tool_call>zoom\n<arg_key>x</arg_key>\n<arg_value>4</arg_value>\n<arg_key>y</arg_key>\n"
    call += "<arg_value>8</arg_value>\n</tool_call>"
    played = Played(agents, [said(call), said("no")], prompt=prompt)
    (found,) = played.play()
    assert found.finish == "stop", played.why
    turns = [("system", "Look."), ("user", "Is {} red?"), ("assistant", call), ("tool", "part{}")]
    crop = picture(3).crop((4, 8, 24, 28))
    tail = tokenizer(said("no"), add_special_tokens=False).input_ids
    assert found.tokens.tolist() == [*reference("qwen3_5", turns, [picture(3), crop]), *tail]
    picture(4).save(tmp_path / "a.png")
    agents.images.last, agents.images.last_urls = ((), ()), ((), [])
    changed = Played(agents, [said("no")], prompt=prompt)
    changed.play()
    assert "has changed since the prompts were loaded" in changed.why[0]
