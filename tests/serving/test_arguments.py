"""Wrong arguments are refused with their name and value, before anything is looked up."""

import ctypes

import numpy as np
import pytest

from sparsekit.serving import Request, Snapshot, _library

from .test_lookup import table_of

LIBRARY = _library.load()


@pytest.fixture
def snapshot(opened, rng):
    return opened([table_of(rng, 4, name="a"), table_of(rng, 6, name="b")])


KEYS = np.arange(10)
OFFSETS = np.array([0, 4, 10])
OUT = np.zeros((10, 6), np.float32)


def feature(**changes):
    fields = {
        "table": 1,
        "combiner": 0,
        "keys": KEYS.ctypes.data,
        "num_keys": 10,
        "offsets": OFFSETS.ctypes.data,
        "num_bags": 2,
        "out": OUT.ctypes.data,
    }
    return _library.Feature(**{**fields, **changes})


def refused(snapshot, *features, number=None):
    """Return the message about a call that is refused as a bad argument."""
    features = (_library.Feature * len(features))(*features)
    number = len(features) if number is None else number
    assert LIBRARY.sk_lookup(snapshot.handle, None, features, number) == 1
    return LIBRARY.sk_message().decode()


def ints(*values):
    return np.array(values, np.int64)


FALLING = ints(0, 5, 3, 10)
LATE, SHORT, LONG = ints(1, 10), ints(0, 9), ints(0, 11)
HUGE = ints(0, 2**62, 10)
WEIGHTS = np.ones(10, np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"table": 2}, "features[1].table is 2, but must be the number of a table"),
        ({"table": -1}, "features[1].table is -1"),
        ({"combiner": 5}, "features[1].combiner is 5, but must be an sk_combiner"),
        ({"combiner": -1}, "features[1].combiner is -1"),
        ({"num_keys": -1}, "features[1].num_keys is -1, but must be at least 0"),
        ({"num_bags": -1}, "features[1].num_bags is -1"),
        ({"keys": None}, "features[1].keys is null"),
        ({"out": None}, "features[1].out is null"),
        ({"out_stride": 5}, "features[1].out_stride is 5, but dim is 6"),
        ({"out_stride": -6}, "features[1].out_stride is -6"),
        (
            {"offsets": LATE.ctypes.data, "num_bags": 1},
            "features[1].offsets[0] is 1, but must be 0",
        ),
        (
            {"offsets": SHORT.ctypes.data, "num_bags": 1},
            "features[1].offsets[1] is 9, but must be num_keys, 10",
        ),
        ({"offsets": LONG.ctypes.data, "num_bags": 1}, "features[1].offsets[1] is 11"),
        (
            {"offsets": FALLING.ctypes.data, "num_bags": 3},
            "features[1].offsets[2] is 3, but must be at least 5",
        ),
        ({"offsets": HUGE.ctypes.data}, "features[1].offsets[2] is 10"),
        (
            {"combiner": 4, "weights": WEIGHTS.ctypes.data},
            "features[1].weights must be null, as its combiner is SK_MAX",
        ),
        ({"combiner": 3, "weights": WEIGHTS.ctypes.data}, "SK_NONE"),
        ({"size": 8}, "features[1].size is 8, but must be "),
    ],
)
def test_features(snapshot, changes, message):
    OUT[:] = 7
    bad = feature(**{key: value for key, value in changes.items() if key != "size"})
    bad.size = changes.get("size", bad.size)
    assert message in refused(snapshot, feature(), bad)
    assert "model.sks" in LIBRARY.sk_message().decode()
    assert (OUT == 7).all()  # the first feature has not been looked up either


def test_null_and_negative(snapshot):
    assert "num_features is -1" in refused(snapshot, feature(), number=-1)
    assert LIBRARY.sk_lookup(snapshot.handle, None, None, 1) == 1
    assert b"features is null" in LIBRARY.sk_message()
    assert LIBRARY.sk_lookup(None, None, None, 0) == 1
    assert LIBRARY.sk_lookup(snapshot.handle, None, None, 0) == 0
    for call in (
        lambda: LIBRARY.sk_open(None, None, ctypes.byref(ctypes.c_void_p())),
        lambda: LIBRARY.sk_open(b"file", None, None),
        lambda: LIBRARY.sk_describe(snapshot.handle, None),
        lambda: LIBRARY.sk_describe(None, ctypes.byref(_library.Info())),
        lambda: LIBRARY.sk_describe_table(snapshot.handle, 0, None),
        lambda: LIBRARY.sk_describe_table(snapshot.handle, 2, ctypes.byref(_library.TableInfo())),
        lambda: LIBRARY.sk_describe_table(snapshot.handle, -1, ctypes.byref(_library.TableInfo())),
        lambda: LIBRARY.sk_find_table(snapshot.handle, None, ctypes.byref(ctypes.c_int32())),
        lambda: LIBRARY.sk_find_table(snapshot.handle, b"a", None),
        lambda: LIBRARY.sk_pin_newest(snapshot.handle, None),
        lambda: LIBRARY.sk_unpin(snapshot.handle, None),
    ):
        assert call() == 1
    assert LIBRARY.sk_close(None) == 0


def test_null_rows_and_results(snapshot):
    features = (_library.Feature * 1)(feature())
    one, row, encoded = ctypes.c_int64(), (ctypes.c_float * 2)(), (ctypes.c_uint8 * 8)()
    bad, n, dim = ctypes.byref(one), ctypes.c_int64(1), ctypes.c_int64(2)
    for function, arguments, name in (
        ("sk_time_lookups", (snapshot.handle, features, 1, 1, None), "nanoseconds"),
        ("sk_encode_rows", (0, None, n, dim, encoded, bad), "rows"),
        ("sk_encode_rows", (0, row, n, dim, None, bad), "out"),
        ("sk_encode_rows", (0, row, n, dim, encoded, None), "bad"),
        ("sk_decode_rows", (0, None, n, dim, row), "rows"),
        ("sk_decode_rows", (0, encoded, n, dim, None), "out"),
    ):
        assert getattr(LIBRARY, function)(*arguments) == 1
        assert LIBRARY.sk_message().decode() == f"{function}: {name} is null"


