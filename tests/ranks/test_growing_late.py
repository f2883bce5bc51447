"""Ranks that grow on a device, whose lookups know a bound of their rows alone, agree with one."""

import rooms
import torch

import sparsekit
from sparsekit.device_rooms import is_in_room
from sparsekit.distributed.exchange import attempt


def keys_of(rank, number):
    draw = torch.Generator().manual_seed(100 * number + rank)
    return torch.randint(0, 20 + 40 * number, (8, 1, 4), generator=draw)


def layer_of(**options):
    return sparsekit.DistributedEmbedding(
        "sum", options.pop("rows", 20), 4, 1, 4, name="users", seed=1, **options
    )


def trained(layer):
    """Train; return the vectors of all keys."""
    optimizer = sparsekit.optim.LazyAdam(layer.parameters(), lr=0.1)
    for number in range(12):
        layer(keys_of(layer.rank, number)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    sparsekit.raise_errors()
    return layer.eval().vectors(torch.arange(500))


def test_vectors_are_those_of_large_tables(late_ranks):
    def grows(exchange):
        layer = layer_of(on_full="grow", max_capacity=1 << 20)
        assert is_in_room(layer.weight)
        return trained(layer), layer.table.capacity

    def large(exchange):
        return trained(layer_of(rows=2000))

    with rooms.rooms():
        found, expected = late_ranks(grows), late_ranks(large)
    for (vectors, capacity), wanted in zip(found, expected, strict=True):
        assert torch.equal(vectors, wanted)
        assert capacity > 100


def test_the_end_of_the_room_is_raised_on_all_ranks(late_ranks):
    def both(exchange):
        layer = layer_of(on_full="grow", max_capacity=20 if exchange.rank else 400_000)
        layer(keys_of(exchange.rank, 0))
        many = torch.arange(100).view(25, 1, 4)
        errors = [attempt(lambda: layer(many)) for _ in range(9)]
        return [error for error in errors if isinstance(error, Exception)], len(layer.table)

    with rooms.rooms():
        (other, most), (own, few) = late_ranks(both)
    assert isinstance(own[0], sparsekit.TableFullError)
    assert "users: the table on rank 1 is full" in str(own[0])
    assert isinstance(other[0], sparsekit.TableFullError)
    assert few <= 20 < most
