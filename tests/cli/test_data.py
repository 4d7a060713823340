"""`coalmine data` as a user calls it."""

import json
import subprocess
import sys

import pytest
from server import serving
from test_fetch import PLAIN, tiny

from coalmine.cli import main as cli
from coalmine.data import DATASETS
from coalmine.data import download as download_module


@pytest.fixture
def coalmine(capsys):
    """The exit code, stdout and stderr of a command."""

    def call(*arguments):
        with pytest.raises(SystemExit) as stop:
            cli.main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return stop.value.code, said.out, said.err

    return call


@pytest.fixture
def site(monkeypatch):
    monkeypatch.setattr(download_module, "WAIT", 0.0)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serving({"plain.gz": PLAIN}) as running:
        file = download_module.Download(url=running.url + "plain.gz")  # type: ignore[attr-defined]
        monkeypatch.setitem(DATASETS, "fashion-mnist", tiny(running.url, file))
        yield running


def test_list_shows_all_data_sets_and_which_are_present(coalmine, tmp_path):
    code, out, err = coalmine("data", "--data-dir", tmp_path)
    assert (code, err) == (0, "")
    assert all(name in out for name in DATASETS)
    assert "342,477" in out
    assert "yes" not in out
    (tmp_path / "stackexchange").mkdir()
    (tmp_path / "stackexchange" / "stackexchange_by_user.jsonl.gz").write_bytes(b"")
    code, out, _ = coalmine("data", "--data-dir", tmp_path, "--json")
    found = {entry["name"]: entry for entry in json.loads(out)}
    assert code == 0
    assert [name for name, entry in found.items() if entry["here"]] == ["stackexchange"]
    assert found["stackexchange"]["title"] == "Stack Exchange, 15 sites"
    assert found["stackexchange"]["can_be_fetched"] is False
    assert found["fashion-mnist"]["download_bytes"] == 30_878_645
    assert found["stackoverflow"]["download_bytes"] is None
    assert found["emnist"]["licence"]
    assert found["emnist"]["source"].startswith("https://")


def test_list_uses_the_folder_of_the_environment_variable(coalmine, tmp_path, monkeypatch):
    monkeypatch.setenv("COALMINE_DATA_DIR", str(tmp_path / "elsewhere"))
    code, out, _ = coalmine("data")
    assert code == 0
    assert str(tmp_path / "elsewhere") in out


def test_get_prints_size_and_checksum(coalmine, site, tmp_path):
    code, out, err = coalmine("data", "fashion-mnist", "--data-dir", tmp_path)
    assert (code, err) == (0, "")
    assert (tmp_path / "tiny" / "plain.gz").read_bytes() == PLAIN
    assert f"plain.gz: {len(PLAIN)} bytes, not verified: no checksum is published; sha256 " in out
    code, out, _ = coalmine("data", "fashion-mnist", "--data-dir", tmp_path)
    assert code == 0
    assert "already present" in out


@pytest.mark.parametrize(
    ("statuses", "name", "message"),
    [
        ([], "nothing", "'nothing' is not one of 'fashion-mnist', "),
        ([404], "fashion-mnist", "cannot be fetched: the server answers 404 Not Found"),
        ([500] * 4, "fashion-mnist", "the server answers 500 Internal Server Error"),
        ([], "stackexchange", "stackexchange cannot be fetched: no download is known"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(coalmine, site, tmp_path, statuses, name, message):
    site.statuses = statuses
    code, out, err = coalmine("data", name, "--data-dir", tmp_path)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "tiny" / "plain.gz").exists()


@pytest.mark.full
def test_the_commands_need_no_torch():
    code = (
        "import sys; sys.argv = ['coalmine', 'data']; from coalmine.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "assert not {'torch', 'h5py', 'sklearn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
