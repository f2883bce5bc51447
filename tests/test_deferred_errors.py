"""Errors of lookups on a device are deferred, name the layer, and are not lost."""

import copy
import io
import math
import random

import pytest
import torch
from deferred_errors import Copy, deferred_errors, library
from simt import SimtMode

import sparsekit
from sparsekit import checkpoint
from sparsekit._reports import MOST_LOOKUPS
from sparsekit.optim import LazyAdam, fuse_in_backward
from sparsekit.tables.hash_table import RowBound
from sparsekit.train import Trainer

ROWS = 50


def table(capacity=ROWS, name="users", **options):
    torch.manual_seed(0)
    options = {"slot_num": 1, "max_nnz": 8, "seed": 1, **options}
    return sparsekit.DistributedEmbedding("sum", capacity, 4, name=name, **options)


def keys(*values):
    return torch.tensor(values).view(-1, 1, 1)


def few(layer):
    """Return a sample with one key in each slot."""
    return torch.ones(1, layer.slot_num, 1, dtype=torch.int64)


def never(looks):
    return False


def at_once(looks):
    return True


class Waits:
    """Counts waits for reports, in lookups with the host runner whose errors are deferred."""

    def __init__(self, is_made=at_once):
        self.count = 0
        self._context = deferred_errors(is_made, self._waited), SimtMode()

    def _waited(self):
        self.count += 1

    def __enter__(self):
        for context in self._context:
            context.__enter__()
        return self

    def __exit__(self, *error):
        for context in reversed(self._context):
            context.__exit__(*error)


def test_only_lookups_whose_keys_might_not_fit_wait():
    layer = table()
    with Waits() as waits:
        layer(keys(*range(20)))
        assert waits.count == 1  # nothing is known of the table
        layer(keys(*range(25)))
        layer(keys(*range(25)))
        assert waits.count == 1
        layer(keys(*range(25, 50)))
        layer(keys(*range(25, 50)))
        assert waits.count == 1 + 1  # 50 rows and 25 keys might be too many
    assert len(layer.table) == 50


def test_keys_on_their_way_count_as_inserted():
    layer = table()
    with Waits(never) as waits:
        layer(keys(1))
        waits.count = 0
        for _ in range(4):
            layer(keys(*range(12)))
        assert waits.count == 0  # 1 + 48 keys fit in any case
        layer(keys(*range(12)))
        assert waits.count == 5  # all five reports
        layer(keys(*range(12)))
        assert waits.count == 5  # now it is known that there are 12 rows


def test_keys_of_all_features_of_a_table_count():
    group = sparsekit.EmbeddingGroup({"users": table(4)}, features={"a": "users", "b": "users"})
    with Waits(never):
        group({"a": keys(1), "b": keys(2)})
        with pytest.raises(sparsekit.TableFullError, match=r"users.*2 of 4 rows.*3 new keys"):
            group({"a": keys(3), "b": keys(4, 5)})


def test_a_full_table_raises_at_once():
    layer = table(4)
    with Waits(never):
        layer(keys(1, 2, 3))
        with pytest.raises(sparsekit.TableFullError, match=r"users.*3 of 4 rows.*2 new keys"):
            layer(keys(3, 4, 5, 4))
        layer(keys(4))
        sparsekit.raise_errors()
    assert layer.table.keys().tolist() == [1, 2, 3, 4]


def test_an_error_beside_a_full_table_is_its_cause():
    layer = table(4, padding_key=7)
    with Waits(never):
        layer(keys(1))
        with pytest.raises(sparsekit.TableFullError, match="users") as raised:
            layer((torch.arange(10, 16), torch.tensor([0, 6, 5])))
    assert isinstance(raised.value.__cause__, IndexError)
    assert "offsets" in str(raised.value.__cause__)


@pytest.mark.parametrize(
    "write",
    [
        lambda layer: layer.table.find_or_insert(torch.arange(100, 148)),
        lambda layer: layer.load_state_dict(full_state()),
        lambda layer: layer.table.load_state_dict(
            {k[6:]: v for k, v in full_state().items() if k.startswith("table.")}
        ),
        lambda layer: layer.load_state_dict(full_state(), assign=True),
    ],
)
def test_what_others_insert_is_counted(write):
    layer = table()
    with Waits(never) as waits:
        for _ in range(3):
            layer(keys(1, 2))
        write(layer)
        waits.count = 0
        with pytest.raises(sparsekit.TableFullError, match=r"users.*of 50 rows"):
            layer(keys(*range(200, 210)))
        assert waits.count > 0


def full_state():
    layer = table()
    layer(keys(*range(300, 348)))
    return layer.state_dict()


def test_a_bound_counts_the_keys_that_came_later():
    bound, size = RowBound(), torch.zeros(1)
    first = bound.add(size, 10)
    bound.add(size, 5)
    bound.learn(3, first)
    assert bound.most == 3 + 5


