"""The lectures' pictures, computed by the formulas of the chapters."""

from __future__ import annotations

from collections.abc import Callable
from math import log2, log10

from tests.pages.svg import COLORS, FAINT, PALE, Axis, Bar, Curve, Drawing, bars, chart


def ways_to_divide() -> str:
    drawing = Drawing(760, 290, "Three ways to divide a training between two devices")
    for index, (name, said) in enumerate(
        [
            ("data parallel", "samples are divided"),
            ("tensor parallel", "each layer is divided"),
            ("pipeline parallel", "the stack of layers is divided"),
        ]
    ):
        left = 30 + 245 * index
        drawing.text(left + 105, 28, name, size=15)
        drawing.text(left + 105, 278, said)
        for device in range(2):
            x = left + 115 * device
            drawing.rect(x, 42, 95, 190, "#ffffff", FAINT)
            drawing.text(x + 47, 252, f"device {device}")
            for layer in range(4):
                y = 190 - 44 * layer
                if index == 2 and layer // 2 != device:
                    continue
                part = 40 if index == 1 else 80
                shift = 40 * device if index == 1 else 0
                drawing.rect(x + 8 + shift, y, part, 34, PALE[layer], COLORS[layer])
                drawing.text(x + 8 + shift + part / 2, y + 22, f"L{layer}")
    return drawing.svg()


_STATES = ("weights", "gradients", "optimizer state")


def memory_by_stage() -> str:
    weights, gradients, state = (7.5 * size for size in (2, 2, 12))
    rows = [
        ("every device has all", (weights, gradients, state)),
        ("ZeRO 1", (weights, gradients, state / 64)),
        ("ZeRO 2", (weights, gradients / 64, state / 64)),
        ("ZeRO 3, FSDP", (weights / 64, gradients / 64, state / 64)),
    ]
    return bars(
        "Memory per device: 7.5 billion parameters, 64 devices, mixed precision with Adam",
        _STATES,
        [Bar(name, parts, f"{sum(parts):.1f} GB") for name, parts in rows],
    )


def all_reduce_times() -> str:
    """64 ranks, 10 µs and 10 GB/s: stated in the chapter."""
    n, latency_s, rate = 64, 10e-6, 10e9
    sizes = [2.0**power for power in range(10, 31)]

    def curve(name: str, rounds: float, share: float) -> Curve:
        return Curve(name, tuple((s, 1e3 * (rounds * latency_s + share * s / rate)) for s in sizes))

    return chart(
        "An all-reduce on 64 ranks, by the model (10 µs and 10 GB/s a message)",
        Axis(
            "bytes",
            tuple(2.0**power for power in (10, 15, 20, 25, 30)),
            ("1 KiB", "32 KiB", "1 MiB", "32 MiB", "1 GiB"),
            is_log=True,
        ),
        Axis("milliseconds", (0.1, 1, 10, 100, 1000, 10000), is_log=True),
        [
            curve("through rank 0", 2 * (n - 1), 2 * (n - 1)),
            curve("tree", 2 * log2(n), 2 * log2(n)),
            curve("ring", 2 * (n - 1), 2 * (n - 1) / n),
            curve("recursive halving", 2 * log2(n), 2 * (n - 1) / n),
        ],
    )


def ring_steps() -> str:
    drawing = Drawing(760, 300, "Reduce-scatter around a ring of four ranks")
    drawing.text(20, 26, "Reduce-scatter around a ring: which chunks are summed", "start", 15)
    for step in range(4):
        left = 30 + 183 * step
        drawing.text(left + 70, 54, "before" if step == 0 else f"after step {step}")
        for rank in range(4):
            y = 66 + 50 * rank
            if step == 0:
                drawing.text(left - 5, y + 22, f"r{rank}", "end", 12)
            for chunk in range(4):
                # chunk c begins at rank c and has been added to on the way here
                hops = (rank - chunk) % 4
                num_added = hops + 1 if hops <= step else 1
                shade = PALE[0] if num_added == 1 else PALE[num_added - 1]
                drawing.rect(left + 36 * chunk, y, 34, 34, shade, FAINT)
                drawing.text(left + 36 * chunk + 17, y + 22, str(num_added))
    drawing.text(
        380, 284, "number of ranks whose values are in each chunk; 4 is the finished sum", size=13
    )
    return drawing.svg()


