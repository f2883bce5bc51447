"""New keys get a row once they are admitted; until then they are read and not trained."""

import copy
from collections import Counter

import pytest
import torch
from interruptions import OPS, PACKAGE, interrupt

import sparsekit
from sparsekit import LFU, MinCount, Probability
from sparsekit.tables.admission import ExactCounts, Sketch
from sparsekit.tables.saved_state import run_all


def layer_of(admission, **options):
    return sparsekit.EmbeddingBag(
        100, 4, mode="sum", name="a", admission=admission, dtype=torch.float64, **options
    )


def look_up(layer, *keys):
    return layer(torch.tensor(keys).view(-1, 1))


@pytest.mark.parametrize("before", ["initial", "zero"])
def test_a_key_is_read_and_not_trained_until_it_is_admitted(before):
    layer = layer_of(MinCount(3), before_admission=before)
    optimizer = sparsekit.optim.LazyAdam([layer.weight], lr=0.1)
    initial = layer_of(None).vectors(torch.tensor([5, 6]))
    expected = torch.zeros_like(initial) if before == "zero" else initial
    for count in range(4):
        outputs = look_up(layer, 5, 6) if count == 0 else look_up(layer, 5)
        outputs.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if count < 2:
            assert torch.equal(outputs, expected[: len(outputs)])
            assert len(layer.table) == 0
    assert layer.table.keys().tolist() == [5]
    # Trained twice, in the batch that admitted it, and after: from the initial vector.
    assert bool(((layer.vectors(torch.tensor([5])) - initial[:1]).abs() > 0.1).all())
    layer.eval()
    assert torch.equal(look_up(layer, 6), expected[1:])
    assert torch.equal(layer.vectors(torch.tensor([6])), expected[1:])


def test_all_positions_of_a_batch_count_at_once():
    layer = layer_of(MinCount(3), score=LFU(0))
    look_up(layer, 5, 7, 5, 5, 7)
    assert layer.table.keys().tolist() == [5]
    assert layer.life.counts.state()[:, :2].tolist() == [[7, 2]]
    look_up(layer, 7)
    # The score of an admitted key is its count.
    scores = dict(zip(layer.table.keys().tolist(), layer.scores.tolist(), strict=False))
    assert {key: word >> 32 for key, word in scores.items()} == {5: 3, 7: 3}
    assert layer.life.counts.state().tolist() == []
    assert (layer.life.admitted, layer.life.refused) == (2, 1)


def test_counts_expire():
    layer = layer_of(MinCount(2, expire_after=10))
    sparsekit.set_clock(layer, 100)
    look_up(layer, 5, 6)
    sparsekit.set_clock(layer, 110)
    look_up(layer, 5)  # the last moment
    sparsekit.set_clock(layer, 111)
    look_up(layer, 6)
    assert layer.table.keys().tolist() == [5]
    assert layer.life.counts.state().tolist() == [[6, 1, 111]]


def test_many_counts_are_those_of_a_dict():
    counts, expected = ExactCounts(torch.device("cpu"), None), Counter()
    random = torch.Generator().manual_seed(1)
    for now in range(60):
        keys = torch.randint(-(2**62), 2**62, (200,), generator=random).remainder(3000).unique()
        n = torch.randint(1, 5, keys.shape, generator=random)
        before = [expected[key] for key in keys.tolist()]
        expected.update(dict(zip(keys.tolist(), n.tolist(), strict=True)))
        assert counts.add(keys, n, now).tolist() == (torch.tensor(before) + n).tolist()
        gone = keys[::3]
        remove = counts.erasure if now % 2 else counts.removal
        run_all(remove(torch.cat([gone, torch.tensor([10**9])])))
        for key in gone.tolist():
            del expected[key]
    assert {key: count for key, count, _ in counts.state().tolist()} == expected
    assert counts.index.capacity > 1024


def test_expired_counts_make_room():
    counts = ExactCounts(torch.device("cpu"), 5)
    for now in range(100):
        keys = torch.arange(500) + 500 * now
        assert counts.add(keys, torch.ones_like(keys), now).tolist() == [1] * 500
    assert counts.index.capacity <= 8192


