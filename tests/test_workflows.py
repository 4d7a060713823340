"""The workflows are valid YAML, ask for no more permissions than they need, and call existing commands."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import click
import pytest

from coalmine.cli.main import app

ROOT = Path(__file__).parents[1]
TEMPLATE, OWN = ROOT / "examples" / "ci" / "privacy.yml", ROOT / ".github" / "workflows" / "ci.yml"
SITE, ADVISORIES = OWN.with_name("docs.yml"), OWN.with_name("advisories.yml")
yaml = pytest.importorskip("yaml", reason="PyYAML comes with flwr, which is not installed")
if not OWN.exists():
    pytest.skip("the workflows are in the repository, not in the package", allow_module_level=True)


def steps(path):
    workflow = yaml.safe_load(path.read_text())
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def coalmine_commands(text):
    """Every coalmine command line in a text, split into words; a backslash continues a line."""
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = [line.strip() for line in joined.splitlines() if line.strip().startswith("coalmine ")]
    return [shlex.split(re.split(r"\|\|", line)[0], comments=True) for line in lines]


def parse(words):
    """Parse the words with the command's own parser; click raises an error for unknown commands and options."""
    _, name, *arguments = words
    command = app.get_command(click.Context(app), name)
    assert command is not None, f"coalmine has no command {name}"
    return command.make_context(name, list(arguments), resilient_parsing=False)


