"""A privacy statement contains everything that the run and the operator state, and nothing else."""

import json
import os
import re
import stat
from dataclasses import replace
from pathlib import Path

import jsonschema
import msgspec
import pytest
import yaml
from chromium import Chromium
from runs import HOSTILE, make_run, make_sampled_run
from statements import (
    EVERY_ITEM,
    SCHEMA,
    complete,
    leaves,
    number_forms,
    numbers_in,
    numbers_of,
    percent_forms,
    posterior,
    values,
    visible_text,
)

from coalmine.cli import main as cli
from coalmine.report.statement import read_statement
from coalmine.report.statement_check import check_statement
from coalmine.report.statement_facts import NO_FACTS, Facts, facts_from_dict, read_facts, template
from coalmine.report.statement_formats import statement_text
from coalmine.version import __version__

FORMATS = ("md", "html", "json", "yaml", "card")
DEPLOYMENT = {
    "name": "Keyboard model",
    "curators": ["Example Ltd"],
    "description": "Suggests the next word.",
    "intended_use": "Keyboards.",
    "region": "European Union",
    "publication_date": "2026-11-16",
}
FACTS = {
    "guarantee": {"unit": "client", "unit_details": "Everything that one person typed.", "tuning": "On public data."},
    "mechanism": {"clip_norm": 0.75, "library": "numpy"},
    "deployment": DEPLOYMENT,
}
FIXED = {
    1,
    2,
    3,
    4,
    5,
    10,
    50,
    95,
    100,
    10_000,
    0.25,
}  # numbers of parts, priors, the crowds, levels in fixed sentences
REGISTRY = Path(os.environ.get("COALMINE_DATA_DIR", "missing")).parent / "registry" / "deployments-schema.yaml"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of each kind: a claim about known rounds, an amplified one, a refuted one, and none."""
    home = tmp_path_factory.mktemp("runs")
    return {
        "loop": make_run(home / "loop", canaries=60),
        "sampled": make_sampled_run(home / "sampled", rounds=20),
        "refuted": make_sampled_run(home / "refuted", rounds=20, rate=0.3),
        "no claim": make_run(home / "none", canaries=60, claim=False),
        "hostile": make_run(home / "hostile", canaries=60, more={"title": HOSTILE["script"] + HOSTILE["control"]}),
    }


@pytest.fixture
def command(capsys):
    def call(*arguments):
        with pytest.raises(SystemExit) as stop:
            cli.main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        return stop.value.code, output.out, output.err

    return call


def stored(run):
    return json.loads((run / "result.json").read_text())


def facts_file(path, text):
    path.write_text(text)
    return path


# Items


@pytest.mark.parametrize("name", ["loop", "sampled", "refuted", "no claim", "hostile"])
def test_every_item_is_filled_in_or_not_stated(runs, name):
    complete(runs[name])
    complete(runs[name], facts_from_dict({"guarantee": {"unit": "document", "tuning": "None."}}))


def test_a_claim_about_known_rounds_is_stated_as_it_was_made(runs):
    statement, result = complete(runs["loop"]), stored(runs["loop"])
    assert values(statement, "guarantee.epsilon", "guarantee.delta", "mechanism.noise_multiplier") == {
        "guarantee.epsilon": result["claimed_epsilon"],
        "guarantee.delta": 1e-6,
        "mechanism.noise_multiplier": 1.0,
    }
    assert statement.items["guarantee.mu"].value == pytest.approx(1.0, rel=1e-9)  # one round at noise multiplier 1
    assert result["claim_mu"] == statement.items["guarantee.mu"].value
    assert statement.items["accounting.sampling"].value == "none"
    assert statement.items["accounting.noise_level"].basis == "observed"
    assert statement.items["accounting.clipping"].basis == "not stated"
    top = result["headline"]
    assert statement.items["evidence.measured_epsilon"].value == top["epsilon"]
    assert statement.items["evidence.interval"].value == top["interval"]
    assert statement.items["evidence.verdict"].value == result["verdict"] == "PASS"
    assert statement.items["evidence.power"].value == result["facts"]["power"]


def test_an_amplified_claim_is_stated_with_its_scheme_and_legs(runs):
    statement, result = complete(runs["sampled"]), stored(runs["sampled"])
    assert statement.items["accounting.sampling"].text == "Poisson sampling with probability 0.1 in 20 rounds"
    assert statement.items["accounting.sampling"].basis == "observed"
    assert statement.items["guarantee.adjacency"].value == "add/remove"
    assert statement.items["guarantee.mu"].text.startswith("does not apply")
    assert {leg: statement.items[f"evidence.{leg}_leg"].value for leg in result["legs"]} == {
        leg: verdict["verdict"] for leg, verdict in result["legs"].items()
    }
    for leg, verdict in result["legs"].items():
        assert verdict["reason"] in statement.items[f"evidence.{leg}_leg"].text


def test_a_contradicted_assumption_is_marked_as_contradicted(runs):
    statement = complete(runs["refuted"])
    assert statement.items["evidence.verdict"].value == "VIOLATION"
    assert "Not met: " in statement.items["accounting.sampling"].text
    assert statement.items["evidence.power"].text == "does not apply: the claim is refuted"
    assert not statement.passed_scope


def test_missing_noise_contradicts_the_size_of_the_noise(tmp_path):
    run = make_run(tmp_path / "run", canaries=60)
    result = stored(run)
    result["gauges"]["length"]["statistics"]["pooled residual"] |= {"status": "low", "flagged": [1]}
    (run / "result.json").write_text(json.dumps(result))
    item = read_statement(run).items["accounting.noise_level"]
    assert (item.basis, item.value) == ("observed", False)
    assert "Not met: these gauges are outside their limits: pooled residual" in item.text


def test_without_a_claim_nothing_is_guaranteed(runs):
    statement = complete(runs["no claim"])
    assert statement.summary == ["No ε is guaranteed.", "The audit has no verdict."]
    missing = {item.key for item in statement.not_stated}
    assert {f"guarantee.{name}" for name in ("variant", "epsilon", "delta", "mu", "releases")} <= missing
    assert "Going by the measured ε, which is an estimate" in statement.guess_sentence
    stated = complete(runs["no claim"], facts_from_dict({"guarantee": {"epsilon": 3.0, "delta": 1e-6}}))
    assert stated.items["guarantee.epsilon"].basis == "stated by the operator"


def test_a_client_who_takes_part_more_often_is_named_at_the_top(tmp_path):
    more = {"client_rounds": 4, "client_epsilon": 11.5, "client_exposure": "average", "level": "client"}
    run = make_run(tmp_path / "run", canaries=60, more=more)
    result = stored(run) | {"claim_participations": 1}
    (run / "result.json").write_text(json.dumps(result))
    lines, item = read_statement(run).summary, read_statement(run).items["accounting.participations"]
    assert item.basis == "observed"
    assert "Not met: A client takes part in about 4 rounds" in item.text
    assert lines[1] == "A client takes part in about 4 rounds of this run, for which the analytical ε is 11.5."
    record = statement_text(read_statement(run, facts_from_dict({"deployment": DEPLOYMENT})), "yaml")
    assert (
        "the analytical ε is 11.5" in yaml.safe_load(record)["deployment"]["privacy_loss"]["privacy_parameters_details"]
    )


@pytest.mark.parametrize("name", ["loop", "sampled", "refuted", "no claim"])
@pytest.mark.parametrize("kind", FORMATS)
def test_no_number_appears_that_the_result_does_not_hold(runs, name, kind):
    result, facts = stored(runs[name]), facts_from_dict(FACTS)
    sources = numbers_of(result) | numbers_of(facts.to_dict())
    allowed = FIXED | {form for value in sources for form in number_forms(value)}
    allowed |= {form for value in sources if 0 <= value <= 1 for form in percent_forms(value)}
    epsilons = [value for value in (result["claimed_epsilon"], result["headline"]["epsilon"]) if value]
    posteriors = {posterior(prior, epsilon) for prior in (0.01, 0.1, 0.5) for epsilon in epsilons}
    allowed |= {form for share in posteriors for form in percent_forms(share)}
    text = statement_text(read_statement(runs[name], facts), kind)
    if kind == "json":
        record = json.loads(text)
        exact = numbers_of({part: record.pop(part) for part in ("guarantee", "accounting", "mechanism")})
        assert {number for number in exact if number not in allowed} == set()
        for row in record["meaning"].pop("epsilons"):
            for prior, share in row["suspicion_becomes"].items():
                assert share == pytest.approx(posterior(float(prior), row["epsilon"]), rel=1e-9)
        text = json.dumps(record, ensure_ascii=False)
    if kind == "html":
        text = visible_text(text)
    unexpected = [number for number in numbers_in(text) if number not in allowed]
    crowd = {number for number in unexpected if kind == "html" and f"up to {number:.0f}" in text}
    assert set(unexpected) == crowd
    assert len(numbers_in(text)) > (5 if kind == "yaml" else 20)


def test_numbers_in_reads_every_number_format():
    assert numbers_in("ε = 4.89 and δ = 8.2 · 10⁻⁷ in 1,500 rounds") == [4.89, 8.2e-7, 1500.0]
    assert 4.88 not in set(number_forms(4.8926))


def test_invalid_pipeline_entries_are_ignored(tmp_path):
    odd = {
        "unit": "martian",
        "clip_norm": "<b>",
        "library": 7,
        "generator": "",
        "trust_model": ["central"],
        "clipping": "x",
    }
    statement = complete(make_run(tmp_path / "run", canaries=60, more={"pipeline": odd | {"precision": "float32"}}))
    for key in ("guarantee.unit", "guarantee.trust_model", "mechanism.clip_norm", "mechanism.library"):
        assert not statement.items[key].stated
    assert statement.items["mechanism.precision"].value == "float32"


# Facts


def test_the_template_names_every_fact_and_is_a_facts_file(tmp_path):
    filled = re.sub(r"^# (?=\w+ = )", "", template(), flags=re.MULTILINE)
    facts = read_facts(facts_file(tmp_path / "facts.toml", filled))
    record = facts.to_dict()
    parts = {part.name: part.type for part in msgspec.structs.fields(Facts)}
    for name, kind in parts.items():
        assert set(record[name]) == {part.name for part in msgspec.structs.fields(kind)}
    assert read_facts(facts_file(tmp_path / "empty.toml", template())) == NO_FACTS
    assert facts_from_dict(record) == facts


def test_the_template_option_prints_only_the_template(command, tmp_path):
    assert command("statement", "--template") == (0, template(), "")
    assert command("statement", tmp_path, "--template")[0] == 2
    assert command("statement")[0] == 2


BAD_FACTS = {
    "[guarantee]\nepsilom = 3.0": "'epsilom' is not a fact",
    "[garantee]\nepsilon = 3.0": "'garantee' is not a fact",
    "[guarantee]\nepsilon = 'three'": "guarantee.epsilon must be a number above 0 and at most 1e+100, got 'three'",
    "[guarantee]\nepsilon = nan": "must be a finite number, got nan",
    "[guarantee]\nepsilon = inf": "must be a finite number, got inf",
    "[guarantee]\nepsilon = -1.0": "guarantee.epsilon must be a number above 0 and at most 1e+100, got -1.0",
    "[guarantee]\nepsilon = true": "guarantee.epsilon must be a number above 0 and at most 1e+100, got True",
    "[guarantee]\ndelta = 1.0": "guarantee.delta must be",
    "[guarantee]\nunit = 'household'": 'guarantee.unit must be one of "client", "document", "example"',
    "[guarantee]\ntuning = ''": "guarantee.tuning must be",
    '[guarantee]\ntuning = "a\\u0007b"': "hidden character",
    '[guarantee]\ntuning = "a\\u202Eb"': "hidden character",
    "[accounting]\nparticipations = 0": "must be a whole number of at least 1 and at most 1,000,000,000,000, got 0",
    "[accounting]\nparticipations = 1.5": "must be a whole number of at least 1 and at most 1,000,000,000,000, got 1.5",
    "[deployment]\npublication_date = 'yesterday'": "deployment.publication_date must be",
    "[deployment]\ncurators = 'Example Ltd'": "deployment.curators must be a list",
    "[deployment]\nurl_slug = '../x'": "deployment.url_slug must be",
    "guarantee = 3": "guarantee must be a table",
    "[guarantee]\nepsilon = 1\nepsilon = 2": "must be TOML",
    "epsilon = " + "[" * 5_000: "must be TOML",
    "[guarantee]\nepsilon = " + "9" * 5_000: "must be TOML",
    "[guarantee]\nepsilon = " + "9" * 400: "guarantee.epsilon must be a number above 0 and at most 1e+100, got 9999",
    "[guarantee]\ntuning = '" + "x" * 5_000 + "'": "guarantee.tuning must be",
    "# " + "x" * 300_000: "at most 262,144 bytes",
}


@pytest.mark.parametrize("text", BAD_FACTS, ids=lambda text: text[:40])
def test_invalid_facts_are_rejected_with_one_line(runs, command, tmp_path, text):
    file = facts_file(tmp_path / "facts.toml", text)
    code, out, err = command("statement", runs["loop"], "--facts", file, "--out", tmp_path / "out.md")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert BAD_FACTS[text] in err
    assert not (tmp_path / "out.md").exists()


def test_unreadable_facts_files_are_rejected(runs, command, tmp_path):
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    os.mkfifo(tmp_path / "pipe.toml")
    assert stat.S_ISFIFO((tmp_path / "pipe.toml").stat().st_mode)
    for name, message in [("bytes.toml", "UTF-8"), ("pipe.toml", "ordinary file"), ("none.toml", "No such file")]:
        code, _, err = command("statement", runs["loop"], "--facts", tmp_path / name)
        assert (code, err.count("\n"), message in err) == (2, 1, True)


CONTRADICTIONS = [
    ("loop", {"guarantee": {"epsilon": 2.0}}, "guarantee.epsilon is 2.0 in the facts file and 4.88"),
    ("loop", {"guarantee": {"delta": 1e-5}}, "guarantee.delta"),
    ("no claim", {"guarantee": {"delta": 1e-5}}, "guarantee.delta"),
    ("loop", {"guarantee": {"variant": "pure DP"}}, "guarantee.variant"),
    ("loop", {"guarantee": {"adjacency": "replace"}}, "guarantee.adjacency"),
    ("sampled", {"guarantee": {"adjacency": "zero-out"}}, "guarantee.adjacency"),
    ("loop", {"guarantee": {"releases": "final model"}}, "guarantee.releases"),
    ("loop", {"accounting": {"sampling": "poisson"}}, "accounting.sampling"),
    ("sampled", {"accounting": {"sampling": "shuffled"}}, "accounting.sampling"),
    ("sampled", {"accounting": {"participations": 3}}, "accounting.participations"),
    ("loop", {"mechanism": {"noise_multiplier": 2.0}}, "mechanism.noise_multiplier"),
]


@pytest.mark.parametrize(("name", "facts", "message"), CONTRADICTIONS)
def test_a_fact_that_contradicts_the_run_is_an_error(runs, name, facts, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_statement(runs[name], facts_from_dict(facts))


def test_a_contradiction_is_one_line_and_exit_code_2(runs, command, tmp_path):
    file = facts_file(tmp_path / "facts.toml", "[guarantee]\nepsilon = 2.0\n")
    code, out, err = command("statement", runs["loop"], "--facts", file)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "correct the one that is wrong, or leave it out of the facts file" in err


def test_a_rounded_fact_is_accepted_and_the_runs_number_is_stated(runs):
    statement = read_statement(runs["loop"], facts_from_dict({"guarantee": {"epsilon": 4.89, "adjacency": "zero-out"}}))
    assert statement.items["guarantee.epsilon"].value == stored(runs["loop"])["claimed_epsilon"]
    assert statement.items["guarantee.adjacency"].value == "zero-out"


def test_noise_that_implies_more_than_the_claim_is_a_contradiction(tmp_path):
    run = make_run(tmp_path / "run", canaries=60)
    result = stored(run)
    del result["noise_multiplier"]
    (run / "result.json").write_text(json.dumps(result | {"claim_participations": 1}))
    assert read_statement(run, facts_from_dict({"mechanism": {"noise_multiplier": 1.0}}))
    with pytest.raises(ValueError, match=r"gives an epsilon of 11 for 1 round, and the run claims 4\.88"):
        read_statement(run, facts_from_dict({"mechanism": {"noise_multiplier": 0.5}}))


# Formats


def test_a_run_that_is_not_finished_has_no_statement(command, runs, tmp_path):
    (tmp_path / "run" / "audit").mkdir(parents=True)
    assert "result.json is missing" in command("statement", tmp_path / "run")[2]
    assert command("statement", tmp_path / "nothing")[0] == 2
    code, _, err = command("statement", runs["loop"], "--out", runs["loop"] / "result.json")
    assert (code, "a file of the run itself" in err) == (2, True)


@pytest.mark.parametrize("kind", FORMATS)
def test_untrusted_text_is_escaped(runs, kind):
    marks = "</script><script>x()</script> | ` [a](javascript:x) \\ \" ' & : # - {{ 7 * 7 }}"
    facts = facts_from_dict({"guarantee": {"tuning": marks}, "deployment": DEPLOYMENT | {"name": marks}})
    text = statement_text(read_statement(runs["hostile"], facts), kind)
    assert "\x00" not in text
    assert "\x1b" not in text
    assert re.search(r"\{\{ 7 \\?\* 7 \}\}", text)
    if kind == "json":
        assert json.loads(text)["guarantee"]["tuning"]["value"] == marks
    else:
        assert "<script>x" not in text
    if kind in ("md", "card"):
        rows = [line for line in text.splitlines() if line.startswith("| data used for tuning")]
        assert len(re.findall(r"(?<!\\)\|", rows[0])) == 4
    if kind == "yaml":
        assert yaml.safe_load(text)["deployment"]["basic"]["name"].startswith("&lt;/script&gt;")


def registry_rules(record):
    """Check the registry's rules that a record could break, independently of its schema."""
    assert set(record) == {"url_slug", "status", "tier", "deployment"}
    assert record["status"] == "Draft"
    assert record["tier"] in (1, 2, 3)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", record["deployment"]["basic"]["publication_date"])
    assert "not stated" not in list(leaves(record))
    assert all(leaf is not None for leaf in leaves(record))
    parameters = record["deployment"]["privacy_loss"].get("privacy_parameters", {})
    assert all(isinstance(value, float) for value in parameters.values())
    if REGISTRY.is_file():
        jsonschema.Draft7Validator(yaml.safe_load(REGISTRY.read_text())).validate(record)


