"""Random damage to JSON values and files."""

import copy
import json
import os
import struct

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st


DRAWS = int(os.environ.get("KLX_FUZZ_DRAWS", "15"))


FUZZ = settings(
    max_examples=DRAWS,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize="KLX_FUZZ_DRAWS" not in os.environ,
    database=None,
    phases=[Phase.generate],
)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=True),
    st.text(max_size=8),
    st.sampled_from([[], {}, "../../etc/passwd", "1e999", -1, 0, 1e308]),
)


def paths_in(value, here=()):
    yield here
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths_in(inner, (*here, key))


def changed(data, content):
    """The JSON value with one part replaced or left out."""
    content = copy.deepcopy(content)
    path = data.draw(st.sampled_from([path for path in paths_in(content) if path]))
    place = content
    for key in path[:-1]:
        place = place[key]
    if isinstance(place, dict) and data.draw(st.booleans()):
        del place[path[-1]]
    else:
        place[path[-1]] = data.draw(scalars)
    return content


def damaged_bytes(data, content: bytes) -> bytes:
    kind = data.draw(st.sampled_from(["flip", "cut", "tail", "zeros"]))
    place = data.draw(st.integers(0, len(content) - 1))
    if kind == "flip":
        return content[:place] + bytes([content[place] ^ (1 << data.draw(st.integers(0, 7)))]) + content[place + 1 :]
    if kind == "zeros":
        return content[:place] + b"\0" * (len(content) - place)
    return content[:place] if kind == "cut" else content + data.draw(st.binary(min_size=1, max_size=16))


def damaged_header(data, content: bytes) -> bytes:
    """The same data under another header, with names, shapes, types and offsets that were never written."""
    (length,) = struct.unpack("<Q", content[:8])
    header = json.dumps(changed(data, json.loads(content[8 : 8 + length]))).encode()
    return struct.pack("<Q", len(header)) + header + content[8 + length :]
