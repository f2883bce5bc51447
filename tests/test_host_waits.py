"""Steps of layers rarely wait for a device, and all kinds of waits are counted."""

import functools
from contextlib import nullcontext

import pytest
import torch
from conftest import generator
from deferred_errors import deferred_errors
from host_waits import waits_of
from nn.keyed import Keyed
from simt import SimtMode

import sparsekit
from sparsekit.distributed import wire
from sparsekit.distributed.exchange import attempt
from sparsekit.optim import LazyAdam, fuse_in_backward

X = torch.arange(6.0).view(2, 3)
HOST = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda x: x[0, 0].item(), "_local_scalar_dense"),
        (lambda x: bool(x.any()), "_local_scalar_dense"),
        (lambda x: int(x[0, 1]), "_local_scalar_dense"),
        (lambda x: (x + 1).tolist(), "tolist"),
        (lambda x: x.detach().numpy(), "numpy"),
        (lambda x: x.cpu(), "to the host"),
        (lambda x: x.to("cpu"), "to the host"),
        (lambda x: HOST.to(x.device), "to the device"),
        (lambda x: torch.tensor([1.0], device=x.device), "tensor(device=)"),
        (lambda x: x.new_tensor([1.0]), "new_tensor"),
        (lambda x: x.copy_(HOST), "copy_ from the host"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 1], "a boolean mask"),
        (lambda x: x.masked_select(x > 1), "masked_select"),
        (lambda x: x.unique(), "_unique2"),
        (lambda x: torch.equal(x, x + 0), "equal"),
        (lambda x: x[0].repeat_interleave(x[1].long()), "repeat_interleave"),
        (lambda x: x.__setitem__((0, 0), 3.0), "an element set to a number"),
        (lambda x: torch.ops.sparsekit.unique(x.long().view(-1)), "ops of sparsekit"),
    ],
)
def test_each_kind_of_wait_is_seen(call, kind):
    x = X.clone()
    found = waits_of(lambda: call(x), x)
    assert found[kind] >= 1, found


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x + HOST[0, 0],
        lambda x: x[0].fill_(3),
        lambda x: x.__setitem__(0, 3.0),
        lambda x: HOST.tolist(),
        lambda x: HOST[0, 0].item(),
        lambda x: x[0].repeat_interleave(x[1].long(), output_size=12),
        lambda x: torch.zeros(3, device=x.device).add_(x[0]),
        lambda x: x.view(-1)[torch.arange(2, device=x.device)],
        lambda x: torch.tensor([1.0], device="cpu").tolist(),
    ],
)
def test_what_does_not_wait_is_not_counted(call):
    x = X.clone()
    assert waits_of(lambda: call(x), x).total() == 0


def test_waits_in_backward_are_seen():
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            grad.tolist()
            return grad * float(grad.sum())

    x = X.clone().requires_grad_()
    found = waits_of(lambda: Reads.apply(x).sum().backward(), x)
    assert found == {"tolist": 1, "_local_scalar_dense": 1}


def test_what_is_made_of_the_tensors_of_a_device_is_its_own():
    x = X.clone()
    kept = {}

    def step():
        if "sum" not in kept:
            kept["sum"] = torch.ones(2, device=x.device) + x.sum()
        kept["sum"].tolist()

    assert waits_of(step, x) == {"tolist": 1}


KEYS = torch.randint(0, 500, (16, 2, 3), generator=generator(0))
KEYS.view(-1)[::9] = 7  # the padding key of most cases
KEYS.view(-1)[4::23] = 0
FLAT, OFFSETS = KEYS.view(-1), torch.arange(0, 97, 3)
WEIGHTS = torch.rand(96, generator=generator(1))


def layer(combiner="sum", max_nnz=3, **options):
    return sparsekit.DistributedEmbedding(
        combiner, 1000, 8, 2, max_nnz, seed=1, name="waits", **options
    )


