"""What a reader of the report asks first."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator

import torch

from drivetrain.core.text import readable_bytes
from drivetrain.parallel.accelerator import Accelerator, accelerator_type, num_devices
from tests.gpu_smoke.devices import backend, device_module, fits
from tests.gpu_smoke.rows import PASS, SKIPPED, Row, judged


def rows() -> Iterator[Row]:
    first = Accelerator(torch.device(accelerator_type(), 0))
    names = {Accelerator(torch.device(accelerator_type(), i)).name for i in range(num_devices())}
    memory = readable_bytes(first.memory_bytes or 0)
    yield Row("devices", PASS, f"{num_devices()} × {', '.join(sorted(names))}, {memory}")
    built = {name: getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu")}
    told = ", ".join(f"{name} {version}" for name, version in built.items() if version)
    yield Row("torch", PASS, f"{torch.__version__}, built for {told or 'no GPU of its own'}")
    yield Row("collectives", PASS, f"{backend()}{_nccl()}")
    yield Row("device events tell time", PASS, "yes" if first.has_timed_events else "no")
    yield _peer_access()
    yield Row("drivetrain env", PASS, "below", _output_of("env")[1])
    code, text = _output_of("doctor")
    yield judged("drivetrain doctor", code == 0, text.splitlines()[-1], f"```\n{text}\n```")
    if tool := shutil.which("nvidia-smi"):
        topology = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, check=False)
        yield Row("nvidia-smi topo -m", PASS, "below", f"```\n{topology.stdout}\n```")


def _nccl() -> str:
    if "nccl" not in backend():
        return ""
    version = ".".join(map(str, torch.cuda.nccl.version()))  # RCCL's too
    return f", NCCL {version}"


def _peer_access() -> Row:
    ask = getattr(device_module(), "can_device_access_peer", None)
    if ask is None or not fits(2):
        reason = "one device" if ask is not None else "the device's module does not tell"
        return Row("peer access", SKIPPED, reason)
    count = num_devices()
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    return Row("peer access", PASS, f"{sum(ask(a, b) for a, b in pairs)} of {len(pairs)} pairs")


def _output_of(verb: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain", verb], capture_output=True, text=True, check=False
    )
    return done.returncode, (done.stdout or done.stderr).strip()
