"""replace_embeddings replaces the right layers of a model, which then trains as before."""

import pytest
import torch
from torch import nn

import sparsekit
from sparsekit import replace_embeddings

USERS, ITEMS, TAGS = 60, 40, 30
BATCH, STEPS = 64, 50
BIG = 10**18


class Ratings(nn.Module):
    """Model of a user, an item and its tags; users who write and users who read share a table."""

    def __init__(self, sparse):
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {
                "writer": nn.Embedding(USERS, 8, sparse=sparse),
                "item": nn.Embedding(ITEMS, 8, padding_idx=0, sparse=sparse),
            }
        )
        self.embeddings["reader"] = self.embeddings["writer"]
        self.tags = nn.EmbeddingBag(TAGS, 8, mode="sum", sparse=sparse, padding_idx=2)
        self.history = nn.EmbeddingBag(ITEMS, 8, include_last_offset=True, sparse=sparse)
        self.top = nn.Sequential(nn.Linear(40, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch):
        vectors = [
            *(self.embeddings[name](batch[name]) for name in ("writer", "reader", "item")),
            self.tags(batch["tags"], None, batch["weights"]),
            self.history(*batch["history"]),
        ]
        return self.top(torch.cat(vectors, 1)).squeeze(1)


def batch_of(step, ids=lambda ids: ids):
    draw = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 5, (BATCH,), generator=draw)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])

    def of(rows, *shape):
        return ids(torch.randint(rows, shape, generator=draw))

    return {
        "writer": of(USERS, BATCH),
        "reader": of(USERS, BATCH),
        "item": of(ITEMS, BATCH),
        "tags": of(TAGS, BATCH, 3),
        "weights": torch.rand(BATCH, 3, generator=draw),
        "history": (of(ITEMS, int(offsets[-1])), offsets),
    }


def losses(model, optimizers, ids=lambda ids: ids):
    found = []
    for step in range(STEPS):
        batch = batch_of(step, ids)
        target = torch.randn(BATCH, generator=torch.Generator().manual_seed(-step))
        loss = nn.functional.mse_loss(model(batch), target)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        found.append(loss.item())
    return torch.tensor(found)


def dense_and_tables(model):
    tables = [p for name, p in model.named_parameters() if not name.startswith("top")]
    return list(model.top.parameters()), tables


def sgd(model, swapped):
    return [torch.optim.SGD(model.parameters(), lr=0.1)]


def adagrad(model, swapped):
    return [torch.optim.Adagrad(model.parameters(), lr=0.1)]


def lazy_adam(model, swapped):
    dense, tables = dense_and_tables(model)
    of_tables = sparsekit.optim.LazyAdam if swapped else torch.optim.SparseAdam
    return [torch.optim.Adam(dense, lr=0.01), of_tables(tables, lr=0.01)]


def adam(model, swapped):
    if not swapped:
        return [torch.optim.Adam(model.parameters(), lr=0.01)]
    dense, tables = dense_and_tables(model)
    return [torch.optim.Adam(dense, lr=0.01), sparsekit.optim.Adam(tables, lr=0.01)]


def model_of(sparse=False, seed=0):
    torch.manual_seed(seed)
    return Ratings(sparse)


@pytest.mark.parametrize("optimizer", [sgd, adagrad, lazy_adam, adam])
def test_the_loss_curve_is_that_of_the_original(optimizer, capsys):
    original, swapped = (model_of(sparse=optimizer is lazy_adam) for _ in range(2))
    original.tags.max_norm = swapped.tags.max_norm = 1.0
    done = replace_embeddings(swapped)
    assert [one.new is not None for one in done] == [True] * 4
    expected = losses(original, optimizer(original, False))
    got = losses(swapped, optimizer(swapped, True))
    assert expected[-5:].mean() < expected[:5].mean() - 0.01
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
    batch = batch_of(99)
    torch.testing.assert_close(swapped.eval()(batch), original.eval()(batch), rtol=1e-3, atol=1e-4)


def test_raw_ids_work_then():
    model = model_of()
    replace_embeddings(model, extra_rows=100, verbose=False)
    found = losses(model, sgd(model, True), lambda ids: ids * 0x9E3779B97F4A7C15 - BIG)
    assert found[-5:].mean() < found[:5].mean() - 0.01
    assert len(model.embeddings["writer"].table) == 2 * USERS


