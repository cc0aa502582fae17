"""Images in a batch: they stay with their sequences, and only sequences that show the same images share tokens."""

from dataclasses import dataclass

import pytest
import torch

from spmdrl.data.batch import Batch, concatenate
from spmdrl.data.distribute import distribute
from spmdrl.data.microbatch import microbatches, units_of
from spmdrl.data.placeholders import distinct_tokens, marks_of, places, whole, with_images
from spmdrl.data.tree import plan_tree
from spmdrl.spmd.peers import Peers

PAD, HOST = 9, torch.device("cpu")


@dataclass
class Image:
    """Stands for the payload of an image."""

    name: str
    tokens: int


A, B, C = (Image(letter * 32, tokens) for letter, tokens in (("a", 3), ("b", 2), ("c", 3)))


def batch_of(*rows: tuple[list, int]) -> Batch:
    """Packs rows of tokens and images, each with the number of sampled tokens at its end, as samples of their own."""
    tokens = [
        [x for part in row for x in ([part] if isinstance(part, int) else [PAD] * part.tokens)] for row, _ in rows
    ]
    lengths = torch.tensor([len(x) for x in tokens])
    mask = torch.cat([torch.arange(len(x)) >= len(x) - n for x, (_, n) in zip(tokens, rows, strict=True)])
    index = torch.arange(len(rows))
    token = {"tokens": torch.tensor([x for row in tokens for x in row]), "mask": mask}
    seq = {"position": index * 0, "sample": index, "update": index * 0, "work": lengths}
    images = [tuple(part for part in row if not isinstance(part, int)) for row, _ in rows]
    return with_images(Batch(lengths, token, seq), images, PAD)


def tree_of(batch: Batch):
    return plan_tree(
        batch.token["tokens"], batch.lengths, batch.token["mask"], batch.begins, None, batch.token["image"]
    )


ROWS = ([1, A, 2, 5], 1), ([1, A, 2, 6], 1), ([1, C, 2, 5], 1), ([1, 2, 3], 1), ([1, A, B, 4, B, 5], 1)


def test_images_stay_with_their_sequences():
    batch = batch_of(*ROWS)
    want = [(A,), (A,), (C,), (), (A, B, B)]
    assert batch.images == want
    order = torch.tensor([4, 2, 2, 0])
    for got in (batch.select(order), batch.select(order).to(HOST), batch.select(order).like()):
        assert got.images == [want[i] for i in order]
    assert batch.kept(torch.tensor([False, True, True, False, False])).images == [(A,), (C,)]
    text = Batch(
        torch.tensor([1]), {k: x[:1] for k, x in batch.token.items()}, {k: x[:1] for k, x in batch.seq.items()}
    )
    assert concatenate(text, batch).images == [(), *want] and concatenate(text, text).images is None
    for micro in microbatches(batch, 2, 30, units_of(batch, 30, True)):
        assert micro.images == [want[i] for i in micro.seq["sample"].tolist()]
    moved = distribute(
        batch.select(torch.tensor([3, 1, 0, 4, 2])), torch.zeros(1, 1, dtype=torch.int64), Peers(None, HOST)
    )
    assert moved.images == want and "row" not in moved.seq
    found = [(payload.name[0], at.tolist()) for payload, at in places(batch.token["image"], want)]
    assert found[:2] == [("a", [1, 2, 3]), ("a", [7, 8, 9])] and [name for name, _ in found[2:]] == ["c", "a", "b", "b"]


def test_sequences_share_tokens_only_up_to_an_image_that_differs():
    # Samples of a prompt share all of it, or nothing; paths of an episode share what is equal, but no part of an image.
    tree = tree_of(batch_of(*ROWS[:2]))
    assert tree is not None and tree.lengths == [5, 1, 1]
    assert tree_of(batch_of(ROWS[0], ROWS[2])) is None
    batch = batch_of(ROWS[0], ROWS[2], ROWS[0])
    batch.seq |= {"path": torch.arange(3), "paths": torch.full((3,), 3)}
    tree = tree_of(batch)
    assert tree is not None and tree.lengths[0] == 1 and len(tree.keep) == 1 + 5 + 5 + 1
    # Equal tokens that continue with different images after an equal one.
    batch = batch_of(([1, A, 7, A, 5], 1), ([1, A, 7, C, 5], 1))
    batch.seq |= {"path": torch.arange(2), "paths": torch.full((2,), 2)}
    tree = tree_of(batch)
    assert tree is not None and tree.lengths[0] == 5 and len(tree.keep) == 5 + 4 + 4
    # The last token of a sequence is never shared, so an image at its end is not shared either.
    batch = batch_of(([1, 2, A], 0), ([1, 2, A], 0))
    tree = tree_of(batch)
    assert tree is not None and tree.lengths == [2, 3, 3]
    assert [whole(n, batch.token["image"][:5]) for n in range(6)] == [0, 1, 2, 2, 2, 5]
    assert units_of(batch_of(ROWS[0], ROWS[2]), 20, True)[0].tokens == 6


def test_placeholders_that_do_not_fit_the_images_are_refused():
    batch = batch_of(*ROWS)
    with pytest.raises(ValueError, match="sequence 3 has 0 placeholder tokens .* its 1 images need 2"):
        with_images(batch, [(A,), (A,), (C,), (B,), (A, B, B)], PAD)
    text = Batch(torch.tensor([2]), {"tokens": torch.tensor([1, 2])}, {})
    assert with_images(text, [()], PAD).token["image"].tolist() == [0, 0]


def test_sequences_with_different_images_are_distinct():
    batch = batch_of(*ROWS)
    rows = batch.token["tokens"].split(batch.lengths.tolist()), batch.token["image"].split(batch.lengths.tolist())
    for tokens, marks, images in zip(*rows, batch.images, strict=True):
        assert torch.equal(marks, marks_of(list(images), tokens == PAD))
        apart = distinct_tokens(tokens, marks)
        assert torch.equal(apart[marks == 0], tokens[marks == 0]) and torch.equal(apart.int().long(), apart)
        assert bool((apart[marks > 0] < 0).all())
    first, _, third, *_ = (distinct_tokens(*row) for row in zip(*rows, strict=True))
    assert not bool((first[1:4] == third[1:4]).any()) and torch.equal(distinct_tokens(rows[0][3], None), rows[0][3])