def _slots(schedule: str, stages: int, batches: int) -> list[tuple[int, int, int, str, int]]:
    """(stage, begin, length, kind, micro-batch): a forward takes 1, a backward 2."""
    slots: list[tuple[int, int, int, str, int]] = []
    done: dict[tuple[str, int, int], int] = {}
    queues = {stage: _order(schedule, stage, stages, batches) for stage in range(stages)}
    free = dict.fromkeys(range(stages), 0)
    while any(queues.values()):
        for stage, queue in queues.items():
            while queue:
                kind, batch = queue[0]
                before = (kind, stage - 1 if kind == "F" else stage + 1, batch)
                is_first = stage == (0 if kind == "F" else stages - 1)
                needs = ("F", stage, batch) if is_first and kind == "B" else before
                if not (is_first and kind == "F") and needs not in done:
                    break
                begin = max(free[stage], done.get(needs, 0))
                length = 1 if kind == "F" else 2
                done[kind, stage, batch] = free[stage] = begin + length
                slots.append((stage, begin, length, kind, batch))
                queue.pop(0)
    return slots


def _order(schedule: str, stage: int, stages: int, batches: int) -> list[tuple[str, int]]:
    if schedule == "gpipe":
        return [("F", i) for i in range(batches)] + [("B", i) for i in range(batches)]
    warm = min(stages - 1 - stage, batches)
    order = [("F", i) for i in range(warm)]
    for i in range(batches - warm):
        order += [("F", warm + i), ("B", i)]
    return order + [("B", i) for i in range(batches - warm, batches)]


def pipeline_schedules() -> str:
    stages, batches, unit = 4, 6, 25
    drawing = Drawing(760, 400, "GPipe and 1F1B: four stages, six micro-batches")
    for index, (name, said) in enumerate(
        [
            ("gpipe", "GPipe: all forwards, then all backwards (6 micro-batches held)"),
            ("1f1b", "1F1B: the same idle time, at most 4 micro-batches held"),
        ]
    ):
        top = 20 + 190 * index
        drawing.text(60, top + 12, said, "start", 14)
        for stage in range(stages):
            drawing.text(52, top + 43 + 36 * stage, f"stage {stage}", "end", 12)
            drawing.rect(60, top + 24 + 36 * stage, unit * 27, 30, "#ffffff", "#d3dedb")
        for stage, begin, length, kind, batch in _slots(name, stages, batches):
            color = 0 if kind == "F" else 1
            x, y = 60 + unit * begin, top + 24 + 36 * stage
            drawing.rect(x, y, unit * length, 30, PALE[color], COLORS[color])
            drawing.text(x + unit * length / 2, y + 20, str(batch), size=12)
    return drawing.svg()


def speed_ups() -> str:
    ranks = [2.0**power for power in range(11)]

    def amdahl(serial: float) -> Curve:
        points = tuple((n, 1 / (serial + (1 - serial) / n)) for n in ranks)
        return Curve(f"Amdahl, {serial:.0%} serial", points)

    return chart(
        "Speed-up by Amdahl (fixed work) and Gustafson (work grows)",
        Axis("devices", (1, 4, 16, 64, 256, 1024), is_log=True),
        Axis("times as fast", (1, 4, 16, 64, 256, 1024), is_log=True),
        [
            Curve("Gustafson, 5% serial", tuple((n, n - 0.05 * (n - 1)) for n in ranks)),
            amdahl(0.01),
            amdahl(0.05),
            amdahl(0.2),
        ],
    )


def compute_optimal() -> str:
    """The published fit of Hoffmann et al. 2022, third approach."""
    curves = []
    for compute, name in ((1e20, "10²⁰ operations"), (1e22, "10²²"), (1e24, "10²⁴")):
        points = []
        for step in range(61):
            n = 10 ** (8 + step / 15)
            tokens = compute / (6 * n)
            points.append((n, 1.69 + 406.4 / n**0.34 + 410.7 / tokens**0.28))
        curves.append(Curve(name, tuple(points)))
    return chart(
        "Loss by model size at a fixed amount of compute (Hoffmann et al. 2022)",
        Axis(
            "parameters",
            (1e8, 1e9, 1e10, 1e11, 1e12),
            ("0.1 B", "1 B", "10 B", "100 B", "1 T"),
            True,
        ),
        Axis("loss", (1.8, 2.0, 2.2, 2.4, 2.6, 2.8, 3.0)),
        curves,
    )


