from importlib.util import find_spec

if find_spec("torch") is None:  # training is an extra
    collect_ignore = ["test_crafted_canaries.py"]
