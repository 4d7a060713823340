"""Downloads from a real server on this machine, which cuts connections, changes files and lies about sizes."""

import hashlib
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from server import serving

from coalmine.data import download as module
from coalmine.data.catalogue import Download
from coalmine.data.download import download

CONTENT = bytes(range(256)) * 4096  # 1 MiB
SHA256 = hashlib.sha256(CONTENT).hexdigest()
MD5 = hashlib.md5(CONTENT).hexdigest()


@pytest.fixture
def site():
    with serving({"file.bin": CONTENT}) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(module, "WAIT", 0.0)
    monkeypatch.setattr(module, "CHUNK", 1 << 16)
    monkeypatch.setattr(module, "TIMEOUT", 5.0)
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def test_a_file_arrives_whole_and_checked(site, tmp_path):
    seen = []
    file = Download(url=site.url + "file.bin", size=len(CONTENT), sha256=SHA256, checksum_from="us")
    found = download(file, tmp_path / "file.bin", progress=lambda done, total: seen.append((done, total)))
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert (found.size, found.sha256, found.checked) == (len(CONTENT), SHA256, "sha256 of us")
    assert seen[0] == (0, len(CONTENT))
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert [path.name for path in tmp_path.iterdir()] == ["file.bin"]
    assert site.asked[0]["User-Agent"].startswith("coalmine/")


def test_md5_serves_where_it_is_all_there_is(site, tmp_path):
    found = download(Download(url=site.url + "file.bin", md5=MD5, checksum_from="them"), tmp_path / "a")
    assert (found.checked, found.sha256) == ("md5 of them", SHA256)
    assert download(Download(url=site.url + "file.bin"), tmp_path / "b").checked == ""


