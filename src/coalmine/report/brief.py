"""A result in at most ten lines: verdict, claim, ε, what was checked and what not, what to do, where the report is."""

import math
import re
import shlex
import textwrap
from collections.abc import Iterator

from coalmine.argument_checks import one_line, printable
from coalmine.evidence.gaussian_bound import FINAL_RUNGS
from coalmine.evidence.unknown_round import RUNG as UNKNOWN_ROUND
from coalmine.known_faults import likely_faults
from coalmine.report.table_rows import TableRow, top_row
from coalmine.result.audit_result import AuditResult
from coalmine.result.trainer_section import TrainerSection
from coalmine.result.words import (
    IN_STEPS,
    Words,
    format_bound,
    format_measured,
    format_number,
    format_rounds,
    short_power,
)
from coalmine.verdict.claim import ADD_OR_REMOVE, REPLACE, ZERO_OUT
from coalmine.verdict.coverage import AuditedItem
from coalmine.verdict.findings.amplified import AccountedAboveClaim, OtherSampler, SamplerAboveClaim
from coalmine.verdict.findings.finding import Doubt
from coalmine.verdict.findings.missing import NothingClaimed, PipelineDiffers
from coalmine.verdict.findings.noise import LessThanStated, LittleNoise, StatedTooLittle
from coalmine.verdict.findings.records import RecordsAboveClaim
from coalmine.verdict.findings.rows import RowAboveClaim
from coalmine.verdict.outcome import PASS, VIOLATION
from coalmine.verdict.verdict import Verdict

MOST_LINES, WIDTH = 10, 100
MOST_FAULTS = 2
GLUED = re.compile(r"(?<=[ε≥≤…]) (?=[\d≥≤∞])| (?=[%…])")
MOST_WRAPPED = 2  # lines of one answer
FIRST_TO_WRAP = (
    "why",
    "next",
    "claim",
    "measured",
    "not checked",
    "checked",
    "more",
    "lower bound",
    "outputs",
    "accuracy",
    "views",
    "canaries",
)
INDENT = " " * 15  # below the labels
ATTACKERS = {
    "final": "an attacker who sees only the final model",
    "final-update": "an attacker who sees the model before and after training",
    "all-iterates": "an attacker who sees the model after each round",
    "unknown-round": "an attacker who cannot see which clients take part",
    "known-round": "an attacker who sees which clients take part",
    "known-others": "an attacker who knows everything but this client",
}
ITEMS = {  # an audited item in words of its own
    "noise level": "noise level",
    "noise law": "noise distribution",
    "clipping": "clipping",
    "weights": "weighting",
    "tensors": "single layers",
    "sampler": "sampling",
    "participations": "participation",
    "others": "others' sum",
    "rows": "single clients",
    "records": "outputs",
}
KEEP = "Keep this report with the model."
NOISE, EACH_LAYER = "noise", "noise in every layer"  # level and distribution; and each layer by itself
CHANGED = {ADD_OR_REMOVE: "added or removed", ZERO_OUT: "zeroed out", REPLACE: "replaced"}  # what neighbours differ in
CLAIM_FIRST = "State the ε before training, for example claim=3.0: without a claim nothing can pass."
LATE = ", stated after training: nobody can tell whether it was fitted to the result"


def brief(result: AuditResult, subject: str = "the run") -> str:
    """The result in at most ten lines of a hundred characters, in words of the user. `subject` is what was audited."""
    words = Words.of(result)
    lines = _wrapped(words.say(headline(result, subject)), first="", rest="  ", most=2)
    texts = {label: words.say(one_line(text)) for label, text in answers(result)}
    needed = {label: min(len(_wrapped(text, first=INDENT, rest=INDENT)), MOST_WRAPPED) for label, text in texts.items()}
    for dispensable in ("canaries", "accuracy"):
        if len(lines) + sum(needed[label] for label in texts) > MOST_LINES:
            texts.pop(dispensable, None)
    left = MOST_LINES - len(lines) - len(texts)
    longest = dict.fromkeys(texts, 1)
    for label in sorted(longest, key=FIRST_TO_WRAP.index):
        longest[label] += min(needed[label] - 1, left)
        left -= longest[label] - 1
    for label, text in texts.items():
        lines += _wrapped(text, first=f"  {label:<13}", rest=INDENT, most=longest[label])
    return "\n".join(lines)


def headline(result: AuditResult, subject: str = "the run") -> str:
    """The verdict in one sentence."""
    verdict, claim = result.verdict, result.claim
    if verdict is not None and isinstance(verdict.finding, LessThanStated):
        return f"VIOLATION: {subject} has less noise than its rounds state; nothing was claimed"
    if verdict is None or claim is None:
        return f"NO VERDICT: nothing was claimed for {subject}"
    epsilon = format_number(claim.epsilon, 4)
    terms = f"at δ {short_power(result.settings.delta)} for one client"
    changed = f", {CHANGED[claim.stated_adjacency]}" if claim.stated_adjacency else ""
    if verdict.outcome == VIOLATION and claim.stated_adjacency != REPLACE:
        changed = ""  # nothing is promised, and the line is long
    if verdict.outcome == PASS:
        return f"PASS: {subject} keeps ε ≤ {epsilon} {terms}{changed}"
    if verdict.outcome == VIOLATION:
        return f"VIOLATION: {subject} gives away more than the claimed ε = {epsilon} {terms}{changed}"
    unconfirmed = "nothing confirms it either"
    if isinstance(verdict.finding, PipelineDiffers):
        unconfirmed = f"the pipeline differs: {ITEMS.get(verdict.finding.item, verdict.finding.item)}"
    return f"UNDERPOWERED: nothing refutes ε ≤ {epsilon} {terms}, but {unconfirmed}"