def interval_costs() -> str:
    """A save of 30 s, a failure every 3 hours: the chapter's example."""
    save_s, mtbf_s = 30.0, 3 * 3600.0
    minutes = [0.5 * 1.15**step for step in range(40)]

    def curve(name: str, cost: Callable[[float], float]) -> Curve:
        return Curve(name, tuple((m, 100 * cost(60 * m)) for m in minutes))

    return chart(
        "Time lost by interval: a save costs 30 s, a failure comes every 3 hours",
        Axis("minutes between saves", (1, 2, 5, 10, 20, 50, 100), is_log=True),
        Axis("per cent of the time", (0, 10, 20, 30, 40, 50)),
        [
            curve("both", lambda t: save_s / t + t / (2 * mtbf_s)),
            curve("saving", lambda t: save_s / t),
            curve("work done again", lambda t: t / (2 * mtbf_s)),
        ],
    )


def goodput_by_size() -> str:
    """docs/simulate.md has the table, and what the three stand for."""
    devices = (1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5)
    found = {
        "live replicas": (99.6, 99.4, 98.9, 98.4, 97.5, 95.5, 92.4),
        "supervised": (98.3, 98.5, 97.6, 96.2, 93.7, 87.9, 79.8),
        "a launcher's defaults": (93.6, 89.1, 76.8, 59.4, 35.6, 8.0, 0.7),
    }
    return chart(
        "Simulated goodput by size, at the failure rate of Llama 3's nodes",
        Axis("devices", (1e3, 1e4, 1e5), ("1,000", "10,000", "100,000"), is_log=True),
        Axis("useful time, per cent", (0, 20, 40, 60, 80, 100)),
        [Curve(k, tuple(zip(devices, v, strict=True)), dots=True) for k, v in found.items()],
    )


def a_failure() -> str:
    drawing = Drawing(760, 190, "What a failure costs")
    drawing.text(20, 26, "What one failure costs", "start", 15)
    pieces = [
        (30, "save", 2),
        (120, "useful", 0),
        (30, "save", 2),
        (110, "work", 3),
        (60, "notice", 1),
        (110, "restart", 1),
        (110, "again", 3),
        (110, "useful", 0),
    ]
    x = 40.0
    for width, said, color in pieces:
        drawing.rect(x, 60, width, 46, PALE[color], COLORS[color])
        drawing.text(x + width / 2, 87, said if width > 40 else "", size=12)
        x += width
    drawing.text(55, 124, "save", size=12)
    drawing.text(205, 124, "save", size=12)
    drawing.arrow((330, 44), (330, 59))
    drawing.text(330, 40, "failure", size=12)
    drawing.line([(220, 140), (220, 150), (610, 150), (610, 140)], FAINT)
    drawing.text(415, 170, "lost: since the last save, until noticed, until restarted", size=13)
    return drawing.svg()


def commit_order() -> str:
    drawing = Drawing(760, 210, "A checkpoint is committed by its manifest")
    drawing.text(20, 26, "Data first, made durable; the manifest last, by one rename", "start", 15)
    names = ["data-00000.bin", "data-00001.bin", "index.json", "manifest.json"]
    for index, name in enumerate(names):
        x = 40 + 175 * index
        color = 1 if index == 3 else 0
        drawing.rect(x, 60, 150, 44, PALE[color], COLORS[color])
        drawing.text(x + 75, 87, name)
        if index:
            drawing.arrow((x - 24, 82), (x - 3, 82))
    drawing.line([(40, 122), (40, 132), (540, 132), (540, 122)], FAINT)
    drawing.text(290, 156, "killed here: no checkpoint, the one before counts")
    drawing.line([(570, 122), (570, 132), (720, 132), (720, 122)], FAINT)
    drawing.text(645, 156, "from here: whole")
    drawing.text(380, 190, "a reader that finds no manifest ignores the folder", size=13)
    return drawing.svg()