BAG = functools.partial(sparsekit.EmbeddingBag, 1000, 8)
CASES = {
    "dense": (layer, [KEYS]),
    "dense, padding": (lambda: layer(padding_key=7), [KEYS]),
    "dense, weights, padding": (
        lambda: layer("mean", padding_key=7),
        [KEYS, WEIGHTS.view(16, 2, 3)],
    ),
    "dense, most keys of a sample": (lambda: layer(max_feature_num=6), [KEYS]),
    "offsets": (layer, [(FLAT, OFFSETS)]),
    "offsets, weights": (layer, [(FLAT, OFFSETS), WEIGHTS]),
    "offsets, padding": (lambda: layer(padding_key=7), [(FLAT, OFFSETS)]),
    "offsets, weights, padding": (
        lambda: layer("sqrtn", padding_key=7),
        [(FLAT, OFFSETS), WEIGHTS],
    ),
    "offsets, most keys of a sample": (lambda: layer(max_feature_num=6), [(FLAT, OFFSETS)]),
    "a combiner for each slot": (lambda: layer(("sum", "mean")), [KEYS]),
    "offsets, a combiner for each slot": (lambda: layer(("sum", "mean")), [(FLAT, OFFSETS)]),
    "scores": (lambda: layer(score="lfu", ttl=1000), [KEYS]),
    "evicts": (lambda: layer(on_full="evict", max_rows=900), [(FLAT, OFFSETS)]),
    "truncated": (lambda: layer(max_nnz=2, truncate=True), [(FLAT, OFFSETS)]),
    "truncated by slot": (lambda: layer(max_nnz=[2, 1], truncate=True), [(FLAT, OFFSETS)]),
    "all at once": (
        lambda: layer(("mean", "sum"), [1, 2], truncate=True, padding_key=7, max_feature_num=6),
        [(FLAT, OFFSETS), WEIGHTS],
    ),
    "a limit of each slot": (lambda: layer(max_nnz=[3, 4]), [(FLAT, OFFSETS)]),
    "slots first": (
        lambda: layer(padding_key=7, max_feature_num=6),
        [Keyed(["a", "b"], FLAT, OFFSETS)],
    ),
    "no keys": (lambda: layer(padding_key=7), [(FLAT[:0], torch.zeros(33, dtype=torch.int64))]),
    "maximum": (lambda: layer("max"), [KEYS]),
    "offsets, maximum": (lambda: layer("max"), [(FLAT, OFFSETS)]),
    "maximum, padding": (lambda: layer("max", padding_key=7), [KEYS]),
    "offsets, maximum, truncated, padding": (
        lambda: layer("max", 2, truncate=True, padding_key=7, max_feature_num=6),
        [(FLAT, OFFSETS)],
    ),
    "maximum in one slot": (lambda: layer(("max", "mean"), padding_key=7), [(FLAT, OFFSETS)]),
    "maximum, a range of keys": (lambda: layer("max", use_hashtable=False), [(FLAT, OFFSETS)]),
    "weights with a gradient": (layer, [(FLAT, OFFSETS), WEIGHTS.clone().requires_grad_()]),
    "weights with a gradient, padding": (
        lambda: layer("mean", padding_key=7),
        [(FLAT, OFFSETS), WEIGHTS.clone().requires_grad_()],
    ),
    "weights with a gradient, a combiner for each slot": (
        lambda: layer(("sum", "sqrtn"), [1, 3], truncate=True),
        [(FLAT, OFFSETS), WEIGHTS.clone().requires_grad_()],
    ),
    "a range of keys": (lambda: layer(use_hashtable=False), [KEYS]),
    "a range of keys, padding": (lambda: layer(use_hashtable=False, padding_key=-1), [KEYS - 1]),
    "EmbeddingBag": (lambda: BAG(mode="mean"), [FLAT, OFFSETS[:-1]]),
    "Embedding": (lambda: sparsekit.Embedding(1000, 8), [KEYS]),
    "Embedding, padding": (lambda: sparsekit.Embedding(1000, 8, padding_idx=7), [KEYS]),
}


def step_of(module, inputs, fused=True):
    optimizer = LazyAdam(module.parameters(), lr=0.01)
    if fused:
        fuse_in_backward(optimizer, module)

    def step():
        outputs = module(*inputs)
        outputs = list(outputs.values()) if isinstance(outputs, dict) else [outputs]
        sum(out.sum() for out in outputs).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def made(case, seed=0):
    """Return a layer and its inputs."""
    make, inputs = CASES[case]
    torch.manual_seed(seed)
    module = make()
    inputs = [
        x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
        for x in inputs
    ]
    return module, inputs


@pytest.mark.parametrize("case", CASES)
def test_a_fused_step_waits_for_nothing(case):
    module, inputs = made(case)
    assert waits_of(step_of(module, inputs), module, inputs).total() == 0


@pytest.mark.parametrize("case", CASES)
def test_a_step_that_does_not_wait_gives_the_weights_of_one_that_does(case):
    (early, inputs), (late, others) = made(case), made(case)
    for module in (early, late):
        module.load_state_dict(early.state_dict())
    outputs = []
    with SimtMode():
        for module, given, context in (
            (early, inputs, nullcontext()),
            (late, others, deferred_errors()),
        ):
            step = step_of(module, given)
            with context:
                for _ in range(3):
                    step()
                outputs.append(module(*given).detach())
                outputs.append(module.eval()(*given))
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[3])
    assert torch.equal(early.weight, late.weight)
    for x, y in zip(inputs, others, strict=True):
        if isinstance(x, torch.Tensor) and x.requires_grad:
            assert torch.equal(x.grad, y.grad)
    if early.table is not None:
        assert torch.equal(early.table.keys(), late.table.keys())


