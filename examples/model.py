"""The examples' model, which predicts clicks from raw 64-bit ids; its tables can be sharded."""

import torch

import sparsekit


class Clicks(torch.nn.Module):
    """A click model with two tables and a dense part."""

    def __init__(self) -> None:
        super().__init__()
        self.user = sparsekit.Embedding(None, 8, name="user")
        self.tags = sparsekit.EmbeddingBag(None, 8, mode="mean", name="tags")
        self.top = torch.nn.Sequential(
            torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
        )

    def forward(self, user: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, 1] for users, int64 [batch], and their tags, int64 [batch, 3]."""
        return self.top(torch.cat([self.user(user), self.tags(tags)], 1))


loss_of = torch.nn.functional.binary_cross_entropy_with_logits


def data(samples: int = 512) -> torch.utils.data.TensorDataset:
    """Generate ids of users and tags, spread over 64 bits, and clicks that depend on the user."""
    random = torch.Generator().manual_seed(0)
    user = torch.randint(0, 50, (samples,), generator=random)
    tags = torch.randint(-(2**62), 2**62, (20,), generator=random)
    tags = tags[torch.randint(0, 20, (samples, 3), generator=random)]
    return torch.utils.data.TensorDataset(user * 10**17 - 7, tags, (user % 2).float().unsqueeze(1))
