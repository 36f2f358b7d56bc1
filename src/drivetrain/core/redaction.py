"""Removal of secrets from shared text, by the name of a variable and by the form of a value.

When in doubt, a harmless value is removed as well. The removal is visible, and the name stays.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

REMOVED = "<removed>"

_NAME = re.compile(
    r"(?:^|_)(?:API|ACCESS|SECRET|PRIVATE|SIGNING|ENCRYPTION|ACCOUNT|LICENSE|SSH|MASTER)?_?KEYS?(?:_ID)?$"
    r"|TOKEN|SECRET|PASSW|PASSPHRASE|(?:^|_|PG)PASS$|(?:^|_)PWD$|CREDENTIAL|COOKIE|(?:^|_)AUTH|AUTH$|BEARER"
    r"|SIGNATURE|(?:^|_)(?:SAS|DSN|JWT|PAT|PIN)(?:_|$)|CONNECTION_STRING|WEBHOOK|PRIVATE",
    re.IGNORECASE,
)
# PWD is the working directory, not a password.
_HARMLESS_NAMES = {"PWD", "OLDPWD", "SSH_AUTH_SOCK", "TOKENIZERS_PARALLELISM"}
# Text may come from anywhere and may be crafted to make a pattern slow. Each pattern therefore
# starts at a word boundary or a rare character, and does not rescan what it has already matched.
_LOOKS = (
    re.compile(
        r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
        r".*?(?:-----END [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)",
        re.DOTALL,
    ),
    re.compile(r"(?<![\w-])eyJ[\w-]{8,}+\.[\w-]{8,}+\.[\w-]*+"),  # JSON web tokens
    re.compile(r"\b(?:AKIA|ASIA|AROA|AIDA)[0-9A-Z]{12,}+\b"),  # AWS
    re.compile(
        r"\b(?:gh[pousr]_|github_pat_|glpat-|hf_|xox[abeoprs]-|npm_|pypi-|dop_v1_|shpat_)[\w-]{8,}+"
    ),
    re.compile(r"(?<![\w-])(?:sk|pk|rk)[-_][\w-]{16,}+"),  # OpenAI's and Stripe's style
    re.compile(r"(?<![\w-])AIza[\w-]{30,}+"),  # Google
    re.compile(r"\bya29\.[\w.-]++"),
    re.compile(r"(?i)\b(?:bearer|basic)\s{1,20}[\w.+/=~-]{8,}+"),
    re.compile(
        r"(?i)(?<=[?&;])(?:sig|signature|x-amz-[a-z-]{1,40}|token|key|password|access_token)=[^&\s;]++"
    ),
)
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s?#]{1,1000}(?=@)")  # user:password@host
# Anyone who knows the part after the host of such an address can post there.
_WEBHOOK = re.compile(
    r"(?i)(?<=://)(hooks\.[^\s/]{1,253}|[^\s/]{0,253}\.?webhooks?\.[^\s/]{1,253}"
    r"|[^\s/]{1,253}/(?:api/)?(?:web)?hooks?)/[^\s\"']++"
)
_ASSIGNED = re.compile(
    r"(?i)((?:password|passwd|passphrase|secret|api[-_]?key|access[-_]?key|credential"
    # a tokenizer or a number of tokens is not a secret
    r"|token(?!i[sz]|s?[\w.-]{0,40}[\"']?\s{0,8}[=:\s]\s{0,8}\d{1,12}(?!\w)))[\w.-]{0,40})"
    r"([\"']?\s{0,8}[=:]\s{0,8}[\"']?|\s{1,8})([^\s\"',;&]{3,}+)"
)
# Short words, which mark a secret only as the name of a flag or a variable.
_PASS = re.compile(
    r"(?i)((?<![\w-])--?pass(?:\s{1,8}|=)|(?:(?<![a-z])|pg)pass[\"']?\s{0,8}[=:]\s{0,8}[\"']?)"
    r"([^\s\"',;&]{3,}+)"
)
_USER = re.compile(r"((?<!\S)(?:-u|--user|--proxy-user)[\s=]{0,8})([^\s:\"']{1,200}:[^\s\"']++)")
_BLOB = re.compile(r"(?<![\w/.+=-])[A-Za-z0-9+/_=-]{32,}+(?![\w/.+=-])")
_BLOB_ENTROPY_BITS = 3.5
_CALL = re.compile(r'^(  File "[^"\n]*", line \d+, in .*\n)', re.MULTILINE)
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def without_secrets(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with secret values replaced."""
    return {name: _value(name, text) for name, text in variables.items()}


def _value(name: str, text: str) -> str:
    return REMOVED if text and _is_secret_name(name) else clean_text(text)


def is_secret(name: str, text: str = "") -> bool:
    """True if a variable's name or value marks it as secret."""
    return (bool(text) and _is_secret_name(name)) or clean_text(text) != text


def _is_secret_name(name: str) -> bool:
    return name not in _HARMLESS_NAMES and _NAME.search(name) is not None


def clean_text(text: str) -> str:
    """Replace everything that looks like a secret: in command lines, addresses, messages."""
    for look in _LOOKS:
        text = look.sub(REMOVED, text)
    text = _IN_ADDRESS.sub(REMOVED, text)
    text = _WEBHOOK.sub(rf"\1/{REMOVED}", text)
    for named in (_ASSIGNED, _PASS, _USER):
        text = named.sub(_keep_name, text)
    return _BLOB.sub(lambda match: REMOVED if _is_random(match[0]) else match[0], text)


def clean_traceback(text: str) -> str:
    """Clean a traceback, but keep the location of each call: file, line and function."""
    parts = _CALL.split(text)  # alternates text between calls with calls
    return "".join(part if _CALL.fullmatch(part) else clean_text(part) for part in parts)


def secrets_among(argv: Sequence[str]) -> list[str]:
    """Return the arguments that look like secrets, cleaned, each with the flag that marks it."""
    found = []
    for flag, word in pairwise(("", *argv)):
        pair = f"{flag} {word}"
        if clean_text(word) != word:
            found.append(clean_text(word))
        elif flag.startswith("-") and "=" not in flag and clean_text(pair) != pair:
            found.append(clean_text(pair))
    return found


def clean_address(text: str) -> str:
    """Remove user and password from addresses in the text; leave the rest unchanged."""
    return _IN_ADDRESS.sub(REMOVED, text)


def _keep_name(match: re.Match[str]) -> str:
    """Keep everything but the value, which is the last group."""
    return match[0][: match.start(match.re.groups) - match.start()] + REMOVED


def _is_random(word: str) -> bool:
    """True if a word mixes letters and digits without a pattern, as keys do and names do not."""
    if _UUID.search(word):  # names of GPUs or runs
        return False
    if not (any(c.isdigit() for c in word) and any(c.isalpha() for c in word)):
        return False
    counts = Counter(word)
    entropy = -sum(n / len(word) * math.log2(n / len(word)) for n in counts.values())
    return entropy > _BLOB_ENTROPY_BITS