@pytest.mark.parametrize("path", [TEMPLATE, OWN, ADVISORIES])
def test_workflows_only_read_the_repository(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert "secrets." not in path.read_text()
    assert "permissions" not in str(workflow["jobs"])
    checkouts = [step for step in steps(path) if step.get("uses", "").startswith("actions/checkout@")]
    assert [step["with"]["persist-credentials"] for step in checkouts] == [False] * len(workflow["jobs"])
    assert all(job["timeout-minutes"] <= 90 for job in workflow["jobs"].values())
    assert workflow[True]  # YAML 1.1 reads "on" as true


def test_the_site_is_published_by_a_job_that_may_do_nothing_else():
    workflow = yaml.safe_load(SITE.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert "secrets." not in SITE.read_text()
    assert workflow[True] == {"push": {"branches": ["main"]}, "workflow_dispatch": None}
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert "permissions" not in build
    assert build["steps"][0]["with"]["persist-credentials"] is False
    assert [step["run"] for step in build["steps"] if "run" in step] == ["make docs EXTRAS=all"]
    assert build["steps"][-1]["with"]["path"] == "build/docs"
    assert publish["needs"] == "build"
    assert publish["permissions"] == {"pages": "write", "id-token": "write"}
    assert [step["uses"].partition("@")[0] for step in publish["steps"]] == ["actions/deploy-pages"]


def test_our_workflow_runs_the_ci_script():
    commands = [step["run"] for step in steps(OWN) if "run" in step]
    assert commands == [".ci/run", "make ${{ matrix.target }}"]
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o100
    assert "python:3.11" in yaml.safe_load(OWN.read_text())["jobs"]["ci"]["container"]


def test_advisories_are_looked_up_on_a_schedule_and_stop_no_change():
    workflow = yaml.safe_load(ADVISORIES.read_text())
    assert set(workflow[True]) == {"schedule", "workflow_dispatch"}
    (command,) = [step["run"] for step in steps(ADVISORIES) if "run" in step]
    (file,) = re.findall(r"--requirement (\S+)", command)
    pins = [line.partition("#")[0].strip() for line in (ROOT / file).read_text().splitlines()]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins if pin)  # as --disable-pip needs


def test_every_hook_runs_what_make_check_runs():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    recipe = (
        (ROOT / "Makefile").read_text().partition("\ncheck:")[2].partition("\n\n")[0].replace("$(BIN)", ".venv/bin")
    )
    assert {hook["entry"] for hook in hooks} <= {line.removesuffix(" .").strip() for line in recipe.splitlines()}


def test_every_python_is_tested_and_every_target_exists():
    jobs = yaml.safe_load(OWN.read_text())["jobs"]
    cases = jobs["versions"]["strategy"]["matrix"]["include"]
    pythons = {case["python"] for case in cases} | {jobs["ci"]["container"].partition(":")[2].partition("-")[0]}
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    assert pythons == {line.rpartition(" ")[2] for line in classifiers if line.startswith("Programming Language")}
    for case in cases:
        assert re.search(rf"^([\w -]+ )?{case['target']}( [\w -]+)?:", (ROOT / "Makefile").read_text(), flags=re.M)


def test_ci_runs_what_make_test_leaves_out():
    """The two selections of .ci/run have every test that is no study, each once."""
    recipes = dict(re.findall(r'^([\w-]+):.*\n\t\$\(PYTEST\) -m "(.*)"$', (ROOT / "Makefile").read_text(), flags=re.M))
    assert recipes == {"test": "not full and not slow", "test-full": "full and not slow", "test-all": "not slow"}
    script = (ROOT / ".ci" / "run").read_text()
    assert "export COALMINE_FORBID_SKIPS=1" in script
    assert re.search(r'^for target in test test-full; do.*\n    make "\$target"', script, flags=re.M)


def test_the_template_uploads_the_report_that_its_check_writes():
    (check,) = [words for step in steps(TEMPLATE) for words in coalmine_commands(step.get("run", ""))]
    (upload,) = [step for step in steps(TEMPLATE) if step.get("uses", "").startswith("actions/upload-artifact@")]
    assert upload["with"]["path"] == check[check.index("--junit") + 1]
    assert upload["if"] == "${{ !cancelled() }}"


@pytest.mark.parametrize("path", [TEMPLATE, TEMPLATE.with_name("README.md")])
def test_every_command_and_option_exists(path):
    found = coalmine_commands(path.read_text())
    assert found
    for words in found:
        parse(words)
    with pytest.raises(click.UsageError, match="No such option"):
        parse([*found[0], "--no-such-option"])


def test_the_readme_names_every_exit_code_of_a_verdict():
    codes = re.findall(r"^\| (\d) \| (\w+)", TEMPLATE.with_name("README.md").read_text(), flags=re.M)
    assert codes == [("0", "PASS"), ("1", "VIOLATION"), ("2", "bad"), ("3", "UNDERPOWERED")]
    page = (ROOT / "docs" / "reference" / "exit-codes.md").read_text()
    for code, word in (("1", "VIOLATION"), ("2", "bad input"), ("3", "UNDERPOWERED")):
        assert re.search(rf"^\| {code} \| {word}", page, flags=re.M)


def test_the_action_and_the_hook_run_commands_that_exist():
    """The action passes its inputs through the environment, so none is read as shell."""
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    steps = action["runs"]["steps"]
    script = "\n".join(step["run"] for step in steps)
    assert "${{" not in script
    used = {name for step in steps for name in re.findall(r"inputs\.(\w+)", str(step["env"]))}
    assert used == set(action["inputs"])
    for inputs in ({"FUNCTION": "a:b", "OPTIONS": "--aggregate mean"}, {"RUNS": "runs/a runs/b"}):
        given = {
            "EPSILON": "3",
            "DELTA": "1e-5",
            "DIM": "9",
            "JUNIT": "x.xml",
            "FUNCTION": "",
            "OPTIONS": "",
            "RUNS": "",
        }
        shell = "coalmine() { printf '%s\\n' coalmine \"$@\"; }\n" + steps[-1]["run"]
        done = subprocess.run(["bash", "-euc", shell], env=given | inputs, capture_output=True, text=True, check=True)
        parse(done.stdout.splitlines())
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    page = (ROOT / "docs" / "how-to" / "ci.md").read_text()
    example = next(block for block in re.findall(r"^```yaml\n(.*?)^```", page, flags=re.M | re.S) if "hooks" in block)
    arguments = yaml.safe_load(example)[0]["hooks"][0]
    assert arguments["id"] == hook["id"]
    parse([*shlex.split(hook["entry"]), *map(str, arguments["args"])])
    step = yaml.safe_load(
        next(block for block in re.findall(r"^```yaml\n(.*?)^```", page, flags=re.M | re.S) if "with:" in block)
    )
    assert set(step[0]["with"]) <= set(action["inputs"])
