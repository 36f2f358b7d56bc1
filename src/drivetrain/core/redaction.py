"""Taking secrets out of what people paste: by the name of a variable, and by the look of a text.

Better one harmless value too many: what is taken out says so, and its name stays.
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
# The working directory is called PWD, and is no password.
_HARMLESS_NAMES = {"PWD", "OLDPWD", "SSH_AUTH_SOCK", "TOKENIZERS_PARALLELISM"}
# Texts come from anywhere, and may be made to be slow: a pattern begins where a word does, or where
# a rare sign is, and what it may run through is not run through again from the next letter.
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
    re.compile(r"(?<![\w-])(?:sk|pk|rk)[-_][\w-]{16,}+"),  # OpenAI's and Stripe's manner
    re.compile(r"(?<![\w-])AIza[\w-]{30,}+"),  # Google
    re.compile(r"\bya29\.[\w.-]++"),
    re.compile(r"(?i)\b(?:bearer|basic)\s{1,20}[\w.+/=~-]{8,}+"),
    re.compile(
        r"(?i)(?<=[?&;])(?:sig|signature|x-amz-[a-z-]{1,40}|token|key|password|access_token)=[^&\s;]++"
    ),
)
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s?#]{1,1000}(?=@)")  # user:password@host
# What comes after the host of such an address is all it takes to post there.
_WEBHOOK = re.compile(
    r"(?i)(?<=://)(hooks\.[^\s/]{1,253}|[^\s/]{0,253}\.?webhooks?\.[^\s/]{1,253}"
    r"|[^\s/]{1,253}/(?:api/)?(?:web)?hooks?)/[^\s\"']++"
)
_ASSIGNED = re.compile(
    r"(?i)((?:password|passwd|passphrase|secret|api[-_]?key|access[-_]?key|credential"
    # a tokenizer and a number of tokens are no secrets
    r"|token(?!i[sz]|s?[\w.-]{0,40}[\"']?\s{0,8}[=:\s]\s{0,8}\d{1,12}(?!\w)))[\w.-]{0,40})"
    r"([\"']?\s{0,8}[=:]\s{0,8}[\"']?|\s{1,8})([^\s\"',;&]{3,}+)"
)
# Short words, which are secrets only as the name of a flag or of a variable.
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
    """The same variables, secret values replaced."""
    return {name: _value(name, text) for name, text in variables.items()}


def _value(name: str, text: str) -> str:
    return REMOVED if text and _is_secret_name(name) else clean_text(text)


def is_secret(name: str, text: str = "") -> bool:
    """Whether a variable, by its name or its value, is not to be shown."""
    return (bool(text) and _is_secret_name(name)) or clean_text(text) != text


def _is_secret_name(name: str) -> bool:
    return name not in _HARMLESS_NAMES and _NAME.search(name) is not None


def clean_text(text: str) -> str:
    """A text with whatever looks like a secret replaced: command lines, addresses, messages."""
    for look in _LOOKS:
        text = look.sub(REMOVED, text)
    text = _IN_ADDRESS.sub(REMOVED, text)
    text = _WEBHOOK.sub(rf"\1/{REMOVED}", text)
    for named in (_ASSIGNED, _PASS, _USER):
        text = named.sub(_keep_name, text)
    return _BLOB.sub(lambda match: REMOVED if _is_random(match[0]) else match[0], text)


def clean_traceback(text: str) -> str:
    """The same of a traceback, whose calls keep their place: file, line and function."""
    parts = _CALL.split(text)  # what is between calls, and each call
    return "".join(part if _CALL.fullmatch(part) else clean_text(part) for part in parts)


def secrets_among(argv: Sequence[str]) -> list[str]:
    """The words of a command line that look like secrets, cleaned; with the flag that says so."""
    found = []
    for flag, word in pairwise(("", *argv)):
        pair = f"{flag} {word}"
        if clean_text(word) != word:
            found.append(clean_text(word))
        elif flag.startswith("-") and "=" not in flag and clean_text(pair) != pair:
            found.append(clean_text(pair))
    return found


def clean_address(text: str) -> str:
    """An address without the user and password in it; any other text as it is."""
    return _IN_ADDRESS.sub(REMOVED, text)


def _keep_name(match: re.Match[str]) -> str:
    """All but the value, which is the last group."""
    return match[0][: match.start(match.re.groups) - match.start()] + REMOVED


def _is_random(word: str) -> bool:
    """Long, mixed and without a pattern: keys are, names are not."""
    if _UUID.search(word):  # names of GPUs, of runs
        return False
    if not (any(c.isdigit() for c in word) and any(c.isalpha() for c in word)):
        return False
    counts = Counter(word)
    entropy = -sum(n / len(word) * math.log2(n / len(word)) for n in counts.values())
    return entropy > _BLOB_ENTROPY_BITS
