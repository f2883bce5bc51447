"""A stand-in passed to an op in place of a list of tensors has the effect of the list."""

import gc

import pytest
import torch
from torch._subclasses import FakeTensorMode

from sparsekit import HashTable, ops
from sparsekit.tables.kept_tensors import KeptTensors

kept_list = torch.ops.sparsekit.kept_list
words_of = torch.ops.sparsekit.words_of


class Tables:
    """Two tables, and a step of momentum SGD in them."""

    def __init__(self, device):
        self.hashed = [HashTable(20, device=device) for _ in range(2)]
        self.weights = [torch.zeros(20, dim, device=device) for dim in (3, 4)]
        self.states = [torch.ones_like(weight) for weight in self.weights]
        self.seeds = [torch.tensor([seed], device=device) for seed in (5, 6)]
        self.steps = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(2)]
        self.scores = [torch.zeros(20, dtype=torch.int64, device=device) for _ in range(2)]
        self.clocks = [torch.tensor([clock], device=device) for clock in (5, 6)]
        self.keys = torch.tensor([7, 8, 7, 9, 7, 10], device=device)
        self.offsets = torch.tensor([0, 2, 3, 6, 6], device=device)
        self.features = torch.tensor([[0, 0, 0, 2, 0, 9, 0, 0, 7], [1, 0, 2, 2, 0, 9, 0, 3, 7]])
        self.described = torch.tensor([[0, 20, 1], [1, 20, 1]])
        self.initial = torch.tensor([[1, -0.5, 0.5]] * 2, dtype=torch.float64)

    def of_hash_tables(self, name):
        return [getattr(table, name) for table in self.hashed]

    def step(self, passed):
        """Return all results of a step, with passed(list) in place of each list of tables."""
        buckets, seeds, sizes = map(self.of_hash_tables, ("buckets", "hash_seed", "size"))
        asked = [self.keys], [self.offsets], self.features
        tables = passed(buckets), passed(seeds)
        rows, inverse, counts, bags, starts = torch.ops.sparsekit.group_find_or_insert_(
            *tables, passed(sizes), passed(self.weights), passed(self.seeds), self.described,
            self.initial, *asked, []
        )  # fmt: skip
        found = torch.ops.sparsekit.group_find(*tables, self.described, *asked)[0]
        out = torch.zeros(2, 7, device=self.keys.device)
        torch.ops.sparsekit.group_embedding_bag_(
            [out], passed(self.weights), found, None, None, bags, self.features, [], starts,
            [self.keys], passed(self.seeds), self.initial
        )  # fmt: skip
        ops.group_embedding_bag_update_(
            [out], inverse, rows, counts, bags, self.features, [], starts, passed(self.weights),
            passed(self.states), [], passed(self.steps), "sgd", [0.5, 0.9, 0.0, 0.0],
            count_steps=True,
        )  # fmt: skip
        torch.ops.sparsekit.group_touch_(
            passed(self.scores), inverse, rows, counts, bags, self.features,
            torch.tensor([[1, 0], [2, 3]]), passed(self.clocks)
        )  # fmt: skip
        changed = *self.weights, *self.states, *self.steps, *sizes, *self.scores
        return [counts, found, out, *changed]


def test_a_step_is_the_same(device):
    expected, got = Tables(device), Tables(device)
    for made in expected, got:
        for table in made.hashed:
            table.hash_seed.fill_(3)
    standing_in = {}

    def kept(tensors):
        key = tuple(map(id, tensors))
        return [standing_in.setdefault(key, kept_list(tensors))]

    for _ in range(3):
        for one, other in zip(expected.step(list), got.step(kept), strict=True):
            assert torch.equal(one, other)
    assert got.weights[0].any()
    assert all(score.any() for score in got.scores)


def on_the_host(device):
    if device.type == "cuda":
        pytest.skip("words_of reads the host's memory only")


def test_words(device):
    on_the_host(device)
    words = [torch.tensor([i - 5], device=device) for i in range(9)]
    for given in words, [kept_list(words)]:
        assert words_of(given).tolist() == list(range(-5, 4))
    with pytest.raises(ValueError, match=r"words\[1\] must have one element, got 2"):
        words_of([words[0], torch.tensor([1, 2], device=device)])


