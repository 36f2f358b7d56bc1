"""`drivetrain verify resume|parity|curve` and `drivetrain drill`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.cli.say import say
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.launch.job import missing_script

if TYPE_CHECKING:
    from rich.console import Console

    from drivetrain.verify.parity.certificate import LayoutResult, ParityCertificate
    from drivetrain.verify.parity.compare import Tolerance


def _check_script(argv: Sequence[str]) -> None:
    """Refuse a missing file before anything is run; Python looks for the module of `-m`."""
    if argv[0] != "-m" and (problems := missing_script(argv[0])):
        raise ConfigError(problems)


# `drivetrain verify resume` and `drivetrain verify parity`.


def verify_resume(
    argv: tuple[str, ...], steps: int, ranks: int, then_ranks: int, *, as_json: bool
) -> int:
    """Certify and print the result; return 1 if the certificate does not hold."""
    from drivetrain.cli.terminal import terminal
    from drivetrain.verify.resume import TOLERANCE, certify_resume

    _check_script(argv)
    certificate = certify_resume(argv, steps, ranks, then_ranks)
    console = terminal(soft_wrap=True)
    if as_json:
        console.print(json.dumps(certificate.to_dict(), indent=2), markup=False)
        return 0 if certificate.holds else 1
    half = certificate.killed_after
    console.print(
        f"{certificate.script}: {steps} steps on {ranks} ranks, against {half} steps on {ranks} "
        f"ranks, SIGKILL, and a resume from step {certificate.resumed_from} on {then_ranks} ranks",
        markup=False,
    )
    for problem in certificate.problems:
        console.print(f"  {problem}", markup=False)
    if certificate.same_bits:
        console.print("  final weights: equal bit for bit")
    elif not certificate.problems:
        console.print(
            f"  losses after the kill: largest relative deviation {certificate.deviation:.1e} "
            f"(allowed in another layout: {TOLERANCE:.0e}; in the same one: none, bit for bit)"
        )
    if certificate.repeats is False:
        console.print(
            "  a second run without a kill has other weights, too: the script does not repeat "
            "itself; if it draws weights or data itself, call torch.manual_seed at its top"
        )
    console.print("  certified" if certificate.holds else "  NOT certified")
    return 0 if certificate.holds else 1


def verify_parity(argv: tuple[str, ...], layouts: str, steps: int, *, as_json: bool) -> int:
    """Certify and print the result; return 1 if a layout does not hold."""
    from drivetrain.cli.terminal import terminal
    from drivetrain.verify.parity.layouts import parse_layouts

    _check_script(argv)
    asked = parse_layouts(layouts)  # before torch is imported, so that a typo is reported at once

    from drivetrain.verify.parity.certificate import certify_parity

    console = terminal(soft_wrap=True)
    with console.status("") as status:  # shown on a terminal only

        def say(name: str) -> None:
            status.update(f"{argv[0]}: {name}")

        certificate = certify_parity(argv, asked, steps, say)
    if as_json:
        console.print(json.dumps(certificate.to_dict(), indent=2), markup=False)
    else:
        _show_parity(console, certificate)
    return 0 if certificate.holds else 1


def write_curve(runs: Sequence[str], metric: str, path: str) -> int:
    """Write the curves of several seeds, for `verify_curve`."""
    from drivetrain.verify import curve

    expected = curve.collect(runs, metric)
    curve.write(expected, path)
    say(f"{path}: {metric} of {len(runs)} runs at {len(expected.steps)} steps")
    return 0


def verify_curve(runs: Sequence[str], path: str) -> int:
    """Print every step and the verdict; return 1 if a value is outside its interval."""
    from drivetrain.verify import curve

    if not path or len(runs) != 1:
        rule, remedy = "needs one run with --expected, or several with --write", "give one of them"
        raise ConfigError([Problem("RUN", rule, remedy, " ".join(runs))])
    expected = curve.read(path)
    points = curve.judge(runs[0], expected)
    say(f"{runs[0]}: {expected.metric}, against {len(expected.curves)} seeds")
    say(f"{'step':>8}  {'value':>10}  between")
    for point in points:
        mark = "" if point.holds else "  outside"
        say(f"{point.step:>8}  {point.value:>10.6g}  {point.low:.6g} and {point.high:.6g}{mark}")
    num_outside = sum(not point.holds for point in points)
    if num_outside:
        say(f"different curve: {num_outside} of {len(points)} values are outside the interval")
        return 1
    say("as expected: every value is within the seeds' prediction interval")
    return 0


def _show_parity(console: Console, certificate: ParityCertificate) -> None:
    allowed = certificate.tolerance
    console.print(
        f"{certificate.script}: {certificate.steps} steps in {certificate.precision}, each layout "
        f"against 1 process\n  allowed: losses {allowed.loss:.0e}, gradient norms "
        f"{allowed.gradient_norm:.0e}, relative ({allowed.reason})" + _traced(allowed),
        markup=False,
    )
    for note in certificate.notes:
        console.print(f"  {note}", markup=False)
    width = max(len("layout"), *(len(result.layout.name) for result in certificate.results))
    console.print(f"\n  {'layout':<{width}}  ranks  losses   norms")
    for result in certificate.results:
        for line in _parity_lines(result, width):
            console.print(f"  {line}", markup=False)
    console.print(f"\n  {_verdict(certificate)}", markup=False)


def _verdict(certificate: ParityCertificate) -> str:
    depends = certificate.depends_on_size
    if depends is None:
        return "certified" if certificate.holds else "NOT certified"
    parting, size = depends.parting, depends.fixed
    verdict = f"certified only with micro_batch_size={size}"
    if not certificate.layouts_hold:
        verdict = "NOT certified"
    if depends.is_sum:
        remedy = (
            'the loss is a sum over the samples: use reduction="mean", or divide by their number'
        )
    else:
        remedy = (
            f"dropout or batch norm: set micro_batch_size={size}; a loss that is not a plain mean "
            "over the samples (weight=, ignore_index): return Total(sum, count)"
        )
    at_size = f"{parting.reference:.6g} in micro-batches of {size}"
    lines = (
        verdict,
        "with micro_batch_size = auto, another number of ranks is another training: on one process",
        f"the {parting.what} of step {parting.step} is {at_size}, and {parting.here:.6g} in "
        f"micro-batches of {depends.other}",
        remedy,
    )
    return "\n    ".join(lines)


def _traced(allowed: Tolerance) -> str:
    from drivetrain.verify.parity.certificate import TRACED_STEPS

    if not allowed.judges_traces:
        return ""
    return (
        f"\n  in the first {TRACED_STEPS} steps also: every module's output {allowed.output:.0e}, "
        f"every parameter's gradient and update {allowed.value:.0e}"
    )


def _parity_lines(result: LayoutResult, width: int) -> list[str]:
    layout = result.layout
    head = f"{layout.name:<{width}}  {layout.num_ranks:>5}  "
    if result.problem:
        return [f"{head}could not be run: {result.problem}"]
    head += f"{result.loss_deviation:.1e}  {result.norm_deviation:.1e}  "
    if result.itself is not None and result.parting is not None:
        return [
            f"{head}same training to step {result.parting.step - 1}",
            f"  after that, one process diverges from itself by {result.itself.loss_deviation:.1e} "
            "when only the last bits of its gradients change",
        ]
    if result.holds and result.lacks_gradients:
        why = "its engine handles the gradients: not compared parameter by parameter"
        return [f"{head}same training", f"  {why}"]
    if result.holds:
        return [f"{head}same training"]
    lines = [f"{head}DIFFERENT training"]
    parting = result.parting
    if parting is not None:
        lines.append(
            f"  {parting.what} at step {parting.step}: {parting.here:.6g} instead of "
            f"{parting.reference:.6g}"
        )
    if result.divergence is not None:
        lines.append(f"  first difference: {result.divergence}")
    else:
        lines.append("  no module or parameter was seen to differ")
    return lines + _late_parting(result)


def _late_parting(result: LayoutResult) -> list[str]:
    """What to do about a layout that agrees at first: rounding grows, and a rare fault waits."""
    if result.agreed is None or result.parting is None:
        return []
    step = result.parting.step
    lines = [
        f"  losses agreed to {result.agreed:.1e} for {step - 1} steps, then parted at step {step}: "
        "a rounding difference that grew (an activation or a sort that flips) looks like this, "
        "and so does a rare fault"
    ]
    if result.layout.has_bitwise_mode:
        lines.append(
            "  to tell them apart, run it again with reproducibility=bitwise and a number as "
            "micro_batch_size: without a fault both then give the same bits"
        )
    return lines


# `drivetrain drill`.

_LEAST_SLOW_S = 20.0

_OWN_LOOP = (
    "your own loop calls no hooks: samples are not compared, and a rank cannot be made to hang"
)


def drill_script(argv: tuple[str, ...], ranks: int, kinds: tuple[str, ...], step: int) -> int:
    """Inject each kind of fault once into the user's script; return 1 if a run does not recover."""
    from drivetrain.cli.terminal import terminal
    from drivetrain.verify.drills.drill import Setting, run_drill, run_reference, small_disk
    from drivetrain.verify.drills.faults import (
        BY_HOOK,
        ON_SMALL_DISK,
        ONE_HOST_ALL,
        Fault,
        Faults,
    )

    unknown = [kind for kind in kinds if kind not in ONE_HOST_ALL]
    if unknown:
        known = ", ".join(ONE_HOST_ALL)
        raise ConfigError([Problem("--faults", "unknown", f"use some of {known}", unknown[0])])
    _check_script(argv)
    console = terminal()
    setting = Setting(argv, ranks, forced=(f"checkpoint.every_steps={max(1, step // 4)}",))
    passed = True
    with (
        tempfile.TemporaryDirectory(prefix="drill-") as scratch,
        small_disk(Path(scratch) / "disk")
        if set(kinds) & set(ON_SMALL_DISK)
        else nullcontext() as disk,
    ):
        setting = replace(setting, disk=disk)
        console.print(f"{argv[0]} on {ranks} ranks, without a fault …", markup=False)
        reference = run_reference(setting, Path(scratch) / "reference", timeout_s=3600)
        # a rank may be stopped while it starts, saves or evaluates; none takes longer than the run
        slow_s = max(_LEAST_SLOW_S, 3 * reference.took_s)
        setting = replace(setting, flags=("--slow-timeout", f"{slow_s:.0f}"))
        audited = "same weights, every sample once"
        if (
            not reference.samples
        ):  # no hook was called: no samples were recorded, and no rank can hang
            console.print(_OWN_LOOP, markup=False)
            audited, kinds = "same weights", tuple(kind for kind in kinds if kind not in BY_HOOK)
        for kind in (each for each in ONE_HOST_ALL if each in kinds):
            faults = Faults((Fault(kind, step, rank=ranks - 1),))
            outcome = run_drill(setting, faults, reference, Path(scratch) / kind, timeout_s=3600)
            passed &= outcome.passed
            took = ", ".join(f"{value:.1f} s" for value in outcome.recovery_s) or "–"
            verdict = audited if outcome.passed else outcome.problems[0]
            console.print(f"{kind:16}  recovered in {took:8}  {verdict}", markup=False)
    return 0 if passed else 1