@pytest.mark.parametrize("name", ["loop", "sampled", "refuted", "no claim", "hostile"])
def test_the_registry_record_follows_the_registrys_rules(runs, name):
    facts = facts_from_dict({"deployment": DEPLOYMENT})
    record = yaml.safe_load(statement_text(read_statement(runs[name], facts), "yaml"))
    registry_rules(record)
    assert record["tier"] == 1
    if name != "no claim":
        expected = {"epsilon": stored(runs[name])["claimed_epsilon"], "delta": stored(runs[name])["delta"]}
        assert record["deployment"]["privacy_loss"]["privacy_parameters"] == expected
    assert "Not stated: " in record["deployment"]["administrative"]["notes"]


def test_a_record_with_every_fact_reaches_the_third_tier(runs, tmp_path):
    filled = re.sub(r"^# (?=\w+ = )", "", template(), flags=re.MULTILINE)
    known = r"^(epsilon|delta|sampling|participations|noise_multiplier) = .*\n"  # by the run
    facts = read_facts(facts_file(tmp_path / "facts.toml", re.sub(known, "", filled, flags=re.MULTILINE)))
    record = yaml.safe_load(statement_text(read_statement(runs["sampled"], facts), "yaml"))
    registry_rules(record)
    assert (record["tier"], record["deployment"]["deployment_model"]["model_name"]) == (3, "Central")