_FORMATS = (
    ("fp32", 8, 23),
    ("tf32", 8, 10),
    ("bf16", 8, 7),
    ("fp16", 5, 10),
    ("fp8 E5M2", 5, 2),
    ("fp8 E4M3", 4, 3),
)


def number_formats() -> str:
    drawing = Drawing(760, 76 + 40 * len(_FORMATS), "Sign, exponent and mantissa bits of formats")
    drawing.text(
        20, 26, "One sign bit, then exponent bits (range), then mantissa bits", "start", 15
    )
    for row, (name, exponent, mantissa) in enumerate(_FORMATS):
        y = 46 + 40 * row
        drawing.text(105, y + 20, name, "end")
        for bit in range(1 + exponent + mantissa):
            color = 4 if bit == 0 else 1 if bit <= exponent else 0
            drawing.rect(115 + 16 * bit, y, 15, 28, PALE[color], COLORS[color])
        right = 125 + 16 * (1 + exponent + mantissa)
        drawing.text(right, y + 20, f"{exponent} + {mantissa}", "start")
    drawing.text(
        20,
        62 + 40 * len(_FORMATS),
        "tf32 is stored in 32 bits; tensor cores read 19 of them",
        "start",
    )
    return drawing.svg()


def format_ranges() -> str:
    """From the smallest subnormal to the largest number, in powers of two."""
    spans = (
        ("fp32", -149, 128),
        ("bf16", -133, 128),
        ("fp16", -24, 16),
        ("fp8 E5M2", -16, 16),
        ("fp8 E4M3", -9, 9),
    )
    drawing = Drawing(760, 90 + 40 * len(spans), "Ranges of number formats")
    drawing.text(20, 26, "From the smallest number to the largest, in powers of two", "start", 15)

    def place(power: float) -> float:
        return 110 + (power + 150) * 2.2

    bottom = 46 + 40 * len(spans)
    for power in (-150, -100, -50, 0, 50, 100):
        drawing.line([(place(power), 42), (place(power), bottom)], "#d3dedb", 1)
        drawing.text(place(power), bottom + 18, f"2^{power}")
    for row, (name, low, high) in enumerate(spans):
        y = 48 + 40 * row
        drawing.text(100, y + 19, name, "end")
        drawing.rect(place(low), y, place(high) - place(low), 28, PALE[row % 3], COLORS[row % 3])
    return drawing.svg()


def mixed_precision_step() -> str:
    drawing = Drawing(760, 240, "A step of mixed precision")
    drawing.text(20, 26, "A step: 32-bit boxes keep, 16-bit boxes multiply", "start", 15)
    boxes = {
        "master": (30, 60, "weights, fp32", 0),
        "copy": (220, 60, "weights, 16 bits", 1),
        "forward": (410, 60, "forward, 16 bits", 1),
        "loss": (600, 60, "loss, fp32", 0),
        "backward": (600, 160, "× scale, backward", 1),
        "gradients": (410, 160, "gradients, 16 bits", 1),
        "unscaled": (220, 160, "÷ scale, fp32, clip", 0),
        "adam": (30, 160, "optimizer, fp32", 0),
    }
    for x, y, said, color in boxes.values():
        drawing.rect(x, y, 140, 46, PALE[color], COLORS[color])
        drawing.text(x + 70, y + 28, said)
    for y, direction in ((83, 1), (183, -1)):
        for gap in (170, 360, 550):
            start, end = (gap, gap + 50) if direction == 1 else (gap + 50, gap)
            drawing.arrow((start, y), (end, y))
    drawing.arrow((670, 106), (670, 160))
    drawing.arrow((100, 160), (100, 106))
    drawing.text(380, 228, "the scale is for fp16; bf16 has fp32's range and goes without")
    return drawing.svg()


