"""`python -m tests.kubernetes.golden`: write the golden manifests anew, to be looked at."""

from __future__ import annotations

from tests.kubernetes.test_manifests import GOLDEN, NAMES, rendered

if __name__ == "__main__":
    for name in NAMES:
        (GOLDEN / f"{name}.yaml").write_text(rendered(name))