def test_a_record_without_required_facts_is_rejected(runs, command):
    code, out, err = command("statement", runs["loop"], "--format", "yaml")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "the registry needs deployment.name, deployment.curators" in err


def test_a_model_card_is_read_by_hugging_face(runs):
    import huggingface_hub as hub  # slow to import

    result = stored(runs["sampled"])
    read = hub.ModelCard(statement_text(read_statement(runs["sampled"], facts_from_dict(FACTS)), "card"))
    record = read.data.to_dict()
    assert record["tags"] == ["differential-privacy"]
    assert record["differential_privacy"]["epsilon"] == result["claimed_epsilon"]
    assert record["differential_privacy"]["delta"] == 1e-5
    assert record["differential_privacy"]["trust_model"] == "not stated"
    assert record["privacy_audit"]["measured_epsilon"] == result["headline"]["epsilon"]
    assert "## Privacy statement: Keyboard model" in read.text
    assert hub.ModelCard(str(read)).data.to_dict() == record


def test_a_text_browser_reads_every_item_in_order(runs):
    statement = read_statement(runs["sampled"], facts_from_dict(FACTS))
    text, place = visible_text(statement_text(statement, "html")), 0
    for item in statement.items.values():
        if item.key != "evidence.limits":
            place = text.index(f"{item.label} {' '.join(item.text.split())}", place)
    for line in statement.items["evidence.limits"].value:
        assert line in text
    assert "guessing: 50 of 100" in text


