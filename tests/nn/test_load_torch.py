"""A state_dict of a model with torch's layers loads into a model with replaced layers."""

import pytest
import torch

import sparsekit


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.user = torch.nn.Embedding(20, 4, padding_idx=0)
        self.again = self.user
        self.tags = torch.nn.EmbeddingBag(9, 3, mode="sum")
        self.top = torch.nn.Sequential(torch.nn.Linear(7, 2), torch.nn.BatchNorm1d(2))

    def forward(self, ids):
        return self.top(torch.cat([self.again(ids), self.tags(ids.view(-1, 1) % 9)], 1))


def swapped(**options):
    torch.manual_seed(1)
    model = Model()
    sparsekit.replace_embeddings(model, verbose=False, **options)
    return model


@pytest.mark.parametrize("use_hashtable", [True, False])
def test_a_whole_state_in_one_call(use_hashtable):
    torch.manual_seed(0)
    theirs, ids = Model(), torch.arange(20)
    theirs(ids)  # changes the batch norm's buffers
    model = swapped(extra_rows=5, use_hashtable=use_hashtable)
    optimizer = sparsekit.optim.Adam(model.parameters(), mode="catch_up")
    extra = torch.tensor([22, 23])
    initial = model.user.vectors(extra)
    for keys in (extra, ids):  # the second step leaves the rows of the first step late
        optimizer.zero_grad()
        model.user(keys).sum().backward()
        optimizer.step()
    found = sparsekit.load_torch_state_dict(model, theirs.state_dict())
    assert (found.missing_keys, found.unexpected_keys) == ([], [])
    assert torch.equal(model.eval()(ids), theirs.eval()(ids))
    assert torch.equal(model.user.vectors(extra), initial)
    assert model.user is model.again
    if use_hashtable:
        assert model.user.table.keys().tolist() == list(range(20))  # keys 22 and 23 are gone
    model.train()(ids).sum().backward()
    optimizer.step()


WRONG = {
    "user.weight": {
        "rows": (torch.zeros(21, 4), r"user: weight in the state has 21 rows.* room for 20"),
        "dim": (torch.zeros(20, 5), r"user: weight in the state has shape \[20, 5\].*\[n, 4\]"),
        "dtype": (torch.zeros(20, 4, dtype=torch.int64), "user: weight must be .* got torch.int64"),
        "no tensor": (5, "user: weight must be a floating-point tensor, got int"),
        "padding": (torch.ones(20, 4), "user: the vector at padding_idx=0"),
    },
    "top.0.weight": {"dense": (torch.zeros(3, 7), r"top\.0\.weight has shape \[2, 7\].*\[3, 7\]")},
    "other": {"unexpected": (torch.zeros(1), "has besides other")},
    "tags.weight": {"missing": (None, "lacks tags.weight")},
}


@pytest.mark.parametrize(
    ("name", "kind"), [(n, kind) for n, kinds in WRONG.items() for kind in kinds]
)
def test_what_does_not_fit_is_refused_and_nothing_changed(name, kind):
    value, match = WRONG[name][kind]
    model, state = swapped(), Model().state_dict()
    before = {key: each.clone() for key, each in model.state_dict().items()}
    state[name] = value
    if value is None:
        del state[name]
    with pytest.raises((TypeError, ValueError), match=f"load_torch_state_dict: .*{match}"):
        sparsekit.load_torch_state_dict(model, state)
    assert all(torch.equal(each, before[key]) for key, each in model.state_dict().items())
    if kind in ("unexpected", "missing"):
        found = sparsekit.load_torch_state_dict(model, state, strict=False)
        assert [*found.missing_keys, *found.unexpected_keys][:1] == [name]


def test_both_sides_are_told_apart():
    model, state = swapped(), Model().state_dict()
    state["more"] = state.pop("top.0.bias")
    found = sparsekit.load_torch_state_dict(model, state, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["top.0.bias"], ["more"])


