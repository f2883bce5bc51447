"""Trains layers for some steps, and compares them with a model of a dict and dense tensors."""

import copy
import itertools
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from conftest import TOLERANCE

from sparsekit import (
    All2AllDenseEmbedding,
    DistributedEmbedding,
    EmbeddingGroup,
    TableFullError,
    nn,
    optim,
)

from ..nn import bags as forms
from ..ops.optimizer_rules import widths
from ..reference import ops as reference
from .case import Case

_ADAM = {"lr": 0.1, "eps": 1e-2}
# For each optimizer: its class and keyword arguments; its rule, the rule's settings and the states'
# initial values; whether a step moves all rows.
OPTIMIZERS = {
    "SGD": (optim.SGD, {"lr": 0.1, "weight_decay": 0.01}, "sgd", [0.1, 0, 0.01, 0], [], False),
    "momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9}, "sgd", [0.1, 0.9, 0, 0], [0], False),
    "catch_up": (
        optim.SGD, {"lr": 0.1, "momentum": 0.8, "nesterov": True, "mode": "catch_up"},
        "sgd", [0.1, 0.8, 0, 1], [0], True,
    ),
    "LazyAdam": (
        optim.LazyAdam, _ADAM | {"weight_decay": 0.1},
        "adam", [0.1, 0.9, 0.999, 1e-2, 0.1, 0], [0, 0], False,
    ),
    "amsgrad per row": (
        optim.LazyAdam, _ADAM | {"amsgrad": True, "bias_correction": "per_row"},
        "adam", [0.1, 0.9, 0.999, 1e-2, 0, 0], [0, 0, 0], False,
    ),
    "Adam": (optim.Adam, _ADAM, "adam", [0.1, 0.9, 0.999, 1e-2, 0, 1], [0, 0], True),
    "Adam sweep": (
        optim.Adam, _ADAM | {"mode": "sweep"}, "adam", [0.1, 0.9, 0.999, 1e-2, 0, 1], [0, 0], True,
    ),
    "Adagrad": (
        optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.2, "eps": 1e-3},
        "adagrad", [0.1, 0.1, 1e-3, 0, 0], [0.2], False,
    ),
    "RowWiseAdagrad": (
        optim.RowWiseAdagrad, {"lr": 0.1, "initial_accumulator_value": 0.1, "eps": 1e-3},
        "row_wise_adagrad", [0.1, 0, 1e-3, 0, 0], [0.1], False,
    ),
    "RMSProp": (
        optim.RMSProp, {"lr": 0.1, "eps": 1e-2, "momentum": 0.5},
        "rms_prop", [0.1, 0.99, 1e-2, 0.5, 0, 0, 0], [0, 0], False,
    ),
    "RMSProp of TensorFlow": (
        optim.RMSProp, {"lr": 0.1, "eps": 1e-2, "form": "tensorflow"},
        "rms_prop", [0.1, 0.9, 1e-2, 0, 1, 0, 0], [1], False,
    ),
    "Ftrl": (
        optim.Ftrl, {"lr": 0.5, "l1": 0.1, "l2": 0.01},
        "ftrl", [0.5, 0.1, 0.01, -0.5], [0.1, 0], False,
    ),
    "PartialRowWiseAdam": (
        optim.PartialRowWiseAdam, _ADAM | {"weight_decay": 0.1},
        "partial_row_wise_adam", [0.1, 0.9, 0.999, 1e-2, 0.1], [0, 0], False,
    ),
    "LazyLAMB per row": (
        optim.LazyLAMB, _ADAM | {"weight_decay": 0.1, "bias_correction": "per_row"},
        "lamb", [0.1, 0.9, 0.999, 1e-2, 0.1], [0, 0], False,
    ),
}  # fmt: skip


