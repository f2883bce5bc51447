"""A group that passes kept tensors to the ops behaves like one that collects them in each step."""

import copy
import gc
import weakref

import pytest
import torch

import sparsekit
from sparsekit.lookup.plan import PlanCache
from sparsekit.optim import SGD, Adam, LazyAdam, fuse_in_backward
from sparsekit.optim.fused_call import FusedCalls
from tests.nn.keyed import Keyed

NAMES = "abc"
BATCH = 4


def batch_of(step):
    keys = [(torch.arange(2 * BATCH) * 3 + 5 * step + i) % 30 for i in range(len(NAMES))]
    offsets = torch.arange(len(NAMES) * BATCH + 1) * 2
    return Keyed(list(NAMES), torch.cat(keys), offsets)


class Model:
    """A group with updates in backward; if `renews`, nothing is kept from step to step."""

    def __init__(self, renews, optimizer=LazyAdam):
        self.renews, self.steps = renews, 0
        layers = {
            name: sparsekit.DistributedEmbedding(
                "sum", 40, 3 + i, 1, 9, name=name, use_hashtable=name != "b"
            )
            for i, name in enumerate(NAMES)
        }
        self.group = sparsekit.EmbeddingGroup(layers, output="concatenated")
        self.optimizer = optimizer(self.group.parameters(), lr=0.1)
        fuse_in_backward(self.optimizer, self.group)

    @property
    def layers(self):
        return self.group.layers

    def step(self):
        if self.renews:
            self.group._plan_cache = PlanCache()
            self.optimizer._fused = FusedCalls()
        out = self.group(batch_of(self.steps))
        out.backward(torch.ones_like(out))
        self.optimizer.step()
        self.steps += 1
        return out.detach()

    def look(self):
        if self.renews:
            self.group._plan_cache = PlanCache()
        with torch.no_grad():
            return self.group(batch_of(1))

    def tensors(self):
        states = [self.optimizer.state[p] for p in self.group.parameters()]
        numbers = [state[name] for state in states for name in sorted(state)]
        states = self.group.state_dict().items()
        # A reset draws a new hash_seed, and with it other places in the buckets.
        return [value for name, value in states if "table" not in name] + numbers


def alike(change=lambda model: None, trains=True, optimizer=LazyAdam, steps=4):
    """Call a model that keeps tensors and one that does not, and change both on the way."""
    kept, renewing = models = Model(False, optimizer), Model(True, optimizer)
    for name in "ac":
        # Where keys lie in a table depends on its seed.
        renewing.layers[name].table.hash_seed.copy_(kept.layers[name].table.hash_seed)
    phases = [(True, Model.step)] if trains else [(True, Model.step), (False, Model.look)]
    for training, call in phases:
        if training != kept.group.training:
            for model in models:
                model.group.train(training)
        for _ in range(steps):
            assert torch.equal(call(kept), call(renewing))
    # The change comes between two calls with the same plan.
    change(kept)
    change(renewing)
    for _ in range(4):
        assert torch.equal(call(kept), call(renewing))
    for one, other in zip(kept.tensors(), renewing.tensors(), strict=True):
        assert torch.equal(one, other)
    return kept


def new_data(model):
    with torch.no_grad():
        model.layers["c"].weight.data = model.layers["c"].weight.data * 2


def new_weight(model):
    old = model.layers["b"].weight
    model.layers["b"].weight = torch.nn.Parameter(old.detach() + 1)


def smaller_group(model):
    model.optimizer.param_groups[0]["params"].pop()


def new_seed(model):
    model.layers["a"].seed = torch.tensor([77])


def seed_as_a_swap_of_tensors_does(model):
    model.layers["a"]._buffers["seed"] = torch.tensor([77])


def seed_in_other_memory(model):
    model.layers["a"].seed.data = torch.tensor([77])


def larger_table(model):
    table = model.layers["a"].table
    table.buckets.data = table.buckets.clone()
    table.size.data = table.size.clone()


def set_to_other_memory(model):
    layer = model.layers["a"]
    with torch.no_grad():
        layer.weight.set_(layer.weight * 2)
    layer.table.buckets.set_(layer.table.buckets.clone())
    layer.table.size.set_(layer.table.size.clone())


def storage_in_other_memory(model):
    for tensor in (model.layers["c"].weight, model.layers["c"].table.buckets):
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        storage.resize_(2 * size)
        storage.resize_(size)


def loaded_by_swaps(model):
    """Load as torch does if it swaps tensors, which it refuses while C++ refers to them."""
    state = copy.deepcopy(model.group.state_dict())
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.group.load_state_dict(state)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def loaded(model):
    model.group.load_state_dict(copy.deepcopy(model.group.state_dict()))


def loaded_and_assigned(model):
    model.group.load_state_dict(copy.deepcopy(model.group.state_dict()), assign=True)


def loaded_optimizer(model):
    model.optimizer.load_state_dict(copy.deepcopy(model.optimizer.state_dict()))


def new_state(model):
    state = model.optimizer.state[model.layers["a"].weight]
    state["exp_avg"] = state["exp_avg"] * 3


def new_states(model):
    weight = model.layers["a"].weight
    state = model.optimizer.state[weight]
    model.optimizer.state[weight] = {name: value * 3 for name, value in state.items()}


def state_set_to_other_memory(model):
    state = model.optimizer.state[model.layers["c"].weight]
    for name in ("exp_avg", "step"):
        state[name].set_(state[name] * 3)


def state_in_other_memory(model):
    state = model.optimizer.state[model.layers["c"].weight]
    state["step"].data = state["step"] + 5


def reset(model):
    model.layers["a"].reset_parameters()