def test_estimates_of_a_sketch_are_never_too_low_and_seldom_too_high():
    size = 1 << 14
    sketch, random = Sketch(size, torch.device("cpu")), torch.Generator().manual_seed(1)
    stream = (torch.rand(40000, generator=random) ** 4 * 20000).to(torch.int64)
    for part in stream.split(500):
        keys, n = part.unique(return_counts=True)
        sketch.add(keys, n, 0)
    keys, n = stream.unique(return_counts=True)
    excess = sketch.add(keys, torch.zeros_like(n), 0) - n
    assert int(excess.min()) >= 0
    assert int(excess.max()) > 0  # or the test would not see a sketch at work
    bound = 44 / size * len(stream)
    assert float((excess > bound).double().mean()) <= 0.02


def test_a_sketch_admits_what_it_has_counted():
    layer = layer_of(MinCount(2, sketch_bytes=1 << 16))
    look_up(layer, 1, 2, 3)
    look_up(layer, 3, 1)
    assert layer.table.keys().tolist() == [3, 1]
    with pytest.raises(ValueError, match="expire_after=5 needs exact counts"):
        MinCount(2, sketch_bytes=64, expire_after=5)


def test_chance_depends_on_key_seed_and_time_alone():
    keys = torch.arange(20000)
    for p in (0.1, 0.5, 1.0):
        admitted = Probability(p, seed=3).admits(keys, 7)
        assert abs(float(admitted.double().mean()) - p) < 0.01
        assert torch.equal(Probability(p, seed=3).admits(keys.flip(0), 7), admitted.flip(0))
    first = Probability(0.5, seed=3).admits(keys, 7)
    for other in (Probability(0.5, seed=3).admits(keys, 8), Probability(0.5, 4).admits(keys, 7)):
        assert 0.45 < float((first == other).double().mean()) < 0.55


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: MinCount(0), ValueError, r"MinCount: count must be in \[1, 2147483647\], got 0"),
        (lambda: MinCount("2"), TypeError, "MinCount: count must be an int, got '2'"),
        (lambda: MinCount(2, 63), ValueError, "sketch_bytes must be in"),
        (lambda: MinCount(2, expire_after=0), ValueError, "expire_after must be in"),
        (lambda: Probability(0), ValueError, r"Probability: p must be in \(0, 1\], got 0"),
        (lambda: Probability(1.5), ValueError, "got 1.5"),
        (lambda: Probability(0.5, seed=-1), ValueError, "seed must be in"),
        (lambda: LFU(-1), ValueError, "LFU: halve_every must be in"),
    ],
)
def test_bad_settings(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize("admission", [MinCount(3), MinCount(3, sketch_bytes=256)])
def test_counts_are_part_of_the_state(admission):
    layer = layer_of(admission)
    look_up(layer, 1, 2, 2, 3)
    others = [copy.deepcopy(layer), layer_of(admission)]
    others[1].load_state_dict(layer.state_dict())
    for other in others:
        look_up(other, 2, 3)
        assert other.table.keys().tolist() == [2]
    assert len(layer.table) == 0  # counts are not shared
    # A state without counts starts from nothing; one with counts can be read without admission.
    others[0].load_state_dict(layer_of(None, score="lru").state_dict())
    look_up(others[0], 2)
    assert len(others[0].table) == 0
    plain = layer_of(None)
    plain.load_state_dict(layer.state_dict())


def test_damaged_counts_are_refused():
    layer = layer_of(MinCount(3))
    look_up(layer, 1, 1)
    state = layer.state_dict()
    for bad in (torch.zeros(2, 2, dtype=torch.int64), torch.zeros(1, 3)):
        with pytest.raises(RuntimeError, match="a: counts in the state must"):
            layer.load_state_dict({**state, "counts": bad})
    look_up(layer, 1)
    assert layer.table.keys().tolist() == [1]


def test_erasing_clearing_and_resetting_forget_counts():
    for forget in (
        lambda layer: layer.erase(torch.tensor([1])),
        lambda layer: layer.clear(),
        lambda layer: layer.reset_parameters(),
    ):
        layer = layer_of(MinCount(2))
        look_up(layer, 1)
        forget(layer)
        look_up(layer, 1)
        assert len(layer.table) == 0


def test_an_empty_table_with_keys_that_wait_can_be_cleared():
    layer = layer_of(MinCount(2))
    out = look_up(layer, 1)
    assert layer.clear() == 0
    with pytest.raises(RuntimeError, match="a: its rows have other keys than in the forward"):
        out.sum().backward()
    look_up(layer, 1)
    assert len(layer.table) == 0


def test_assigned_keys_are_admitted():
    layer = layer_of(MinCount(5))
    look_up(layer, 4, 4, 6)
    layer.assign(torch.tensor([4]), torch.ones(1, 4))
    assert torch.equal(look_up(layer, 4).detach(), torch.ones(1, 4, dtype=torch.float64))
    # Their counts are gone, so that they wait anew once they have been dropped.
    assert layer.life.counts.state()[:, :2].tolist() == [[6, 1]]


def test_a_full_table_refuses_admitted_keys_and_stays_as_it_was():
    layer = sparsekit.EmbeddingBag(2, 4, mode="sum", name="a", admission=MinCount(1))
    look_up(layer, 1, 2)
    with pytest.raises(sparsekit.TableFullError, match="a: the table on rank 0 is full: 2 of 2"):
        look_up(layer, 3)
    assert layer.table.keys().tolist() == [1, 2]


def test_an_interrupted_admission_leaves_each_key_a_row_or_its_count():
    def admitted(moment, files):
        layer = layer_of(MinCount(2), score=LFU(0))
        look_up(layer, 1, 2, 3)
        count = interrupt(lambda: look_up(layer, 1, 2), moment, files)
        rows = layer.table.keys().tolist()
        counts = dict(layer.life.counts.state()[:, :2].tolist())
        assert {*rows} & {*counts} == set()
        assert {*rows, *counts} == {1, 2, 3}
        initial = layer_of(None).vectors(torch.tensor(rows, dtype=torch.int64))
        assert torch.equal(layer.weight[: len(rows)].detach(), initial)
        # The count that a key has waited with is part of its score at once.
        assert all(word >> 32 >= 1 for word in layer.scores[: len(rows)].tolist())
        # The host knows the clock, wherever the interrupt came.
        assert layer.life.now(layer.clock) == int(layer.clock)
        return count

    for files, most in ((PACKAGE, 100), (OPS, 200)):
        count = admitted(10**9, files)
        for moment in range(1, count, max(1, count // most)):
            assert admitted(moment, files) is None


def test_the_host_knows_the_clock_after_an_interrupt(monkeypatch):
    layer = layer_of(None, score="lru")
    look_up(layer, 1)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("sparsekit.lookup.touch.end_ticks", interrupted)
        with pytest.raises(KeyboardInterrupt):
            look_up(layer, 2)
    assert layer.life.now(layer.clock) == int(layer.clock) == 2
    look_up(layer, 3)
    assert layer.scores[:3].tolist() == [1, 2, 3]


def test_a_key_that_found_the_table_full_keeps_its_count():
    layer = sparsekit.EmbeddingBag(1, 4, mode="sum", name="a", admission=MinCount(2))
    look_up(layer, 1, 1, 2)
    with pytest.raises(sparsekit.TableFullError):
        look_up(layer, 2)
    assert layer.life.counts.state()[:, :2].tolist() == [[2, 2]]
    assert (layer.life.admitted, layer.life.refused) == (1, 1)
    layer.erase(torch.tensor([1]))
    look_up(layer, 2)
    assert layer.table.keys().tolist() == [2]


def test_a_lookup_that_is_refused_does_not_use_up_an_expiry():
    layer = sparsekit.EmbeddingBag(10, 4, mode="sum", name="a", ttl=16)
    look_up(layer, 1)
    sparsekit.set_clock(layer, 100)
    with pytest.raises(ValueError, match="offsets"):
        layer(torch.tensor([2, 3]), torch.tensor([0, 5]))
    assert layer.table.keys().tolist() == [1]
    look_up(layer, 2)
    assert layer.table.keys().tolist() == [2]