def test_shared_modules_stay_shared_and_all_is_said(capsys):
    model = model_of()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.tags.weight.requires_grad_(False)
    model.eval()
    done = replace_embeddings(model, extra_rows=5)
    assert model.embeddings["reader"] is model.embeddings["writer"]
    assert isinstance(model.embeddings["reader"], sparsekit.Embedding)
    assert isinstance(model.tags, sparsekit.EmbeddingBag)
    assert not model.tags.weight.requires_grad
    assert model.history.weight.requires_grad
    assert not model.history.training
    assert model.history.include_last_offset
    for one in done:
        n = one.old.num_embeddings
        assert one.new.num_embeddings == n + 5
        assert torch.equal(one.new.weight[:n], before[f"{one.names[0]}.weight"])
        assert one.new.name == one.names[0]
    assert capsys.readouterr().out.splitlines() == [
        "replace_embeddings: 4 of 4 layers swapped",
        "  embeddings.writer = embeddings.reader: Embedding(60, 8) -> sparsekit.Embedding, 65 rows",
        "  embeddings.item: Embedding(40, 8) -> sparsekit.Embedding, 45 rows",
        "  tags: EmbeddingBag(30, 8) -> sparsekit.EmbeddingBag, 35 rows",
        "  history: EmbeddingBag(40, 8) -> sparsekit.EmbeddingBag, 45 rows",
    ]