def answers(result: AuditResult) -> Iterator[tuple[str, str]]:
    """The lines below the headline, each with its label."""
    verdict = result.verdict
    if result.claim is not None:
        yield "claim", claim_words(result)
    if verdict is not None and verdict.outcome != PASS and not isinstance(verdict.finding, NothingClaimed):
        yield "why", why(result, verdict)
    yield from _epsilons(top_row(result), claimed=_passed(result))
    if result.trainer.views:
        yield "views", "; ".join(f"{view.name}: {view.outcome or 'nothing claimed'}" for view in result.trainer.views)
    if result.records is not None:
        yield "outputs", result.records.brief()
    if result.trainer.accuracy is not None:
        yield "accuracy", accuracy_words(result.trainer)
    yield from _coverage(result)
    if canaries := canary_words(result):
        yield "canaries", canaries
    yield "next", next_step(result)
    yield "more", where(result)


def accuracy_words(trainer: TrainerSection) -> str:
    """The accuracy, beside that of the same model without DP and canaries if it was measured."""
    plain = trainer.accuracy_without_dp
    text = f"{trainer.accuracy:.1%} on examples held out from training"
    return text if plain is None else f"{text}; {plain:.1%} without DP and canaries"


def wrong_items(result: AuditResult) -> dict[str, str]:
    """The checked items that the verdict or a gauge contradicts, and what a printout says of each."""
    finding = None if result.verdict is None else result.verdict.finding
    refuted = finding.refuted if isinstance(finding, LessThanStated) else finding
    blamed = isinstance(refuted, LittleNoise) and not isinstance(refuted, StatedTooLittle)
    wrong = {"noise level": "in doubt"} if blamed else {}
    wrong |= {gauge.contradicts: "wrong" for gauge in result.gauges if gauge.status != "ok" and gauge.bars_pass}
    wrong |= {"sampler": "wrong"} if isinstance(finding, OtherSampler) else {}
    return wrong | {item.name: "wrong" for item in result.audited if item.status == "failed"}


def item_status(result: AuditResult, item: AuditedItem) -> str:
    """The status of an audited item, with the mark of a checked one that is wrong or in doubt."""
    mark = wrong_items(result).get(item.name) if item.status == "checked" else None
    return f"{item.status}: {mark}" if mark else item.status


def _coverage(result: AuditResult) -> Iterator[tuple[str, str]]:
    """The audited items in two lines: those that were looked at, with those that are wrong, and the others."""
    if not result.audited:
        return
    wrong = wrong_items(result)
    seen = [item.name for item in result.audited if item.status in ("checked", "failed")]
    left = ", ".join(
        ITEMS.get(item.name, item.name) for item in result.audited if item.is_open and item.name not in seen
    )
    assumed = {item.name: item.replayed.assumes for item in result.audited if item.replayed and item.replayed.assumes}
    marks = {name: text.removeprefix("the ") for name, text in assumed.items()} | wrong
    texts = {name: ITEMS.get(name, name) + (f" ({marks[name]})" if name in marks else "") for name in seen}
    if {"noise level", "noise law"} <= texts.keys():
        mark = max(wrong.get("noise level", ""), wrong.get("noise law", ""))
        layers = "tensors" in seen and wrong.get("tensors", "") in ("", mark)
        texts = {"noise": (f"{NOISE} ({mark})" if mark else EACH_LAYER if layers else NOISE)} | texts
        for name in ("noise level", "noise law", *["tensors"] * layers):
            del texts[name]
    yield "checked", ("" if left or wrong else "all items: ") + (", ".join(texts.values()) or "the canaries alone")
    if left:
        yield "not checked", left.replace("noise level, noise distribution", NOISE)


def canary_words(result: AuditResult) -> str:
    """What the canaries of a model that passed mean for whoever releases it."""
    if result.verdict is None or result.verdict.outcome != PASS or result.trainer.check is not None:
        return ""
    secret = " while the seed is secret" if result.trainer.name in IN_STEPS else ""  # rows carry canaries there
    return f"{result.settings.canaries:,}, which leave the guarantee of real clients as it is{secret}"


def claim_words(result: AuditResult) -> str:
    """How the claimed number was read."""
    claim = result.claim
    assert claim is not None
    if result.trainer.check is not None:
        text = f"one call, {result.trainer.check.adjacency} adjacency"
    elif claim.sampling is not None:
        text = f"whole training, counting {claim.sampling}"
    elif claim.bare:
        text = "whole training, not counting any sampling"
    elif claim.participations is None:
        text = "a client whose rounds the attacker knows"
    else:
        rounds = format_rounds(claim.participations)
        text = f"a client takes part in {rounds}, and the attacker knows in which"
    return text + LATE * bool(result.trainer.claimed_late)