@pytest.mark.full
def test_the_page_fits_a_phone_and_fetches_nothing(runs, tmp_path):
    page = tmp_path / "statement.html"
    page.write_text(statement_text(read_statement(runs["hostile"], facts_from_dict(FACTS)), "html"))
    browser = Chromium()
    try:
        for width, dark in [(390, True), (1100, False)]:
            browser.open(page, width=width, dark=dark)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            assert browser.complaints == []
            assert browser.requests == [page.absolute().as_uri()]
        assert browser.pdf().startswith(b"%PDF")
    finally:
        browser.close()


# Verification


def check(run, path, facts=None):
    return {each.name: each.held for each in check_statement(run, path, facts)}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("name", ["loop", "refuted"])
def test_a_statement_verifies_only_against_its_own_run(runs, tmp_path, kind, name):
    facts, path = facts_from_dict(FACTS), tmp_path / "statement"
    path.write_text(statement_text(read_statement(runs[name], facts), kind))
    assert check(runs[name], path, facts) == {"statement": True, "facts": True}
    other = check_statement(runs["sampled"], path, facts)[0]
    assert other.held is False
    assert kind == "yaml" or "another run" in other.detail
    changed = facts_from_dict(FACTS | {"mechanism": {"clip_norm": 0.5}})  # the facts file was changed after
    assert check(runs[name], path, changed) == {"statement": False, "facts": False}
    assert check(runs[name], path)["facts"] is None
    assert True not in check(runs[name], path).values() or kind == "json"


