"""Receipts: what they state, who signed them, and that programs of others agree."""

import base64
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import called
from requires import require

from coalmine import Audit
from coalmine.log.provenance import code_facts
from coalmine.report.receipt import check_receipt, data_sha256, file_sha256, receipt

require("cryptography")
from coalmine.report.envelope import encoded, opened  # noqa: E402

SEED = b"a seed of sixteen"
SCHEMA = Path(__file__).parents[2] / "docs" / "reference" / "receipt.schema.json"
openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


def run_openssl(*arguments):
    return subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("receipt") / "run"
    rng, model = np.random.default_rng(0), np.ones(2_000)
    with Audit(2_000, canaries=50, seed=SEED, delta=1e-5, rounds=4, claim=5.0, directory=path) as audit:
        audit.commit_to(initial=model)
        for number in range(1, 5):
            present = audit.canaries_in_round(number)
            delta = (audit.updates(present, 1.0) + rng.normal(size=2_000)) / 10
            audit.observe_round(number, delta, present=present, noise_std=0.1, clip_norm=0.1)
            model = model + delta
        audit.observe_final(model)
        audit.finish()
    return path


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Key files by algorithm: private and public."""
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    folder, made = tmp_path_factory.mktemp("keys"), {}
    fresh: dict[str, Any] = {
        "ed25519": ed25519.Ed25519PrivateKey.generate(),
        "p256": ec.generate_private_key(ec.SECP256R1()),
    }
    for name, key in fresh.items():
        private, public = folder / f"{name}.pem", folder / f"{name}.pub"
        private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
        made[name] = private, public
    return made


@pytest.fixture(params=["ed25519", "p256"])
def signed(request, run, keys, tmp_path):
    private, public = keys[request.param]
    file = tmp_path / "receipt.json"
    assert called("receipt", run, "--key", private, "--out", file).returncode == 0
    return file, public


def verified(*arguments):
    done = called("verify", *arguments, "--json")
    return done.returncode, {name: check["held"] for name, check in json.loads(done.stdout).items()}


def test_a_receipt_states_what_its_schema_says(run):
    values = receipt(run, data=run / "audit")
    require("jsonschema").validate(values, json.loads(SCHEMA.read_text()))
    (subject,), predicate = values["subject"], values["predicate"]
    assert subject["digest"]["sha256"] == file_sha256(run / "model.npy")
    assert predicate["claim"]["epsilon"] == 5.0
    assert predicate["claim"]["delta"] == 1e-5
    assert predicate["error_rates"]["violation_of_a_true_claim"] == 0.01
    assert predicate["data"] == {"name": "audit", "sha256": data_sha256(run / "audit")}
    assert "sampler" in predicate["not_checked"]
    assert predicate["environment"]["numpy"] == np.__version__
    assert len(predicate["code"]["libraries"]["coalmine"]) == 64
    assert SEED.decode() not in json.dumps(values)


def test_a_signed_receipt_of_the_run_verifies(run, signed):
    file, public = signed
    assert verified(run, "--receipt", file, "--key", public) == (3, {"run": None, "signature": True, "receipt": True})
    alone = verified("--receipt", file, "--key", public, "--model", run / "model.npy")
    assert alone == (0, {"signature": True, "subject": True, "receipt": None})


@openssl
def test_openssl_verifies_the_signature_over_the_documented_encoding(signed, tmp_path):
    """DSSE's encoding, written out here by hand; nothing of coalmine or of its library takes part."""
    file, public = signed
    envelope = json.loads(file.read_text())
    payload = base64.b64decode(envelope["payload"])
    kind = envelope["payloadType"]
    (tmp_path / "pae").write_bytes(f"DSSEv1 {len(kind)} {kind} {len(payload)} ".encode() + payload)
    (tmp_path / "sig").write_bytes(base64.b64decode(envelope["signatures"][0]["sig"]))
    if "p256" in public.name:
        command = ("dgst", "-sha256", "-verify", public, "-signature", tmp_path / "sig", tmp_path / "pae")
    else:
        command = (
            "pkeyutl",
            "-verify",
            "-pubin",
            "-inkey",
            public,
            "-rawin",
            "-in",
            tmp_path / "pae",
            "-sigfile",
            tmp_path / "sig",
        )
    assert run_openssl(*command).returncode == 0
    (tmp_path / "pae").write_bytes((tmp_path / "pae").read_bytes().replace(b"5.0", b"3.0"))
    assert run_openssl(*command).returncode != 0


def test_another_key_or_another_payload_is_refused(run, signed, keys):
    file, public = signed
    other = keys["p256" if "ed25519" in public.name else "ed25519"][1]
    assert verified(run, "--receipt", file, "--key", other) == (1, {"run": None, "signature": False})
    envelope = json.loads(file.read_text())
    payload = base64.b64decode(envelope["payload"]).replace(b'"epsilon": 5.0', b'"epsilon": 4.0')
    file.write_text(json.dumps(envelope | {"payload": base64.b64encode(payload).decode()}))
    assert verified(run, "--receipt", file, "--key", public) == (1, {"run": None, "signature": False})


