"""Reads and writes Thrift's compact protocol, which Parquet uses in footers and page headers.

A struct is a list of [field, kind, value], a list is [kind, values]; kinds are Thrift's numbers.
"""

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)
INTEGERS = (I16, I32, I64)


def read_struct(data, place):
    """Return the struct that begins at a position, and the position where it ends."""
    fields, field = [], 0
    while head := data[place]:
        place += 1
        step, kind = head >> 4, head & 15
        if step:
            field += step
        else:
            field, place = _zigzag(data, place)
        if kind in (TRUE, FALSE):
            value = kind == TRUE
        else:
            value, place = _read(data, place, kind)
        fields.append([field, kind, value])
    return fields, place + 1


def write_struct(fields):
    """Return a struct encoded as bytes."""
    out, last = bytearray(), 0
    for field, kind, value in fields:
        if kind in (TRUE, FALSE):
            kind = TRUE if value else FALSE
        step = field - last
        out += (
            bytes([step << 4 | kind]) if 0 < step < 16 else bytes([kind]) + _unsigned_zigzag(field)
        )
        last = field
        if kind not in (TRUE, FALSE):
            out += _write(kind, value)
    return bytes(out) + b"\0"


def _read(data, place, kind):
    if kind in INTEGERS:
        return _zigzag(data, place)
    if kind == BINARY:
        size, place = _varint(data, place)
        return bytes(data[place : place + size]), place + size
    if kind == STRUCT:
        return read_struct(data, place)
    if kind in (BYTE, DOUBLE):
        size = 8 if kind == DOUBLE else 1
        return bytes(data[place : place + size]), place + size
    if kind not in (LIST, SET):
        raise ValueError(f"kind {kind} is not read")
    head, place = data[place], place + 1
    size, item = head >> 4, head & 15
    if size == 15:
        size, place = _varint(data, place)
    items = []
    for _ in range(size):
        if item in (TRUE, FALSE):
            value, place = data[place] == TRUE, place + 1
        else:
            value, place = _read(data, place, item)
        items.append(value)
    return [item, items], place


def _write(kind, value):
    if kind in INTEGERS:
        return _unsigned_zigzag(value)
    if kind == BINARY:
        return _unsigned(len(value)) + value
    if kind == STRUCT:
        return write_struct(value)
    if kind in (BYTE, DOUBLE):
        return value
    item, items = value
    size = len(items)
    head = bytes([size << 4 | item]) if size < 15 else bytes([0xF0 | item]) + _unsigned(size)
    if item in (TRUE, FALSE):
        return head + bytes(TRUE if each else FALSE for each in items)
    return head + b"".join(_write(item, each) for each in items)


def _varint(data, place):
    value = shift = 0
    while True:
        byte, place = data[place], place + 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
        shift += 7


def _zigzag(data, place):
    value, place = _varint(data, place)
    return value >> 1 ^ -(value & 1), place


def _unsigned(value):
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out) + bytes([value])


def _unsigned_zigzag(value):
    return _unsigned((value << 1 ^ value >> 63) & (2**64 - 1))
