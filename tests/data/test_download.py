"""Downloads from a real local server that cuts connections and changes files."""

import hashlib
import sys

import pytest
import requests
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


def test_a_download_is_complete_and_checked(site, tmp_path):
    seen = []
    file = Download(url=site.url + "file.bin", size=len(CONTENT), sha256=SHA256, checksum_from="us")
    found = download(file, tmp_path / "file.bin", progress=lambda done, total: seen.append((done, total)))
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert (found, file.checked) == (SHA256, "sha256 of us")
    assert seen[0] == (1 << 16, len(CONTENT))
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert [path.name for path in tmp_path.iterdir()] == ["file.bin"]
    assert site.asked[0]["User-Agent"].startswith("coalmine/")


def test_md5_is_checked_where_no_sha256_is_published(site, tmp_path):
    file = Download(url=site.url + "file.bin", md5=MD5, checksum_from="them")
    assert download(file, tmp_path / "a") == SHA256
    assert file.checked == "md5 of them"
    unchecked = Download(url=site.url + "file.bin")
    assert download(unchecked, tmp_path / "b") == SHA256
    assert unchecked.checked == ""


def test_a_cut_connection_is_retried(site, tmp_path):
    site.cuts = [300_000, 1]
    download(Download(url=site.url + "file.bin", sha256=SHA256), tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert len(site.asked) == 3


def test_retries_end_with_an_error(site, tmp_path):
    site.cuts = [300_000] * 50
    with pytest.raises(ConnectionError, match=r"cannot be fetched: .*300000 bytes read.* \(tried 4 times"):
        download(Download(url=site.url + "file.bin", sha256=SHA256), tmp_path / "file.bin")
    assert len(site.asked) == 4
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_checksum_is_rejected_and_the_file_deleted(site, tmp_path):
    for wrong in ({"sha256": "0" * 64}, {"md5": "0" * 32}):
        with pytest.raises(ValueError, match=r"(SHA256|MD5) hash of downloaded file \(file.bin\) does not match"):
            download(Download(url=site.url + "file.bin", **wrong), tmp_path / "file.bin")
        assert list(tmp_path.iterdir()) == []
    assert len(site.asked) == 2  # a retry would fetch the same file


def test_a_wrong_size_is_rejected_before_downloading(site, tmp_path):
    with pytest.raises(ValueError, match=r"has 1,048,576 bytes now, the published file has 5; not downloaded"):
        download(Download(url=site.url + "file.bin", size=5), tmp_path / "file.bin")
    assert list(tmp_path.iterdir()) == []


def test_a_file_with_the_right_checksum_is_not_downloaded_again(site, tmp_path):
    file = Download(url=site.url + "file.bin", sha256=SHA256)
    (tmp_path / "file.bin").write_bytes(CONTENT)
    assert download(file, tmp_path / "file.bin") == SHA256
    assert site.asked == []
    (tmp_path / "file.bin").write_bytes(b"damaged")
    download(file, tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_server_errors_are_retried_and_missing_files_are_not(site, tmp_path):
    with pytest.raises(ValueError, match="nothing cannot be fetched: the server answers 404 Not Found"):
        download(Download(url=site.url + "nothing"), tmp_path / "file.bin")
    assert len(site.asked) == 1
    site.statuses = [503, 429]
    download(Download(url=site.url + "file.bin", sha256=SHA256), tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    site.statuses = [500] * 4
    with pytest.raises(ConnectionError, match="the server answers 500 Internal Server Error"):
        download(Download(url=site.url + "file.bin"), tmp_path / "other.bin")


def test_an_unreachable_server_is_reported_with_a_hint_about_proxies(tmp_path):
    with serving({}) as closed:
        url = closed.url
    with pytest.raises(ConnectionError, match=r"Connection refused.*set a proxy with HTTPS_PROXY") as raised:
        download(Download(url=url + "file.bin"), tmp_path / "file.bin")
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_the_proxy_of_the_environment_is_used(site, tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", site.url)
    download(Download(url="http://data.invalid/some/file.bin", sha256=SHA256), tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert site.asked[0]["target"] == "http://data.invalid/some/file.bin"
    monkeypatch.setenv("no_proxy", "data.invalid")
    with pytest.raises(ConnectionError, match="cannot be fetched"):
        download(Download(url="http://data.invalid/some/file.bin"), tmp_path / "other.bin")
    assert len(site.asked) == 1


def test_redirects_are_followed_unless_they_leave_https(site, tmp_path):
    site.moved["old.bin"] = site.url + "file.bin"
    file = Download(url=site.url + "old.bin", size=len(CONTENT), sha256=SHA256)
    download(file, tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    response = requests.Response()
    response.status_code, response.url = 302, "https://data.example/file"
    response.headers["Location"] = "http://data.example/file"
    assert "redirects to http://data.example/file, without HTTPS" in str(module._problem(file, response))


def test_a_missing_pooch_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ImportError, match=r"pip install 'coalmine\[simulation\]'"):
        download(Download(url="http://data.invalid/"), tmp_path / "file.bin")
