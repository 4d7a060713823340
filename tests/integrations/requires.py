"""Frameworks are extras: their tests are skipped where they are not installed, unless that is forbidden."""

import importlib
import os
import warnings

import pytest


def require(module):
    """Import a framework or skip the calling test module; with COALMINE_FORBID_SKIPS=1, fail instead."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a framework imports is its own affair
            return importlib.import_module(module)
    except ImportError:
        if os.environ.get("COALMINE_FORBID_SKIPS") == "1":
            raise
        pytest.skip(f"{module} is not installed", allow_module_level=True)
