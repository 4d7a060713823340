"""Frameworks are optional: their tests are skipped if they are not installed, unless skipping is forbidden."""

import importlib
import os
import warnings

import pytest


def require(module):
    """Import a framework or skip the calling test module; with COALMINE_FORBID_SKIPS=1, fail instead."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of a framework's own imports
            return importlib.import_module(module)
    except ImportError:
        if os.environ.get("COALMINE_FORBID_SKIPS") == "1":
            raise
        pytest.skip(f"{module} is not installed", allow_module_level=True)
