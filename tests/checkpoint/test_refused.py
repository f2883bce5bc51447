"""A save raises an error that names unsupported contents, and writes nothing."""

import os

import pytest
import torch

import sparsekit
from sparsekit import checkpoint
from sparsekit.checkpoint import CheckpointError
from sparsekit.checkpoint.tensor_file import carried


class State:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Buffer(torch.nn.Module):
    def __init__(self, value):
        super().__init__()
        self.register_buffer("bits", value)


STORED = [torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.float8_e4m3fn,
          torch.float8_e5m2]  # fmt: skip


@pytest.mark.parametrize("dtype", STORED)
def test_dtypes_of_dense_tensors_and_states(tmp_path, dtype):
    bits = torch.arange(24, dtype=torch.uint8).view(dtype)
    if dtype == torch.complex64:
        bits = torch.tensor([1 + 2j, 3 - 4j]).conj()
    checkpoint.save(Buffer(bits), tmp_path / "a", state={"it": State([bits, bits[0]])})
    loaded, state = Buffer(torch.zeros_like(bits)), State(None)
    checkpoint.load(loaded, tmp_path / "a", state={"it": state})
    for found in (loaded.bits, state.value[0]):
        assert found.dtype == dtype
        assert carried(found).tolist() == carried(bits).tolist()
    assert not checkpoint.diff(tmp_path / "a", tmp_path / "a")


REFUSED = {
    "complex128": (lambda: torch.zeros(2, dtype=torch.complex128), "complex128 cannot be saved"),
    "sparse": (lambda: torch.eye(2).to_sparse(), "sparse_coo cannot be saved"),
    "sparse_csr": (lambda: torch.eye(2).to_sparse_csr(), "sparse_csr cannot be saved"),
    "meta": (lambda: torch.ones(2, device="meta"), "on meta cannot be saved"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns about sparse tensors
def test_tensors_that_no_file_can_have(tmp_path, kind):
    make, text = REFUSED[kind]
    tensor = make()
    for save in (checkpoint.save, checkpoint.async_save):
        with pytest.raises(CheckpointError, match=f"^bits: a tensor .*{text}"):
            save(Buffer(tensor), tmp_path / "a")
        with pytest.raises(CheckpointError, match=f"^state.it.value.0: a tensor .*{text}"):
            save(Buffer(torch.ones(1)), tmp_path / "a", state={"it": State([tensor])})
    assert not list(tmp_path.iterdir())


WRAPPED = {
    "dict": lambda value: {"a": value},
    "list": lambda value: [value],
    "tuple": lambda value: (value,),
    "items": lambda value: {1: value},
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_deep_states(tmp_path, kind):
    """A nested state is saved and loaded, or the save raises and names the path to it."""
    saved = 0
    for depth in (40, 48, 49, 96, 97, 98, 101, 5000):
        value = 1
        for _ in range(depth):
            value = WRAPPED[kind](value)
        path = tmp_path / str(depth)
        try:
            checkpoint.save(Buffer(torch.ones(1)), path, state={"it": State(value)})
        except CheckpointError as error:
            assert str(error).startswith("state.it.value.")  # noqa: PT017
            assert "nested deeper than" in str(error)  # noqa: PT017
            continue
        state = State(None)
        checkpoint.load(Buffer(torch.ones(1)), path, state={"it": state})
        assert repr(state.value) == repr(value)
        saved += 1
    assert 2 <= saved <= 6
    assert len(list(tmp_path.iterdir())) == saved


ODD_STATES = {
    "another length": (torch.zeros(3), "shape .3. is neither a number nor one for each"),
    "uint8": (torch.zeros(20, 2, dtype=torch.uint8), "a table's rows cannot have torch.uint8"),
    "complex": (torch.zeros(20, dtype=torch.complex64), "rows cannot have torch.complex64"),
    "a number": (torch.tensor(1, dtype=torch.uint8), "a number for a table cannot be torch.uint8"),
}


@pytest.mark.parametrize("kind", ODD_STATES)
def test_states_that_no_table_can_have(tmp_path, kind):
    layer = sparsekit.Embedding(20, 2, name="ids")
    optimizer = sparsekit.optim.SGD(layer.parameters(), lr=0.1)
    value, text = ODD_STATES[kind]
    optimizer.state[layer.weight]["odd"] = value
    with pytest.raises(CheckpointError, match=f"table.odd, which the optimizer keeps: .*{text}"):
        checkpoint.save(layer, tmp_path / "a", optimizer)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", [-1, 2**63, 1.5])
def test_steps(tmp_path, step):
    for save in (checkpoint.save, checkpoint.async_save):
        with pytest.raises((TypeError, ValueError), match="save: step must be"):
            save(Buffer(torch.ones(1)), tmp_path / "a", step=step)
    assert not list(tmp_path.iterdir())


def test_a_path_that_is_no_utf_8(tmp_path):
    path = tmp_path / os.fsdecode(b"caf\xe9")
    checkpoint.save(Buffer(torch.ones(1)), path / "a")
    checkpoint.load(Buffer(torch.ones(1)), path / "a")
