import pytest

try:
    import torch
except ImportError:  # training is an extra
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _one_thread():
    """Use one thread: on a busy machine two threads would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
