"""Measures the peak resident memory of a block of code."""


def forget_peak():
    """Reset the peak to the number of bytes now in use; return this number."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return peak()


def peak():
    """Return the peak resident memory of this process in bytes."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
