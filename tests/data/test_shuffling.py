"""Rows are shuffled within pieces, and each piece has a different order."""

import pytest

from sparsekit.data import CsvReader

from .written import write


def test_rows_of_each_block_have_an_order_of_their_own(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("row\n" + "".join(f"{row}\n" for row in range(1000, 3000)))
    blocks = [[] for _ in range(10)]
    for batch in CsvReader(path, 50, label="row", shuffle=True, block_bytes=1000):
        for row in batch.label.int().tolist():
            blocks[(row - 1000) // 200].append(row % 200)
    assert all(sorted(block) == list(range(200)) for block in blocks)
    assert len(set(map(tuple, blocks))) == 10


@pytest.mark.parametrize("compress", [False, True])
def test_the_order_within_a_block_depends_on_epoch_and_seed(tmp_path, compress):
    rows = "".join(f"{row}\n" for row in range(100, 200))
    path = write(tmp_path / "x.csv", "row\n" + rows, compress)

    def orders(seed, block_bytes=8 << 20):
        settings = {"label": "row", "shuffle": True, "block_bytes": block_bytes}
        made = CsvReader(path, 100, seed=seed, **settings)
        return [batch.label.int().tolist() for _ in range(2) for batch in made]

    assert len(set(map(tuple, orders(0) + orders(1)))) == 4
    if compress:
        # Rows that are in memory together form a piece. Each piece gets a different order.
        order, pieces = orders(0, 40)[0], []
        while order:
            size = next(
                n for n in range(1, 101) if {*order[:n]} == {*range(min(order), min(order) + n)}
            )
            piece, order = order[:size], order[size:]
            pieces.append(tuple(row - min(piece) for row in piece))
        assert len(set(pieces)) > len(pieces) // 2 > 2