def rows_that_count(model):
    model.optimizer.param_groups[0]["bias_correction"] = "per_row"


def maximizing(model):
    model.optimizer.param_groups[0]["maximize"] = True


def other_group(model):
    """Move a weight to another group, with another learning rate."""
    first = model.optimizer.param_groups[0]
    model.optimizer.param_groups.append({**first, "params": [first["params"].pop()], "lr": 0.5})


def rows_that_catch_up(model):
    model.optimizer.param_groups[0].update(mode="catch_up", momentum=0.9)


def keys_to_follow(model):
    """Let rows of a table stand for other keys, as a load does that is interrupted."""
    weight = model.layers["a"].weight
    keys = weight.keys()
    model.optimizer.state[weight]["keys"] = keys.flip(0)


def slower(model):
    model.optimizer.param_groups[0]["lr"] = 0.01


OF_TABLES = [
    *(
        new_data,
        new_seed,
        seed_as_a_swap_of_tensors_does,
        seed_in_other_memory,
        larger_table,
        set_to_other_memory,
        storage_in_other_memory,
        loaded,
        loaded_by_swaps,
        loaded_and_assigned,
        reset,
    ),
]
OF_OPTIMIZERS = [
    *(
        loaded_optimizer,
        new_state,
        new_states,
        state_in_other_memory,
        state_set_to_other_memory,
        rows_that_count,
        maximizing,
        slower,
    ),
    *(smaller_group, other_group, keys_to_follow),
]


@pytest.mark.parametrize("change", OF_TABLES + OF_OPTIMIZERS)
def test_what_is_replaced_counts_from_the_next_step(change):
    alike(change)


@pytest.mark.parametrize("change", OF_TABLES)
def test_what_is_replaced_counts_from_the_next_evaluation(change):
    alike(change, trains=False)


def test_rows_that_move_without_a_gradient():
    alike(optimizer=Adam)
    alike(rows_that_catch_up, optimizer=SGD)


def test_rows_that_another_optimizer_has_left_late():
    """The other optimizer has its own steps to apply to all rows before this one."""

    class Other:
        calls = 0

        def catch_up(self, weight, rows):
            self.calls += rows is None

    def left_late(model):
        model.other = Other()
        model.layers["a"].weight.before_read = model.other.catch_up

    kept = Model(False)
    for step in range(6):
        if step == 3:
            left_late(kept)
        kept.step()
    assert kept.other.calls == 3


@pytest.mark.parametrize("change", [new_data, new_state])
def test_a_change_after_the_first_step(change):
    alike(change, steps=1)


def test_two_groups_whose_first_table_is_the_same():
    models = Model(False), Model(True)
    for name in "ac":
        seed = models[0].layers[name].table.hash_seed
        models[1].layers[name].table.hash_seed.copy_(seed)
    for model in models:
        few = {name: model.layers[name] for name in "ac"}
        model.groups = [model.group, sparsekit.EmbeddingGroup(few, output="concatenated")]
    for step in range(8):
        for model in models:
            model.group = model.groups[step // 2 % 2]
        assert torch.equal(models[0].step(), models[1].step())
    for one, other in zip(models[0].tensors(), models[1].tensors(), strict=True):
        assert torch.equal(one, other)


def test_tensors_are_kept():
    kept = alike()
    (batch,) = kept.group._plan_cache._plan.batches
    assert batch._kept is not None
    (call,) = kept.optimizer._fused._calls.values()
    assert call.kept is not None
    assert not any(weight.written() for weight in kept.group.parameters())


def test_two_updates_without_a_step_are_refused():
    kept = alike()
    out = kept.group(batch_of(0)), kept.group(batch_of(1))
    out[0].sum().backward()
    with pytest.raises(RuntimeError, match="two updates of a without step"):
        out[1].sum().backward()


def test_a_weight_that_is_replaced_gets_gradients_of_its_own():
    kept = Model(False)
    for _ in range(3):
        kept.step()
    old = kept.layers["b"].weight
    before = old.detach().clone()
    new_weight(kept)
    kept.step()
    assert torch.equal(old, before)
    assert kept.layers["b"].weight.grad is not None


@pytest.mark.parametrize("rows", [10, 50])
def test_a_weight_of_another_size_in_the_same_memory_is_refused(rows):
    kept = Model(False)
    weight = kept.layers["a"].weight
    room = torch.zeros(50, weight.shape[1])
    weight.data = room[:40]
    for _ in range(4):
        kept.step()
    weight.data = room[:rows]
    with pytest.raises(ValueError, match=rf"got shape \({rows}, 3\)"):
        kept.step()


def test_memory_that_is_replaced_between_forward_and_backward():
    kept = Model(False)
    for _ in range(3):
        kept.step()
    weight = kept.layers["b"].weight
    out = kept.group(batch_of(9))
    old = weight.data
    before = old.clone()
    weight.data = weight.data.clone()
    out.backward(torch.ones_like(out))
    assert torch.equal(old, before)
    assert not torch.equal(weight.data, before)


def test_backward_notices_rows_that_a_step_has_written():
    kept = Model(False)
    for _ in range(4):
        kept.step()
    weight = kept.layers["b"].weight
    squares = (weight * weight).sum()
    kept.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


def test_a_group_that_its_weights_refer_to_is_collected():
    kept = Model(False)
    for _ in range(4):
        kept.step()
    weight = kept.layers["a"].weight
    weight.register_hook(lambda grad, group=kept.group: grad)
    weight.of_group, weight.of_optimizer = kept.group, kept.optimizer
    gone = [weakref.ref(kept.group), weakref.ref(weight)]
    del kept, weight
    gc.collect()
    assert [one() for one in gone] == [None, None]
