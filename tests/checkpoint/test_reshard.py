"""sparsekit checkpoint: inspect, verify, reshard, compact."""

import pytest
import torch

from sparsekit import checkpoint, cli, ops
from sparsekit.nn.owners import even_map

from .models import assert_equal, contents, made, saved_chain
from .numpy_reader import read_file, read_manifest, read_table


@pytest.fixture
def saved(tmp_path):
    """A chain of three; its folder, and what it holds."""
    return tmp_path / "saved", contents(*saved_chain(tmp_path / "saved"))


def run(capsys, *arguments, status=0):
    assert cli.main(["checkpoint", *map(str, arguments)]) == status
    return "".join(capsys.readouterr())


def test_inspect_and_verify(saved, capsys):
    folder, expected = saved
    text = run(capsys, "inspect", folder)
    assert "step 2, 1 rank(s)" in text
    assert text.index("follows step-000000000001") < text.index("follows step-000000000000")
    assert f"changed rows of {len(expected['users keys'])}, dim 8, float32, hash table" in text
    assert "Ftrl: accumulator, linear" in text
    assert "whole, with 2 before it" in run(capsys, "verify", folder)
    file = folder / "step-000000000000" / "table-0001-rank-0000.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert str(file) in run(capsys, "verify", folder, status=2)
    assert str(file) in run(capsys, "reshard", folder, folder / "x", "--world", 2, status=2)
    assert not (folder / "x").exists()
    assert "no such folder" in run(capsys, "inspect", folder / "none", status=2)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_reshard(saved, tmp_path, capsys, world):
    folder, expected = saved
    out = tmp_path / "out"
    run(capsys, "reshard", folder, out, "--world", world)
    assert "whole" in run(capsys, "verify", out)
    assert "something already" in run(capsys, "reshard", folder, out, "--world", 1, status=2)
    manifest = read_manifest(out)
    assert manifest["base"] is None
    for name, owners in (("users", even_map(world, torch.device("cpu"))), ("rows", None)):
        rows = read_table(out, name)
        assert sorted(rows) == expected[f"{name} keys"].tolist()
        for shard in manifest["tables"][name]["shards"]:
            crc = manifest["files"][shard["file"]]["crc32"]
            keys = torch.tensor(read_file(out / shard["file"], crc)["keys"])
            counts = ops.bucketize(keys, world, owners if world > 1 else None)[1].tolist()
            assert counts == [len(keys) * (rank == shard["rank"]) for rank in range(world)]
    model, optimizers = made("Ftrl", seed=1, hash_table=False)
    assert checkpoint.load(model, out, optimizers).step == 2
    assert_equal(contents(model, optimizers), expected)


def test_compact(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(checkpoint.reshard.__globals__, "PIECE", 500)  # many pieces
    folder, expected = saved
    run(capsys, "compact", folder, tmp_path / "out")
    assert "follows" not in run(capsys, "inspect", tmp_path / "out")
    model, optimizers = made("Ftrl", seed=1, hash_table=False)
    checkpoint.load(model, tmp_path / "out", optimizers)
    assert_equal(contents(model, optimizers), expected)
