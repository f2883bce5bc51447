"""Runs ranks as threads of one process, over a transport in memory, so tests take milliseconds."""

import queue
import threading

import torch

from sparsekit.distributed.exchange import Exchange, attempt
from sparsekit.distributed.transport import Transport, room_for

CPU = torch.device("cpu")


class InMemory(Transport):
    """Sends parts through queues, one for each pair of ranks."""

    def __init__(self, rank, queues):
        self.rank, self.world_size, self.queues, self.closed = rank, len(queues), queues, 0

    def begin_all_to_all(self, send, send_splits, receive_splits, received=None):
        received = room_for(send, receive_splits, received)
        for other, part in enumerate(send.split(list(send_splits))):
            self.queues[self.rank][other].put(part.clone())

        def wait():
            for other, room in enumerate(received.split(list(receive_splits))):
                part = self._next(other)
                assert other != self.rank or len(part) == len(room)
                room[: len(part)] = part
            return received

        return wait

    def all_gather(self, data):
        for own in self.queues[self.rank]:
            own.put(data)
        return [self._next(other) for other in range(self.world_size)]

    def _next(self, other):
        part = self.queues[other][self.rank].get(timeout=30)
        if isinstance(part, BaseException):
            raise part
        return part

    def close(self):
        self.closed += 1


def on_ranks(function, world_size=2):
    """Run function(exchange) on each rank; return each rank's result, or the error it raised."""
    queues = [[queue.Queue() for _ in range(world_size)] for _ in range(world_size)]
    results = [None] * world_size

    def run(rank):
        exchange = Exchange(object(), CPU, InMemory(rank, queues))
        exchange._teller = exchange.transport
        results[rank] = attempt(lambda: function(exchange))
        for own in queues[rank]:  # nobody needs to wait for this rank any more
            own.put(RuntimeError(f"rank {rank} has ended"))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def each(results):
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
