"""Other projects' models learn as before with replaced embeddings. Missing projects are skipped."""

import copy

import pytest
import torch

import sparsekit

KINDS = {
    "SGD": (torch.optim.SGD, sparsekit.optim.SGD),
    "Adam": (torch.optim.Adam, sparsekit.optim.Adam),
}
pytestmark = pytest.mark.filterwarnings("ignore")


def curve(model, loss_of, optimizer):
    """Return the losses of 50 steps."""
    losses = []
    for step in range(50):
        optimizer.zero_grad()
        loss = loss_of(model, torch.Generator().manual_seed(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def check(model, loss_of, swapped):
    """Compare a model with a copy whose embeddings are replaced; `loss_of` encodes ids by `ids`."""
    ours = copy.deepcopy(model)
    assert len(sparsekit.replace_embeddings(ours, extra_rows=1000, verbose=False)) == swapped
    for theirs, kind in KINDS.values():
        one, other = copy.deepcopy(model), copy.deepcopy(ours)
        torch.testing.assert_close(
            curve(other, loss_of, kind(other.parameters(), lr=0.01)),
            curve(one, loss_of, theirs(one.parameters(), lr=0.01)),
            rtol=0, atol=1e-4,
        )  # fmt: skip

    def of_raw(model, random):
        return loss_of(model, random, lambda ids: ids * 10**16 - 5)

    losses = curve(ours, of_raw, sparsekit.optim.LazyAdam(ours.parameters(), lr=0.01))
    assert losses[-10:].mean() < losses[:10].mean()


def test_huggingface_bert():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "max_position_embeddings": 4}
    config = transformers.BertConfig(
        vocab_size=50, num_hidden_layers=1, num_attention_heads=2, **sizes
    )
    model = transformers.BertModel(config).eval()
    model.resize_token_embeddings(60)  # must come first: it requires a torch.nn.Embedding
    ids = torch.tensor([[1, 2, 59]])
    expected = model(ids).last_hidden_state
    replaced = sparsekit.replace_embeddings(model, "*word*", extra_rows=5, verbose=False)
    assert [one.reason for one in replaced] == [""]
    assert torch.equal(model(ids).last_hidden_state, expected)
    model.train()(ids + 10**12)
    assert len(model.get_input_embeddings().table) == 63
    with pytest.raises(TypeError, match=r"not an instance of .*torch\.nn"):
        model.resize_token_embeddings(70)


def test_recbole_bpr():
    bpr = pytest.importorskip("recbole.model.general_recommender.bpr")
    names = {"USER_ID_FIELD": "user", "ITEM_ID_FIELD": "item", "NEG_PREFIX": "not_"}

    class Data:
        def num(self, field):
            return 50

    def loss_of(model, random, ids=lambda ids: ids):
        bounds = {"user": (1, 50), "item": (1, 25), "not_item": (25, 50)}
        batch = {n: torch.randint(*b, (32,), generator=random) for n, b in bounds.items()}
        return model.calculate_loss({name: ids(values) for name, values in batch.items()})

    torch.manual_seed(0)
    check(bpr.BPR({**names, "device": "cpu", "embedding_size": 8}, Data()), loss_of, 2)


def test_torchrec_dlrm():
    torchrec = pytest.importorskip("torchrec")
    dlrm = pytest.importorskip("torchrec.models.dlrm")
    tables = [
        torchrec.EmbeddingBagConfig(
            name=f"of_{name}", embedding_dim=8, num_embeddings=40, feature_names=[name]
        )
        for name in "ab"
    ]

    def loss_of(model, random, ids=lambda ids: ids):
        lengths = torch.randint(0, 4, (32,), generator=random)
        keys = torch.randint(0, 40, (int(lengths.sum()),), generator=random)
        dense = torch.randn(16, 4, generator=random)
        bags = torchrec.KeyedJaggedTensor.from_lengths_sync(["a", "b"], ids(keys), lengths)
        wanted = (dense[:, :1] > 0).float()
        return torch.nn.functional.binary_cross_entropy_with_logits(model(dense, bags), wanted)

    torch.manual_seed(0)
    bags = torchrec.EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
    check(dlrm.DLRM(bags, 4, [8, 8], [8, 1]), loss_of, 2)


def test_widedeep():
    models = pytest.importorskip(
        "pytorch_widedeep.models",
        reason="pytorch-widedeep is no part of requirements-dev-no-deps.txt, which says why",
        exc_type=ImportError,
    )
    columns = {"of_a": 0, "of_b": 1}
    sizes = [("of_a", 30, 8), ("of_b", 30, 8)]

    def loss_of(model, random, ids=lambda ids: ids):
        a, b = torch.randint(1, 31, (2, 32), generator=random)
        # The second column's ids follow the first column's ids, since both share a table.
        wide = ids(torch.stack([a, b + 30], 1))
        deep = ids(torch.stack([a, b], 1))
        predicted = model({"wide": wide, "deeptabular": deep}).squeeze(1)
        return torch.nn.functional.mse_loss(predicted, (a > b).float())

    torch.manual_seed(0)
    wide = models.Wide(60)
    # Zero the vector at padding_idx, which Wide leaves random; otherwise the table is not replaced.
    torch.nn.init.zeros_(wide.wide_linear.weight[:1].detach())
    deep = models.TabMlp(columns, cat_embed_input=sizes, mlp_hidden_dims=[16, 8], mlp_dropout=0.0)
    check(models.WideDeep(wide=wide, deeptabular=deep), loss_of, 3)
