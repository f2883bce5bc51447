"""Stand-in for Trainer that records what commands pass to it, and trains nothing."""

import argparse


class Epoch(argparse.Namespace):
    pass


class FakeTrainer:
    """Stand-in for Trainer; it records calls of `fit`, each of which adds epochs to the history."""

    def __init__(self, interrupted_after=None):
        self.history, self.interrupted, self.calls = [], False, []
        self.interrupted_after, self.metrics = interrupted_after, {}

    def make(self, args, model, loss, optimizers, **options):
        """Stand in for `training.make_trainer`."""
        self.model, self.loss, self.optimizers, self.options = model, loss, optimizers, options
        return self

    def fit(self, data, *, epochs, **options):
        self.calls.append({"data": data, "epochs": epochs, **options})
        self.history += [
            Epoch(loss=0.5 / (1 + i), seconds=0.25, metrics=self.metrics) for i in range(epochs)
        ]
        self.interrupted = len(self.calls) == self.interrupted_after