@pytest.mark.parametrize(
    ("choice", "swapped"),
    [
        ({"names": "embeddings.*"}, ["embeddings.writer", "embeddings.item"]),
        ({"names": ["tags", "*reader"]}, ["embeddings.writer", "tags"]),
        ({"min_rows": 41}, ["embeddings.writer"]),
        ({"min_rows": 40, "names": "*i*"}, ["embeddings.writer", "embeddings.item", "history"]),
        ({"min_rows": 99}, []),
    ],
)
def test_choice(choice, swapped, capsys):
    model = model_of()
    done = replace_embeddings(model, **choice)
    assert [one.names[0] for one in done] == swapped
    found = [n for n, m in model.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    assert len(found) == 4 - len(swapped)
    assert f"{len(swapped)} of {len(swapped)} layers" in capsys.readouterr().out


def tied(model):
    model.decoder = nn.Linear(8, TAGS)
    model.decoder.weight = model.tags.weight


def of_two_tables(model):
    model.other = nn.EmbeddingBag(TAGS, 8)
    model.other.weight = model.tags.weight


class Scaled(nn.EmbeddingBag):
    def forward(self, *inputs):
        return 2 * super().forward(*inputs)


def with_padding(model):
    model.tags = nn.Embedding(TAGS, 8, padding_idx=1)
    nn.init.ones_(model.tags.weight)


LEFT = {
    "frequency": (lambda m: setattr(m.tags, "scale_grad_by_freq", True), "no scale_grad_by_freq"),
    "tied": (tied, "its weight is that of several modules: tags.weight = decoder.weight"),
    "two tables": (of_two_tables, "its weight is that of several modules"),
    "class": (lambda m: setattr(m, "tags", Scaled(TAGS, 8)), "is its own"),
    "forward": (lambda m: setattr(m.tags, "forward", m.tags.forward), "is its own"),
    "weight's hook": (lambda m: m.tags.weight.register_hook(print), "its weight has hooks"),
    "hook": (lambda m: m.tags.register_forward_hook(print), "it has hooks"),
    "pre-hook": (lambda m: m.tags.register_forward_pre_hook(print), "it has hooks"),
    "backward hook": (lambda m: m.tags.register_full_backward_hook(print), "it has hooks"),
    "backward pre-hook": (lambda m: m.tags.register_full_backward_pre_hook(print), "it has hooks"),
    "weight's later hook": (
        lambda m: m.tags.weight.register_post_accumulate_grad_hook(print),
        "its weight has hooks",
    ),
    "no columns": (lambda m: setattr(m, "tags", nn.Embedding(5, 0)), "has no elements"),
    "parametrized": (
        lambda m: nn.utils.parametrizations.weight_norm(m.tags),
        "is its own",
    ),
    "half": (lambda m: m.tags.half(), "its weight is torch.float16"),
    "meta": (lambda m: m.tags.to("meta"), "its weight is on meta"),
    "nan": (lambda m: nn.init.constant_(m.tags.weight, float("nan")), "its weight is not finite"),
    "empty": (lambda m: setattr(m, "tags", nn.EmbeddingBag(0, 8)), "has no elements"),
    "padding": (
        with_padding,
        "zeros, which a padding's is in sparsekit: to have it replaced, zero that vector first "
        "(weight.data[1] = 0)",
    ),
}


@pytest.mark.parametrize("case", LEFT)
def test_left_with_a_reason(case, capsys):
    model = model_of()
    change, reason = LEFT[case]
    change(model)
    before = model.tags
    (one,) = replace_embeddings(model, "tags")
    assert one.new is None
    assert reason in one.reason
    assert model.tags is before
    printed = capsys.readouterr().out
    assert "0 of 1 layers swapped" in printed
    assert f"left: {one.reason}" in printed


def test_new_ids_start_like_the_old_ones():
    model = nn.Sequential(nn.Embedding(500, 16))
    nn.init.normal_(model[0].weight, 0.5, 0.01)
    replace_embeddings(model, extra_rows=500, verbose=False)
    vectors = model(torch.arange(500) + BIG)
    assert abs(vectors.mean() - 0.5) < 0.001
    assert abs(vectors.std() - 0.01) < 0.001
    model = nn.Sequential(nn.Embedding(500, 16))
    constant = sparsekit.nn.Constant(2.0)
    replace_embeddings(model, extra_rows=1, embedding_initializer=constant, verbose=False)
    assert (model(torch.tensor([BIG])) == 2).all()


def test_a_new_id_starts_like_a_single_number():
    model = nn.Sequential(nn.Embedding(1, 1))
    replace_embeddings(model, extra_rows=1, verbose=False)
    assert model(torch.tensor([BIG])).item() == pytest.approx(model[0].weight[0].item(), rel=0.01)


def test_settings_are_those_of_the_old_layer():
    norms = {"padding_idx": 1, "max_norm": 1.5, "norm_type": 1.0}
    model = nn.Sequential(
        nn.Embedding(5, 2, **norms),
        nn.EmbeddingBag(5, 2, mode="max", include_last_offset=True, **norms),
    )
    model[1].weight.requires_grad_(False)
    old = list(model.eval())
    replace_embeddings(model, verbose=False)
    for new, before in zip(model, old, strict=True):
        found = {name: getattr(new, name) for name in [*norms, "num_embeddings", "training"]}
        assert found == {**norms, "num_embeddings": 5, "training": False}
        assert new.weight.requires_grad == before.weight.requires_grad
    assert (model[1].mode, model[1].include_last_offset) == ("max", True)


def test_options_are_for_all_layers():
    model = model_of()
    replace_embeddings(model, use_hashtable=False, gradient_reduction="sum", verbose=False)
    tables = [m for m in model.modules() if isinstance(m, sparsekit.nn.layer.EmbeddingLayer)]
    assert len(tables) == 4
    assert all(m.table is None and m.gradient_reduction == "sum" for m in tables)


def test_nothing_is_swapped_if_it_raises():
    for arguments, error, match in (
        ({"names": "tag"}, ValueError, "no layer fits 'tag'; there are"),
        ({"name": "x"}, TypeError, "name is not the same of all layers"),
        ({"extra_rows": -1}, ValueError, "extra_rows must be in"),
        ({"placement": "near"}, ValueError, "placement must be one of"),
    ):
        model = model_of()
        before = str(model)
        with pytest.raises(error, match=match):
            replace_embeddings(model, **arguments)
        assert str(model) == before


def test_the_model_itself():
    with pytest.raises(TypeError, match=r"sparsekit\.EmbeddingBag\.from_pretrained"):
        replace_embeddings(nn.EmbeddingBag(3, 2))


def test_a_model_without_such_layers(capsys):
    assert replace_embeddings(nn.Linear(1, 1)) == []
    assert "0 of 0 layers swapped" in capsys.readouterr().out


def test_in_a_shared_parent():
    part = nn.Sequential(nn.Embedding(5, 2))
    model = nn.ModuleDict({"a": part, "b": part, "c": nn.ModuleList([part[0]])})
    (one,) = replace_embeddings(model, "b.*", verbose=False)
    assert one.names == ("a.0", "b.0", "c.0")
    assert model["a"][0] is model["b"][0] is model["c"][0] is one.new


@pytest.mark.parametrize("padding", [0, 2])
def test_only_a_bags_padding_may_have_a_vector(padding):
    model = nn.Sequential(
        nn.Embedding(3, 2, padding_idx=padding), nn.EmbeddingBag(3, 2, padding_idx=padding)
    )
    for layer in list(model):
        nn.init.ones_(layer.weight)
    kept, swapped = replace_embeddings(model, verbose=False)
    assert kept.reason.startswith(f"its vector at padding_idx={padding} is not zeros")
    assert swapped.new is model[1]
    assert not model[1](torch.tensor([[padding]])).any()


def test_initial_vectors_are_rounded_to_three_digits():
    model = nn.Sequential(nn.Embedding(2, 1))
    model[0].weight.data.copy_(torch.tensor([[0.0], [1 / 3]]))
    replace_embeddings(model, verbose=False)
    assert model[0].initializer == sparsekit.nn.Normal(0.167, 0.167)


def test_nothing_is_printed_unless_verbose(capsys):
    replace_embeddings(model_of(), verbose=False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("rows", [1.5, True, "2"])
def test_extra_rows_are_an_int(rows):
    with pytest.raises(TypeError, match=r"^replace_embeddings: extra_rows must be an int, got"):
        replace_embeddings(model_of(), extra_rows=rows)
