"""Calls with one invalid argument raise an error of the right type and change nothing."""

import torch

from sparsekit import HashTable, nn, ops

from ..nn import bags as forms
from .case import DOCUMENTED, Case

WRONG = (TypeError, ValueError)


def _calls(case: Case):
    """Return a valid call of each op: function, arguments, and the arguments that it changes."""
    n, num_rows, dim = case.random.randint(1, 40), case.random.randint(1, 30), case.dim(40)
    dtype, key_dtype = case.row_dtype(), case.key_dtype()
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    table = case.floats(num_rows, dim, dtype=dtype)
    rows = case.integers(0, num_rows - 1, n)
    distinct = torch.randperm(num_rows, generator=case.generator)
    keys = case.keys(n, key_dtype)
    hash_table = HashTable(100)
    hash_table.find_or_insert(torch.arange(20))
    steps = torch.zeros(num_rows, dtype=torch.int32)
    moments = [case.floats(num_rows, dim, dtype=wide).abs() for _ in range(2)]
    adam = ("adam", [0.1, 0.9, 0.99, 1e-3, 0.0, 0.0])
    inner = case.integers(0, n, case.any_of(0, 1, 3, 7, n)).sort().values
    offsets = torch.cat([torch.tensor([0]), inner, torch.tensor([n])])
    update = {
        "weight": table,
        "states": moments,
        "row_step": steps,
        "rows": distinct,
        "grad": table.clone(),
        "step": torch.tensor([3]),
        "rule": adam[0],
        "settings": adam[1],
    }
    numbers = torch.rand(4, 2, dtype=torch.float64, generator=case.generator)
    return {
        ops.unique: {"keys": keys},
        ops.bucketize: {
            "keys": keys,
            "world_size": 3,
            "owners": torch.arange(65536).remainder(3).to(torch.int16),
        },
        hash_table.find: {"keys": keys},
        hash_table.find_or_insert: {"keys": keys},
        ops.gather_rows: {"table": table, "rows": rows},
        ops.unsorted_segment_sum: {
            "data": case.floats(n, dim, dtype=dtype),
            "segment_ids": rows,
            "num_segments": num_rows,
        },
        ops.embedding_bag: {
            "weight": table,
            "rows": rows,
            "offsets": offsets,
            "combiner": "mean",
            "sample_weights": case.floats(n, dtype=wide),
        },
        ops.init_rows_: {"out": table, "keys": distinct + 5, "rows": distinct},
        ops.update_rows_: update,
        ops.catch_up_rows_: {
            **{name: update[name] for name in ("weight", "states", "row_step", "rows")},
            "numbers": numbers,
            "first_step": 1,
            "rule": adam[0],
            "settings": adam[1],
        },
    }, hash_table


# Arguments that can have an element out of range, with the error that it raises.
BEYOND = {
    ("gather_rows", "rows"): IndexError,
    ("unsorted_segment_sum", "segment_ids"): IndexError,
    ("embedding_bag", "rows"): IndexError,
    ("embedding_bag", "offsets"): ValueError,
    ("init_rows_", "rows"): IndexError,
    ("update_rows_", "rows"): IndexError,
    ("catch_up_rows_", "rows"): IndexError,
}
# When these ops refuse a call, they still change the rows that are valid: init_rows_ always, the
# other two only on devices, whose kernels cannot wait for a check.
IN_PART = ("init_rows_", "update_rows_", "catch_up_rows_")


