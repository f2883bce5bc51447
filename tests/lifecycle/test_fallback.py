"""Until they are admitted, keys share fallback rows, which train."""

import pickle
from collections import Counter

import pytest
import torch
from deferred_errors import deferred_errors
from simt import SimtMode

import sparsekit
from sparsekit import Fallback, Feature, MinCount, checkpoint
from tests.nn.keyed import Keyed

T = torch.tensor
DIM, ROWS, COUNT = 4, 3, 3
FIRST = -(2**63)
OPTIONS = {"seed": 3, "dtype": torch.float64, "name": "a"}
WITH = {"admission": MinCount(COUNT), "before_admission": Fallback(ROWS)}


def layer_of(capacity=200, **options):
    return sparsekit.DistributedEmbedding("sum", capacity, DIM, 1, **OPTIONS, **options)


def bag(*keys):
    return T(keys, dtype=torch.int64), T([0, len(keys)])


class Redirecting:
    """Replaces keys that have not come COUNT times, counted with plain Python."""

    def __init__(self):
        self.came = Counter()

    def __call__(self, keys, counts=True):
        keys = keys.tolist()
        if counts:
            self.came.update(keys)
        own = [key if self.came[key] >= COUNT else self.shared(key) for key in keys]
        return T(own, dtype=torch.int64)

    @staticmethod
    def shared(key):
        """Return the key of the row: splitmix64's finaliser modulo the number of rows."""
        word = key % 2**64
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
        word ^= word >> 31
        signed = word - 2**64 if word >= 2**63 else word
        return FIRST + signed % ROWS


