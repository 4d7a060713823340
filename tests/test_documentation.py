"""The documentation: the reference is complete, links lead somewhere, and the site works in a browser from disk."""

import ast
import dataclasses
import json
import os
import posixpath
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import click
import pytest
from chromium import Chromium
from plain_docstrings import convert
from readability import MOST_WORDS, count_words, long_sentences, pages, prose, sentences
from reference_pages import with_parts

from coalmine.cli.main import app
from coalmine.report.sentences import GLOSSARY
from coalmine.simulation.config import RunConfig
from coalmine.simulation.config_sources import config_with

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([^)\s]+)\)")
PUBLIC_PACKAGES = ("coalmine", "coalmine.simulation", "coalmine.report", "coalmine.testing", "coalmine.data_canaries")
# Pages that take long to build and that no test here opens; `make docs` builds all.
LEFT_OUT = ("extensions", "**.ipynb", "evidence/*.md", "explanation/blocks.md", "reference/python/*")


def names_in(file):
    """The names in a module's __all__. Two public modules have none: there, all functions and classes are public."""
    tree = ast.parse(file.read_text())
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return ast.literal_eval(statement.value)
    defined = [part.name for part in tree.body if isinstance(part, ast.FunctionDef | ast.ClassDef)]
    return (
        [name for name in defined if not name.startswith("_")] if file.name in ("plots.py", "sharded_jax.py") else None
    )


def public_names():
    source = ROOT / "src"
    files = [source / package.replace(".", "/") / "__init__.py" for package in PUBLIC_PACKAGES]
    files += [source / "coalmine/report/plots.py", source / "coalmine/canaries/sharded_jax.py"]
    for package in ("integrations", "testing"):
        files += [*(source / "coalmine" / package).glob("*.py"), *(source / "coalmine" / package).glob("*/__init__.py")]
    for file in files:
        module = ".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        for name in names_in(file) or []:
            if not name.startswith("__"):
                yield f"{module}.{name}"


def test_every_public_name_is_in_the_reference():
    pages = "".join(with_parts(page.read_text()) for page in (DOCS / "reference" / "python").glob("*.md"))
    documented = re.findall(r"^\.\. auto\w+:: (\S+)$", pages, flags=re.MULTILINE)
    public = set(public_names())
    assert set(documented) == public
    assert len(documented) == len(public)
    assert {"coalmine.Audit", "coalmine.integrations.opacus.audited", "coalmine.report.plots.ladder"} <= public


def test_the_page_of_settings_has_every_key_with_its_type_and_default():
    page = with_parts((DOCS / "reference" / "config.md").read_text())
    top, *sections = re.split(r"^## \[(\w+)\]$", page, flags=re.MULTILINE)
    tables = dict(zip(sections[::2], sections[1::2], strict=True)) | {"": top}
    shown = {"integer": int, "number": (int, float), "string": str, "boolean": bool, "list of integer": list}
    for section, settings in {"": RunConfig(), **vars(RunConfig())}.items():
        for field in dataclasses.fields(settings) if dataclasses.is_dataclass(settings) else ():
            value = getattr(settings, field.name)
            if dataclasses.is_dataclass(value):
                continue
            kind, default = re.search(
                rf"^\| `{field.name}` \| ([\w ]+) \| (.*?) \|", tables[section], flags=re.M
            ).groups()
            if value is not None:
                assert json.loads(default.strip("`")) == json.loads(json.dumps(value))
                assert isinstance(json.loads(default.strip("`")), shown[kind])
    assert "Noise std divided by the clip norm; 0 clips without adding noise. Option `--noise-multiplier`." in page


def test_the_example_of_settings_is_a_valid_config(tmp_path):
    page = (DOCS / "reference" / "config.md").read_text()
    file = tmp_path / "config.toml"
    file.write_text("\n".join(line[4:] for line in page.splitlines() if line.startswith("    ") or not line))
    assert tomllib.loads(file.read_text())["canaries"] == {"count": 500}
    config = config_with({}, file)
    assert (config.rounds, config.privacy.noise_multiplier, config.canaries.count) == (40, 1.0, 500)


def test_the_page_of_results_has_every_entry_of_the_schema():
    schema = json.loads((DOCS / "reference" / "result.schema.json").read_text())
    page = with_parts((DOCS / "reference" / "result.md").read_text())
    entries = page.partition("## Entries")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| .*? \| (yes|no) \|", entries, flags=re.MULTILINE))
    assert rows == {name: "yes" if name in schema["required"] else "no" for name in schema["properties"]}


def test_docstrings_become_restructured_text():
    lines = ["First *line* with `a*b` and |x|:", "", "    code_(1)", "", "    * more", "", "1. item", "", "    of_ it"]
    convert(lines)
    first = "First \\*line\\* with `a*b` and \\|x\\|:"
    assert lines == [first, "", "::", "", "    code_(1)", "", "    * more", "", "1. item", "", "    of\\_ it"]


def tracked():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("the files that belong to the repository are known to git alone")
    return [ROOT / name for name in listed.stdout.splitlines()]


def test_links_of_pages_outside_of_the_site_lead_to_files():
    pages = [file for file in tracked() if file.suffix == ".md" and DOCS not in file.parents]
    links = [(page, link) for page in pages for link in LINK.findall(page.read_text()) if "://" not in link]
    assert len(links) > 10
    assert [(page.name, link) for page, link in links if not (page.parent / link.partition("#")[0]).exists()] == []