def test_a_copy_stands_for_nothing(device):
    on_the_host(device)
    words = [torch.tensor([1], device=device), torch.tensor([2], device=device)]
    stand_in = kept_list(words)
    for copied in stand_in.clone(), stand_in.view(3, 1, 1, 1).to(torch.int32):
        with pytest.raises((TypeError, ValueError), match=r"words\[0\] must have"):
            words_of([copied])
    with pytest.raises(ValueError, match=r"words\[0\] must have"):
        words_of([stand_in, stand_in])


def test_a_stand_in_keeps_the_memory():
    words = [torch.full((1,), value) for value in (11, 12)]
    stand_in = kept_list(words)
    del words
    gc.collect()
    others = [torch.full((1,), value) for value in range(50)]
    assert words_of([stand_in]).tolist() == [11, 12]
    assert len(others) == 50


def test_a_stand_in_follows_its_tensors_to_other_memory(device):
    on_the_host(device)
    words = [torch.tensor([value], device=device) for value in (11, 12, 13)]
    stand_in = kept_list(words)
    words[0].data = torch.tensor([21], device=device)
    assert words_of([stand_in]).tolist() == [21, 12, 13]
    words[1].set_(torch.tensor([22], device=device))
    assert words_of([stand_in]).tolist() == [21, 22, 13]
    words[2].untyped_storage().resize_(2**20)
    words[2].fill_(23)
    assert words_of([stand_in]).tolist() == [21, 22, 23]
    words[1].data = torch.tensor([0.5], device=device)
    with pytest.raises(ValueError, match=r"words\[1\] must have dtype Long, got Float"):
        words_of([stand_in])
    words[1].data = torch.tensor([1, 2], device=device)
    with pytest.raises(ValueError, match=r"words\[1\] must have one element, got 2"):
        words_of([stand_in])


def test_an_argument_that_overlaps_kept_tensors_is_refused_in_any_call(device):
    """Kept tensors are compared with one another only once, but with others in each call."""
    tables, rows = 20, torch.zeros(2, dtype=torch.int32, device=device)
    room = torch.rand(tables * 4 + 2, 3, device=device)
    weights = [room[4 * t : 4 * t + 4] for t in range(tables)]
    features = torch.tensor([[0, 0, 0, 2, 0, 9, 0, 0, 3]])
    bags = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    pool = torch.ops.sparsekit.group_embedding_bag_
    stand_in, out = [kept_list(weights)], torch.zeros(2, 3, device=device)
    for _ in range(3):
        for passed in weights, stand_in:
            pool([out], passed, rows, None, None, bags, features, [], None, [], [], None)
            assert torch.equal(out, weights[0][:1].expand(2, 3))
            for t in (0, 7, tables - 1):
                with pytest.raises(ValueError, match=rf"weights\[{t}\] overlaps outs\[0\]"):
                    pool(
                        *([weights[t][2:]], passed, rows, None, None, bags, features),
                        *([], None, [], [], None),
                    )
    outs = [out, out[1:]]
    with pytest.raises(ValueError, match=r"outs\[1\] overlaps outs\[0\]"):
        pool(outs, stand_in, rows, None, None, bags, features, [], None, [], [], None)
    twice = [kept_list([*weights, room[5:7]])]
    out = room[tables * 4 :]
    pool([out], twice, rows, None, None, bags, features, [], None, [], [], None)


def test_a_refusal_names_the_table(device):
    tables = Tables(device)
    tables.states[1] = torch.zeros(19, 4, device=device)
    with pytest.raises(ValueError, match=r"table 1: states\[0\] must have size 20"):
        tables.step(lambda tensors: [kept_list(tensors)])


def test_nothing_traces_a_stand_in():
    with FakeTensorMode() as mode, pytest.raises(Exception, match="kept_list"):
        kept_list([mode.from_tensor(torch.zeros(1))])


def test_lists_are_the_same_until_a_tensor_is_replaced_or_gets_other_memory():
    tensors = [torch.zeros(3), torch.nn.Parameter(torch.zeros(2))]
    kept = KeptTensors([tensors, []])
    assert kept.are([list(tensors), []])
    assert [len(argument) for argument in kept.arguments] == [1, 0]
    assert not kept.are([[tensors[0], torch.nn.Parameter(tensors[1].detach())], []])
    assert not kept.are([tensors[:1], []])
    assert not kept.are([tensors, tensors])
    tensors[1].data = torch.zeros(2)
    assert not kept.are([tensors, []])