def drawn(steps, seed=1):
    """Return the keys and offsets of each step: skewed, with repeats; some bags are empty."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        offsets = T([0, *torch.randint(0, 5, (6,), generator=generator).cumsum(0).tolist()])
        keys = (torch.rand(int(offsets[-1]), generator=generator) ** 3 * 60).long() + step
        yield keys, offsets


FORMS = {
    "bags": lambda layer: lambda keys, offsets: layer((keys, offsets)),
    "largest": lambda layer: _group(layer, Feature("a", "max")),
    "unpooled": lambda layer: _group(layer, Feature("a", None)),
    "mean": lambda layer: _group(layer, Feature("a", "mean")),
    "keyed": lambda layer: _keyed(layer),
}


def _group(layer, feature):
    group = sparsekit.EmbeddingGroup({"a": layer}, {"x": feature})

    def look_up(keys, offsets):
        inputs = {"x": (keys, offsets)}
        group.prefetch(inputs)
        output = group(inputs)["x"]
        return output.values() if output.is_nested else output

    return look_up


def _keyed(layer):
    other = sparsekit.DistributedEmbedding("sum", 200, DIM, 1, name="b", dtype=torch.float64)
    features = {"x": "a", "z": "b"}
    group = sparsekit.EmbeddingGroup({"a": layer, "b": other}, features, "concatenated")

    def look_up(keys, offsets):
        doubled = torch.cat([offsets, offsets[1:] + offsets[-1]])
        return group(Keyed(["z", "x"], torch.cat([keys, keys]), doubled))[:, :DIM]

    return look_up


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_keys_read_and_train_a_shared_row_until_they_are_admitted(form, fused):
    """As a table without admission, whose keys a plain Python model replaces."""
    layers = layer_of(**WITH), layer_of()
    redirect = Redirecting()
    optimizers = [sparsekit.optim.LazyAdam(layer.parameters(), lr=0.1) for layer in layers]
    if fused:
        for optimizer, layer in zip(optimizers, layers, strict=True):
            sparsekit.optim.fuse_in_backward(optimizer, layer)
    ours, theirs = (FORMS[form](layer) for layer in layers)
    for keys, offsets in drawn(25):
        outputs = ours(keys, offsets), theirs(redirect(keys), offsets)
        assert torch.equal(*outputs)
        for output, optimizer in zip(outputs, optimizers, strict=True):
            (output * torch.linspace(1, 2, DIM)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    asked = torch.arange(100)
    assert torch.equal(layers[0].vectors(asked), layers[1].vectors(redirect(asked, False)))
    for layer in layers:
        layer.eval()
    one_each = torch.arange(101)
    expected = layers[1]((redirect(asked, False), one_each))
    assert torch.equal(layers[0]((asked, one_each)), expected)
    admitted = {key for key, count in redirect.came.items() if count >= COUNT}
    found = torch.cat([part.keys for part in layers[0].items(chunk=7)])
    assert set(found.tolist()) == admitted
    assert len(found) == len(admitted) > 20
    assert set(layers[0].table.keys().tolist()) == admitted | {FIRST + f for f in range(ROWS)}


def test_the_rest_is_as_without_fallback_rows():
    """Who is admitted, evicted and expired, scores, and counts; the budget has the rows, too."""
    life = {"score": "lfu", "on_full": "evict", "ttl": 9, "admission": MinCount(COUNT)}
    plain = layer_of(**life, max_rows=20)
    layer = layer_of(**life, max_rows=20 + ROWS, before_admission=Fallback(ROWS))
    gone = [], []
    for one, told in zip((plain, layer), gone, strict=True):
        # Sweeps leave 99%, here of two budgets: have both sweep to the same number of rows.
        one.on_evict(lambda evicted, told=told: told.extend(sorted(evicted.keys.tolist())))
    for keys, offsets in drawn(40):
        plain((keys, offsets))
        layer((keys, offsets))
        assert {FIRST + f for f in range(ROWS)} <= set(layer.table.keys().tolist())
        plain.evict(keep=12)
        layer.evict(keep=12 + ROWS)
        expected = dict(zip(plain.table.keys().tolist(), plain.scores.tolist(), strict=False))
        found = dict(zip(layer.table.keys().tolist(), layer.scores.tolist(), strict=False))
        assert expected == {key: word for key, word in found.items() if key >= FIRST + ROWS}
    assert gone[0] == gone[1]
    assert len(gone[0]) > 20
    ours, theirs = layer.row_counts(), plain.row_counts()
    assert ours == theirs._replace(rows=theirs.rows + ROWS, inserted=theirs.inserted + ROWS)
    assert ours.expired > 0
    assert ours.evicted > 0


def test_fallback_rows_are_never_dropped():
    layer = layer_of(**WITH, ttl=1, on_full="evict", max_rows=9)
    for step in range(10):
        layer(bag(*[step] * COUNT))
        assert layer.table.find(T([FIRST, FIRST + 1, FIRST + 2])).min() >= 0
    assert layer.row_counts().expired > 5
    layer.evict(fraction=1.0)
    assert sorted(layer.table.keys().tolist()) == [FIRST, FIRST + 1, FIRST + 2]
    assert list(layer.items()) == [] or all(len(part.keys) == 0 for part in layer.items())
    trained = layer.vectors(T([7]))
    assert layer.erase(T([7])) == 0
    assert torch.equal(layer.vectors(T([7])), trained)
    layer.clear()
    layer(bag(1))
    assert len(layer.table) == ROWS


def test_features_that_read_use_them_and_do_not_count():
    layer = layer_of(**WITH)
    features = {"x": "a", "y": Feature("a", insert=False)}
    group = sparsekit.EmbeddingGroup({"a": layer}, features)
    for _ in range(4):
        out = group({"x": bag(5), "y": bag(9, 5)})
    out["y"].sum().backward()
    assert layer.life.counts.state()[:, :2].tolist() == []
    rows = layer.table.find(T([5, Redirecting.shared(9)])).sort().values
    assert torch.equal(layer.weight.grad.coalesce().indices()[0], rows)
    assert set(layer.table.keys().tolist()) == {5, *(FIRST + f for f in range(ROWS))}
    assert layer.row_counts()[-2:] == (4, 1)  # asked and found, of key 5 alone


def test_only_features_that_read_change_nothing():
    layer = layer_of(**WITH, ttl=1)
    for key in range(3):
        layer(bag(*[key] * COUNT))
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    group = sparsekit.EmbeddingGroup({"a": layer}, {"y": Feature("a", insert=False)})
    out = group({"y": bag(9)})
    assert torch.equal(out["y"], layer.weight[layer.table.find(T([Redirecting.shared(9)]))])
    assert all(torch.equal(before[name], t) for name, t in layer.state_dict().items())
    new = layer_of(**WITH)
    sparsekit.EmbeddingGroup({"a": new}, {"y": Feature("a", insert=False)})({"y": bag(9, 9, 9)})
    assert len(new.table) == len(new.life.counts.state()) == 0


def test_functions_score_keys_of_users_only():
    scored = []

    def score(keys):
        scored.extend(keys.tolist())
        return keys

    layer = layer_of(**WITH, score=score)
    for _ in range(COUNT):
        layer(bag(7, 8, 8))
    assert set(scored) == {7, 8}
    assert {part.keys.tolist()[0] for part in layer.items(min_score=8)} == {8}


def test_padding_is_padding():
    layer = layer_of(**WITH, padding_key=7)
    for _ in range(COUNT):
        layer(bag(7, 8))
    assert 7 not in layer.table.keys().tolist()
    assert layer.vectors(T([7])).count_nonzero() == 0
    assert layer(bag(7)).count_nonzero() == 0


def test_keys_of_32_bits_are_those_of_64():
    layer, keys = layer_of(**WITH), T([0, 1, ROWS, -1, -(2**31)])
    layer((keys.int(), T([0, len(keys)])))
    vectors = torch.ones(len(keys), DIM, dtype=torch.float64)
    assert bool((layer.vectors(keys.int()) == layer.vectors(keys)).all())
    layer.assign(keys.int(), vectors)
    assert torch.equal(layer.vectors(keys.int()), vectors)
    assert layer.erase(keys.int()) == len(keys)


def test_layers_that_insert_nothing_read_them(tmp_path):
    layer = layer_of(**WITH)
    optimizer = sparsekit.optim.LazyAdam(layer.parameters(), lr=0.1)
    layer(bag(1, 2, 3)).sum().backward()
    optimizer.step()
    expected = layer.vectors(torch.arange(9))
    assert bool((expected != layer_of().vectors(torch.arange(9))).all())
    copy = pickle.loads(pickle.dumps(layer))
    loaded, restored = layer_of(**WITH, insert=False), layer_of(**WITH)
    loaded.load_state_dict(layer.state_dict())
    checkpoint.save(layer, tmp_path / "saved")
    checkpoint.load(restored, tmp_path / "saved")
    for other in (copy, loaded, restored):
        assert torch.equal(other.vectors(torch.arange(9)), expected)
    loaded((torch.arange(9).repeat(9), T([0, 81])))
    assert len(loaded.table) == ROWS


@pytest.mark.parametrize("read", [False, True])
def test_a_device_counts_the_keys_of_each_feature(read):
    """Keys of a KeyedJaggedTensor that padding or a limit leaves out are not counted."""
    found = []
    for deferred in (False, True):
        layer = layer_of(**WITH, padding_key=7)
        second = Feature("a", "sum", max_nnz=2, truncate=True, insert=not read)
        group = sparsekit.EmbeddingGroup({"a": layer}, {"x": "a", "y": second})
        values = T([1, 7, 1, 2, 7, 3, 3, 3, 4, 5, 1, 1, 2])
        inputs = Keyed(["x", "y"], values, T([0, 3, 5, 9, 13]))
        with SimtMode(), deferred_errors() if deferred else SimtMode():
            outputs = group(inputs)
        found.append((outputs["x"], outputs["y"], layer.life.counts.state()[:, :2].tolist()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert sorted(found[0][2]) == sorted(found[1][2])
    assert sorted(found[0][2]) == [[1, 2], [2, 1]] if read else [[1, 2], [2, 1], [4, 1], [5, 1]]


def test_what_is_refused():
    layer = layer_of(**WITH)
    for call in (
        lambda key: layer(bag(4, key)),
        lambda key: layer.vectors(T([key])),
        lambda key: layer.erase(T([key])),
        lambda key: layer.assign(T([key]), torch.ones(1, DIM)),
    ):
        with pytest.raises(ValueError, match=rf"a: key {FIRST + 2} is one of the 3 smallest int64"):
            call(FIRST + 2)
    with pytest.raises(ValueError, match="offsets"):
        layer((T([1, 2]), T([0, 3])))
    assert len(layer.table) == len(layer.life.counts.state()) == 0
    layer(bag(FIRST + 3))
    with pytest.raises(ValueError, match=r"before_admission=Fallback\(rows=3\) needs admission"):
        layer_of(before_admission=Fallback(3))
    with pytest.raises(ValueError, match=f"a: key {FIRST} is one of"):
        layer_of(**WITH, padding_key=FIRST)
    with pytest.raises(ValueError, match=r"a: before_admission.rows must be in \[1, 2\], got 3"):
        layer_of(**WITH, on_full="evict", max_rows=3)
    with pytest.raises(ValueError, match="Fallback: rows"):
        Fallback(0)
    full = layer_of(**WITH, capacity=4)
    full(bag(1, 1, 1))
    with pytest.raises(sparsekit.TableFullError):
        full(bag(2, 2, 2))
