"""A report has the words of each table, which give the bound of its rows and its errors."""

import ctypes
import math
import threading

import pytest
import torch

from sparsekit import TableFullError
from sparsekit.tables import reports
from sparsekit.tables.hash_table import HashTable, RowBound
from sparsekit.tables.reports import Inserting, Report, entries_by_table

CPU = torch.device("cpu")
NUM_ERRORS = 2


class Library:
    """Stand-in for the library of kernels; a nonzero first word is an error."""

    def sparsekit_num_errors(self):
        return NUM_ERRORS

    def sparsekit_reported_error(self, words):
        number = ctypes.cast(words, ctypes.POINTER(ctypes.c_int64))[0]
        return f"error {number}".encode() if number else None


class Sent:
    """Stand-in for the reports of a device; it records all calls."""

    def __init__(self):
        self.calls = []

    def send(self, words, read):
        self.calls.append((words, read))

    def drain(self):
        self.calls.append("drain")


@pytest.fixture(autouse=True)
def library(monkeypatch):
    monkeypatch.setattr(reports, "device_library", Library)


def inserting(number, capacity=10, rank=0):
    return Inserting(number, RowBound(), f"t{number}", rank, capacity)


def report_of(tables, entries, names=("t0", "t1", "t2")):
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in tables]
    return Report(CPU, names, tables, sizes, entries)


def words(error=0, *status):
    return torch.tensor([error, 0, *(word for each in status for word in each)])


def test_facts_of_a_table():
    table = HashTable(9, name="n")
    table.rank = 3
    facts = Inserting.of(2, table)
    assert facts == (2, table.row_bound, "n", 3, 9)
    assert facts.bound is table.row_bound


@pytest.mark.parametrize("entries", [[], [4], [4, 5, 6]])
def test_a_report_has_three_words_for_each_table(entries):
    made = report_of([], entries)
    assert (made.words.dtype, made.words.device) == (torch.int64, CPU)
    assert made.words.shape == (NUM_ERRORS + 3 * len(entries),)
    assert Report(torch.device("meta"), ["n"]).words.device.type == "meta"


def test_each_table_learns_its_own_words():
    one, other = inserting(0), inserting(2)
    made = report_of([one, other], [5, 6, 7])
    assert (one.bound.entries, other.bound.entries) == (5, 7)
    assert one.bound.most == other.bound.most == math.inf
    one.bound.add(one.bound._size, 1)
    made.read(words(0, (0, 0, 3), (0, 0, 9), (0, 0, 4)))
    assert (one.bound.most, other.bound.most) == (3 + 1, 4)


DAMAGED = "^t{}: the table is damaged: its size is {} of {}, and no slot was free for the new keys$"


@pytest.mark.parametrize(
    ("first", "second", "error", "message"),
    [
        (
            (1, 2, 3),
            (0, 0, 0),
            TableFullError,
            "^t0: .*rank 4 .*: 1 of 10 .* 2 new keys for 9 free",
        ),
        ((0, 0, 0), (1, 2, 3), TableFullError, "^t2: .*rank 5 .*: 1 of 20 .* 2 new keys for 19"),
        ((1, 2, 3), (4, 5, 6), TableFullError, "^t0: "),
        ((1, -1, 3), (4, 5, 6), ValueError, DAMAGED.format(0, 1, 10)),
        ((4, 5, 6), (1, -2, 3), ValueError, DAMAGED.format(2, 1, 20)),
        ((1, 1, 3), (0, 0, 0), TableFullError, "^t0: "),
    ],
)
@pytest.mark.parametrize("beside", [0, 7])
def test_errors_of_tables(first, second, error, message, beside):
    tables = [inserting(0, rank=4), inserting(2, 20, rank=5)]
    made = report_of(tables, [1, 1, 1])
    with pytest.raises(error, match=message) as raised:
        made.read(words(beside, first, (9, 9, 9), second))
    assert type(raised.value) is error
    cause = raised.value.__cause__
    assert (cause is None) if not beside else str(cause) == "t0, t1, t2: error 7"
    assert [table.bound.most for table in tables] == [first[2], second[2]]  # learnt first


@pytest.mark.parametrize(
    ("count", "names"),
    [(1, "a"), (3, "a, b, c"), (4, "a, b, c and 1 more"), (6, "a, b, c and 3 more")],
)
def test_errors_of_kernels_name_the_first_tables(count, names):
    made = Report(CPU, list("abcdef")[:count])
    with pytest.raises(IndexError) as raised:
        made.read(words(3))
    assert str(raised.value) == f"{names}: error 3"
    made.read(words(0))


@pytest.mark.parametrize("waits", [True, False, None])
@pytest.mark.parametrize(("known", "fits"), [(4, True), (5, False), (math.inf, False)])
def test_a_report_is_waited_for_if_its_keys_might_not_fit(known, fits, waits):
    roomy, tight, sizes = inserting(0, 1000), inserting(1), [torch.zeros(1) for _ in range(2)]
    for table, size, most in ((roomy, sizes[0], 1), (tight, sizes[1], known)):
        table.bound.add(size, 1)
        table.bound.most = most
    made = Report(CPU, ["n"], [roomy, tight], sizes, [6, 6])
    sent = Sent()
    made.send(sent, **({} if waits is None else {"waits": waits}))
    assert sent.calls[0][0] is made.words
    assert sent.calls[0][1] == made.read
    assert sent.calls[1:] == ([] if fits or waits is False else ["drain"])