class Model:
    """Model of a layer and its optimizer: rows by key, dense and in float64."""

    def __init__(self, layer, name: str) -> None:
        self.layer, self.capacity, self.dim = layer, layer.capacity, layer.embedding_vec_size
        self.seed, (self.distribution, self.a, self.b) = (
            int(layer.seed),
            layer.initializer._distribution,
        )
        *_, self.rule, self.settings, first, self.moves_all = OPTIMIZERS[name]
        self.row: dict[int, int] = {}
        self.weight = torch.zeros(self.capacity, self.dim, dtype=torch.float64)
        self.states = [
            torch.full((self.capacity, width), float(value), dtype=torch.float64)
            for width, value in zip(widths(self.rule, len(first), self.dim), first, strict=True)
        ]
        self.per_row = name.endswith("per row")
        self.row_step = torch.zeros(self.capacity, dtype=torch.int32) if self.per_row else None
        self.step = 0
        if layer.table is None:
            self.insert(list(range(self.capacity)))

    def initial(self, keys: list[int]) -> torch.Tensor:
        vectors = reference.init_vectors(
            torch.tensor(keys, dtype=torch.int64),
            self.dim,
            seed=self.seed,
            distribution=self.distribution,
            a=self.a,
            b=self.b,
        )
        return vectors.to(self.layer.weight.dtype).double()

    def new(self, keys: list[int]) -> list[int]:
        return [key for key in dict.fromkeys(keys) if key not in self.row]

    def insert(self, keys: list[int]) -> None:
        new = self.new(keys)
        rows = range(len(self.row), len(self.row) + len(new))
        self.row.update(zip(new, rows, strict=True))
        self.weight[list(rows)] = self.initial(new)

    def vectors(self, keys: list[int]) -> torch.Tensor:
        """Return the vectors of keys; a key that is not in the table has its initial vector."""
        found = self.weight[[self.row.get(key, 0) for key in keys]]
        absent = [i for i, key in enumerate(keys) if key not in self.row]
        found[absent] = self.initial([keys[i] for i in absent])
        return found

    def train(self, keys: list[int], gradient: torch.Tensor) -> None:
        """Take a step of the optimizer; `gradient` has a row for each key."""
        self.step += 1
        rows = torch.tensor([self.row.get(key, -1) for key in keys], dtype=torch.int64)
        rows, gradient = rows[rows >= 0], gradient[rows >= 0]
        total = torch.zeros_like(self.weight).index_add(0, rows, gradient)
        touched = None if self.moves_all else rows.unique()
        reference.update_rows_(
            self.weight,
            self.states,
            self.row_step,
            touched,
            total if touched is None else total[touched],
            torch.tensor(self.step),
            self.rule,
            self.settings,
            per_row=self.per_row,
        )


@dataclass
class Input:
    """Arguments of a call, and the bags that they represent."""

    given: tuple[Any, ...]
    bags: list[list[int]]
    weights: torch.Tensor | None = None  # one for each key, or None

    @property
    def keys(self) -> list[int]:
        return [key for bag in self.bags for key in bag]

    def as_inserted(self) -> list[int]:
        """Return the keys in the order in which the layer inserts them."""
        form = self.given[0]
        if isinstance(form, forms.KeyedJagged):
            return form.values().tolist()
        if isinstance(form, torch.Tensor) and form.layout == torch.sparse_coo:
            order = form._indices()[0].argsort(stable=True)
            return form._values()[order].tolist()
        return self.keys


def _layer(case: Case, name: str):
    """Draw a layer that pools or one that does not."""
    arguments = {
        "max_vocabulary_size_per_gpu": case.any_of(20, 60, 300),
        "embedding_vec_size": case.any_of(1, 3, 4, 8, 17),
        "use_hashtable": case.maybe(0.8),
        "embedding_initializer": case.any_of(
            None, nn.Normal(0.5, 2.0), nn.Constant(0.25), nn.Uniform(-1.0, 1.0)
        ),
        "padding_key": forms.PADDING,
        "seed": case.random.getrandbits(63),
        "dtype": case.any_of(torch.float64, torch.float64, torch.float32),
        "name": name,
    }
    if case.maybe(0.3):
        layer = All2AllDenseEmbedding(
            slot_num=2, nnz_per_slot=3, dynamic_input=case.maybe(0.5), **arguments
        )
    else:
        combiner = case.any_of("sum", "mean", "sqrtn")
        layer = DistributedEmbedding(
            combiner, slot_num=forms.SLOTS, max_nnz=forms.MAX_NNZ, **arguments
        )
    return layer


