r"""The Linux kernel's documentation as tokens: a tokenizer of its own, documents packed end to end.

python examples/applications/language/prepare.py            # Debian: apt-get install linux-doc-6.1
python examples/applications/language/prepare.py --text FOLDER --glob '*.md'
python examples/applications/language/prepare.py --only 'hwmon/*' \
    --tokenizer data/kernel-docs/tokenizer.json --out data/hwmon
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import ByteLevelBPETokenizer, Tokenizer

END = "<|end|>"
DOCUMENTS = "/usr/share/doc/linux-doc-6.1/Documentation"
_VALIDATED = 20
"""One document in so many is never trained on."""


def read_documents(folder: Path, pattern: str) -> dict[str, str]:
    """By their path, translations left out."""
    found = {}
    for path in sorted(folder.rglob(pattern)):
        name = path.relative_to(folder).as_posix()
        if not name.startswith("translations/"):
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            found[name] = data.decode(errors="replace")
    return found


def is_validated(name: str) -> bool:
    """By the document's name, so that it stays where it is when others come and go."""
    return hashlib.sha256(name.encode()).digest()[0] % _VALIDATED == 0


def make_tokenizer(texts: Sequence[str], vocabulary: int) -> Any:
    """Byte-level BPE, END first."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocabulary, special_tokens=[END])
    return tokenizer


def pack(tokenizer: Any, texts: Sequence[str], end: str = END) -> np.ndarray:
    """Documents one after the other, each closed by `end`."""
    last = tokenizer.token_to_id(end)
    if last is None:
        raise SystemExit(f"the tokenizer has no {end}; --end TOKEN names what closes a document")
    kind = np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32
    found = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return np.concatenate([np.asarray([*each.ids, last], kind) for each in found])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, default=Path(DOCUMENTS))
    parser.add_argument("--glob", default="*.rst.gz")
    parser.add_argument("--only", default="*", help="a pattern of paths under --text")
    parser.add_argument("--without", default="", help="a pattern of paths to leave out")
    parser.add_argument("--out", type=Path, default=Path("data/kernel-docs"))
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json there is already")
    parser.add_argument("--end", default=END, help="the token that closes a document")
    asked = parser.parse_args()
    documents = {
        name: text
        for name, text in read_documents(asked.text, asked.glob).items()
        if fnmatch(name, asked.only) and not fnmatch(name, asked.without)
    }
    train = [text for name, text in documents.items() if not is_validated(name)]
    val = [text for name, text in documents.items() if is_validated(name)]
    if not train or not val:
        parser.error(f"too few {asked.glob} in {asked.text}: apt-get install linux-doc-6.1, --text")
    given = asked.tokenizer
    tokenizer = (
        Tokenizer.from_file(str(given)) if given else make_tokenizer(train, asked.vocabulary)
    )
    asked.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(asked.out / "tokenizer.json"))
    for name, texts in (("train", train), ("val", val)):
        tokens = pack(tokenizer, texts, asked.end)
        np.save(asked.out / f"{name}.npy", tokens)
        size = sum(map(len, texts))
        print(f"{name}: {len(texts):,} documents, {size:,} characters, {len(tokens):,} tokens")


if __name__ == "__main__":
    main()