def roofline() -> str:
    """An H100 by its data sheet: 989e12 operations and 3.35e12 bytes a second."""
    peak, rate = 989.0, 3.35
    intensities = [2.0 ** (power / 4) for power in range(-12, 49)]
    return chart(
        "Roofline of an H100 in bf16, by its data sheet",
        Axis("operations per byte", (0.125, 1, 8, 64, 512, 4096), is_log=True),
        Axis("Tera-operations a second", (0.1, 1, 10, 100, 1000), is_log=True),
        [
            Curve("what can be reached", tuple((i, min(peak, rate * i)) for i in intensities)),
            Curve("adding: 1/6", ((1 / 6, 0.1), (1 / 6, rate / 6)), dots=True),
            Curve("one operation a byte", ((1, 0.1), (1, rate)), dots=True),
            Curve("4,096³ product: 1,365", ((1365, 0.1), (1365, peak)), dots=True),
        ],
    )


def overlap() -> str:
    drawing = Drawing(760, 280, "Exchanges after backward, and beside it")
    rows = [
        ("after backward", 0, [(300, "exchange", 240)]),
        ("in buckets", 1, [(180, "1", 60), (240, "2", 60), (300, "3", 60), (360, "4", 60)]),
    ]
    for name, index, sends in rows:
        top = 30 + 120 * index
        drawing.text(20, top + 12, name, "start", 15)
        for y, said in ((top + 24, "compute"), (top + 60, "link")):
            drawing.text(92, y + 20, said, "end", 12)
        drawing.rect(100, top + 24, 100, 30, PALE[0], COLORS[0])
        drawing.text(150, top + 44, "forward")
        drawing.rect(200, top + 24, 200, 30, PALE[1], COLORS[1])
        drawing.text(300, top + 44, "backward")
        for begin, said, width in sends:
            drawing.rect(begin + 100, top + 60, width, 30, PALE[2], COLORS[2])
            drawing.text(begin + 100 + width / 2, top + 80, said)
        end = max(begin + width for begin, _, width in sends) + 100
        drawing.rect(end, top + 24, 60, 30, PALE[3], COLORS[3])
        drawing.text(end + 30, top + 44, "step")
    drawing.text(
        380, 268, "the exchange takes as long; a bucket leaves when its gradients are there"
    )
    return drawing.svg()


def where_time_goes() -> str:
    """The first five runs of benchmarks/results/ledger/table.md, in seconds."""
    rows = {
        "clean": (16.30, 2.43, 1.22, 6.22, 0.0),
        "killed": (15.38, 2.31, 1.12, 5.86, 1.59),
        "preempted": (19.81, 2.57, 1.74, 11.82, 3.68),
        "stalled": (19.10, 3.23, 1.62, 6.75, 3.59),
        "resized": (13.80, 5.92, 1.50, 8.70, 6.03),
    }
    return bars(
        "Where five short runs spent their seconds (benchmarks/results/ledger)",
        ("productive", "communication", "data, saves", "start-up", "failures"),
        [Bar(k, v, f"{sum(v):.1f} s") for k, v in rows.items()],
    )


def rails() -> str:
    drawing = Drawing(760, 330, "Two nodes of four devices, with one adapter per device")
    drawing.text(20, 26, "Two nodes with one adapter per device: rails", "start", 15)
    for node in range(2):
        left = 40 + 370 * node
        drawing.rect(left, 150, 310, 150, "#ffffff", FAINT)
        drawing.text(left + 155, 290, f"node {node}", size=13)
        drawing.rect(left + 15, 232, 280, 34, PALE[0], COLORS[0])
        drawing.text(left + 155, 254, "NVLink switch")
        for device in range(4):
            x = left + 20 + 72 * device
            drawing.line([(x + 28, 212), (x + 28, 232)], COLORS[0], 3)
            drawing.rect(x, 180, 56, 32, PALE[2], COLORS[2])
            drawing.text(x + 28, 201, f"r{4 * node + device}")
            drawing.line([(x + 28, 166), (x + 28, 180)], COLORS[1], 2)
            drawing.rect(x + 8, 152, 40, 14, PALE[1], COLORS[1])
            drawing.line([(x + 28, 152), (150 + 150 * device, 92)], COLORS[1], 1.5)
    for rail in range(4):
        drawing.rect(100 + 150 * rail, 60, 100, 32, PALE[3], COLORS[3])
        drawing.text(150 + 150 * rail, 81, f"rail {rail}")
    drawing.text(
        380, 320, "device i of each node meets device i of the others on one switch", size=13
    )
    return drawing.svg()


