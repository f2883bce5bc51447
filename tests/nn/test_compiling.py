"""Lookups break the graphs of torch.compile into few parts, and unsupported tools raise."""

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

import sparsekit
from sparsekit.lookup import access


class Model(torch.nn.Module):
    """Model with layers of every kind and a group."""

    def __init__(self, layers):
        super().__init__()
        self.ids = torch.nn.ModuleList(sparsekit.Embedding(99, 4) for _ in range(layers))
        modes = ["sum", "mean", "max"]
        self.bags = torch.nn.ModuleList(
            sparsekit.EmbeddingBag(99, 4, mode=modes[i % 3]) for i in range(layers)
        )
        self.slots = sparsekit.DistributedEmbedding("sum", 99, 4, 1, 9)
        self.vectors = sparsekit.All2AllDenseEmbedding(99, 4, 1, 3)
        self.group = sparsekit.EmbeddingGroup({"a": sparsekit.Embedding(99, 4)})
        self.top = torch.nn.Linear(4, 1)

    def forward(self, keys):
        found = [layer(keys[:, 0]) for layer in self.ids] + [layer(keys) for layer in self.bags]
        found.append(self.slots(keys.unsqueeze(1)).squeeze(1))
        found.append(self.vectors(keys.unsqueeze(1)).sum((1, 2)))
        found.append(self.group({"a": keys[:, 1]})["a"])
        return self.top(torch.stack(found).sum(0)).relu()


@pytest.fixture
def graphs():
    """Return a list of compiled graphs, and the backend that appends to the list."""
    torch._dynamo.reset()
    counters.clear()
    seen = []

    def backend(graph, _):
        seen.append(graph)
        return graph.forward

    seen_by = seen, backend
    yield seen_by
    torch._dynamo.reset()


def compiled_graphs(graphs, layers):
    seen, backend = graphs
    torch._dynamo.reset()
    seen.clear()
    model = Model(layers)
    compiled = torch.compile(model, backend=backend)
    for batch in (4, 8, 5, 16):
        keys = torch.randint(0, 30, (batch, 3))
        found = compiled(keys)
        torch.testing.assert_close(found, model(keys))
        found.sum().backward()
    # No graph contains code of sparsekit.
    code = "".join(graph.code for graph in seen)
    assert "sparsekit" not in code
    return len(seen)


def test_graphs_do_not_grow_with_layers_or_batches(graphs):
    """Each part of a model between layers compiles twice: for the first size, then for all."""
    few = compiled_graphs(graphs, 1)
    # Every graph break reports sparsekit's own reason.
    assert counters["graph_break"]
    assert all("sparsekit: a lookup" in reason for reason in counters["graph_break"])
    assert compiled_graphs(graphs, 6) == few <= 10


# Torch reads .grad of tensors between graphs.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("kind", ["LazyAdam", "Adam"])
def test_a_compiled_step(graphs, kind):
    _, backend = graphs
    layer = sparsekit.EmbeddingBag(30, 4, name="step")
    twin = sparsekit.EmbeddingBag(30, 4, name="step")
    optimizers = [getattr(sparsekit.optim, kind)(x.parameters(), lr=0.1) for x in (layer, twin)]

    def step(layer, optimizer, keys):
        optimizer.zero_grad()
        layer(keys).square().sum().backward()
        sparsekit.optim.clip_grad_norm_(layer.parameters(), 1.0)
        sparsekit.optim.clip_grad_value_(layer.parameters(), 0.1)
        optimizer.step()

    compiled = torch.compile(step, backend=backend)
    for n in (2, 3, 5, 4):
        keys = torch.randint(0, 20, (n, 3))
        compiled(layer, optimizers[0], keys)
        step(twin, optimizers[1], keys)
    keys = torch.arange(20).view(4, 5)
    assert torch.equal(layer.eval()(keys), twin.eval()(keys))


def model_and_keys():
    layer = sparsekit.Embedding(9, 4, name="words")
    return torch.nn.Sequential(layer, torch.nn.Linear(4, 1)), torch.arange(3)


RECORDERS = {
    "torch.jit.script": lambda model, keys: torch.jit.script(model),
    "torch.jit.trace": torch.jit.trace,
    "torch.export": lambda model, keys: torch.export.export(model, (keys,)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tool", RECORDERS)
def test_what_cannot_record_a_lookup(tool):
    model, keys = model_and_keys()
    with pytest.raises(NotImplementedError, match=rf"^words: {tool} is not supported.*outside"):
        RECORDERS[tool](model, keys)
    assert len(model[0].table) == 0
    group = sparsekit.EmbeddingGroup({"words": model[0]})
    if tool == "torch.jit.script":
        with pytest.raises(NotImplementedError, match=r"words: torch\.jit\.script is not supp"):
            torch.jit.script(group)
    assert model(keys).shape == (3, 1)


OUTSIDE_OF_GRAPHS = [
    sparsekit.DistributedEmbedding.forward,
    sparsekit.All2AllDenseEmbedding.forward,
    sparsekit.Embedding.forward,
    access.vectors_of,
    access.assign,
    sparsekit.EmbeddingBag.forward,
    sparsekit.EmbeddingGroup.forward,
    sparsekit.EmbeddingGroup.prefetch,
    sparsekit.group_embedding_lookup_sparse,
    sparsekit.optim.RowOptimizer.step,
    sparsekit.optim.clip_grad_norm_,
    sparsekit.optim.clip_grad_value_,
]


@pytest.mark.parametrize("function", OUTSIDE_OF_GRAPHS, ids=lambda each: each.__qualname__)
def test_what_a_graph_ends_before(function):
    assert function._torchdynamo_disable


def test_a_whole_graph_is_refused_with_the_reason():
    model, keys = model_and_keys()
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="sparsekit: a lookup in a table"):
        torch.compile(model, backend="eager", fullgraph=True)(keys)
