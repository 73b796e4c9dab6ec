"""Proofs that a gateway of this cluster has started an answer. Every gateway can check them.

A client receives the proof with the first message of an answer and sends it back to resume it. The
proof is a message authentication code, so gateways store nothing. It is valid for any number of
resumes of the same request until it expires. A gateway has one open stream per request id, so each
gateway serves at most one stream with a proof at a time.
"""

import hmac
import re
import time
from array import array
from dataclasses import replace

from tandem.core.request import Request
from tandem.core.schema import pack

MAX_AGE_S = 4 * 3600.0
"""Age in seconds after which a proof is void. A resume does not renew it."""
_PROOF_PATTERN = re.compile(r"(\d{1,12})\.[0-9a-f]{64}", re.ASCII)


def with_proof(
    request: Request, sent_proof: str, key: bytes, model_digest: str
) -> tuple[Request, str]:
    """Return the request and the proof for its client.

    The request is marked as resumed if it resumes an answer with a valid proof. Any other request
    gets a new proof, which is "" without a ``key``.
    """
    if request.output_ids and _is_genuine(request, sent_proof, key, model_digest):
        return replace(request, is_resumed=True), sent_proof
    return request, _sign(
        request=request, issued_at=int(time.time()), key=key, model_digest=model_digest
    ) if key else ""


def _is_genuine(request: Request, proof: str, key: bytes, model_digest: str) -> bool:
    form = _PROOF_PATTERN.fullmatch(proof)
    if form is None or not key:
        return False
    issued_at = int(form[1])
    # Clocks of gateways differ a little, so a proof may be dated in the future.
    is_valid = abs(time.time() - issued_at) < MAX_AGE_S
    return is_valid and hmac.compare_digest(
        proof, _sign(request=request, issued_at=issued_at, key=key, model_digest=model_digest)
    )


def _sign(request: Request, issued_at: int, key: bytes, model_digest: str) -> str:
    """Return the proof for a request that was issued at ``issued_at``, a Unix time in seconds.

    It does not depend on the output tokens so far.
    """
    # Encoding 131,072 token ids with pydantic takes 15 ms, during which it holds the GIL.
    prompt = array("I", request.prompt_ids).tobytes()
    options = pack(replace(request, prompt_ids=(), output_ids=(), is_resumed=False))
    text = f"{issued_at} {model_digest} {len(prompt)} ".encode() + prompt + options
    return f"{issued_at}.{hmac.digest(key, text, 'sha256').hex()}"