@pytest.mark.parametrize("options", [{}, {"padding_key": 7}])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("tables", [1, 26])
def test_waits_of_a_group(tables, fused, options):
    """A step that is not fused waits for the lengths of its gradients."""
    layers = {
        f"t{i}": sparsekit.DistributedEmbedding(
            "sum", 1000, 8, 2, 3, seed=1, name=f"group {i}", **options
        )
        for i in range(tables)
    }
    group = sparsekit.EmbeddingGroup(layers)
    batch = dict.fromkeys(layers, KEYS)
    found = waits_of(step_of(group, [batch], fused), group, batch)
    assert found == ({} if fused else {"ops of sparsekit": 1})


def test_waits_of_a_feature_that_inserts_nothing():
    layer = sparsekit.DistributedEmbedding("sum", 1000, 8, 1, seed=1, name="read", score="lfu")
    features = {"own": "read", "read": sparsekit.Feature("read", insert=False)}
    group = sparsekit.EmbeddingGroup({"read": layer}, features)
    batch = {"own": (FLAT, OFFSETS), "read": (FLAT + 300, OFFSETS)}
    assert waits_of(step_of(group, [batch]), group, batch).total() == 5


def test_a_group_of_several_dtypes_features_and_options_waits_for_nothing():
    layers = {
        f"t{i}": sparsekit.DistributedEmbedding(
            "sum",
            1000,
            8,
            1,
            seed=1,
            name=f"several {i}",
            dtype=dtype,
            use_hashtable=False,
            **options,
        )
        for i, (dtype, options) in enumerate(
            [(torch.float32, {}), (torch.float64, {"padding_key": 7}), (torch.float64, {})]
        )
    }
    features = {
        "plain": "t0",
        "padded": sparsekit.Feature("t1", combiner="mean"),
        "truncated": sparsekit.Feature("t2", max_nnz=2, truncate=True),
    }
    group = sparsekit.EmbeddingGroup(layers, features)
    batch = dict.fromkeys(features, (FLAT, OFFSETS))
    assert waits_of(step_of(group, [batch]), group, batch).total() == 0


def test_an_evaluation_waits_for_nothing():
    module = layer().eval()
    assert waits_of(lambda: module(KEYS), module, KEYS).total() == 0


class OnDevice:
    """Stand-in for a tensor on a device."""

    is_cpu = False

    def __init__(self, tensor):
        self._tensor = tensor

    def view(self, dtype):
        return self._tensor.view(dtype)


def test_heads_of_messages_are_written_without_a_wait():
    data, expected = torch.zeros(8, dtype=torch.int64), torch.tensor([0, 0, 5, 1, 0, 0, 5, 1])
    bytes_of = data.view(torch.uint8)
    write = functools.partial(wire.write_heads, OnDevice(bytes_of), [16, 48], [5, 1])
    assert waits_of(write, data).total() == 0
    assert torch.equal(data, expected)
    wire.write_heads(bytes_of.zero_(), [16, 48], [5, 1])
    assert torch.equal(data, expected)


@pytest.mark.parametrize("offsets", [[1, 3, 96], [0, 40, 90], [0, 97, 96], [0, 4, 96], [0]])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_bad_offsets_of_what_is_pooled_here_are_reported(offsets, weights):
    """They must not be read beyond the keys; a bag of 92 keys exceeds max_nnz."""
    module = layer("max" if weights is None else "mean", max_nnz=91)
    good = [(FLAT, OFFSETS)] if weights is None else [(FLAT, OFFSETS), WEIGHTS]
    bad = [(FLAT, torch.tensor(offsets))]
    if weights is not None:
        bad = [*bad, weights.clone().requires_grad_()]
    with SimtMode(), deferred_errors():
        module(*good)
        errors = [attempt(lambda given=given: module(*given)) for given in (bad, *[good] * 8)]
        found = [str(error) for error in errors if isinstance(error, Exception)]
        assert any("offsets[" in text for text in found), found
        assert all("waits: " in text for text in found)
        assert torch.equal(module(*good), module(*good))
        sparsekit.raise_errors()


def test_a_maximum_has_no_weights():
    module = layer("max", padding_key=7)
    with SimtMode(), deferred_errors(), pytest.raises(ValueError, match=r"waits: .* no weights"):
        module((FLAT, OFFSETS), WEIGHTS)