def test_a_cut_connection_is_gone_on_with_from_where_it_was_cut(site, tmp_path):
    site.cuts = [300_000, 1]
    download(Download(url=site.url + "file.bin", sha256=SHA256), tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert [asked.get("Range") for asked in site.asked] == [None, "bytes=300000-", "bytes=300001-"]
    assert [asked.get("If-Range") for asked in site.asked] == [None, '"v1"', '"v1"']


def test_what_came_before_a_failure_is_kept_for_the_next_time(site, tmp_path):
    file = Download(url=site.url + "file.bin", sha256=SHA256)
    site.cuts = [200_000, 0, 0, 0, 0]
    with pytest.raises(ConnectionError, match=r"ended too early \(tried 4 times.*the 200,000 bytes that came are kept"):
        download(file, tmp_path / "file.bin")
    assert not (tmp_path / "file.bin").exists()
    assert (tmp_path / "file.bin.part").stat().st_size == 200_000
    site.cuts = []
    site.asked.clear()
    download(file, tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert [asked["Range"] for asked in site.asked] == ["bytes=200000-"]


def test_a_whole_part_is_not_fetched_again(site, tmp_path):
    """Killed after the last byte and before the rename."""
    (tmp_path / "file.bin.part").write_bytes(CONTENT)
    download(Download(url=site.url + "file.bin", sha256=SHA256), tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert len(site.asked) == 1


@pytest.mark.parametrize("heeded", [True, False])
def test_a_part_of_another_file_is_not_gone_on_with(site, tmp_path, heeded):
    """Also when the server sends the rest of another version than it was asked for."""
    site.if_range = heeded
    site.cuts = [200_000, 0, 0, 0]
    file = Download(url=site.url + "file.bin")
    with pytest.raises(ConnectionError):
        download(file, tmp_path / "file.bin")
    other = CONTENT[::-1]
    site.files["file.bin"], site.etag = other, '"v2"'
    download(file, tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == other


def test_without_a_checksum_or_a_version_it_starts_anew(site, tmp_path):
    site.etag = None
    site.cuts = [200_000]
    download(Download(url=site.url + "file.bin"), tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert [asked.get("Range") for asked in site.asked] == [None, None]


@pytest.mark.parametrize("problem", ["ranges", "part"])
def test_servers_without_ranges_and_parts_that_are_too_long(site, tmp_path, problem):
    if problem == "ranges":
        site.ranges, site.cuts = False, [300_000]
    else:
        (tmp_path / "file.bin.part").write_bytes(CONTENT + b"more")
    download(Download(url=site.url + "file.bin", sha256=SHA256), tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_a_server_that_cuts_for_ever_is_given_up(site, tmp_path):
    site.ranges, site.cuts = False, [300_000] * 50
    with pytest.raises(ConnectionError, match="tried 4 times"):
        download(Download(url=site.url + "file.bin", sha256=SHA256), tmp_path / "file.bin")
    assert len(site.asked) <= 5


def test_another_checksum_is_refused_and_the_file_deleted(site, tmp_path):
    for wrong in ({"sha256": "0" * 64}, {"md5": "0" * 32}):
        with pytest.raises(ValueError, match=r"file.bin has (sha256|md5) \w+, published is 0+: damaged on its way"):
            download(Download(url=site.url + "file.bin", **wrong), tmp_path / "file.bin")
        assert list(tmp_path.iterdir()) == []


def test_another_size_is_refused_before_a_byte_is_taken(site, tmp_path):
    with pytest.raises(
        ValueError, match="has 1,048,576 bytes now, 5 are published: it has changed, so it is not taken"
    ):
        download(Download(url=site.url + "file.bin", size=5), tmp_path / "file.bin")
    assert list(tmp_path.iterdir()) == []


def test_more_bytes_than_agreed_are_refused(site, tmp_path, monkeypatch):
    site.length = False  # it says nothing and goes on
    with pytest.raises(ValueError, match="sends more than the 100,000 bytes it should have"):
        download(Download(url=site.url + "file.bin", size=100_000), tmp_path / "file.bin")
    monkeypatch.setattr(module, "LARGEST", 200_000)
    with pytest.raises(ValueError, match="sends more than the 200,000 bytes it should have"):
        download(Download(url=site.url + "file.bin"), tmp_path / "file.bin")
    assert list(tmp_path.glob("file.bin")) == []


def test_a_disk_that_is_too_full_is_noticed_first(site, tmp_path, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(OSError, match=r"needs 1,048,576 more bytes in .*, where 1,000 are free"):
        download(Download(url=site.url + "file.bin"), tmp_path / "file.bin")


def test_errors_of_the_server(site, tmp_path):
    with pytest.raises(ValueError, match="nothing cannot be fetched: the server answers 404 Not Found"):
        download(Download(url=site.url + "nothing"), tmp_path / "file.bin")
    assert len(site.asked) == 1  # it will not be there the next time either
    site.statuses = [503, 429]
    download(Download(url=site.url + "file.bin", sha256=SHA256), tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    site.statuses = [500] * 4
    with pytest.raises(ConnectionError, match="the server answers 500 Internal Server Error"):
        download(Download(url=site.url + "file.bin"), tmp_path / "other.bin")


def test_nobody_there(tmp_path):
    with serving({}) as closed:
        url = closed.url
    with pytest.raises(ConnectionError, match=r"Connection refused.*a proxy is named by HTTPS_PROXY"):
        download(Download(url=url + "file.bin"), tmp_path / "file.bin")
    assert list(tmp_path.iterdir()) == []


def test_the_proxy_of_the_environment_is_asked(site, tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", site.url)
    download(Download(url="http://data.invalid/some/file.bin", sha256=SHA256), tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert site.asked[0]["target"] == "http://data.invalid/some/file.bin"
    monkeypatch.setenv("no_proxy", "data.invalid")
    with pytest.raises(ConnectionError, match="cannot be fetched"):
        download(Download(url="http://data.invalid/some/file.bin"), tmp_path / "other.bin")
    assert len(site.asked) == 1


def test_redirects_are_followed_but_not_out_of_https(site, tmp_path, monkeypatch):
    site.moved["old.bin"] = site.url + "file.bin"
    download(Download(url=site.url + "old.bin", sha256=SHA256), tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    handler = module._NoDowngrade()
    request = module.urllib.request.Request("https://data.example/file")
    with pytest.raises(module.urllib.error.HTTPError, match=r"redirects to http://data.example/file, without HTTPS"):
        handler.redirect_request(request, None, 302, "", {}, "http://data.example/file")


def test_two_at_once_do_not_write_the_same_file(site, tmp_path):
    fcntl = pytest.importorskip("fcntl")
    with (tmp_path / "file.bin.part").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match="is being downloaded by another process; wait for it"):
            download(Download(url=site.url + "file.bin"), tmp_path / "file.bin")


def test_a_damaged_note_beside_a_part_is_no_obstacle(site, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:1000])
    for note in ("{", json.dumps([1]), json.dumps({"url": "http://elsewhere/", "validator": '"v1"'})):
        (tmp_path / "file.bin.part.json").write_text(note)
        (tmp_path / "file.bin.part").write_bytes(b"x" * 1000)
        download(Download(url=site.url + "file.bin"), tmp_path / "file.bin")
        assert (tmp_path / "file.bin").read_bytes() == CONTENT
