"""The strategies used by the tests; they often draw the ends of ranges."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any


class Strategy:
    def __init__(self, draw: Callable[[Random], Any]) -> None:
        self.draw = draw

    def map(self, function: Callable[[Any], Any]) -> "Strategy":
        return Strategy(lambda source: function(self.draw(source)))

    def filter(self, accept: Callable[[Any], bool]) -> "Strategy":
        def draw(source: Random) -> Any:
            for _ in range(1000):
                value = self.draw(source)
                if accept(value):
                    return value
            raise ValueError("none of 1000 values passed the filter")

        return Strategy(draw)


def integers(min_value: int = -(2**70), max_value: int = 2**70) -> Strategy:
    def draw(source: Random) -> int:
        if source.random() < 0.2:
            return source.choice([min_value, max_value])
        return source.randint(min_value, max_value)

    return Strategy(draw)


def floats(min_value: float, max_value: float) -> Strategy:
    def draw(source: Random) -> float:
        if source.random() < 0.2:
            return source.choice([min_value, max_value])
        return source.uniform(min_value, max_value)

    return Strategy(draw)


def booleans() -> Strategy:
    return sampled_from([False, True])


def none() -> Strategy:
    return Strategy(lambda source: None)


def randoms() -> Strategy:
    return Strategy(lambda source: Random(source.random()))


def sampled_from(values: Sequence[Any]) -> Strategy:
    return Strategy(lambda source: source.choice(values))


def one_of(*strategies: Strategy) -> Strategy:
    return Strategy(lambda source: source.choice(strategies).draw(source))


def tuples(*strategies: Strategy) -> Strategy:
    return Strategy(lambda source: tuple(strategy.draw(source) for strategy in strategies))


def lists(elements: Strategy, *, min_size: int = 0, max_size: int = 20) -> Strategy:
    sizes = integers(min_size, max_size)
    return Strategy(lambda source: [elements.draw(source) for _ in range(sizes.draw(source))])


class Data:
    """Source of values that a test draws while it runs."""

    def __init__(self, source: Random) -> None:
        self.source = source

    def draw(self, strategy: Strategy) -> Any:
        return strategy.draw(self.source)


def data() -> Strategy:
    return Strategy(Data)
