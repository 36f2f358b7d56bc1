"""The Linux kernel's documentation as tokens: a tokenizer of its own, documents packed end to end.

python examples/applications/language/prepare.py            # Debian: apt-get install linux-doc-6.1
python examples/applications/language/prepare.py --text FOLDER --glob '*.md'
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
from pathlib import Path

import numpy as np
from tokenizers import ByteLevelBPETokenizer

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


def pack(tokenizer: ByteLevelBPETokenizer, texts: list[str]) -> np.ndarray:
    """Documents one after the other, each closed by END."""
    end = tokenizer.token_to_id(END)
    rows = [[*each.ids, end] for each in tokenizer.encode_batch(texts)]
    return np.concatenate([np.asarray(row, np.uint16) for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, default=Path(DOCUMENTS))
    parser.add_argument("--glob", default="*.rst.gz")
    parser.add_argument("--out", type=Path, default=Path("data/kernel-docs"))
    parser.add_argument("--vocabulary", type=int, default=4096)
    asked = parser.parse_args()
    documents = read_documents(asked.text, asked.glob)
    if not documents:
        parser.error(f"{asked.text} has no {asked.glob}; apt-get install linux-doc-6.1, or --text")
    train = [text for name, text in documents.items() if not is_validated(name)]
    val = [text for name, text in documents.items() if is_validated(name)]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(train, asked.vocabulary, special_tokens=[END])
    asked.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(asked.out / "tokenizer.json"))
    for name, texts in (("train", train), ("val", val)):
        tokens = pack(tokenizer, texts)
        np.save(asked.out / f"{name}.npy", tokens)
        size = sum(map(len, texts))
        print(f"{name}: {len(texts):,} documents, {size:,} characters, {len(tokens):,} tokens")


if __name__ == "__main__":
    main()