def _keys(case: Case, layer, n: int, unseen: bool = False) -> list[int]:
    if layer.table is None:
        return case.integers(0, layer.capacity - 1, n).tolist()
    few = case.integers(-5, case.any_of(5, 15, 40), n).tolist()
    wild = case.keys(n, torch.int64).tolist()
    keys = [w if case.maybe(0.3 if unseen else 0.03) else f for f, w in zip(few, wild, strict=True)]
    return [key for key in keys if key != forms.PADDING] + [0] * keys.count(forms.PADDING)


def _input(case: Case, layer, unseen: bool = False) -> Input:
    if isinstance(layer, All2AllDenseEmbedding):
        n = case.size(40)
        shape = (n,) if layer.dynamic_input else (n, layer.slot_num, layer.nnz_per_slot)
        keys = torch.tensor(
            _keys(case, layer, torch.Size(shape).numel(), unseen), dtype=torch.int64
        )
        keys[case.integers(0, 9, len(keys)) == 0] = forms.PADDING
        bags = [[] if key == forms.PADDING else [key] for key in keys.tolist()]
        return Input((case.placed(keys.view(shape)),), bags)
    samples = case.any_of(0, 1, 2, 12)
    lengths = [case.random.randint(0, forms.MAX_NNZ) for _ in range(samples * forms.SLOTS)]
    keys = iter(_keys(case, layer, sum(lengths), unseen))
    bags = [list(itertools.islice(keys, length)) for length in lengths]
    weights = None
    if case.maybe(0.5):
        weights = torch.rand(sum(lengths), generator=case.generator, dtype=torch.float64) + 0.5
        weights = weights.to(layer.weight.dtype)
    narrow = all(-(2**31) <= key < 2**31 for bag in bags for key in bag)
    usable = [f for f in forms.FORMS if f != "int32" or narrow]
    if samples == 0:  # torch has no jagged tensor without rows
        usable = ["values_offsets", "coo", "csr", "dense"]
    if weights is not None:
        # This form keeps its weights in a different order.
        usable = [f for f in usable if f != "uncoalesced_coo"]
    form = case.any_of(*usable)
    case.note(form=form, bags=bags, weights=weights)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that CSR tensors are beta
        given = forms.FORMS[form](bags, weights)
    return Input(given, bags, weights)


def _expected(layer, given: Input, vectors: torch.Tensor) -> torch.Tensor:
    """Return the output expected for the input, given the vectors of its keys in order."""
    offsets = torch.tensor([0, *map(len, given.bags)]).cumsum(0)
    pooled = reference.embedding_bag(
        vectors,
        torch.arange(len(vectors)),
        offsets,
        getattr(layer, "combiner", "sum"),
        None if given.weights is None else given.weights.double(),
    )
    if isinstance(layer, All2AllDenseEmbedding):
        return pooled if layer.dynamic_input else pooled.view(-1, 2, 3, layer.embedding_vec_size)
    return pooled.view(-1, forms.SLOTS, layer.embedding_vec_size)


def _close(case, layer, name, actual, expected) -> None:
    """Compare with a hundred times the tolerance of one op: errors grow over the steps."""
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    tolerance = 100 * TOLERANCE[layer.weight.dtype]
    case.close(name, actual, expected, (1 + largest) * tolerance / TOLERANCE[layer.weight.dtype])


def _evaluate(case, group, models) -> None:
    """Check that lookups of unseen keys return initial vectors and insert nothing."""
    group.eval()
    inputs = {name: _input(case, model.layer, unseen=True) for name, model in models.items()}
    before = [buffer.clone() for buffer in group.buffers()]
    outputs = _call(case, group, inputs)
    for name, model in models.items():
        expected = _expected(model.layer, inputs[name], model.vectors(inputs[name].keys))
        _close(case, model.layer, f"{name} in evaluation", outputs[name].detach(), expected)
    for now, then in zip(group.buffers(), before, strict=True):
        case.same("a buffer after evaluation", now, then)


def _call(case, group, inputs) -> dict[str, torch.Tensor]:
    keys = {name: own.given[0] for name, own in inputs.items()}
    weights = {n: own.given[1] for n, own in inputs.items() if own.weights is not None}
    case.note(inputs=keys, sample_weights=weights)
    if len(group.layers) == 1 and case.maybe(0.5):
        (name,) = keys
        return {name: group.layers[name](*inputs[name].given)}
    return group(keys, weights)


