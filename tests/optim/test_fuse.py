"""fuse_in_backward gives the weights of a normal step, or raises if that is impossible."""

import copy
import gc

import pytest
import torch
from conftest import same_bits

import sparsekit
from sparsekit import optim
from sparsekit.optim import fuse_in_backward

from .cases import OPTIMIZERS, make

pytestmark = pytest.mark.usefixtures("engine")


class Model(torch.nn.Module):
    """Model with a pooled layer with a hash table, one without, and a dense part."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.bags = sparsekit.DistributedEmbedding("mean", 60, 4, 2, 3, name="bags", dtype=dtype)
        self.rows = sparsekit.All2AllDenseEmbedding(
            30, 3, 2, 1, use_hashtable=False, name="rows", dtype=dtype
        )
        self.head = torch.nn.Linear(14, 1, dtype=dtype)

    def forward(self, keys):
        bags, rows = self.bags(keys), self.rows(keys[:, :, :1] % 30)
        return self.head(torch.cat([bags.flatten(1), rows.flatten(1)], 1))


def keys_of(step):
    return torch.randint(0, 50, (5, 2, 3), generator=torch.Generator().manual_seed(step))


def train(name, dtype, fused, steps=8):
    model = Model(dtype)
    tables, dense = sparsekit.split_embedding_variable_from_others(model)
    settings = {"l1": 1e-4} if name == "Ftrl" else {}  # otherwise all weights become zeros
    optimizers = make(name, tables, **settings), torch.optim.SGD(dense, lr=0.1)
    if fused:
        fuse_in_backward(optimizers[0], model)
    for step in range(steps):
        loss = model(keys_of(step)).square().sum()
        loss.backward()
        assert all((p.grad is None) == fused for p in tables)
        # An update is not a manual write, after which a layer would check its free rows.
        assert not fused or not any(p.written() for p in tables)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert not any(p.written() for p in tables)
    optimizers[0].state_dict()
    assert not any(p.written() for p in tables)
    return model, optimizers[0]


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_the_normal_step_bit_for_bit(name, dtype):
    (one, first), (other, second) = (train(name, dtype, fused) for fused in (False, True))
    for (key, value), expected in zip(
        other.state_dict().items(), one.state_dict().values(), strict=True
    ):
        # The hash seed is random, so keys may be in other buckets.
        if key not in ("bags.table.buckets", "bags.table.hash_seed"):
            assert same_bits(value, expected), key
    assert not same_bits(one.bags.weight, Model(dtype).bags.weight)
    for p, q in zip((one.bags.weight, one.rows.weight), (other.bags.weight, other.rows.weight),
                    strict=True):  # fmt: skip
        for key, value in first.state[p].items():
            assert same_bits(value.reshape(-1), second.state[q][key].reshape(-1)), key


def test_a_group_and_evaluation():
    """Backward also updates rows in evaluation mode, where unseen keys get no row."""
    results = []
    for fused in (False, True):
        layers = {
            "a": sparsekit.DistributedEmbedding("sum", 40, 4, 1, 3, name="a"),
            "b": sparsekit.DistributedEmbedding("sum", 40, 2, 1, 3, name="b"),
        }
        group = sparsekit.EmbeddingGroup(layers)
        optimizer = optim.Adagrad(group.parameters(), lr=0.1)
        if fused:
            fuse_in_backward(optimizer, group)
        for step in range(6):
            group.train(step % 2 == 0)
            keys = keys_of(step)[:, :1]
            sum(out.square().sum() for out in group({"a": keys, "b": keys + 7}).values()).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([layer.weight.detach() for layer in layers.values()])
    for one, other in zip(*results, strict=True):
        assert same_bits(one, other)


def test_layers_of_which_some_count_the_steps_of_rows():
    """After a change of settings, tables may have different states and need separate calls."""
    results = []
    for fused in (False, True):
        layers = {name: sparsekit.Embedding(9, 2, name=name) for name in "ab"}
        group = sparsekit.EmbeddingGroup(layers)
        optimizer = optim.LazyAdam(group.parameters(), lr=0.1, bias_correction="per_row")
        if fused:
            fuse_in_backward(optimizer, group)
        keys = torch.tensor([3, 1])
        layers["a"](keys).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["bias_correction"] = "global"
        sum(out.square().sum() for out in group({"a": keys, "b": keys}).values()).backward()
        optimizer.step()
        assert ["row_step" in optimizer.state[layers[n].weight] for n in "ab"] == [True, False]
        results.append([layer.weight.detach() for layer in layers.values()])
    assert all(map(same_bits, *results))


def test_layers_of_one_lookup_in_two_parameter_groups():
    results = []
    for fused in (False, True):
        layers = {name: sparsekit.Embedding(9, 2, name=name) for name in "ab"}
        group = sparsekit.EmbeddingGroup(layers)
        rates = [{"params": [layers[n].weight], "lr": lr} for n, lr in (("a", 0.1), ("b", 0.3))]
        optimizer = optim.Adagrad(rates)
        if fused:
            fuse_in_backward(optimizer, group)
        for keys in (torch.tensor([3, 1]), torch.tensor([1, 5])):
            optimizer.zero_grad()
            sum(out.square().sum() for out in group({"a": keys, "b": keys}).values()).backward()
            optimizer.step()
        assert all(optimizer.state[layers[n].weight]["step"] == 2 for n in "ab")
        results.append([layer.weight.detach() for layer in layers.values()])
    assert all(map(same_bits, *results))


def test_layers_of_one_lookup_with_two_optimizers():
    results = []
    for fused in (False, True):
        layers = {name: sparsekit.Embedding(9, 2, name=name) for name in "ab"}
        group = sparsekit.EmbeddingGroup(layers)
        rates = {"a": 0.1, "b": 0.3}
        optimizers = {n: optim.SGD([layers[n].weight], lr=rate) for n, rate in rates.items()}
        for name, optimizer in optimizers.items() if fused else ():
            fuse_in_backward(optimizer, layers[name])
        keys = torch.tensor([3, 1])
        sum(out.square().sum() for out in group({"a": keys, "b": keys}).values()).backward()
        for optimizer in optimizers.values():
            optimizer.step()
        results.append([layer.weight.detach() for layer in layers.values()])
    assert all(map(same_bits, *results))


def attached(**settings):
    layer = sparsekit.All2AllDenseEmbedding(20, 3, 1, 1, dynamic_input=True, name="one")
    optimizer = optim.LazyAdam([layer.weight], lr=0.1, **settings)
    return layer, optimizer, fuse_in_backward(optimizer, layer)


def test_a_second_backward_without_a_step():
    layer, optimizer, _ = attached()
    layer(torch.tensor([1, 2])).sum().backward()
    out = layer(torch.tensor([2, 3])).sum()
    before = layer.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"LazyAdam: two updates of one without step\(\)"):
        out.backward()
    assert same_bits(layer.weight, before)
    optimizer.step()
    layer(torch.tensor([2, 3])).sum().backward()
    assert not same_bits(layer.weight, before)
    assert optimizer.state[layer.weight]["step"] == 2


def attached_group(rest):
    """Return the layers of a group, the group, and an optimizer of it and of other parameters."""
    layers = {name: sparsekit.Embedding(9, 2, name=name) for name in "ab"}
    group = sparsekit.EmbeddingGroup(layers)
    optimizer = optim.SGD([{"params": list(group.parameters())}, {"params": rest, "lr": 0.5}])
    fuse_in_backward(optimizer, group)
    return layers, group, optimizer


def test_errors_name_the_layers_that_have_been_updated():
    head, keys = torch.nn.Linear(2, 1), torch.tensor([3, 1])
    layers, group, optimizer = attached_group(list(head.parameters()))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(head(layers["b"](keys)).sum()).backward()
    with pytest.raises(RuntimeError, match=r"^SGD: GradScaler .* backward, and b has been updated"):
        scaler.step(optimizer)
    out = sum(group(dict.fromkeys("ab", keys)).values()).sum()
    with pytest.raises(RuntimeError, match=r"^SGD: two updates of b without step\(\)"):
        out.backward()
    layers["a"](keys).sum().backward()
    for name in "ab":
        with pytest.raises(RuntimeError, match=f"^SGD: two updates of {name} without"):
            layers[name](keys).sum().backward()


def test_tables_of_one_group_are_updated_in_a_single_pass(monkeypatch):
    """A group's tables are updated in one call, even if the optimizer has other parameters."""
    layers, group, _ = attached_group([torch.nn.Parameter(torch.ones(2))])
    calls, update = [], sparsekit.ops.group_embedding_bag_update_

    def counted(*arguments, **options):
        calls.append(arguments)
        update(*arguments, **options)

    monkeypatch.setattr(sparsekit.ops, "group_embedding_bag_update_", counted)
    sum(group(dict.fromkeys("ab", torch.tensor([3, 1]))).values()).sum().backward()
    assert len(calls) == 1
    assert not any(layer.weight.written() for layer in layers.values())


