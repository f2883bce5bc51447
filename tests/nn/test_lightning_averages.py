"""Lightning's StochasticWeightAveraging averages tables that grow."""

import copy

import pytest
import torch

import sparsekit


def test_rows_that_come_late_begin_with_their_initial_vectors():
    """The averages equal AveragedModel's, including the rows of new keys."""
    # Here, not above: the import takes seconds, and each worker imports all modules of tests.
    swa = pytest.importorskip("lightning.pytorch.callbacks.stochastic_weight_avg")
    model = torch.nn.Sequential(sparsekit.Embedding(50, 3, name="t"), torch.nn.Linear(3, 1))
    averaged = copy.deepcopy(model)
    of_torch = torch.optim.swa_utils.AveragedModel(model)
    callback, count = swa.StochasticWeightAveraging(swa_lrs=0.1), torch.tensor(0)
    optimizer = sparsekit.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, mode="catch_up")
    for step in range(4):
        optimizer.zero_grad()
        model(torch.arange(3 * step, 3 * step + 5)).sum().backward()
        optimizer.step()
        if step < 3:
            callback.update_parameters(averaged, model, count, swa.StochasticWeightAveraging.avg_fn)
            of_torch.update_parameters(model)
    keys = torch.arange(20)
    expected = of_torch.module[0].vectors(keys)
    assert torch.allclose(averaged[0].vectors(keys), expected)
    callback.transfer_weights(averaged, model)
    assert torch.allclose(model[0].vectors(keys), expected)
    assert torch.equal(model[1].weight, of_torch.module[1].weight)