def test_a_weight_is_looked_at_again_after_an_optimizer_moved_all_rows():
    layer = sparsekit.Embedding(5, 2, name="t")
    layer.weight.grad = torch.ones(5, 2)
    sparsekit.optim.SGD([layer.weight], lr=0.1).step()
    sparsekit.load_torch_state_dict(layer, {"weight": torch.zeros(0, 2)})
    layer.weight.data.fill_(7)
    with pytest.raises(RuntimeError, match="t: weight was written to before"):
        layer.eval()(torch.tensor([1]))


def load(layer, weight):
    return sparsekit.load_torch_state_dict(layer, {"weight": weight})


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("user.weight", torch.zeros(4), ValueError, r"user: weight .* has shape \[4\], .*\[n, 4\]"),
        ("user.weight", None, TypeError, "user: weight must be .* tensor, got NoneType"),
        ("top.0.bias", 5, ValueError, r"top\.0\.bias has shape \[2\], and in the state int$"),
    ],
)
def test_entries_of_another_kind_are_refused(name, value, error, message):
    state = {**Model().state_dict(), name: value}
    with pytest.raises(error, match=f"^load_torch_state_dict: {message}"):
        sparsekit.load_torch_state_dict(swapped(), state)


def test_a_layer_on_meta_is_refused():
    layer = sparsekit.Embedding(5, 2, device="meta", name="t")
    with pytest.raises(RuntimeError, match=r"^t: the layer is on meta"):
        load(layer, torch.zeros(5, 2))


def test_names_that_differ_are_listed_up_to_five():
    state = {f"more.{i}": torch.zeros(1) for i in range(7)}
    with pytest.raises(ValueError, match=r"has besides more\.0, more\.1.*, more\.4; pass strict"):
        sparsekit.load_torch_state_dict(swapped(), {**Model().state_dict(), **state})
    with pytest.raises(ValueError, match=r"the state lacks .*, and has besides nothing;"):
        sparsekit.load_torch_state_dict(swapped(), {})


def test_a_state_of_ours_loads_as_it_is():
    model, other = swapped(), swapped()
    model.user.assign(torch.tensor([3]), torch.ones(1, 4))
    found = sparsekit.load_torch_state_dict(other, model.state_dict())
    assert (found.missing_keys, found.unexpected_keys) == ([], [])
    assert torch.equal(other.user.vectors(torch.tensor([3])), torch.ones(1, 4))


@pytest.mark.parametrize("rows", [5, 6])
def test_padding_may_lie_beyond_the_rows_of_the_state(rows):
    layer = sparsekit.Embedding(9, 2, padding_idx=5, name="t")
    weight = torch.ones(rows, 2)
    if rows > 5:
        with pytest.raises(
            ValueError, match=r"^load_torch_state_dict: the vector at padding_idx=5"
        ):
            load(layer, weight)
    else:
        load(layer, weight)
        assert layer(torch.arange(6)).sum() == 10
    bag = sparsekit.EmbeddingBag(9, 2, mode="sum", padding_idx=5)
    load(bag, weight)
    assert bag(torch.tensor([[0, 5]])).tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_parameters_of_any_dtype_are_copied(dtype):
    layer = sparsekit.Embedding(9, 2, key_dtype=torch.int32, name="t")
    weight = torch.nn.Parameter(torch.ones(5, 2, dtype=dtype))
    load(layer, weight)
    assert layer.weight.dtype == torch.float32
    assert layer.weight.is_leaf
    with torch.no_grad():
        weight.zero_()
    assert layer(torch.arange(5).int()).sum() == 10


def test_keys_that_are_dropped_leave_no_values_behind():
    layer = sparsekit.Embedding(9, 2, name="t")
    optimizer = sparsekit.optim.Adagrad([layer.weight], lr=0.1)
    initial = layer.vectors(torch.tensor([8]))
    layer(torch.arange(8) + 100).sum().backward()
    optimizer.step()
    load(layer, torch.zeros(2, 2))
    assert layer.table.keys().tolist() == [0, 1]
    assert not layer.weight[2:].any()
    assert not optimizer.state[layer.weight]["sum"].any()  # states belonged to the dropped keys
    assert torch.equal(layer(torch.tensor([8])), initial)
