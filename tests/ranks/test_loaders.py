"""The trainer works with one data loader per rank, which reads the samples of this rank."""

import io

import pytest
import torch
import torch.distributed as dist

import sparsekit
from sparsekit.data import Batch, CsvReader, KeyedJaggedTensor
from sparsekit.distributed.averaging import Averaging
from sparsekit.models import DLRM, DeepFM
from sparsekit.train import EarlyStopping, Telemetry, Trainer
from sparsekit.train.scaling import Case, samples_per_second

from .pool import Raised

ROWS, BATCH = 29, 12  # BATCH is the global batch size


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    lines = [f"{row % 3 % 2},{row / 29},{row % 7},{row % 5}" for row in range(ROWS)]
    path.write_text("label,x,user,item\n" + "\n".join(lines) + "\n")
    return path


def losses(model, batch):
    scores = model(batch.dense, batch.sparse)
    return torch.nn.functional.binary_cross_entropy_with_logits(
        scores, batch.label, reduction="none"
    ), 0.0


def train(rank, file, kind, accumulate):
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    settings = {"bottom": [5], "top": [4], "cross_rank": 2} if kind is DLRM else {"deep": [5]}
    model = kind(["user", "item"], 1, rows=50, dim=4, **settings)
    prefetched = []
    prefetch = model.prefetch
    model.prefetch = lambda batch: (prefetched.append(batch.rows), prefetch(batch))
    sparse, dense = sparsekit.split_embedding_variable_from_others(model)
    # Use SGD for both parts: Adam would amplify rounding where a gradient is near zero.
    optimizers = [torch.optim.SGD(sparse, lr=0.5), torch.optim.SGD(dense, lr=0.1)]
    trainer = Trainer(
        model, losses, optimizers, stream=io.StringIO(), accumulate=accumulate, clip_norm=0.3
    )
    sparse_columns = {"user": "int", "item": "int"}
    reader = CsvReader(file, BATCH // ranks, label="label", dense=["x"], sparse=sparse_columns)
    history = trainer.fit(reader, epochs=3)
    keys = torch.arange(7)
    vectors = [layer.vectors(keys) for layer in model.embeddings.layers.values()]
    dense = torch.cat([p.detach().view(-1) for p in dense])
    # Ranks read the shards in a different order than a single rank. Together they have all rows.
    return torch.cat(vectors), dense, [epoch.loss for epoch in history], prefetched


def shares_of_one_rank(file, ranks):
    """Yield batches for one rank, each with the rows that all ranks have in one step."""
    columns = {"label": "label", "dense": ["x"], "sparse": {"user": "int", "item": "int"}}
    readers = [
        list(CsvReader(file, BATCH // ranks, **columns, rank=rank, world_size=ranks))
        for rank in range(ranks)
    ]
    for step in zip(*readers, strict=True):
        keys = [torch.cat([batch.sparse[name][0] for batch in step]) for name in ("user", "item")]
        label = torch.cat([batch.label for batch in step])
        bags = KeyedJaggedTensor(
            ["user", "item"], torch.cat(keys), torch.arange(2 * len(label) + 1)
        )
        yield Batch(label, torch.cat([batch.dense for batch in step]), bags)


@pytest.mark.pairs
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", [DLRM, DeepFM])
def test_ranks_train_as_one(ranks, file, kind, accumulate, monkeypatch):
    many = ranks(train, file, kind, accumulate)
    shares = list(shares_of_one_rank(file, len(many)))
    monkeypatch.setattr(f"{__name__}.CsvReader", lambda *_, **__: shares)
    vectors, dense, means, prefetched = train(0, file, kind, accumulate)
    assert prefetched == []
    for found in many:
        torch.testing.assert_close(found[0], vectors, rtol=0, atol=2e-6)
        torch.testing.assert_close(found[1], dense, rtol=0, atol=2e-6)
        assert found[2] == pytest.approx(means, rel=1e-5)
        # Every batch of an epoch but the first is prefetched.
        assert len(found[3]) == 3 * (len(shares) - 1)


def averagings(rank, accumulate):
    begun = []
    average = Averaging.average

    def counted(self, state, bucket):
        begun.append(bucket.index())
        return average(self, state, bucket)

    Averaging.average = counted
    try:
        model = torch.nn.Linear(1, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = Trainer(model, of_linear, [sgd], stream=io.StringIO(), accumulate=accumulate)
        trainer.fit([(torch.ones(2),)] * 5, epochs=1)
    finally:
        Averaging.average = average
    return len(begun)


def of_linear(model, batch):
    return model(batch[0][:, None])[:, 0], 0.0


def test_gradients_are_averaged_once_a_step(two_ranks):
    assert two_ranks(averagings, 1) == [5, 5]
    assert two_ranks(averagings, 2) == [3, 3]


class Loader:
    """Batches of two samples; on the last rank, `what` happens after the second batch."""

    def __init__(self, rank, what):
        self.last = rank == dist.get_world_size() - 1
        self.what = what

    def __iter__(self):
        yield from [(torch.ones(2),)] * 2
        if self.last:
            if self.what == "ends":
                return
            raise OSError("the disk is gone")
        yield from [(torch.ones(2),)] * 2


def train_unevenly(rank, what):
    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, of_linear, [sgd], stream=io.StringIO())
    trainer.fit(Loader(rank, what), epochs=1)


def test_loaders_of_unequal_length_are_an_error_on_all_ranks(two_ranks):
    for outcome in two_ranks.outcomes(train_unevenly, "ends"):
        assert isinstance(outcome, Raised)
        assert outcome.type == "RuntimeError"
        assert "1 of 2 ranks have a batch of step 3; all loaders must yield" in outcome.message


def test_an_error_of_one_loader_is_an_error_on_all_ranks(two_ranks):
    first, last = two_ranks.outcomes(train_unevenly, "raises")
    assert "1 of the other ranks could not read the batch of step 3" in first.message
    assert last.type == "OSError"
    assert "the disk is gone" in last.message


def stop_early(rank):
    """Check that early stopping follows the values of rank 0 if ranks have different values."""
    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, of_linear, [sgd], stream=io.StringIO())
    values = iter([3.0, 2.0, 2.5, 2.5] if rank == 0 else [3.0, 4.0, 5.0, 6.0])
    trainer.fit(
        (torch.ones(4),),
        epochs=4,
        batch_size=2,
        evaluate=lambda model: {"x": next(values)},
        stop=EarlyStopping("x"),
    )
    return len(trainer.history)


def test_ranks_stop_together(two_ranks):
    assert two_ranks(stop_early) == [3, 3]


def bytes_of_steps(rank, evaluated):
    """Train with an evaluation of `evaluated` lookups; return the logged bytes of each step."""
    layer = sparsekit.DistributedEmbedding("sum", 40, 2, 1, 1, placement="modulo", name="t")
    records = []

    class Log:
        def write(self, record):
            if record["kind"] == "step":
                records.append(record["bytes_sent_per_step"])

    def evaluate(model):
        for _ in range(evaluated):
            model(torch.arange(30).view(-1, 1, 1))
        return {}

    def of_layer(model, batch):
        return model(batch[0].view(-1, 1, 1)).sum((1, 2)), 0.0

    sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
    settings = {"stream": io.StringIO(), "logs": [Log()], "log_every": 1}
    trainer = Trainer(layer, of_layer, [sgd], **settings)
    trainer.fit([(torch.arange(4),)] * 2, epochs=2, evaluate=evaluate)
    return records


def test_bytes_of_a_step_are_not_those_of_an_evaluation(two_ranks):
    records, of_others = two_ranks(bytes_of_steps, 5)
    assert of_others == []  # only rank 0 logs
    assert len(records) == 4
    assert records[2:] == two_ranks(bytes_of_steps, 0)[0][2:]
    assert records[3] > 0


def telemetry(rank):
    layer = sparsekit.DistributedEmbedding("sum", 40, 2, 1, 1, placement="modulo", name="t")
    keys = torch.tensor([0, 2, 4, 1]) if rank == 0 else torch.tensor([6])
    layer(keys.view(-1, 1, 1))  # rank 0 owns four even keys, rank 1 an odd one
    exchange = sparsekit.distributed.exchange_of(None, torch.device("cpu"))
    return Telemetry(layer).read(1, exchange)["t"]


def test_figures_are_of_all_ranks(two_ranks):
    for found in two_ranks(telemetry):
        assert {"rows": 5, "capacity": 80, "load": 5 / 80, "skew": 4 / 2.5}.items() <= found.items()
        assert found["new_rows_per_step"] == 5


def telemetry_of_life(rank):
    options = {"on_full": "evict", "max_rows": 5, "score": "lfu", "placement": "modulo"}
    layer = sparsekit.DistributedEmbedding("sum", 40, 2, 1, 1, name="t", **options)
    with torch.no_grad():
        for keys in ([[0, 2, 4, 1], [0]], [[0], [0, 1]], [[8], [10]]):
            layer(torch.tensor(keys[rank]).view(-1, 1, 1))
    exchange = sparsekit.distributed.exchange_of(None, torch.device("cpu"))
    return Telemetry(layer).read(1, exchange, epoch_ends=True)["t"]


def test_counts_and_deciles_are_of_all_ranks(two_ranks):
    for found in two_ranks(telemetry_of_life):
        # The table has 0 with a count of 4, 1 with 2, and 2 and 4 with 1 each. The new keys 8 and
        # 10 need room, so either 2 or 4 is dropped.
        assert found["rows"] == 5
        assert found["inserted"] == 6
        assert found["evicted"] == 1
        assert found["hit_rate"] == 2 / 8  # a key once in a lookup, whichever ranks have it
        assert found["score_deciles"] == [1] * 7 + [2] * 2 + [4] * 2
        assert found["age_deciles"] == [0] * 5 + [1] * 4 + [2] * 2


def measure(rank):
    return samples_per_second(Case(tables=2, rows=50, dim=4, batch=30, epochs=1))


def test_scaling_is_measured_with_the_samples_of_all_ranks(two_ranks):
    first, second = two_ranks(measure)
    assert first > 0
    assert second > 0