def leaves(value, path=()):
    if isinstance(value, dict) and value:
        return [leaf for key, item in value.items() for leaf in leaves(item, (*path, key))]
    if isinstance(value, list) and value:
        return [leaf for index, item in enumerate(value) for leaf in leaves(item, (*path, index))]
    return [path]


def edited(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 1.5 + 1
    return "edited" if value is None or isinstance(value, str) else [None]


def test_an_edit_of_any_field_is_refused_even_if_its_signer_made_it(run):
    whole = receipt(run)
    paths = [
        path for path in leaves(whole) if path[-2:] != ("predicate", "coalmine") and path[:2] != ("predicate", "data")
    ]
    assert len(paths) > 50
    for path in [path for path in paths if path != ("subject", 0, "name")]:
        values = json.loads(json.dumps(whole))
        place = values
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = edited(place[path[-1]])
        held = {check.name: check.held for check in check_receipt(json.dumps(values).encode(), run, None)}
        assert held == {"receipt": False}, path
    assert [check.held for check in check_receipt(json.dumps(whole).encode(), run, None)] == [True]


def test_files_that_are_no_keys_or_receipts_are_one_line(run, keys, tmp_path):
    private, public = keys["ed25519"]
    for arguments, message in (
        (("receipt", run, "--key", public), "must hold an Ed25519 or P-256 private key in PEM"),
        (("receipt", run, "--key", tmp_path / "none"), "the file does not exist"),
        (("verify", run, "--receipt", public, "--key", public), "must be a signed receipt"),
        (("verify", run, "--receipt", private), "--receipt and --key belong together"),
        (("verify", "--seed-file", private), "give the run directory"),
        (("receipt", run, "--out", run / "result.json"), "is a file of the run itself"),
        (("receipt", run, "--data", tmp_path / "none"), "but"),
    ):
        done = called(*arguments)
        assert done.returncode == 2, arguments
        assert message in done.stderr.replace("\n", " "), done.stderr
    (tmp_path / "envelope").write_text('{"payloadType": "text/plain", "payload": "", "signatures": []}')
    with pytest.raises(ValueError, match="another type of payload"):
        opened(tmp_path / "envelope")


def test_the_encoding_is_that_of_the_specification():
    """The example of the specification has another type; the lengths are of bytes."""
    assert encoded("ε".encode()) == b"DSSEv1 28 application/vnd.in-toto+json 2 \xce\xb5"


@pytest.mark.full
def test_the_code_is_that_of_the_training_script(tmp_path):
    (tmp_path / "helper.py").write_text("VALUE = 1\n")
    (tmp_path / "train.py").write_text(
        "import json, helper, numpy\nfrom coalmine.log.provenance import code_facts\nprint(json.dumps(code_facts()))\n"
    )
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)

    def facts():
        from sys import executable

        return json.loads(subprocess.run([executable, tmp_path / "train.py"], capture_output=True, check=True).stdout)

    first = facts()
    assert first["files"] == {name: file_sha256(tmp_path / name) for name in ("helper.py", "train.py")}
    assert first["git"]["dirty"] is False
    (tmp_path / "helper.py").write_text("VALUE = 2\n")
    second = facts()
    assert second["git"] == {"commit": first["git"]["commit"], "dirty": True}
    assert second["files"]["helper.py"] != first["files"]["helper.py"]
    assert second["libraries"] == first["libraries"]
    assert code_facts()["libraries"].keys() >= {"coalmine"}


@openssl
@pytest.mark.full
def test_a_time_stamp_of_a_local_authority_dates_a_commitment(tmp_path):
    """RFC 3161 as docs/how-to/receipt.md has it, with an authority that is made here."""
    config = tmp_path / "tsa.cnf"
    config.write_text(
        "[req]\ndistinguished_name=dn\nx509_extensions=ext\nprompt=no\n[dn]\nCN=authority\n"
        "[ext]\nextendedKeyUsage=critical,timeStamping\n"
        f"[tsa]\ndefault_tsa=own\n[own]\nserial={tmp_path}/serial\ndefault_policy=1.2.3.4\ndigests=sha256\n"
        "signer_digest=sha256\naccuracy=secs:1\n"
    )
    key, cert = tmp_path / "tsa.key", tmp_path / "tsa.pem"
    query, answer, commitment = (tmp_path / name for name in ("commitment.tsq", "commitment.tsr", "commitment.txt"))
    commitment.write_text("3f1c\n")
    new = (
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        key,
        "-out",
        cert,
        "-config",
        config,
        "-days",
        "2",
    )
    assert run_openssl(*new).returncode == 0
    assert run_openssl("ts", "-query", "-data", commitment, "-sha256", "-cert", "-out", query).returncode == 0
    reply = ("ts", "-reply", "-config", config, "-queryfile", query, "-signer", cert, "-inkey", key, "-out", answer)
    assert run_openssl(*reply).returncode == 0
    check = ("ts", "-verify", "-data", commitment, "-in", answer, "-CAfile", cert)
    assert "Verification: OK" in run_openssl(*check).stdout
    commitment.write_text("3f1d\n")
    assert run_openssl(*check).returncode != 0
