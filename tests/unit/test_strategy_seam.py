"""A strategy owns everything that is said about it: nobody else names one."""

import ast
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivetrain.cluster.description import Cluster
from drivetrain.config import resolve
from drivetrain.core.plugins import load
from drivetrain.core.traits import STRATEGIES, Traits, all_traits, traits_of
from drivetrain.parallel.layout import Layout
from drivetrain.plan.candidate import Candidate
from drivetrain.strategies.cost import PartNumbers
from drivetrain.strategies.strategy import Profile, strategy_from

SOURCE = Path(__file__).parents[2] / "src" / "drivetrain"
NAMES = re.compile(r"ddp|fsdp|hsdp|deepspeed|horovod|local_?sgd|zero_stage", re.IGNORECASE)

ALLOWED = {
    "__init__.py": "the public names of the drop-in trainers",
    "compat/": "the drop-in trainers: the names they replace are their interface",
    "cluster/environments.py": "horovodrun is a launcher that ranks can be started by",
    "cluster/file.py": "the key of a file that older versions have written",
    "doctor/": "versions and variables of libraries, whether a run uses them or not",
    "learn/": "exercises in which a learner writes a strategy",
    "plan/probe.py": "what torch's fully_shard costs on this machine is measured",
    "plan/simulation/published.py": "a paper's title",
    "scaling/": "bare engines that are measured beside ours, and how their rows are called",
    "testing/ahead.py": "torch's own module, imported ahead",
    "train/refusals.py": "modules of classes by which a script may have distributed a model itself",
    "verify/parity/layouts.py": "an example in a message",
    "verify/parity/compare.py": "an explanation in a certificate",
    "cli/commands/": "examples in help texts",
}
"""Where a name may stand, and why."""


def words_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Identifiers and string literals; docstrings and comments may explain by example."""
    explained = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in explained:
                yield line, node.value
        elif isinstance(node, ast.ImportFrom):
            yield line, node.module or ""
        else:
            for field in ("id", "attr", "name", "arg"):
                value = getattr(node, field, None)
                if isinstance(value, str):
                    yield line, value


def named_in(path: Path) -> list[str]:
    words = words_of(ast.parse(path.read_text()))
    return [f"{path.relative_to(SOURCE)}:{line}: {w}" for line, w in words if NAMES.search(w)]


def test_no_strategy_is_named_outside_its_own_folder() -> None:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        where = str(path.relative_to(SOURCE))
        if not where.startswith(("strategies/", *ALLOWED)):
            found += named_in(path)
    assert not found, "ask the strategy's traits instead:\n" + "\n".join(found)


@pytest.mark.parametrize("place", ALLOWED)
def test_an_exception_is_one_only_as_long_as_it_is_needed(place: str) -> None:
    paths = [p for p in SOURCE.rglob("*.py") if str(p.relative_to(SOURCE)).startswith(place)]
    assert any(named_in(path) for path in paths)


COMMON = {"choose", "cost", "strategy"}
"""What everybody may import of strategies/: the interface."""


def test_no_strategys_own_classes_are_imported_elsewhere() -> None:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        where = str(path.relative_to(SOURCE))
        if where.startswith(("strategies/", *ALLOWED)):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom):
                continue
            module = node.module or ""
            if module.startswith("drivetrain.strategies") and module.split(".")[-1] not in COMMON:
                found.append(f"{where}:{node.lineno}: {module}")
    assert not found


def test_a_word_is_found_wherever_it_stands(tmp_path: Path) -> None:
    lines = ('x = "use ddp"', "is_fsdp = 1", "f(zero_stage=2)", 'f"parallel.horovod.{x}"', "a.hsdp")
    for line in lines:
        assert any(NAMES.search(word) for _, word in words_of(ast.parse(line))), line
    explained = ast.parse('"""As ddp does."""\n# fsdp\nx = 1\n"""Of fsdp."""')
    assert not any(NAMES.search(word) for _, word in words_of(explained))


def test_what_is_said_about_a_strategy_loads_no_torch() -> None:
    code = (
        "import sys\n"
        "from drivetrain.core.traits import all_traits\n"
        "from drivetrain.strategies.cost import cost_model\n"
        "names = [each.name for each in all_traits() if each.section() and cost_model(each.name)]\n"
        "import drivetrain.config\n"
        "print(*names, 'torch' in sys.modules)\n"
    )
    said = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert said.split() == [*STRATEGIES.names, "False"]


@pytest.mark.parametrize("traits", all_traits(), ids=lambda traits: traits.name)
def test_what_traits_refer_to_is_there(traits: Traits) -> None:
    references = [traits.strategy, traits.cost, traits.rehearse_within]
    references += [traits.launcher.rendezvous] if traits.launcher else []
    assert all(callable(load(each)) or each == traits.cost for each in references if each)


def test_a_config_with_its_strategys_section_can_be_sent_to_another_process() -> None:
    config = resolve(
        {"global_batch_size": 8, "max_steps": 1, "parallel": {"strategy": "local_sgd"}}
    ).config
    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301 - our own


@pytest.mark.parametrize("name", STRATEGIES.names)
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_the_start_up_check_counts_as_the_planner_does(name: str, micro_batches: int) -> None:
    """Bytes of one and the same model: a candidate of the planner's, and a run that starts."""
    axis = traits_of(name).fills
    layout = Layout(**{axis: 4})
    said = {"global_batch_size": 4 * micro_batches, "max_steps": 1, "parallel": {"strategy": name}}
    config = resolve({**said, "micro_batch_size": 1}).config
    blocks = [range(micro_batches * rank, micro_batches * (rank + 1)) for rank in range(4)]
    facts = Profile(1000, 4000, 4000, 8000, micro_batches_per_step=micro_batches)
    now = strategy_from(config, blocks).cost(facts, layout, Cluster(1, 4))
    candidate = Candidate(layout, name, accumulation=micro_batches, options=config.parallel.options)
    parts = [PartNumbers(1000.0, 1000.0, 2000.0) for _ in range(4)]
    walk = candidate.cost.walk(parts, [False] * 4, 0.0, candidate.use)
    moments = [*walk.forward(), *walk.backward(), walk.optimizer(0.0)]
    sent = candidate.cost.exchanges(parts, [False] * 4, candidate.use)
    assert now.parameter_bytes == walk.held().parameters
    assert now.optimizer_bytes == walk.held().optimizer
    assert now.gradient_bytes == max(moment.gradients for moment in moments)
    assert now.sent_bytes_per_step == int(sum(each.sent_bytes(layout) for each in sent))
