"""Models and steps for tests of `sparsekit.train.CapturedStep`, captured or not."""

import torch
from conftest import same_bits

import sparsekit
from sparsekit import optim
from sparsekit.optim import fuse_in_backward
from sparsekit.train import CapturedStep

BATCH, STEPS = 6, 9


class Model(torch.nn.Module):
    """One layer, or a group of three tables, and a dense layer."""

    def __init__(self, tables, rows=1000, hashed=True, **all_tables):
        super().__init__()
        torch.manual_seed(0)
        options = [("sum", {}), ("mean", {"padding_key": 7}), ("sqrtn", {})][:tables]
        layers = {
            f"t{i}": sparsekit.DistributedEmbedding(
                combiner,
                rows,
                *(4, 2, 3),
                seed=i,
                name=f"captured {i}",
                use_hashtable=hashed,
                **own,
                **all_tables,
            )
            for i, (combiner, own) in enumerate(options)
        }
        self.group = sparsekit.EmbeddingGroup(layers) if tables > 1 else layers["t0"]
        self.head = torch.nn.Linear(8 * tables, 1)

    def forward(self, keys):
        if isinstance(keys, dict):
            vectors = torch.cat([v.flatten(1) for v in self.group(keys).values()], 1)
        else:
            vectors = self.group(keys).flatten(1)
        return self.head(vectors)

    @property
    def layers(self):
        return [m for m in self.modules() if isinstance(m, sparsekit.DistributedEmbedding)]


class Trained:
    """A model, its optimizer and a step, captured or not."""

    def __init__(
        self,
        tables=1,
        kind=optim.LazyAdam,
        captured=True,
        rows=1000,
        hashed=True,
        all_tables=None,
        **settings,
    ):
        self.model = Model(tables, rows, hashed, **all_tables or {})
        self.lr = torch.tensor(0.5)
        self.optimizer = kind(self.model.parameters(), **{"lr": self.lr} | settings)
        self.handle = fuse_in_backward(self.optimizer, self.model)
        self.captured = self.step
        if captured:
            self.captured = CapturedStep(self.step, self.model, self.optimizer)

    def step(self, keys, labels):
        self.optimizer.zero_grad()
        loss = (self.model(keys).squeeze(1) - labels).square().mean()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss, "count": labels.sum()}

    def run(self, first=0, steps=STEPS):
        """Make some steps; return the losses."""
        tables = len(self.model.layers)
        return [
            self.captured(*batch(i, tables))["loss"].item() for i in range(first, first + steps)
        ]

    def contents(self):
        """Return all that training changes, by name."""
        found = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        for layer in self.model.layers:
            if layer.table is not None:
                found[f"keys of {layer.name}"] = layer.table.keys()
        for number, state in enumerate(self.optimizer.state.values()):
            found |= {f"{number} {key}": value.clone() for key, value in state.items()}
        return found


def batch(number, tables=1):
    """Return inputs with new keys in each step; some are repeated, and some are padding."""
    generator = torch.Generator().manual_seed(number)
    keys = torch.randint(0, 10 + 5 * number, (tables, BATCH, 2, 3), generator=generator)
    labels = torch.rand(BATCH, generator=generator)
    return keys[0] if tables == 1 else {f"t{i}": own for i, own in enumerate(keys)}, labels


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert same_bits(value, other[name]), name