def test_reformatting_does_not_change_a_statement(runs, tmp_path):
    statement = read_statement(runs["loop"])
    record = json.loads(statement_text(statement, "json"))
    (tmp_path / "a").write_text(json.dumps(record, sort_keys=True))
    (tmp_path / "b").write_bytes(statement_text(statement, "md").replace("\n", "\r\n").encode("utf-8-sig"))
    for name in "ab":
        assert check(runs["loop"], tmp_path / name) == {"statement": True, "facts": True}


def changed_leaves(value, path=()):
    """Every way to change one leaf, or to remove one name."""
    if isinstance(value, dict | list):
        places = list(value) if isinstance(value, dict) else range(len(value))
        for place in places:
            yield (*path, place), None
            yield from changed_leaves(value[place], (*path, place))
    elif isinstance(value, bool) or value is None:
        yield path, "x"
    else:
        yield path, value * 1.01 + 1 if isinstance(value, int | float) else value + "x"


FORGERIES = (
    (("guarantee", "epsilon", "value"), 1.0),
    (("guarantee", "delta", "value"), 1e-9),
    (("guarantee", "unit", "text"), "one client"),
    (("evidence", "verdict", "value"), "VIOLATION"),
    (("evidence", "noise_leg", "text"), "PASS"),
    (("not_stated", 0), None),
    (("coalmine_version",), "9"),
)


