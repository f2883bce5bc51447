"""Trains a small model with the installed package; run by wheel_check.sh."""

import sys
from importlib.metadata import version
from pathlib import Path

import torch

import sparsekit
from sparsekit.serving import Snapshot, _library
from sparsekit.serving.export import export_module


def main() -> None:
    package = Path(sparsekit.__file__).resolve()
    assert Path(sys.prefix).resolve() in package.parents, f"not the installed wheel: {package}"
    assert torch.__version__.startswith(sys.argv[1]), torch.__version__

    assert version("sparsekit-torch") == sparsekit.__version__

    assert not (package.parent / "lib" / "simt").exists(), "the tests' library is in the wheel"

    _library.load()
    assert (package.parent / "include" / "sparsekit_serving.h").exists()

    torch.manual_seed(0)
    layer = sparsekit.DistributedEmbedding("mean", 1000, 16, slot_num=2, max_nnz=3)
    model = torch.nn.Sequential(layer, torch.nn.Flatten(), torch.nn.Linear(32, 1))
    sparse, dense = sparsekit.split_embedding_variable_from_others(model)
    optimizers = [sparsekit.optim.LazyAdam(sparse, lr=0.01), torch.optim.Adam(dense, lr=0.01)]
    keys = torch.randint(-(2**62), 2**62, (64, 2, 3))
    target = torch.randn(64, 1)
    losses = []
    for _ in range(100):
        loss = torch.nn.functional.mse_loss(model(keys), target)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert layer.table is not None
    assert len(layer.table) == 64 * 2 * 3
    assert losses[-1] < 0.1 * losses[0], losses[:: len(losses) // 10]
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    print(sparsekit.build_info())

    export_module(model, "model.sks")  # read by wheel_check.sh
    with Snapshot("model.sks") as snapshot:
        (name,) = snapshot.tables
        assert name == "0", name
        with torch.no_grad():
            assert torch.equal(snapshot.lookup(name, keys), layer.eval()(keys))


if __name__ == "__main__":
    main()
