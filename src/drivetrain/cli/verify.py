"""`drivetrain verify resume`."""

from __future__ import annotations

import json


def run(words: tuple[str, ...], steps: int, ranks: int, then_ranks: int, *, as_json: bool) -> int:
    """Certify, and say so; 1 when it does not hold."""
    from rich.console import Console

    from drivetrain.testing.faults.certificate import TOLERANCE, certify_resume

    certificate = certify_resume(words, steps, ranks, then_ranks)
    console = Console(highlight=False, soft_wrap=True)
    if as_json:
        console.print(json.dumps(certificate.to_dict(), indent=2), markup=False)
        return 0 if certificate.holds else 1
    half = certificate.killed_after
    console.print(
        f"{certificate.script}: {steps} steps on {ranks} ranks, against {half} steps on {ranks} "
        f"ranks, SIGKILL, and on from step {certificate.resumed_from} on {then_ranks} ranks",
        markup=False,
    )
    for problem in certificate.problems:
        console.print(f"  {problem}", markup=False)
    if certificate.same_bits:
        console.print("  final weights: equal to the last bit")
    elif not certificate.problems:
        console.print(
            f"  losses after the kill: largest relative deviation {certificate.deviation:.1e} "
            f"(allowed at another layout: {TOLERANCE:.0e}; at the same one: none, to the last bit)"
        )
    console.print("  certified" if certificate.holds else "  NOT certified")
    return 0 if certificate.holds else 1