@pytest.mark.parametrize("name", ["loop", "sampled"])
def test_every_change_to_a_statement_in_json_is_detected(runs, tmp_path, name):
    text = statement_text(read_statement(runs[name]), "json")
    changes = list(changed_leaves(json.loads(text)))
    assert len(changes) > 300
    for path, new in [*changes[:: 7 if name == "loop" else 5], *FORGERIES]:
        record = json.loads(text)
        holder = record
        for place in path[:-1]:
            holder = holder[place]
        if new is None:
            del holder[path[-1]]
        else:
            holder[path[-1]] = new
        (tmp_path / "forged").write_text(json.dumps(record))
        assert check(runs[name], tmp_path / "forged")["statement"] is False, path


@pytest.mark.parametrize("kind", ["md", "html", "yaml", "card"])
def test_every_changed_or_removed_line_of_a_text_is_detected(runs, tmp_path, kind):
    facts = facts_from_dict(FACTS)
    lines = statement_text(read_statement(runs["sampled"], facts), kind).splitlines()
    places = [place for place, line in enumerate(lines) if line.strip()][2:]
    for place in places[:: max(1, len(places) // 25)]:
        for forged in (lines[:place] + lines[place + 1 :], [*lines[:place], lines[place] + "1", *lines[place + 1 :]]):
            (tmp_path / "forged").write_text("\n".join(forged))
            checks = check_statement(runs["sampled"], tmp_path / "forged", facts)
            assert checks[0].held is not True, lines[place]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ε = 3.59", "ε = 1.59"),
        ("10⁻⁵", "10⁻⁹"),
        ("PASS: ", "VIOLATION: "),
        ("| weights | not stated", "| weights | equal"),
    ],
)
def test_the_command_detects_a_changed_number_verdict_or_gap(runs, command, tmp_path, old, new):
    text = statement_text(read_statement(runs["sampled"]), "md")
    assert old in text
    (tmp_path / "true.md").write_text(text)
    (tmp_path / "forged.md").write_text(text.replace(old, new))
    code, out, _ = command("verify", runs["sampled"], "--statement", tmp_path / "true.md")
    assert code == 3  # the run itself was not verified
    assert re.search(r"^statement\s+holds", out, re.MULTILINE)
    code, out, _ = command("verify", runs["sampled"], "--statement", tmp_path / "forged.md")
    assert code == 1
    assert re.search(r"^statement\s+DOES NOT HOLD", out, re.MULTILINE)


