"""Adam on the rows that were touched."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .. import ops
from ..ops._checks import ROW_DTYPES, accumulate_dtype


class LazyAdam(torch.optim.Optimizer):
    r"""Adam that moves only the rows with a gradient; all others keep their bits.

    At step t, for every row in the gradient g:

    .. math::
        m &= \beta_1 m + (1 - \beta_1) g, \quad v = \beta_2 v + (1 - \beta_2) g^2 \\
        w &= w - lr \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t} \frac{m}{\sqrt{v} + eps}

    t counts the steps of the parameter, not of the row, and the moments of rows without a
    gradient do not decay. So it is not dense Adam: a row that is rarely seen keeps its momentum
    until it is seen again. This is TensorFlow Addons' LazyAdam and torch.optim.SparseAdam; source
    of the formula: Kingma and Ba, "Adam", ICLR 2015, end of section 2. There eps is not rescaled
    by the bias correction, unlike in torch.optim.Adam.

    A dense gradient is taken as one that touches every row. Moments are float32 for bfloat16
    parameters.

    Args:
        params: parameters or groups of them; float32, float64 or bfloat16.
        lr: learning rate, > 0 or 0.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the root of the second moment, >= 0.

    Raises:
        ValueError: an argument out of range.
        TypeError: (in step) a parameter of another dtype.
        ValueError: (in step) a parameter that is not contiguous, or a sparse gradient of single
            elements rather than rows (sparse_dim > 1).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        if not lr >= 0:
            raise ValueError(f"LazyAdam: lr must be >= 0, got {lr}")
        pair = isinstance(betas, (tuple, list)) and len(betas) == 2
        if not (pair and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(f"LazyAdam: betas must be two numbers in [0, 1), got {betas}")
        if not eps >= 0:
            raise ValueError(f"LazyAdam: eps must be >= 0, got {eps}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; returns the closure's loss, if any."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # All are looked at before any is changed.
        steps = [
            (parameter, group, *self._gradient(parameter))
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        for step in steps:
            self._update(*step)
        return loss

    @staticmethod
    def _gradient(parameter: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Rows, or None for all, and their gradients."""
        if parameter.dtype not in ROW_DTYPES:
            raise TypeError(
                f"LazyAdam: parameters must be float32, float64 or bfloat16, got {parameter.dtype} "
                f"for one of shape {tuple(parameter.shape)}"
            )
        if not parameter.is_contiguous():
            raise ValueError(
                f"LazyAdam: parameters must be contiguous, got one of shape "
                f"{tuple(parameter.shape)} and strides {parameter.stride()}"
            )
        grad, rows = parameter.grad, None
        assert grad is not None
        if grad.is_sparse:
            if grad.sparse_dim() != 1:
                raise ValueError(
                    f"LazyAdam: a sparse gradient must be one of rows (sparse_dim 1), got "
                    f"sparse_dim {grad.sparse_dim()} for a parameter of shape "
                    f"{tuple(parameter.shape)}"
                )
            grad = grad.coalesce()
            rows, grad = grad._indices()[0], grad._values()
        return rows, grad

    def _update(
        self,
        parameter: torch.Tensor,
        group: dict[str, Any],
        rows: torch.Tensor | None,
        grad: torch.Tensor,
    ) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.int64, device=parameter.device)
            for moment in ("exp_avg", "exp_avg_sq"):
                state[moment] = torch.zeros_like(
                    parameter,
                    dtype=accumulate_dtype(parameter.dtype),
                    memory_format=torch.contiguous_format,
                )
        step = state["step"] + 1
        # A parameter of any shape as a matrix of rows; views, so changes reach it. No size is left
        # to view() as -1, since there may be no elements.
        num_rows = parameter.shape[0] if parameter.dim() else 1
        dim = parameter.numel() // max(num_rows, 1)
        ops.lazy_adam_step_(
            parameter.detach().view(num_rows, dim),
            state["exp_avg"].view(num_rows, dim),
            state["exp_avg_sq"].view(num_rows, dim),
            rows,
            grad.reshape(num_rows if rows is None else len(rows), dim),
            step,
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
        )
        state["step"].copy_(step)  # counted once it is done

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, also one of torch's SparseAdam or from another device.

        Moments of bfloat16 parameters stay float32.
        """
        super().load_state_dict(state_dict)
        # torch has cast the moments to the parameters' dtype; go back to the saved ones where the
        # moments are kept in another. It leaves the step where and what it was: on the device it
        # was saved on, and a plain number if SparseAdam has counted it.
        saved = (i for group in state_dict["param_groups"] for i in group["params"])
        parameters = (p for group in self.param_groups for p in group["params"])
        for index, parameter in zip(saved, parameters, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                dtype = accumulate_dtype(parameter.dtype)
                if key == "step":
                    step = torch.as_tensor(value, dtype=torch.int64, device=parameter.device)
                    self.state[parameter][key] = step
                elif dtype != parameter.dtype:
                    self.state[parameter][key] = value.to(parameter.device, dtype, copy=True)