def refused_op(case: Case) -> None:
    calls, hash_table = _calls(case)
    function = case.any_of(*calls)
    arguments, name = dict(calls[function]), function.__name__
    before = [buffer.clone() for buffer in hash_table.buffers()]
    argument = case.any_of(*(a for a, v in arguments.items() if isinstance(v, torch.Tensor)))
    tensor = arguments[argument]
    kinds = ["dtype", "dimensions", "no tensor", "device"]
    if (name, argument) in BEYOND and len(tensor):
        kinds += ["beyond"] * 4
    errors, changes = WRONG, ()
    kind = case.any_of(*kinds)
    case.note(bad=argument, kind=kind)
    if kind == "dtype":
        arguments[argument] = tensor.to(case.any_of(torch.float16, torch.complex64, torch.uint8))
        if argument == "sample_weights":
            arguments[argument] = tensor.to(torch.int64)
    elif kind == "dimensions":
        # `step` and the keys of a hash table may have any shape.
        if argument == "step" or function in (hash_table.find, hash_table.find_or_insert):
            return
        arguments[argument] = tensor.unsqueeze(case.any_of(0, -1))
    elif kind == "no tensor":
        arguments[argument] = case.any_of([1, 2], 3, "rows", object())
        # torch reports a violated schema with a RuntimeError.
        errors = (*DOCUMENTED, AttributeError)
    elif kind == "device":
        if name == "unique":
            return  # the call has no other tensor
        arguments[argument] = tensor.to("meta")
        errors = DOCUMENTED
    else:
        bad = tensor.clone()
        rows = len(bad)
        limit = {
            "unsorted_segment_sum": arguments.get("num_segments"),
            "embedding_bag": len(arguments.get("rows", ())) + 1 if argument == "offsets" else None,
        }.get(name)
        if limit is None:
            limit = len(next(arguments[a] for a in ("table", "weight", "out") if a in arguments))
        values = [limit, limit + 1, 2**31 + limit, 2**63 - 1]
        values += [-1] if argument == "offsets" else []
        bad[case.random.randrange(rows)] = case.any_of(*values)
        arguments[argument] = case.placed(bad)
        errors = BEYOND[name, argument]
        if name in IN_PART[: 1 if case.backend == "cpu" else 3]:
            changes = [
                v for k, v in arguments.items() if k in ("out", "weight", "states", "row_step")
            ]
    case.refused(errors, function, changes=changes, **arguments)
    for now, then in zip(hash_table.buffers(), before, strict=True):
        case.same("a buffer of the table", now, then)


def refused_lookup(case: Case) -> None:
    """Invalid input to a layer in training inserts none of the input's keys."""
    layer = forms.make_layer(case.any_of("sum", "mean", "sqrtn"), padding_key=forms.PADDING)
    if case.maybe(0.2):
        layer = forms.make_layer(use_hashtable=False, embedding_initializer=nn.Constant(1.0))
    layer((torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2, 3])))
    samples = case.random.randint(1, 5)
    lengths = case.integers(1, forms.MAX_NNZ, samples * forms.SLOTS)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    values = case.integers(0, 200, int(offsets[-1]))
    at = case.random.randrange(1, len(offsets) - 1)
    bad = offsets.clone()
    kind = case.any_of(
        "start", "decrease", "end", "dtype", "slots", "long", "weights", "form", "key"
    )
    errors, weights = WRONG, None
    if kind == "start":
        bad[0] = case.any_of(1, -1)
    elif kind == "decrease":
        bad[at] = case.any_of(bad[at + 1] + 1, -1, 2**63 - 1)
    elif kind == "end":
        bad[-1] += case.any_of(1, -1, 2**40)
    elif kind == "dtype":
        values = values.to(case.any_of(torch.float32, torch.int16, torch.bool))
    elif kind == "slots":
        bad, values = bad[:-1], values[: bad[-2]]
    elif kind == "long":
        values = torch.zeros(20, dtype=torch.int64)
        bad = torch.tensor([0, 0, 20, 20])
    elif kind == "weights":
        weights = torch.ones(len(values) + case.any_of(-1, 1))
    inputs = (values, bad)
    if kind == "form":
        inputs = case.any_of(values, 3, None, [values], "keys", values.float().view(1, -1))
    if kind == "key":
        if layer.table is not None:
            return
        values[case.random.randrange(len(values))] = case.any_of(300, -1, 2**63 - 1, -(2**63))
        errors = IndexError
    before = [t.clone() for t in layer.state_dict().values()]
    case.note(kind=kind)
    case.refused(errors, layer, inputs, weights)
    for now, then in zip(layer.state_dict().values(), before, strict=True):
        case.same("the layer's state", now, then)


OPS = {"refused_op": refused_op, "refused_lookup": refused_lookup}