def test_a_bound_takes_nothing_from_before_a_write():
    bound, size = RowBound(), torch.zeros(1)
    before = bound.add(size, 10)
    size.add_(1)
    after = bound.add(size, 5)
    bound.learn(3, before)
    assert bound.most == math.inf
    bound.learn(4, after)
    assert bound.most == 4


def test_a_bound_belongs_to_its_tensor():
    bound, size, other = RowBound(), torch.zeros(1), torch.zeros(1)
    bound.learn(3, bound.add(size, 10))
    assert other._version == size._version
    bound.add(other, 5)
    assert bound.most == math.inf


def test_a_bound_is_unknown_where_writes_are_not_counted():
    bound = RowBound()
    with torch.inference_mode():
        size = torch.zeros(1)
    bound.learn(3, bound.add(size, 10))
    assert bound.most == math.inf


def test_a_copy_of_a_layer_has_a_bound_of_its_own():
    layer = table()
    with Waits(at_once) as waits:
        layer(keys(1))
        other = copy.deepcopy(layer)
        waits.count = 0
        other(keys(2))
        assert waits.count == 1
        layer(keys(*range(10)))
        assert waits.count == 1


def offsets_beyond(layer):
    layer((torch.arange(4), torch.tensor([0, 9, 4])))


def bag_too_long(layer):
    layer((torch.arange(12), torch.tensor([0, 12])))


def key_out_of_range(layer):
    layer(keys(3, 10**6))


def key_out_of_range_in_evaluation(layer):
    layer.eval()
    layer(keys(3, 10**6))
    layer.train()


def of_offsets(*offsets, n=4):
    def call(layer):
        layer((torch.arange(n), torch.tensor(offsets)))

    return call


FAULTS = {
    "offsets": (offsets_beyond, {}, "offsets"),
    "a long bag": (bag_too_long, {}, "max_nnz"),
    "a key": (key_out_of_range, {"use_hashtable": False}, "keys"),
    "a key in evaluation": (key_out_of_range_in_evaluation, {"use_hashtable": False}, "keys"),
    "offsets of padded bags": (offsets_beyond, {"padding_key": 7}, "offsets"),
    "padded bags that begin late": (of_offsets(1, 4), {"padding_key": 7}, "offsets"),
    "padded bags that end early": (of_offsets(0, 2), {"padding_key": 7}, "offsets"),
    "padded bags that end late": (of_offsets(0, 2, 9), {"padding_key": 7}, "offsets"),
    "keys without a bag": (of_offsets(0), {"padding_key": 7}, "offsets"),
    "bags without a key": (of_offsets(0, 3, n=0), {"padding_key": 7}, "offsets"),
    "a limit of a slot": (
        of_offsets(0, 1, 3, 4, 8, n=8),
        {"slot_num": 2, "max_nnz": [1, 3]},
        "offsets",
    ),
    "a sample with many keys": (
        lambda layer: layer((torch.arange(3), torch.tensor([0, 3]))),
        {"max_feature_num": 2},
        "offsets",
    ),
    "a bag that is too long beside its padding": (
        lambda layer: layer((torch.tensor([7, 7, *range(7)]), torch.tensor([0, 9]))),
        {"padding_key": 7},
        "offsets",
    ),
}


def error_of(layer):
    try:
        layer(few(layer))
    except IndexError as error:
        return str(error)
    return None


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("seed", range(10))
def test_an_error_arrives_within_a_few_lookups(fault, seed):
    make, options, argument = FAULTS[fault]
    draw = random.Random(seed)
    layer, other = table(**options), table(name="other")
    with Waits(lambda looks: draw.random() < 0.3):
        for one in (layer, other):
            one(few(one))
        before = layer.weight.detach().clone()
        make(layer)
        errors = (error_of(draw.choice([layer, other])) for _ in range(MOST_LOOKUPS))
        error = next(filter(None, errors), "none")
        assert error.startswith("users: ")
        assert argument in error
        # The error is raised once, and the rows that were there before are unchanged.
        for _ in range(3):
            layer(few(layer))
        sparsekit.raise_errors()
    assert torch.equal(layer.weight[:1], before[:1])


def test_a_device_that_lags_behind_delays_an_error_by_no_more():
    layer = table(use_hashtable=False)
    with Waits(never) as waits:
        key_out_of_range(layer)
        for _ in range(MOST_LOOKUPS - 1):
            layer(keys(1))
        assert waits.count == 0
        with pytest.raises(IndexError, match=r"users: .*keys"):
            layer(keys(1))
        assert waits.count == 1