def test_a_gap_removed_from_the_list_is_detected(runs, tmp_path):
    text = statement_text(read_statement(runs["sampled"]), "md")
    (tmp_path / "forged.md").write_text(text.replace("- weights (accounting)\n", ""))
    assert check(runs["sampled"], tmp_path / "forged.md")["statement"] is False


def test_a_statement_and_its_run_are_verified_together(runs, command, tmp_path):
    (tmp_path / "seed").write_bytes(b"tests only\0")
    (tmp_path / "statement.json").write_text(statement_text(read_statement(runs["loop"]), "json"))
    arguments = ("--seed-file", tmp_path / "seed", "--statement", tmp_path / "statement.json")
    code, out, _ = command("verify", runs["loop"], *arguments)
    assert "DOES NOT HOLD" not in out
    assert re.search(r"^statement\s+holds", out, re.MULTILINE)
    assert code == 3
    result = stored(runs["loop"])
    forged = tmp_path / "forged"
    forged.mkdir()
    (forged / "audit").symlink_to(runs["loop"] / "audit")
    (forged / "result.json").write_text(json.dumps(result | {"claimed_epsilon": 1.0}))
    (tmp_path / "statement.json").write_text(statement_text(read_statement(forged), "json"))
    code, out, _ = command("verify", forged, *arguments)
    assert code == 1  # a statement of a forged result follows from it, and the run itself does not hold
    assert re.search(r"^statement\s+holds", out, re.MULTILINE)


@pytest.mark.parametrize(
    "text", ["", "hello", "{", "[]", '{"schema_version": 1, "schema_version": 1}', '{"a": NaN}', "[" * 100_000]
)
def test_a_file_that_is_not_a_statement_is_rejected(runs, command, tmp_path, text):
    (tmp_path / "file").write_text(text)
    code, out, err = command("verify", runs["loop"], "--statement", tmp_path / "file")
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_verify_needs_a_seed_or_a_statement(runs, command):
    assert command("verify", runs["loop"])[0] == 2
    assert command("verify", runs["loop"], "--facts", "facts.toml")[0] == 2


def test_a_statement_names_the_version_that_wrote_it(runs):
    assert json.loads(statement_text(read_statement(runs["loop"]), "json"))["coalmine_version"] == __version__
    assert set(EVERY_ITEM) == {key for key in EVERY_ITEM if key.partition(".")[0] in SCHEMA["properties"]}


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        ("PASS", "found nothing that speaks against the promise"),
        ("VIOLATION", "more is given away: nobody should rely on the promise"),
        ("UNDERPOWERED", "could neither confirm nor refute the promise"),
    ],
)
def test_the_first_paragraph_is_three_sentences_without_a_term_to_look_up(outcome, said):
    golden = Path(__file__).parents[1] / "golden" / "reference"
    statement = read_statement(golden / "simulated-clients")
    text = replace(statement, outcome=outcome).for_signers
    assert len(re.findall(r"[.](?: |$)", text)) == 3
    assert said in text
    assert not re.search(r"[εδμ]|epsilon|delta|rung|gauge|canar|noise|clip|amplif|known-", text)
    assert statement_text(statement, "md").splitlines()[2].startswith("The promise about this model is that somebody")