def test_every_path_of_the_documentation_that_a_file_names_exists():
    named = re.compile(r"(?<![\w/.-])docs/[\w/.-]+\.(?:md|py|png|json|ipynb)\b")
    files = [file for file in tracked() if file.suffix in (".md", ".py", ".yml", ".toml", "") and file.is_file()]
    found = {path for file in files for path in named.findall(file.read_text())}
    assert len(found) > 25
    assert sorted(path for path in found if not (ROOT / path).exists()) == []


LONG = "This sentence has " + "word " * MOST_WORDS + "too many."


def test_sentences_are_those_of_the_prose():
    page = f"# {LONG}\n\nOne `name.of` code. Two 1.5, see [here](a.b.c)!\n\n- item\n\n| {LONG} |\n|---|\n\n    {LONG}\n"
    page += f"\n```python\n{LONG}\n```\n<!-- {LONG} -->\n![picture](x.png)\n"
    assert sentences(page) == ["One name code.", "Two 1.5, see here!", "item"]
    assert [count_words(sentence) for sentence in sentences(page)] == [3, 4, 1]
    assert long_sentences(page) == []
    assert long_sentences(f"Short. {LONG} Short.") == [LONG]
    assert long_sentences(" ".join(["word"] * MOST_WORDS) + ".") == []
    assert prose("a\nb") == ["a b"]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_sentence_is_too_long(page):
    assert long_sentences(page.read_text()) == []


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site without its slow pages: links to those are not checked here, but by `make docs`."""
    pytest.importorskip("sphinx")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--quiet", "-D", f"exclude_patterns={','.join(LEFT_OUT)}", DOCS, out]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return out


def options(command, path):
    """Every option of a command and of the commands below it, as the inventory of the site names them."""
    for option in command.params:
        if isinstance(option, click.Option):
            yield from (f"{'-'.join(path)}.{name}" for name in (*option.opts, *option.secondary_opts))
    for name, below in getattr(command, "commands", {}).items():
        yield from options(below, [*path, name])


@pytest.mark.full
def test_every_option_of_every_command_is_in_the_reference(site):
    from sphinx.util.inventory import InventoryFile

    with (site / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", posixpath.join)
    expected = set(options(app, ["coalmine"]))
    assert len(expected) > 80
    assert expected - set(inventory["std:cmdoption"]) == set()
    assert set(GLOSSARY) <= set(inventory["std:term"])


@pytest.fixture(scope="module")
def browser():
    browser = Chromium()
    yield browser
    browser.close()


def wait(browser, script):
    """The value of the script as soon as there is one: pages change after a click and while the search runs."""
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        try:
            if value := browser.evaluate(script):
                return value
        except AssertionError as error:
            if "navigated" not in str(error):  # the page that was asked has just been left
                raise
        time.sleep(0.05)
    raise AssertionError(f"no value after 400 seconds: {script}")


def path_of(address):
    return Path(address.removeprefix("file://").partition("#")[0].partition("?")[0])


@pytest.mark.parametrize("dark", [False, True])
def test_the_front_page_opens_from_disk_and_asks_nobody(browser, site, dark):
    browser.open(site / "index.html", dark=dark)
    assert browser.complaints == []
    assert [address for address in browser.requests if not address.startswith(("file:", "data:"))] == []
    assert browser.evaluate("document.querySelector('h1').textContent").startswith("coalmine")
    assert browser.evaluate("[...document.images].every((image) => image.naturalWidth > 0)")
    body = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    light = sum(int(number) for number in re.findall(r"\d+", body)[:3]) > 3 * 128
    assert light != dark


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_the_front_page_has_a_card_for_each_reader_and_scrolls_nowhere_sideways(browser, site, width):
    browser.open(site / "index.html", width=width)
    rows = re.findall(r"^\| .* \| \[", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert browser.evaluate("document.querySelectorAll('.card').length") == len(rows) > 12
    assert browser.evaluate("document.querySelectorAll('.card a').length") >= len(rows)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(
        "[...document.querySelectorAll('pre')].every((code) => code.scrollWidth <= code.clientWidth)"
    )


def test_the_search_finds_a_term_and_leads_to_its_page(browser, site):
    browser.open(site / "index.html")
    browser.evaluate("document.querySelector('.sidebar-search').value = 'verification'")
    browser.evaluate("setTimeout(() => document.querySelector('.sidebar-search-container').submit()) && 0")
    results = "[...document.querySelectorAll('#search-results li a')].map((link) => link.href)"  # they come one by one
    found = wait(browser, f"{results}.find((address) => address.includes('how-to/verification.html'))")
    assert path_of(found) == site / "how-to" / "verification.html"
    browser.open(site / "how-to" / "verification.html")
    assert "Verify" in browser.evaluate("document.querySelector('h1').textContent")


def test_the_links_of_the_tutorials_lead_to_pages(browser, site):
    browser.open(site / "index.html")
    browser.evaluate("setTimeout(() => document.querySelector('article a[href=\"tutorial/index.html\"]').click()) && 0")
    heading = "location.pathname.endsWith('tutorial/index.html') && document.querySelector('h1')?.textContent"
    assert wait(browser, heading).startswith("Tutorials")
    links = browser.evaluate("[...document.querySelectorAll('article a[href]')].map((link) => link.href)")
    targets = {path_of(address) for address in links}
    assert len(targets) >= 4
    assert [path for path in targets if not path.exists()] == []
    for path in targets:
        if path.suffix == ".html" and path.parent.name != "tutorial":
            assert browser.open(path).evaluate("document.querySelector('article').textContent.length") > 500
            assert browser.complaints == []