def test_an_interrupted_wait_loses_no_error(monkeypatch):
    layer = table(use_hashtable=False)

    def interrupted(copy):
        raise KeyboardInterrupt

    with Waits(never):
        key_out_of_range(layer)
        with monkeypatch.context() as patch:
            patch.setattr(Copy, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                sparsekit.raise_errors()
        with pytest.raises(IndexError, match=r"users: .*keys"):
            sparsekit.raise_errors()


def test_the_oldest_error_is_raised_first_and_the_next_one_by_the_next_call():
    one, other = (table(use_hashtable=False, name=name) for name in ("one", "other"))
    with Waits(never):
        key_out_of_range(one)
        key_out_of_range(other)
        for layer in (one, other):
            with pytest.raises(IndexError, match=f"^{layer.name}: "):
                sparsekit.raise_errors()
        sparsekit.raise_errors()


@pytest.mark.parametrize("seed", range(3))
def test_memory_that_is_reused_at_once_loses_no_error(seed):
    draw = random.Random(seed)
    layer = table(use_hashtable=False)
    with Waits(lambda looks: draw.random() < 0.2):
        raised = 0
        for _ in range(60):
            bad = draw.random() < 0.5
            try:
                layer(keys(3, 10**6 if bad else 4))
                if bad:
                    sparsekit.raise_errors()
            except IndexError:
                raised += 1
                continue
            assert not bad
        assert raised > 10


@pytest.mark.parametrize("fault", FAULTS)
def test_a_save_after_a_fault_refuses(fault, tmp_path):
    make, options, argument = FAULTS[fault]
    layer = table(**options)
    with Waits(never):
        layer(few(layer))
        make(layer)
        with pytest.raises(Exception, match=f"users: .*{argument}"):
            checkpoint.save(layer, tmp_path / "one")
        assert not list(tmp_path.glob("one*"))
        checkpoint.save(layer, tmp_path / "two")


def test_an_error_behind_the_last_report_is_raised():
    layer = table()
    optimizer = LazyAdam(layer.parameters())
    fuse_in_backward(optimizer, layer)
    with Waits(never):
        layer(keys(1))
        weight = layer.weight.detach()
        torch.ops.sparsekit.gather_rows(weight, torch.tensor([0, 10**6]))
        with pytest.raises(IndexError, match=r"gather_rows: rows\[1\]"):
            sparsekit.raise_errors()
        sparsekit.raise_errors()


def test_on_the_cpu_there_is_nothing_to_raise():
    layer = table()
    layer(keys(1))
    sparsekit.raise_errors()
    sparsekit.raise_errors("cpu")


def test_checks_raise_what_is_on_its_way_first():
    layer = table(use_hashtable=False)
    with Waits(never):
        layer(keys(1))
        key_out_of_range(layer)
        library().sparsekit_set_checked(1)
        with pytest.raises(IndexError, match=r"users: .*keys"):
            layer(keys(1))
        with pytest.raises(IndexError, match=r"users: key 1000000 at position 1"):
            key_out_of_range(layer)


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        (2, "table 0, table 1"),
        (3, "table 0, table 1, table 2"),
        (4, "table 0, table 1, table 2 and 1 more"),
        (5, "table 0, table 1, table 2 and 2 more"),
    ],
)
def test_an_error_of_a_group_names_its_tables(tables, named):
    layers = {f"t{i}": table(name=f"table {i}", use_hashtable=False) for i in range(tables)}
    group = sparsekit.EmbeddingGroup(layers)
    with Waits(never):
        group(dict.fromkeys(layers, keys(1)))
        group(dict.fromkeys(layers, keys(10**6)))
        with pytest.raises(IndexError, match=rf"^{named}: .*keys"):
            sparsekit.raise_errors()


class Model(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.dense = torch.nn.Linear(4, 1)

    def forward(self, ids):
        return self.dense(self.layer(ids.view(-1, 1, 1)).flatten(1)).squeeze(1)


def mean_of_squares(model, batch):
    (ids,) = batch
    return model(ids) ** 2, 0.0


@pytest.mark.parametrize("evaluates", [True, False])
def test_an_epoch_of_a_trainer_ends_with_its_errors(evaluates):
    layer = table(use_hashtable=False)
    model = Model(layer)
    optimizers = [LazyAdam([layer.weight]), torch.optim.SGD(model.dense.parameters(), 0.1)]
    trainer = Trainer(model, mean_of_squares, optimizers, stream=io.StringIO())
    ids = torch.tensor([1, 2, 3, 4 if evaluates else 10**6])

    def evaluate(model):
        return {"mean": float(model(torch.tensor([10**6])).mean())} if evaluates else {}

    with Waits(never):
        with pytest.raises(IndexError, match=r"users: .*keys"):
            trainer.fit((ids,), epochs=1, batch_size=2, evaluate=evaluate)
        assert trainer.history == []