def link_rates() -> str:
    """docs/networking.md has the table with its sources; GB/s, one direction, per device."""
    rates = [
        ("memory of an H100", 3350.0),
        ("NVLink 4", 450.0),
        ("PCI Express 5 × 16", 63.0),
        ("InfiniBand NDR", 50.0),
        ("Ethernet 100 Gbit/s", 12.5),
        ("Ethernet 10 Gbit/s", 1.25),
    ]
    drawing = Drawing(760, 60 + 40 * len(rates), "Rates of links, on a logarithmic scale")
    drawing.text(
        20, 26, "GB/s in one direction, by their makers (each grid line: ten times)", "start", 15
    )
    for power in range(5):
        x = 190 + 110 * power
        drawing.line([(x, 40), (x, 46 + 40 * len(rates))], "#d3dedb", 1)
    for row, (name, rate) in enumerate(rates):
        y = 44 + 40 * row
        width = 110 * log10(rate)
        drawing.text(180, y + 19, name, "end")
        drawing.rect(190, y, max(width, 4), 28, PALE[row % 3], COLORS[row % 3])
        drawing.text(198 + width, y + 19, f"{rate:g}", "start")
    return drawing.svg()


def two_levels() -> str:
    drawing = Drawing(760, 220, "A hierarchical all-reduce")
    drawing.text(
        20, 26, "All-reduce on two levels: only one part in eight crosses the network", "start", 15
    )
    stages = [
        ("reduce-scatter", "inside each node", "each rank: 1/8 of its node's sum", 0),
        ("all-reduce", "between nodes, rank by rank", "each rank: 1/8 of the whole sum", 1),
        ("all-gather", "inside each node", "each rank: the whole sum", 0),
    ]
    for index, (name, where, after, color) in enumerate(stages):
        x = 30 + 245 * index
        drawing.rect(x, 60, 210, 74, PALE[color], COLORS[color])
        drawing.text(x + 105, 90, name, size=15)
        drawing.text(x + 105, 114, where)
        drawing.text(x + 105, 164, after, size=12)
        if index:
            drawing.arrow((x - 33, 97), (x - 3, 97))
    drawing.text(
        380, 200, "8 ranks in a node: the slow links carry S/8 per rank instead of S", size=13
    )
    return drawing.svg()


def reducer() -> str:
    drawing = Drawing(760, 300, "DDP's reducer: hooks, buckets, all-reduces")
    drawing.text(
        20, 26, "DDP: each gradient reports to its bucket; a full bucket is sent", "start", 15
    )
    layers = ["layer 1", "layer 2", "layer 3", "layer 4", "layer 5", "layer 6"]
    for index, name in enumerate(layers):
        x = 40 + 115 * index
        drawing.rect(x, 60, 95, 36, PALE[0], COLORS[0])
        drawing.text(x + 47, 83, name)
        drawing.arrow((x + 47, 96), (x + 47, 138))
    for bucket, left in enumerate((500, 270, 40)):
        drawing.rect(left, 140, 210, 40, PALE[1], COLORS[1])
        drawing.text(left + 105, 165, f"bucket {bucket + 1}")
        drawing.arrow((left + 105, 180), (left + 105, 212))
    drawing.rect(40, 214, 670, 36, PALE[2], COLORS[2])
    drawing.text(
        375, 237, "all-reduce, bucket 1 first: it is full when backward has passed layers 6 and 5"
    )
    drawing.arrow((700, 52), (60, 52), COLORS[3])
    drawing.text(380, 46, "backward", size=12)
    drawing.text(375, 280, "the last bucket, of the first layers, has nothing left to hide behind")
    return drawing.svg()


