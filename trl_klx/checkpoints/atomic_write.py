"""Writing a file so that a reader finds the old version or the new one, never a part of it."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[str]:
    """
    Yield a temporary path in the same folder, and rename it to `path` when the block ends.

    If the block raises, `path` is left as it was and the temporary file is removed. The folder is created if needed.

    Args:
        path (`str` or `os.PathLike`):
            File to write.
    """
    path = os.fspath(path)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    # `tempfile` would create a file that only its owner may read.
    temporary = f"{path}.{uuid.uuid4().hex}.tmp"
    try:
        yield temporary
        # If a power cut kept the rename but lost the data, the file would be empty.
        with open(temporary, "rb") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
