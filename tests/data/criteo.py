"""Files in Criteo's format, and a short reference reader for them."""

import random
from dataclasses import dataclass

DENSE = [f"I{i}" for i in range(1, 14)]
SPARSE = [f"C{i}" for i in range(1, 27)]


@dataclass
class Rows:
    """Rows of a file: the label, dense values [13] and lists of keys [26] of each row."""

    labels: list[float]
    dense: list[list[float]]
    keys: list[list[list[int]]]

    def __len__(self):
        return len(self.labels)


def random_lines(count, seed=0):
    draw = random.Random(seed)

    def number():
        return "" if draw.random() < 0.1 else str(draw.randrange(-3, 10 ** draw.randrange(1, 7)))

    def category():
        return "" if draw.random() < 0.1 else f"{draw.getrandbits(32):08x}"

    return [
        "\t".join(
            [str(draw.randrange(2)), *(number() for _ in DENSE), *(category() for _ in SPARSE)]
        )
        for _ in range(count)
    ]


def read_lines(lines):
    """Read lines of text in a simple way; the readers under test must give the same rows."""
    rows = Rows([], [], [])
    for line in lines:
        fields = line.split("\t")
        rows.labels.append(float(fields[0]))
        rows.dense.append([float(text or 0) for text in fields[1:14]])
        rows.keys.append([[int(text, 16)] if text else [] for text in fields[14:]])
    return rows


def rows_of(batches):
    """Return the rows of all batches."""
    rows = Rows([], [], [])
    for batch in batches:
        rows.labels += batch.label.tolist()
        rows.dense += batch.dense.tolist()
        bags = batch.sparse.to_dict().values()
        values = [values.tolist() for values, _ in bags]
        ends = [offsets.tolist() for _, offsets in bags]
        rows.keys += [
            [v[e[i] : e[i + 1]] for v, e in zip(values, ends, strict=True)]
            for i in range(batch.rows)
        ]
    return rows
