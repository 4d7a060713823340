"""Signed envelopes (DSSE): a payload with its type, and signatures by keys in files.

https://github.com/secure-systems-lab/dsse. Ed25519 and ECDSA keys on P-256 in PEM files, as `openssl genpkey` writes them.
"""

import base64
import binascii
import hashlib
import json
from pathlib import Path
from typing import Any

try:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519
except ImportError as error:
    raise ImportError("signing a receipt needs: pip install 'coalmine[receipt]'") from error

from coalmine.log.files import parse_json, read_regular

PAYLOAD_TYPE = "application/vnd.in-toto+json"
LARGEST_KEY, LARGEST = 1 << 16, 1 << 26  # bytes of a file
PRIVATE = "an Ed25519 or P-256 private key in PEM without a password: openssl genpkey -algorithm ed25519 -out KEY"
PUBLIC = "an Ed25519 or P-256 public key in PEM: openssl pkey -in KEY -pubout -out PUB"


def signed(payload: bytes, key_file: Path) -> bytes:
    """The payload in an envelope, signed with the private key in a file."""
    key: Any = _key(key_file, PRIVATE, lambda pem: serialization.load_pem_private_key(pem, password=None))
    if isinstance(key, ed25519.Ed25519PrivateKey):
        signature = key.sign(encoded(payload))
    elif isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, ec.SECP256R1):
        signature = key.sign(encoded(payload), ec.ECDSA(hashes.SHA256()))
    else:
        raise ValueError(f"{key_file} must hold {PRIVATE}")
    signatures = [{"keyid": key_id(key.public_key()), "sig": base64.b64encode(signature).decode()}]
    envelope = {"payloadType": PAYLOAD_TYPE, "payload": base64.b64encode(payload).decode(), "signatures": signatures}
    return (json.dumps(envelope, indent=1) + "\n").encode()


def opened(file: Path) -> tuple[bytes, list[bytes]]:
    """The payload of an envelope in a file, and its signatures; ValueError if it is none. Nothing is verified yet."""
    advice = f"{file} must be a signed receipt as `coalmine receipt --key` writes it"
    try:
        values = parse_json(read_regular(file, most=LARGEST))
        if values["payloadType"] != PAYLOAD_TYPE or set(values) != {"payloadType", "payload", "signatures"}:
            raise ValueError("another type of payload")
        payload = base64.b64decode(values["payload"], validate=True)
        return payload, [base64.b64decode(each["sig"], validate=True) for each in values["signatures"]]
    except FileNotFoundError:
        raise ValueError(f"{advice}, but the file does not exist") from None
    except (ValueError, KeyError, TypeError, binascii.Error) as error:
        raise ValueError(f"{advice}, got another file ({error})") from None


def is_signed_by(payload: bytes, signatures: list[bytes], key_file: Path) -> bool:
    """Whether one of the signatures is of the public key in a file."""
    key: Any = _key(key_file, PUBLIC, serialization.load_pem_public_key)
    for signature in signatures:
        try:
            if isinstance(key, ed25519.Ed25519PublicKey):
                key.verify(signature, encoded(payload))
            elif isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1):
                key.verify(signature, encoded(payload), ec.ECDSA(hashes.SHA256()))
            else:
                raise ValueError(f"{key_file} must hold {PUBLIC}")
        except InvalidSignature:
            continue
        return True
    return False


def encoded(payload: bytes) -> bytes:
    """The bytes that are signed: DSSE's pre-authentication encoding of type and payload."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def key_id(public: Any) -> str:
    """A name for a public key: the SHA-256 of its DER form. It is a hint, and proves nothing."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(public.public_bytes(serialization.Encoding.DER, form)).hexdigest()


def _key(file: Path, kind: str, load: Any) -> Any:
    try:
        return load(read_regular(file, most=LARGEST_KEY))
    except FileNotFoundError:
        raise ValueError(f"{file} must hold {kind}; the file does not exist") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ValueError(f"{file} must hold {kind}") from None
