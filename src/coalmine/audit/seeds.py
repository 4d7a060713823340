"""Seeds in files: a seed is a secret, so it never stands on a command line."""

import os
import secrets
from pathlib import Path

DEMO_SEED = 20240507  # not secret: everybody has it
LARGEST = 4096  # bytes


def read_seed(path: Path) -> int | bytes:
    """The seed in a file: a whole number if it holds digits alone, else its bytes less a last line end."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"seed file {path} is missing; make one with: coalmine seed {path}") from None
    except OSError as error:
        raise ValueError(f"seed file {path} cannot be read: {error.strerror}") from None
    text = content.rstrip(b"\r\n")
    if not text:
        raise ValueError(f"seed file {path} is empty; make one with: coalmine seed {path}")
    if len(text) > LARGEST:
        raise ValueError(f"seed file {path} must hold at most {LARGEST} bytes, got {len(text)}")
    if text.isdigit():
        number = int(text)
        if number >= 1 << 128:
            raise ValueError(f"seed file {path} must hold a number below 2^128, or other text")
        return number
    return text


def write_seed(path: Path) -> None:
    """A new random seed of 128 bits, in a file that only its owner may read; an existing file is left alone."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ValueError(f"seed file {path} exists already; a seed is never overwritten") from None
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_hex(16) + "\n")