def why(result: AuditResult, verdict: Verdict) -> str:
    """Why the verdict is not PASS."""
    finding = verdict.finding
    text = finding.plain()
    if isinstance(finding, Doubt) and len(text) > 2 * (WIDTH - len(INDENT)):
        text = finding.headline
    return text if result.alarm is None else f"{text}; alarm in round {result.alarm.round}"


def next_step(result: AuditResult) -> str:
    """The most urgent step, in one or two sentences."""
    verdict = result.verdict
    if verdict is None or isinstance(verdict.finding, NothingClaimed):
        return CLAIM_FIRST
    if verdict.outcome == PASS:
        open_items = any(item.is_open for item in result.audited)
        return KEEP if not open_items else f"{KEEP[:-1]}; quote the PASS with what was not checked."
    if check := result.trainer.check:
        fault = f"Likely: {check.likely_fault}. " if check.likely_fault else ""
        return fault if verdict.outcome == VIOLATION and fault else fault + verdict.finding.advice()
    explained = isinstance(
        verdict.finding, AccountedAboveClaim | SamplerAboveClaim | StatedTooLittle | RowAboveClaim | RecordsAboveClaim
    )
    if verdict.outcome == VIOLATION and not explained and (faults := likely_faults(result)):
        titles = "; or ".join(fault.title for fault in faults[:MOST_FAULTS])
        mend = f" {faults[0].fix}" if len(faults) == 1 else ""
        return f"Do not release this model. Likely: {titles}.{mend}"
    return ("Do not release this model. " if verdict.outcome == VIOLATION else "") + verdict.finding.advice()


def where(result: AuditResult) -> str:
    """Where the rest stands: the page, or how to make it."""
    if result.trainer.check is not None:
        check = result.trainer.check
        return (
            f"{check.calls} calls with {check.clients} clients in {result.settings.dim:,} dimensions; --json has it all"
        )
    if result.directory is None:
        return "result.details() has every attacker and every measurement of the noise"
    page, path = result.directory / "report.html", printable(shlex.quote(str(result.directory)))
    return str(page) if page.exists() else f"`coalmine report {path}` writes the page; --details prints it"


def assumption(rung: str) -> str:
    """What the larger of the two lower bounds assumes, and how it was checked."""
    if rung in FINAL_RUNGS:
        return "if the scores are normal (tested)"
    if rung == UNKNOWN_ROUND:
        return "if noise is Gaussian and sampling as declared"
    return "if the noise is Gaussian (tested)"


def _passed(result: AuditResult) -> float | None:
    """The claimed ε of a run that passed, to compare with what was measured."""
    passed = result.verdict is not None and result.verdict.outcome == PASS
    return result.claim.epsilon if passed and result.claim is not None else None


def _epsilons(top: TableRow | None, *, claimed: float | None) -> Iterator[tuple[str, str]]:
    """The measured ε and its lower bound, of the attacker on whom the verdict rests."""
    if top is None or math.isnan(top.epsilon):
        yield "measured", "no ε: no attack could be evaluated"
        return
    attacker = ATTACKERS.get(top.rung, f"your own attack {top.rung}")
    if not top.detected:
        chance = f"chance alone reaches ε {format_number(top.floor, 2)}"
        yield "measured", f"nothing: the attack finds no canary, and {chance}"
        return
    epsilon, ends = format_measured(top.epsilon, top.interval)
    inside = chance = ""
    if claimed is not None and top.interval is not None and math.isfinite(top.epsilon + top.interval[0]):
        low, value = (float(text.replace(",", "")) for text in (ends.split()[0], epsilon))  # as they are shown
        chance = "; above the claim, but not by more than chance explains" if low > claimed else ""
        inside = ", which includes the claim" if low <= claimed < value else ""
    yield "measured", f"ε {epsilon}{f' (95 %: {ends}{inside})' if ends else ''}, by {attacker}{chance}"
    if math.isnan(top.lower_bound) and not top.lower_bound_gaussian:
        return
    bound = f"≥ {format_bound(top.lower_bound)}"
    if not top.lower_bound_gaussian:
        yield "lower bound", f"ε {bound} with 95 % confidence, without assuming any distribution"
        return
    gaussian = f"ε ≥ {format_bound(top.lower_bound_gaussian)} {assumption(top.rung)}"
    if math.isnan(top.lower_bound):
        yield "lower bound", f"{gaussian} with 95 % confidence"
    else:
        yield "lower bound", f"{gaussian}, {bound} in any case (95 %)"


def _wrapped(text: str, *, first: str, rest: str, most: int = MOST_LINES) -> list[str]:
    """The text in at most `most` lines; an ellipsis marks a cut. No line ends between a number and its sign."""
    lines = textwrap.wrap(
        GLUED.sub("\N{NO-BREAK SPACE}", text),
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        max_lines=most,
        placeholder=" …",
        break_on_hyphens=False,
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]