def negotiation() -> str:
    drawing = Drawing(760, 270, "Horovod's coordinator agrees on an order")
    drawing.text(
        20, 26, "Horovod: ranks report what is ready; rank 0 answers with an order", "start", 15
    )
    ready = [("rank 0", "A, B, C"), ("rank 1", "A, C"), ("rank 2", "C, A, B")]
    for index, (name, tensors) in enumerate(ready):
        y = 60 + 60 * index
        drawing.rect(40, y, 180, 42, PALE[0], COLORS[0])
        drawing.text(130, y + 26, f"{name} has {tensors}")
        drawing.arrow((220, y + 21), (298, 141))
    drawing.rect(300, 110, 170, 62, PALE[1], COLORS[1])
    drawing.text(385, 136, "ready on all ranks:")
    drawing.text(385, 158, "A and C")
    drawing.arrow((470, 141), (540, 141))
    drawing.rect(542, 110, 180, 62, PALE[2], COLORS[2])
    drawing.text(632, 136, "everyone: one fused")
    drawing.text(632, 158, "all-reduce of A, C")
    drawing.text(380, 250, "B waits for the next cycle, until rank 1 has it too")
    return drawing.svg()


def ray_cluster() -> str:
    drawing = Drawing(760, 330, "A Ray cluster: head, nodes, workers, object stores")
    drawing.text(20, 26, "A Ray cluster", "start", 15)
    drawing.rect(40, 50, 200, 90, PALE[1], COLORS[1])
    drawing.text(140, 78, "global control store")
    drawing.text(140, 100, "nodes, actors, jobs", size=12)
    drawing.text(140, 122, "head", size=12)
    drawing.rect(300, 50, 180, 90, PALE[3], COLORS[3])
    drawing.text(390, 88, "driver")
    drawing.text(390, 112, "your program", size=12)
    for node in range(2):
        left = 40 + 360 * node
        drawing.rect(left, 180, 320, 130, "#ffffff", FAINT)
        drawing.text(left + 160, 302, f"node {node}", size=12)
        drawing.rect(left + 15, 195, 90, 40, PALE[2], COLORS[2])
        drawing.text(left + 60, 220, "raylet")
        for worker in range(2):
            x = left + 120 + 95 * worker
            drawing.rect(x, 195, 85, 40, PALE[0], COLORS[0])
            drawing.text(x + 42, 220, "worker")
        drawing.rect(left + 15, 246, 285, 36, PALE[4], COLORS[4])
        drawing.text(left + 157, 269, "object store (shared memory)")
        drawing.line([(140, 140), (left + 60, 195)], COLORS[1], 1.5)
    drawing.line([(390, 140), (300, 195)], COLORS[3], 1.5)
    drawing.line([(390, 140), (560, 195)], COLORS[3], 1.5)
    drawing.text(610, 90, "raylets schedule locally,", size=12)
    drawing.text(610, 108, "the head knows who is there", size=12)
    return drawing.svg()


def halving_bars() -> str:
    """27 trials: each rung keeps a third, and trains it three times as long."""
    rungs = [(27, 1), (9, 3), (3, 9), (1, 27)]
    drawing = Drawing(760, 270, "Successive halving: 27 trials, a third is kept at each rung")
    drawing.text(
        20, 26, "Successive halving: a third is kept, and trained three times as long", "start", 15
    )
    for index, (trials, epochs) in enumerate(rungs):
        x = 40 + 180 * index
        height = 6.0 * trials
        drawing.rect(x, 220 - height, 140, height, PALE[index], COLORS[index])
        drawing.text(x + 70, 212 - height, f"{trials} trials")
        drawing.text(x + 70, 242, f"to epoch {epochs}")
    return drawing.svg()


PICTURES: dict[str, Callable[[], str]] = {
    "ways-to-divide": ways_to_divide,
    "memory-by-stage": memory_by_stage,
    "all-reduce-times": all_reduce_times,
    "ring-steps": ring_steps,
    "pipeline-schedules": pipeline_schedules,
    "speed-ups": speed_ups,
    "compute-optimal": compute_optimal,
    "interval-costs": interval_costs,
    "goodput-by-size": goodput_by_size,
    "a-failure": a_failure,
    "commit-order": commit_order,
    "number-formats": number_formats,
    "format-ranges": format_ranges,
    "mixed-precision-step": mixed_precision_step,
    "ray-cluster": ray_cluster,
    "successive-halving": halving_bars,
    "reducer": reducer,
    "negotiation": negotiation,
    "rails": rails,
    "link-rates": link_rates,
    "two-levels": two_levels,
    "roofline": roofline,
    "overlap": overlap,
    "where-time-goes": where_time_goes,
}
