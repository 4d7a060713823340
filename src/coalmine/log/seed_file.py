"""Secret seeds in files: a command line would show the seed to other users of the machine."""

import os
import secrets
from pathlib import Path

from coalmine.canaries.secret import SecretBytes, SecretInt
from coalmine.log.files import read_regular

DEMO_SEED = 20240507  # not secret: it is public
LARGEST = 4096  # bytes


def read_seed(path: str | Path) -> int | bytes:
    """The secret seed in a file, as `Audit(seed=…)` and the canary classes take it.

    A file of digits alone is a whole number; anything else is its bytes. One line end at the end of the file is dropped.
    The server and the nodes must both read their copy of the file with this function: the same file read in another way,
    say as text, is another seed and gives other canaries.
    """
    path = Path(path)
    try:
        content = SecretBytes(read_regular(path, most=16 * LARGEST))  # a traceback may show this frame
    except FileNotFoundError:
        raise ValueError(f"seed file {path} is missing; make one with: coalmine seed {path}") from None
    except OSError as error:
        raise ValueError(f"seed file {path} cannot be read: {error.strerror}") from None
    if not content.strip():
        raise ValueError(f"seed file {path} is empty; make one with: coalmine seed {path}")
    text = SecretBytes(content.removesuffix(b"\n").removesuffix(b"\r"))
    if text.endswith((b"\n", b"\r")):  # added by an editor, perhaps: it is unclear whether they belong to the seed
        raise ValueError(f"seed file {path} must end in one line end at most, got several; remove the blank lines")
    if len(text) > LARGEST:
        raise ValueError(f"seed file {path} must hold at most {LARGEST} bytes, got {len(text)}")
    if text.isdigit():
        number = SecretInt(text if len(text) <= 39 else 1 << 128)  # 2^128 has 39 digits
        if number >= 1 << 128:
            raise ValueError(f"seed file {path} must hold a number below 2^128, or other text")
        return number
    return text


def write_seed(path: str | Path) -> None:
    """Write a new random seed of 128 bits into a file that only its owner may read; an existing file is an error."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ValueError(f"seed file {path} exists already; a seed is never overwritten") from None
    try:
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(16) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        # An empty or truncated seed, on a full disk, would be taken for a complete one.
        Path(path).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
