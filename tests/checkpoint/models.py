"""A small model with two tables and a dense part, trained on seeded random steps."""

import torch

import sparsekit
from sparsekit import optim
from sparsekit.checkpoint import Checkpoints

OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "LazyAdam": lambda p: optim.LazyAdam(p, lr=0.01),
    "LazyAdam per row": lambda p: optim.LazyAdam(p, lr=0.01, bias_correction="per_row"),
    "Adam": lambda p: optim.Adam(p, lr=0.01, mode="catch_up"),
    "PartialRowWiseAdam": lambda p: optim.PartialRowWiseAdam(p, lr=0.01),
    "LazyLAMB": lambda p: optim.LazyLAMB(p, lr=0.01),
    "Ftrl": lambda p: optim.Ftrl(p, lr=0.1, l1=0.001),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "RowWiseAdagrad": lambda p: optim.RowWiseAdagrad(p, lr=0.05),
    "RMSProp": lambda p: optim.RMSProp(p, lr=0.01),
    "torch's SparseAdam": lambda p: torch.optim.SparseAdam(list(p), lr=0.01),
    "torch's Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
}


class Model(torch.nn.Module):
    """Model that scores samples with three keys each; keys are in [0, 600)."""

    def __init__(self, hash_table=True, capacity=700, dtype=None, placement=None, dim=8, rows=None):
        super().__init__()
        layer = sparsekit.DistributedEmbedding
        options = {"dtype": dtype, "seed": 7}
        self.users = layer("sum", capacity, dim, 1, name="users", placement=placement, **options)
        self.rows = layer(
            "sum", rows or capacity, 4, 1, use_hashtable=hash_table, name="rows", **options
        )
        self.top = torch.nn.Sequential(torch.nn.Linear(dim + 4, 8), torch.nn.ReLU())
        self.out = torch.nn.Linear(8, 1)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, keys):
        if self.training:
            self.steps += 1
        vectors = [self.users(keys * 2**33), self.rows(keys)]
        vectors = torch.cat([each.flatten(1) for each in vectors], dim=1).float()
        return self.out(torch.nn.functional.dropout(self.top(vectors), 0.1, self.training))


def made(optimizer="LazyAdam", seed=0, **options):
    """Return a model and its optimizers: one for the tables, and Adam for the dense part."""
    torch.manual_seed(seed)
    model = Model(**options)
    sparse, dense = sparsekit.split_embedding_variable_from_others(model)
    return model, [OPTIMIZERS[optimizer](sparse), torch.optim.Adam(dense, lr=0.01)]


def keys_of_step(number, samples=32):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 600, (samples, 1, 3), generator=generator)


def train(model, optimizers, first, last, part=slice(None)):
    """Train for steps `first` to `last` - 1. Each step has different keys."""
    model.train()
    for number in range(first, last):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (model(keys_of_step(number)[part]).square().mean() + 0.0).backward()
        for optimizer in optimizers:
            optimizer.step()


def saved_chain(folder):
    """Save a complete and two incremental checkpoints; return the model and its optimizers."""
    model, optimizers = made("Ftrl", hash_table=False)
    keep = Checkpoints(folder, complete_every=3)
    for step in range(3):
        train(model, optimizers, 2 * step, 2 * step + 2)
        keep.save(step, model, optimizers)
    keep.close()
    return model, optimizers


def contents(model, optimizers):
    """Return a dict of everything that a checkpoint must restore; tables are sorted by key."""
    found = {}
    for name in ("users", "rows"):
        layer = getattr(model, name)
        layer.state_dict()  # late rows catch up
        rows = torch.arange(layer.capacity if layer.table is None else len(layer.table))
        keys = rows * layer.world_size + layer.rank if layer.table is None else layer.table.keys()
        rows = keys.argsort()
        found[f"{name} keys"], found[f"{name} vectors"] = keys[rows], layer.weight.detach()[rows]
        state = optimizers[0].state.get(layer.weight, {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                found[f"{name} {key}"] = value[rows].clone()
            else:
                found[f"{name} {key}"] = torch.as_tensor(value).clone()
    tables = ("users.", "rows.")
    found |= {n: t.clone() for n, t in model.state_dict().items() if not n.startswith(tables)}
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            found[f"{number} lr"] = torch.tensor(group["lr"], dtype=torch.float64)
    for number, state in optimizers[1].state_dict()["state"].items():
        found |= {f"dense {number} {key}": torch.as_tensor(v).clone() for key, v in state.items()}
    return found


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def save_two(folder):
    """Save a complete checkpoint at step 0 and an incremental one at step 1."""
    model, optimizers = made()
    keep = Checkpoints(folder, complete_every=2)
    for step in range(2):
        train(model, optimizers, step, step + 1)
        keep.save(step, model, optimizers)
    keep.close()