def _train(case, group, optimizer, models) -> None:
    """Take a step, sometimes in evaluation mode, where unseen keys are not inserted or trained."""
    learns = case.maybe(0.9)
    group.train(learns)
    inputs = {name: _input(case, model.layer, not learns) for name, model in models.items()}
    if learns:
        new = {name: model.new(inputs[name].as_inserted()) for name, model in models.items()}
        full = [n for n, model in models.items() if len(model.row) + len(new[n]) > model.capacity]
        if full:
            return _refuse(case, group, inputs, models, {name: len(new[name]) for name in full})
        for name, model in models.items():
            model.insert(inputs[name].as_inserted())
    outputs = _call(case, group, inputs)
    loss, wanted, leaves = 0.0, 0.0, {}
    for name, model in models.items():
        leaves[name] = model.vectors(inputs[name].keys).requires_grad_()
        expected = _expected(model.layer, inputs[name], leaves[name])
        _close(case, model.layer, f"{name} in a step", outputs[name].detach(), expected.detach())
        upstream = case.floats(*expected.shape, dtype=model.layer.weight.dtype)
        loss = loss + (outputs[name] * upstream).sum()
        wanted = wanted + (expected * upstream.double()).sum()
    case.call(loss.backward)
    wanted.backward()
    optimizer.step()
    optimizer.zero_grad()
    for name, model in models.items():
        model.train(inputs[name].keys, leaves[name].grad)


def _refuse(case, group, inputs, models, full) -> None:
    """Overfill some tables, which must stay unchanged. The other tables may keep their new keys."""
    before = [buffer.clone() for name in full for buffer in group.layers[name].buffers()]
    try:
        _call(case, group, inputs)
    except TableFullError as error:
        case.equal("refused", error.refused, full.get(error.layer))
    else:
        case.equal("a full table", "nothing raised", "TableFullError")
    after = [buffer for name in full for buffer in group.layers[name].buffers()]
    for now, then in zip(after, before, strict=True):
        case.same("a buffer after a refusal", now, then)
    for name, model in models.items():
        table = model.layer.table
        if name not in full and (table is None or len(table) > len(model.row)):
            model.insert(inputs[name].as_inserted())


def _check_state(case, group, models) -> None:
    """Check the saved vectors, and the saved keys in row order."""
    state = group.state_dict()
    for name, model in models.items():
        weight = state[f"layers.{name}.weight"][: len(model.row)]
        _close(case, model.layer, f"{name}: rows", weight, model.weight[: len(model.row)])
        if model.layer.table is not None:
            case.equal("keys", model.layer.table.keys().tolist(), list(model.row))


def _restored(case, group, optimizer, models, name):
    """Return new layers with the state of the old ones, by a copy or by saving and loading."""
    kind, settings, *_ = OPTIMIZERS[name]
    twin = copy.deepcopy(group)
    if case.maybe(0.7):
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.fill_(7)
        twin.load_state_dict(group.state_dict())
    other = kind(twin.parameters(), **settings)
    other.load_state_dict(optimizer.state_dict())
    for layer_name, model in models.items():
        model.layer = twin.layers[layer_name]
    return twin, other


def layers(case: Case) -> None:
    optimizer_name = case.any_of(*OPTIMIZERS)
    kind, settings, *_ = OPTIMIZERS[optimizer_name]
    names = ["a", "b", "c"][: case.any_of(1, 1, 2, 3)]
    group = EmbeddingGroup({name: _layer(case, name) for name in names})
    models = {name: Model(group.layers[name], optimizer_name) for name in names}
    optimizer = kind(group.parameters(), **settings)
    case.note(optimizer=optimizer_name, layers=str(group))
    handle = optim.fuse_in_backward(optimizer, group) if case.maybe(0.3) else None
    for _ in range(case.random.randint(1, case.most(12, 5))):
        _train(case, group, optimizer, models)
        if case.maybe(0.2):
            _evaluate(case, group, models)
        if case.maybe(0.1):
            _check_state(case, group, models)
        if case.maybe(0.1):
            group, optimizer = _restored(case, group, optimizer, models, optimizer_name)
            handle = None
        if handle is not None and case.maybe(0.05):
            handle.remove()
            handle = None
    _evaluate(case, group, models)
    _check_state(case, group, models)


OPS = {"layers": layers}