def test_weights_are_checked_before_an_update_is_noted():
    """The error is the same in a second call, so the refused update has not been noted."""
    weights = [sparsekit.nn.EmbeddingWeight(torch.zeros(3, 2)) for _ in range(2)]
    weights[1].data = torch.zeros(2, 3).t()
    optimizer = optim.SGD(weights)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"^SGD: parameters must be contiguous, got .*\(3, 2\)"
        ):
            optimizer.update_in_backward(weights, lambda: [], None)


def test_an_update_in_backward_has_no_graph():
    """The update disables gradients, which a backward with create_graph enables."""
    weight, enabled = sparsekit.nn.EmbeddingWeight(torch.zeros(2, 3)), []
    optimizer = optim.SGD([weight])
    with torch.enable_grad():
        optimizer.update_in_backward(
            [weight], lambda: enabled.append(torch.is_grad_enabled()) or [], None
        )
    assert enabled == [False]


def test_a_loaded_state_begins_a_new_step():
    layer, optimizer, _ = attached()
    layer(torch.tensor([1, 2])).sum().backward()
    optimizer.load_state_dict(optimizer.state_dict())
    layer(torch.tensor([1, 2])).sum().backward()
    assert optimizer.state[layer.weight]["step"] == 2


def test_a_second_backward_after_a_state_was_loaded():
    layer, optimizer, _ = attached()
    layer(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    layer(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"LazyAdam: two updates of one without step\(\)"):
        layer(torch.tensor([2, 3])).sum().backward()


def test_a_layer_that_is_looked_up_twice_in_a_backward():
    layer, _optimizer, _ = attached()
    out = layer(torch.tensor([1, 2])).sum() + layer(torch.tensor([2, 3])).sum()
    with pytest.raises(RuntimeError, match="do not look a layer up twice"):
        out.backward()


def test_a_gradient_besides():
    layer, optimizer, _ = attached()
    (layer(torch.tensor([1, 2])).sum() + layer.weight.square().sum()).backward()
    with pytest.raises(ValueError, match=r"^LazyAdam: one is updated in backward and has a grad"):
        optimizer.step()


def test_a_gradient_from_elsewhere_alone():
    layer, optimizer, _ = attached()
    layer.weight.square().sum().backward()
    with pytest.raises(ValueError, match=r"^LazyAdam: one is updated in backward and has a grad"):
        optimizer.step()


def test_a_gradient_for_an_optimizer_that_is_not_attached():
    layer = sparsekit.Embedding(20, 3)
    other, optimizer = (optim.SGD([layer.weight]) for _ in range(2))
    fuse_in_backward(optimizer, layer)
    layer.weight.square().sum().backward()
    message = r"^SGD: a weight of shape \(20, 3\) is updated in backward and has a gradient besides"
    with pytest.raises(ValueError, match=message):
        other.step()


def test_what_would_need_to_see_gradients():
    layer, optimizer, _ = attached()
    scaler = torch.amp.GradScaler("cpu")
    head = torch.nn.Linear(3, 1)
    optimizer.add_param_group({"params": list(head.parameters())})
    scaler.scale(head(layer(torch.tensor([1, 2]))).sum()).backward()
    with pytest.raises(ValueError, match=r"clip_grad_norm_: a weight of shape \(20, 3\)"):
        optim.clip_grad_norm_([layer.weight, *head.parameters()], 1.0)
    with pytest.raises(ValueError, match=r"clip_grad_value_: a weight of shape \(20, 3\)"):
        optim.clip_grad_value_([layer.weight, *head.parameters()], 1.0)
    with pytest.raises(ValueError, match="check_finite_gradients: one is updated in backward"):
        optim.check_finite_gradients(torch.nn.Sequential(layer, head))
    with pytest.raises(RuntimeError, match=r"GradScaler cannot unscale .* one has been"):
        scaler.step(optimizer)


def test_detached_again():
    layer, optimizer, handle = attached()
    layer(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    handle.remove()
    layer(torch.tensor([1, 2])).sum().backward()
    assert layer.weight.grad is not None
    optimizer.step()
    assert optimizer.state[layer.weight]["step"] == 2
    fuse_in_backward(optimizer, layer)


def test_copies_are_not_attached():
    layer, optimizer, _ = attached()
    layer, optimizer = copy.deepcopy((layer, optimizer))
    for fused in (False, True):
        optimizer.zero_grad()
        layer(torch.tensor([1, 2])).sum().backward()
        assert (layer.weight.grad is None) == fused
        optimizer.step()
        if not fused:
            fuse_in_backward(optimizer, layer)
    assert optimizer.state[layer.weight]["step"] == 2


def test_all_layers_of_a_model_are_detached():
    model = Model()
    tables, _ = sparsekit.split_embedding_variable_from_others(model)
    optimizer = optim.SGD(tables)
    fuse_in_backward(optimizer, model).remove()
    model(keys_of(0)).sum().backward()
    assert all(weight.grad is not None for weight in tables)


def test_an_optimizer_that_is_dropped_is_detached():
    layer, optimizer, handle = attached()
    layer(torch.tensor([1, 2])).sum().backward()
    message = (
        r"^Adagrad: a parameter of shape \(20, 3\) is updated in backward by another optimizer"
    )
    with pytest.raises(ValueError, match=message):
        optim.Adagrad([torch.nn.Parameter(torch.ones(2)), layer.weight])
    del optimizer, handle
    gc.collect()
    other = optim.Adagrad([layer.weight], lr=0.1)
    layer(torch.tensor([1, 2])).sum().backward()
    assert layer.weight.grad is not None
    other.step()


def test_another_optimizer_takes_over():
    """Rows that are late under the previous optimizer first catch up with its steps."""
    results = []
    for fused in (False, True):
        layer = sparsekit.All2AllDenseEmbedding(20, 3, 1, 1, dynamic_input=True, name="handed on")
        before, after = optim.Adam([layer.weight], lr=0.1), make("SGD catch_up", [layer.weight])
        for step, keys in enumerate(([1, 2, 3, 4, 5], [1], [1, 2], [1, 3], [4])):
            optimizer = before if step < 3 else after
            if fused and step == 3:
                fuse_in_backward(after, layer)
            layer(torch.tensor(keys)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(layer.state_dict()["weight"])
    assert same_bits(*results)


def test_learning_rates_are_those_at_the_time_of_backward():
    layer, optimizer, _ = attached()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step == 0))
    for step in range(2):
        before = layer(torch.tensor([1])).detach().clone()
        layer(torch.tensor([1])).sum().backward()
        optimizer.step()
        scheduler.step()
        assert torch.equal(layer(torch.tensor([1])), before) == (step == 1)


def test_layers_of_every_group_are_attached():
    model = Model()
    groups = [{"params": [model.bags.weight]}, {"params": [model.rows.weight], "lr": 0.5}]
    optimizer = optim.SGD(groups, lr=0.1)
    fuse_in_backward(optimizer, model.bags)
    fuse_in_backward(optimizer, model.rows)
    # A group's backward compares the two to see whether one optimizer updates all tables.
    assert model.bags.weight.update_in_backward is model.rows.weight.update_in_backward
    keys = keys_of(0)
    before = [layer.weight.detach().clone() for layer in (model.bags, model.rows)]
    model(keys).sum().backward()
    for layer, weight in zip((model.bags, model.rows), before, strict=True):
        assert layer.weight.grad is None
        assert not same_bits(layer.weight, weight)


def test_layers_of_other_optimizers_are_left_alone():
    model = Model()
    optimizer = optim.SGD([model.bags.weight], lr=0.1)
    handle = fuse_in_backward(optimizer, model)
    model(keys_of(0)).sum().backward()
    assert model.bags.weight.grad is None
    assert model.rows.weight.grad is not None
    fuse_in_backward(other := optim.SGD([model.rows.weight]), model.rows)
    handle.remove()
    assert model.rows.weight.update_in_backward() == other.update_in_backward


def test_what_is_refused():
    layer, optimizer, _ = attached()
    with pytest.raises(ValueError, match=r"^fuse_in_backward: one has been attached to"):
        fuse_in_backward(optimizer, layer)
    with pytest.raises(TypeError, match=r"^fuse_in_backward: optimizer must be .*optim, got SGD$"):
        fuse_in_backward(torch.optim.SGD([layer.weight]), layer)
    with pytest.raises(ValueError, match=r"^fuse_in_backward: no embedding layer in Linear has"):
        fuse_in_backward(optimizer, torch.nn.Linear(2, 2))


def test_a_refusal_attaches_nothing():
    model = Model()
    optimizer = optim.SGD([model.bags.weight, model.rows.weight], lr=0.1)
    fuse_in_backward(optimizer, model.rows)
    with pytest.raises(ValueError, match=r"^fuse_in_backward: rows has been attached to"):
        fuse_in_backward(optimizer, model)
    model.bags(keys_of(0)).sum().backward()
    assert model.bags.weight.grad is not None