def test_a_report_in_a_graph_is_not_sent_and_loses_the_bounds(monkeypatch):
    monkeypatch.setattr(reports, "is_capturing", lambda device: device == CPU)
    tables, sent = [inserting(0), inserting(1)], Sent()
    report_of(tables, [1, 1]).send(sent)
    lost = report_of([], [])
    lost.send(sent)
    assert (lost.words, sent.calls) == (None, [])
    assert [table.bound._lost for table in tables] == [True, True]
    monkeypatch.setattr(reports, "is_capturing", lambda device: False)
    free = inserting(0)
    report_of([free], [1])
    assert not free.bound._lost


def test_a_report_that_is_collected_in_a_graph_is_sent_by_each_replay(monkeypatch):
    table, size, sent = inserting(0), torch.zeros(1), Sent()
    table.bound.add(size, 1)
    table.bound.most = 3
    monkeypatch.setattr(reports, "is_capturing", lambda device: device == CPU)
    with reports.captured_reports() as captured:
        made = Report(CPU, ["n"], [table], [size], [2])
    made.send(sent)
    assert (captured, sent.calls) == ([made], [])
    assert (table.bound._lost, table.bound.most) == (False, 3)
    replays = [made.replayed(), made.replayed()]
    assert table.bound.most == 7
    for replay in replays:
        replay.send(sent, waits=False)
    assert [call[0] for call in sent.calls] == [made.words] * 2
    assert [replay._counted for replay in replays] == [[3], [5]]
    replays[1].read(words(0, [1, 0, 2]))
    assert table.bound.most == 2
    Report(CPU, ["n"], [table], [size], [2])
    assert table.bound._lost


def test_reports_are_collected_by_the_thread_and_until_the_body_ends(monkeypatch):
    monkeypatch.setattr(reports, "is_capturing", lambda device: True)
    made = {}

    def make(name):
        made[name] = report_of([], [])
        return made[name]

    def capture():
        with reports.captured_reports() as captured:
            thread = threading.Thread(target=make, args=["thread"])
            thread.start()
            thread.join()
            assert captured == [make("own")]
            raise KeyError

    with pytest.raises(KeyError):
        capture()
    assert made["thread"].words is None
    assert report_of([], []).words is None


def test_only_streams_of_cuda_capture(monkeypatch):
    for captures in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)  # noqa: B023
        assert reports.is_capturing(torch.device("cuda", 0)) == captures
        assert not reports.is_capturing(CPU)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ([], [0, 0, 0]),
        ([(0, 0, 9)], [3, 0, 0]),  # all keys of the source
        ([(1, 1, 4)], [0, 4, 0]),  # the limit
        ([(2, 0, 9), (2, 1, 9), (0, 1, 1), (2, 0, 1)], [1, 0, 3 + 5 + 1]),
    ],
)
def test_entries_of_features_of_the_same_table_add_up(limits, expected):
    assert entries_by_table(limits, [torch.zeros(3, 2), torch.zeros(5)], 3) == expected
    assert entries_by_table([(0, 1, 9)], [torch.zeros(3), torch.zeros(5)], 1) == [5]


GPUS = [CPU, torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.mark.parametrize(
    ("device", "asked"),
    [
        (None, GPUS),
        ("cuda", GPUS[1:]),
        (torch.device("cuda"), GPUS[1:]),
        ("cuda:1", GPUS[2:]),
        ("cuda:5", [torch.device("cuda", 5)]),
        ("cpu", GPUS[:1]),
        ("meta", []),
    ],
)
def test_errors_are_asked_of_the_devices_in_use_or_the_given_one(device, asked, monkeypatch):
    found = []
    monkeypatch.setattr(reports, "devices_in_use", lambda: GPUS)
    monkeypatch.setattr(reports, "reports_of", found.append)  # returns None: nothing to wait for
    reports.raise_errors(*([] if device is None else [device]))
    assert found == asked


@pytest.mark.parametrize("device", [CPU, torch.device("meta")], ids=str)
def test_errors_behind_the_last_report_are_asked_for_by_an_empty_lookup(device, monkeypatch):
    sent, words = Sent(), []
    monkeypatch.setattr(reports, "devices_in_use", lambda: [device, GPUS[1]])
    monkeypatch.setattr(reports, "reports_of", lambda used: sent if used == device else None)

    def group_find(*arguments):
        assert sent.calls == ["drain"]
        tables, features = arguments[2], arguments[5]
        assert (tables.shape, features.shape) == ((0, 3), (0, 9))
        for each in (tables, features):
            assert (each.dtype, each.device) == (torch.int64, CPU)
        words.append(arguments[-1])

    monkeypatch.setattr(torch.ops.sparsekit, "group_find", group_find)
    with torch.device("meta"):
        reports.raise_errors()
    assert [call if call == "drain" else "send" for call in sent.calls] == [
        "drain",
        "send",
        "drain",
    ]
    assert sent.calls[1][0] is words[0]
    assert words[0].device == device
    if device != CPU:
        return
    words[0][:] = 8
    with pytest.raises(IndexError, match=r"^sparsekit: error 8$"):
        sent.calls[1][1](words[0])
