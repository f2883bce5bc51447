"""Profiles the first steps of a training command, then stops it."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..train.profile import Profile, profiled
from .common import UsageError, rank, writing

WARM_UP = 3  # steps before the profile, while memory is allocated and ranks connect


class _Enough(Exception):
    """Raised to stop training after all requested steps have been profiled."""


def profile_fit(fit: Callable[[Any, argparse.Namespace], int], data: Any, args: Any) -> int:
    """Call fit, profile ``args.steps`` steps after a warm-up, then stop it and print the profile.

    A step ends when the optimizer has taken its step; with several optimizers, the first one
    counts.

    Raises:
        UsageError: training ended before enough steps were profiled, or ``args.trace`` cannot be
            written.
    """
    profile, steps = Profile(), 0
    first: torch.optim.Optimizer | None = None
    with contextlib.ExitStack() as window:

        def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            nonlocal steps, first, profile
            first = first or optimizer
            if optimizer is not first:
                return
            steps += 1
            if steps == WARM_UP:
                profile = window.enter_context(profiled(args.trace))
            elif steps == WARM_UP + args.steps:
                window.close()
                raise _Enough

        hook = register_optimizer_step_post_hook(count)
        try:
            with writing("--trace", args.trace):
                status: int | None = fit(data, args)
        except _Enough:
            status = None
        finally:
            hook.remove()
    if status:
        return status
    if status is not None:
        raise UsageError(
            f"training ended after {steps} steps, before the {WARM_UP + args.steps} of which "
            f"--steps {args.steps} are profiled: use fewer, or more epochs"
        )
    if rank() == 0:
        _report(profile, args)
    return 0


def _report(profile: Profile, args: argparse.Namespace) -> None:
    print(f"\n{args.steps} steps on {profile.ranks} rank(s), all ranks together:\n")
    print(profile.table(args.lines))
    moved = profile.bytes_moved / args.steps
    print(f"\nA step moves {moved:,.0f} bytes from rank to rank.")
    if args.trace is not None:
        print(f"Trace: {args.trace}")
