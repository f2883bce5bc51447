"""How much resident memory a block of code takes at its peak."""


def forget_peak():
    """Begin anew; returns the bytes in use, which are the peak so far."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return peak()


def peak():
    """Bytes of the largest resident memory that this process has had."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