def test_structs_of_older_and_newer_callers(opened, rng, tmp_path):
    path = str(tmp_path / "model.sks").encode()
    opened([table_of(rng)])
    handle = ctypes.c_void_p()

    class Newer(_library.OpenOptions):
        _fields_ = (("later", ctypes.c_int64),)

    for size, later, status in ((0, 0, 1), (7, 0, 1), (12, 0, 0), (32, 0, 0), (32, 1, 1)):
        options = Newer(later=later, copy=1)
        options.size = size
        pointer = ctypes.cast(ctypes.byref(options), ctypes.POINTER(_library.OpenOptions))
        assert LIBRARY.sk_open(path, pointer, ctypes.byref(handle)) == status
        if status == 0:
            # An older caller has no log_id: nothing is written behind its struct.
            info = _library.Info(version=99)
            info.size = 16
            assert LIBRARY.sk_describe(handle, ctypes.byref(info)) == 0
            assert info.version == 99
            assert info.size == 16
            assert LIBRARY.sk_close(handle) == 0
    info = _library.Info()
    info.size = 0
    assert LIBRARY.sk_open(path, None, ctypes.byref(handle)) == 0
    assert LIBRARY.sk_describe(handle, ctypes.byref(info)) == 1
    assert b"sk_info.size is 0" in LIBRARY.sk_message()
    assert LIBRARY.sk_close(handle) == 0


def test_out_stride_leaves_gaps_alone(snapshot):
    """Several features can write into the columns of one matrix."""
    out = np.full((2, 10), 7, np.float32)
    wide = [
        feature(table=0, out=out.ctypes.data, out_stride=10),
        feature(table=1, out=out.ctypes.data + 16, out_stride=10),
    ]
    features = (_library.Feature * 2)(*wide)
    assert LIBRARY.sk_lookup(snapshot.handle, None, features, 2) == 0
    for table, columns in (("a", slice(0, 4)), ("b", slice(4, 10))):
        expected = snapshot.lookup(table, KEYS, OFFSETS, combiner="sum")
        assert np.array_equal(out[:, columns], expected)
    all_ = ints(0, 10)
    features[0].num_bags, features[0].offsets = 1, all_.ctypes.data
    out[:] = 7
    assert LIBRARY.sk_lookup(snapshot.handle, None, features, 1) == 0
    assert (out[0, 4:] == 7).all()
    assert (out[1] == 7).all()


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (ValueError, {"table": "c"}, "no table named 'c'; tables: 'a', 'b'"),
        (ValueError, {"combiner": "product"}, "combiner must be one of sum, mean"),
        (TypeError, {"keys": KEYS.astype(np.float32)}, "keys must be int64 or int32, got float32"),
        (TypeError, {"keys": KEYS.astype(np.uint64)}, "keys must be int64 or int32, got uint64"),
        (TypeError, {"keys": [1, 2, 3], "offsets": None}, "keys must be a NumPy array"),
        (TypeError, {"offsets": OFFSETS.astype(float)}, "offsets must be int64 or int32"),
        (ValueError, {"offsets": OFFSETS[None]}, "offsets must be 1-D"),
        (ValueError, {"offsets": OFFSETS[:0]}, "offsets[0] is missing"),
        (ValueError, {"offsets": OFFSETS + 1}, "offsets[0] is 1"),
        (ValueError, {"weights": WEIGHTS[:9]}, "weights must have one weight for each key"),
        (TypeError, {"weights": KEYS}, "weights must be floating point, got int64"),
        (ValueError, {"weights": WEIGHTS, "combiner": "max"}, "weights must be None"),
        (ValueError, {"weights": WEIGHTS, "combiner": "none"}, "weights must be None"),
        (ValueError, {"keys": (KEYS, OFFSETS)}, "offsets must be None"),
    ],
)
def test_python(snapshot, error, arguments, message):
    asked = {"table": "a", "keys": KEYS, "offsets": OFFSETS, "combiner": "sum", **arguments}
    with pytest.raises(error) as raised:
        snapshot.lookup(**asked)
    assert message in str(raised.value)
    assert "model.sks" in str(raised.value)
    with pytest.raises(error):
        snapshot.lookup_many([Request("a", KEYS), Request(**asked)])


def test_both_descriptions_of_a_feature_agree():
    fields = {name: number for number, (name, _) in enumerate(_library.Feature._fields_, 1)}
    features = (_library.Feature * 2)()
    _library.FEATURE.pack_into(features, _library.FEATURE.size, *fields.values())
    assert {name: getattr(features[1], name) for name in fields} == fields


def test_what_is_no_request(snapshot):
    with pytest.raises(
        TypeError, match=r"model\.sks: lookup_many takes a list of Request.*got str"
    ):
        snapshot.lookup_many({"a": KEYS})


def test_no_requests(snapshot):
    assert snapshot.lookup_many([]) == []
    assert snapshot.lookup("a", KEYS[:0]).shape == (0, 4)
    assert snapshot.lookup("a", KEYS[:0], OFFSETS[:1] * 0).shape == (0, 4)


def test_a_path_with_a_zero_byte(tmp_path):
    with pytest.raises(ValueError, match="zero byte"):
        Snapshot(f"{tmp_path}/a\0b")
