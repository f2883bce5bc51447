"""The progress of an epoch is printed correctly to a terminal or to a file."""

import io

import pytest

from sparsekit.train import progress


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

        def perf_counter(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_a_file_gets_a_line_every_half_minute(clock):
    stream = io.StringIO()
    asked = []
    with progress.Progress("epoch 1/3", 2000, stream) as bar:
        for _ in range(100):  # advances the clock by 100 s
            clock.now += 1
            bar.update(10, lambda: asked.append(1) or 0.25)
        bar.finish(" loss 0.2000")
    assert stream.getvalue().splitlines() == [
        "epoch 1/3 300 of 2,000 loss 0.2500  10 samples/s",
        "epoch 1/3 600 of 2,000 loss 0.2500  10 samples/s",
        "epoch 1/3 900 of 2,000 loss 0.2500  10 samples/s",
        "epoch 1/3  loss 0.2000",
    ]
    assert len(asked) == 3


@pytest.mark.parametrize("live", [False, True])
def test_what_goes_on_counts_the_time_before(clock, live):
    """After a resume, the rate covers both runs without the pause between them."""
    stream = io.StringIO()
    stream.isatty = lambda: live
    clock.now += 5000
    bar = progress.Progress("epoch 1/3", 2000, stream)
    bar.go_on(900, 60.0)
    assert (bar.done, bar.seconds) == (900, 60.0)
    clock.now += 40
    bar.update(100, lambda: 0.25)
    begun, end = "epoch 1/3", " loss 0.2500  10 samples/s"
    expected = f"{begun} 1,000 of 2,000{end}\n"
    if live:
        expected = f"\r\033[K{begun} [{'#' * 10}{'.' * 10}]{end}"
    assert stream.getvalue() == expected
    assert bar.seconds == 100.0


def test_a_file_whose_rows_nobody_has_counted(clock):
    stream = io.StringIO()
    bar = progress.Progress("hash", 0, stream, unit="rows")
    clock.now += 31
    bar.update(1234)
    assert stream.getvalue() == "hash 1,234 40 rows/s\n"


def test_a_terminal_has_a_bar_that_goes(clock):
    stream = io.StringIO()
    stream.isatty = lambda: True
    bar = progress.Progress("epoch", 100, stream)
    clock.now += 0.0625
    bar.update(40)
    assert stream.getvalue() == ""
    clock.now += 0.0625
    bar.update(10)
    assert stream.getvalue() == f"\r\033[Kepoch [{'#' * 10}{'.' * 10}] 400 samples/s"
    bar.finish("done")
    assert stream.getvalue().endswith("\r\033[Kepoch done\n")


@pytest.mark.parametrize("live", [False, True])
def test_all_that_is_written_is_seen_at_once(clock, live):
    class Buffered(io.StringIO):
        seen = ""

        def flush(self):
            self.seen = self.getvalue()

        def isatty(self):
            return live

    stream = Buffered()
    bar = progress.Progress("epoch", 100, stream)
    for act in (lambda: bar.update(10), bar.clear, lambda: bar.finish("done")):
        clock.now += 31
        act()
        assert stream.seen == stream.getvalue() != ""


def test_progress_is_written_to_stderr_unless_told_otherwise(capsys):
    progress.Progress("epoch", 5).finish("done")
    progress.Progress("epoch", 5, io.StringIO()).finish("done")
    assert capsys.readouterr() == ("", "epoch done\n")