def keyed_group(output="concatenated", **other):
    """Return a group with features of many kinds, and a KeyedJaggedTensor for it."""
    plain = functools.partial(sparsekit.DistributedEmbedding, "sum", 1000, 8, 1, 9, seed=1)
    layers = {
        "plain": plain(name="keyed plain"),
        "padded": plain(name="keyed padded", padding_key=7, **other),
        "other": plain(name="keyed other", padding_key=-1, max_feature_num=9),
    }
    features = {
        "a": "plain",
        "b": "padded",
        "c": sparsekit.Feature("padded", combiner="mean", max_nnz=2, truncate=True),
        "d": sparsekit.Feature("other", combiner="sqrtn", max_nnz=8),
        "e": sparsekit.Feature("plain", max_nnz=1, truncate=True),
    }
    random = generator(3)
    counts = torch.randint(0, 5, (6 * 4,), generator=random)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    values = torch.randint(-1, 12, (int(offsets[-1]),), generator=random)
    weights = torch.rand(len(values), generator=random)
    keyed = Keyed(["c", "none", "a", "e", "d", "b"], values, offsets, weights)
    return sparsekit.EmbeddingGroup(layers, features, output), keyed


@pytest.mark.parametrize("other", [{}, {"dtype": torch.float64}])
def test_features_of_a_keyed_jagged_tensor_wait_for_nothing(other):
    group, keyed = keyed_group("dict", **other)
    given = [keyed.values(), keyed.offsets(), keyed.weights_or_none()]
    assert waits_of(step_of(group, [keyed]), group, given).total() == 0


@pytest.mark.parametrize("output", ["dict", "concatenated"])
def test_features_that_do_not_wait_give_the_outputs_of_those_that_do(output):
    (early, keyed), (late, _) = keyed_group(output), keyed_group(output)
    late.load_state_dict(early.state_dict())
    with SimtMode():
        for group, context in ((early, nullcontext()), (late, deferred_errors())):
            step = step_of(group, [keyed])
            with context:
                for _ in range(3):
                    step()
        one = early(keyed)
        with deferred_errors():
            other = late(keyed)
    for name in one if output == "dict" else [slice(None)]:
        assert torch.equal(one[name], other[name])
    for mine, theirs in zip(early.parameters(), late.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("feature", "limit"), [("b", 9), ("d", 8), ("a", 9)])
def test_a_bag_of_a_keyed_jagged_tensor_that_is_too_long_is_reported(feature, limit):
    group, keyed = keyed_group()
    names = keyed.keys()
    counts = keyed.offsets().diff().view(len(names), -1)
    counts[names.index(feature), 1] = limit
    for more in (0, 1):
        counts[names.index(feature), 1] += more
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.flatten().cumsum(0)])
        values = torch.full((int(offsets[-1]),), 7)
        bags = Keyed(names, values, offsets, None)
        with SimtMode(), deferred_errors():
            group(bags)
            error = attempt(sparsekit.raise_errors)
        assert (error is None) == (more == 0), error
    assert type(error) in (IndexError, ValueError)


def not_pooled(**options):
    """Return a step of a group whose feature has a vector for each key, and the group."""
    options = {"seed": 1, "name": "not pooled"} | options
    layers = {"x": sparsekit.DistributedEmbedding("sum", 1000, 8, 1, 3, **options)}
    group = sparsekit.EmbeddingGroup(layers, {"x": sparsekit.Feature("x", combiner=None)})
    optimizer = LazyAdam(group.parameters(), lr=0.01)
    fuse_in_backward(optimizer, group)

    def step(offsets=OFFSETS):
        vectors = group({"x": (FLAT, offsets)})["x"].values()
        vectors.square().sum().backward()
        optimizer.step()
        return vectors.detach()

    return step, group


@pytest.mark.parametrize("options", [{}, {"padding_key": 7}, {"max_feature_num": 3}])
def test_features_that_are_not_pooled_wait_for_nothing(options):
    step, group = not_pooled(**options)
    assert waits_of(step, group, [FLAT, OFFSETS]).total() == 0
    (early, _), (late, _) = not_pooled(**options), not_pooled(**options)
    with SimtMode():
        for _ in range(3):
            vectors = early()
            with deferred_errors():
                assert torch.equal(vectors, late())


@pytest.mark.parametrize("offsets", [[1, 3, 96], [0, 3, 2, 96], [0, 3, 95], [0, 4, 96]])
def test_bad_bags_that_are_not_pooled_are_reported(offsets):
    step, _ = not_pooled(padding_key=7, max_feature_num=95)
    with SimtMode(), deferred_errors():
        step()
        step(torch.tensor(offsets))
        with pytest.raises((IndexError, ValueError), match="not pooled: "):
            sparsekit.raise_errors()
