"""Raises an exception at a chosen moment, as a signal handler would."""

import os
import sys

import torch

import sparsekit

PACKAGE = os.path.dirname(sparsekit.__file__)
# The method of torch, written in Python, that calls an op.
OPS = torch._ops.__file__


class Interrupted(BaseException):
    """Stand-in for KeyboardInterrupt: pytest would handle the real one itself."""


def interrupt(call, moment, files=PACKAGE):
    """Call a function; raise Interrupted at the `moment`-th bytecode that runs in some files.

    `files` is the beginning of their paths. Python runs signal handlers between bytecodes, so a
    real interrupt has the same effect.

    Returns:
        None if the call was interrupted, otherwise the number of bytecodes that ran.
    """
    seen = 0

    def at_bytecode(frame, event, arg):
        nonlocal seen
        if event == "opcode":
            seen += 1
            if seen == moment:
                raise Interrupted
        return at_bytecode

    def at_call(frame, event, arg):
        if not frame.f_code.co_filename.startswith(files):
            return None
        frame.f_trace_opcodes = True
        return at_bytecode

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        call()
    except Interrupted:
        torch.set_grad_enabled(True)  # an interrupted torch.no_grad() can leave it off
        return None
    finally:
        sys.settrace(before)
        assert torch._C._is_torch_function_enabled()
    return seen
