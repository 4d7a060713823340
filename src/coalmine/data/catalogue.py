"""The catalogue of data sets: contents, licences, sources."""

from dataclasses import dataclass
from pathlib import Path

TFF = "https://storage.googleapis.com/tff-datasets-public/"
MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
QMNIST = "https://raw.githubusercontent.com/facebookresearch/qmnist/master/"
FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"

GIGABYTE = 10**9


@dataclass(frozen=True, kw_only=True)
class Download:
    """A file to download, its published size and checksum, and the files unpacked from it.

    `size` and the checksum are None if they are not published. An archive that holds `unpacked` is unpacked, never
    to more than `unpacked_limit` bytes, and not kept.
    """

    url: str
    size: int | None = None
    sha256: str | None = None
    md5: str | None = None
    checksum_from: str = ""  # who published it
    unpacked: tuple[str, ...] = ()
    unpacked_limit: int = 0

    @property
    def name(self) -> str:
        """The file's own name."""
        return self.url.rpartition("/")[2]

    @property
    def known_hash(self) -> str | None:
        """The published checksum as pooch takes it; None if there is none."""
        return f"sha256:{self.sha256}" if self.sha256 else f"md5:{self.md5}" if self.md5 else None

    @property
    def checked(self) -> str:
        """Which checksum a download is compared with; "" for none."""
        return f"{self.known_hash.partition(':')[0]} of {self.checksum_from}" if self.known_hash else ""

    @property
    def results(self) -> tuple[str, ...]:
        """The files that a download leaves."""
        return self.unpacked or (self.name,)


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A data set as `coalmine data` shows it.

    `folder`, under the data folder, is where the task looks for it. A data set without downloads cannot be fetched. Its
    `note` says why, and `own_files` are the files that a user must put there.
    """

    name: str
    task: str
    title: str
    what: str
    users: int | None
    examples: int
    licence: str
    source: str
    folder: str
    own_files: tuple[str, ...] = ()
    downloads: tuple[Download, ...] = ()
    note: str = ""

    @property
    def size(self) -> int | None:
        """Bytes to download; None if unknown."""
        sizes = [download.size for download in self.downloads]
        return None if not sizes or None in sizes else sum(size for size in sizes if size is not None)

    def is_in(self, data_dir: Path) -> bool:
        """Whether a task would find it under this data folder."""
        files = [*self.own_files, *(name for download in self.downloads for name in download.results)]
        return all((data_dir / self.folder / name).is_file() for name in files)


def _fashion(name: str, size: int, sha256: str) -> Download:
    return Download(url=FASHION + name, size=size, sha256=sha256, checksum_from="the published files")


def _mnist(name: str, size: int, md5: str) -> Download:
    return Download(url=MNIST + name, size=size, md5=md5, checksum_from="torchvision")


def _tff(name: str, sha256: str, *unpacked: str, limit: int) -> Download:
    return Download(
        url=TFF + name, sha256=sha256, checksum_from="TensorFlow Federated", unpacked=unpacked, unpacked_limit=limit
    )


_WORD_COUNT = _tff(
    "stackoverflow.word_count.tar.bz2",
    "1dc00256d6e527c54b9756d968118378ae14e6692c0b3b6cad470cdd3f0c519c",
    "stackoverflow.word_count",
    limit=GIGABYTE,
)
_NIST = "NIST SD19, public domain; via LEAF"
_STACK_OVERFLOW = "CC BY-SA 3.0, its users"

_ALL = (
    Dataset(
        name="fashion-mnist",
        task="fashion-mnist",
        title="Fashion-MNIST",
        what="28 by 28 pictures of clothes, 10 classes",
        users=None,
        examples=70_000,
        licence="MIT, © 2017 Zalando SE",
        source="https://github.com/zalandoresearch/fashion-mnist",
        folder="fashion-mnist",
        downloads=(
            _fashion(
                "train-images-idx3-ubyte.gz",
                26_421_880,
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            ),
            _fashion(
                "train-labels-idx1-ubyte.gz",
                29_515,
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            ),
            _fashion(
                "t10k-images-idx3-ubyte.gz",
                4_422_102,
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            ),
            _fashion(
                "t10k-labels-idx1-ubyte.gz",
                5_148,
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            ),
        ),
    ),
    Dataset(
        name="mnist-by-writer",
        task="mnist-by-writer",
        title="MNIST by NIST writer",
        what="28 by 28 handwritten digits, by writer",
        users=539,
        examples=70_000,
        licence="CC BY-SA 3.0; QMNIST BSD 3-clause",
        source="https://github.com/facebookresearch/qmnist",
        folder="mnist-by-writer",
        downloads=(
            _mnist("train-images-idx3-ubyte.gz", 9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            _mnist("t10k-images-idx3-ubyte.gz", 1_648_877, "9fb629c4189551a2d022fa330f9573f3"),
            _mnist("t10k-labels-idx1-ubyte.gz", 4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
            Download(
                url=f"{QMNIST}qmnist-train-labels-idx2-int.gz",
                size=463_024,
                sha256="2c05dc77f6b916b38e455e97ab129a42a444f3dbef09b278a366f82904e0dd9f",
                checksum_from="the published file",
            ),
        ),
    ),
    Dataset(
        name="emnist",
        task="emnist",
        title="Federated EMNIST",
        what="28 by 28 handwritten characters, 62 classes, by writer",
        users=3_400,
        examples=749_068,
        licence=_NIST,
        source="https://www.tensorflow.org/federated/api_docs/python/tff/simulation/datasets/emnist",
        folder="emnist",
        downloads=(
            _tff(
                "fed_emnist.tar.bz2",
                "fe1ed5a502cea3a952eb105920bff8cffb32836b5173cb18a57a32c3606f3ea0",
                "fed_emnist_train.h5",
                "fed_emnist_test.h5",
                limit=10 * GIGABYTE,
            ),
        ),
    ),
    Dataset(
        name="emnist-digits",
        task="emnist-digits",
        title="Federated EMNIST, digits",
        what="the digits of emnist, 10 classes",
        users=3_383,
        examples=382_705,
        licence=_NIST,
        source="https://www.tensorflow.org/federated/api_docs/python/tff/simulation/datasets/emnist",
        folder="emnist",
        downloads=(
            _tff(
                "fed_emnist_digitsonly.tar.bz2",
                "55333deb8546765427c385710ca5e7301e16f4ed8b60c1dc5ae224b42bd5b14b",
                "fed_emnist_digitsonly_train.h5",
                "fed_emnist_digitsonly_test.h5",
                limit=10 * GIGABYTE,
            ),
        ),
    ),
    Dataset(
        name="stackoverflow",
        task="stackoverflow",
        title="Stack Overflow",
        what="sentences of questions and answers, by writer",
        users=342_477,
        examples=135_818_730,
        licence=_STACK_OVERFLOW,
        source="https://www.tensorflow.org/federated/api_docs/python/tff/simulation/datasets/stackoverflow",
        folder="stackoverflow",
        downloads=(
            _WORD_COUNT,
            _tff(
                "stackoverflow.tar.bz2",
                "99eca2f8b8327a09e5fc123979df2d237acbc5e52322f6d86bf523ee47b961a2",
                "stackoverflow_train.h5",
                "stackoverflow_test.h5",
                limit=200 * GIGABYTE,
            ),
        ),
    ),
    Dataset(
        name="stackexchange",
        task="stackexchange",
        title="Stack Exchange, 15 sites",
        what="sentences of questions, answers and comments, by writer",
        users=5_022,
        examples=241_796,
        licence="CC BY-SA 2.5, 3.0, 4.0, their users",
        source="excerpts of the Stack Exchange data dumps",
        folder="stackexchange",
        own_files=("stackexchange_by_user.jsonl.gz",),
        note="no download is known: put a file in the format of docs/how-to/data.md there",
    ),
    Dataset(
        name="shakespeare",
        task="shakespeare",
        title="Shakespeare (TensorFlow Federated)",
        what="speeches of plays, by role",
        users=715,
        examples=18_424,
        licence="public domain; via LEAF",
        source="https://www.tensorflow.org/federated/api_docs/python/tff/simulation/datasets/shakespeare",
        folder="shakespeare",
        downloads=(
            _tff(
                "shakespeare.tar.bz2",
                "0285be9906cb5f268092eee4edeeacfc2af4574f2941f7cc2f08a321d7f5c707",
                "shakespeare_train.h5",
                "shakespeare_test.h5",
                limit=GIGABYTE,
            ),
        ),
    ),
    Dataset(
        name="shakespeare-by-role",
        task="shakespeare",
        title="Shakespeare, 37 plays by role",
        what="speeches of plays, by role; used if shakespeare is missing",
        users=1_132,
        examples=31_075,
        licence="public domain (Moby, Jon Bosak)",
        source="https://github.com/CodyCahoon/Shapespeare, commit 84f89f1",
        folder="shakespeare",
        own_files=("shakespeare_by_role.jsonl.gz",),
        note="no download is known: put a file in the format of docs/how-to/data.md there, or get shakespeare",
    ),
)
DATASETS = {dataset.name: dataset for dataset in _ALL}
