from __future__ import annotations

import os
import pickle
import re
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from drivetrain.config import RunConfig, load_config, resolve
from drivetrain.config.keys import (
    _OF_OTHER_TOOLS,
    flatten,
    leaf_keys,
    nearest_key,
    unflatten,
    walk_fields,
)
from drivetrain.config.load import value_problems
from drivetrain.config.rules import RULES
from drivetrain.core import set_once
from drivetrain.core.bounded import NotAFile, read_text
from drivetrain.core.errors import ConfigError
from drivetrain.core.section import Section

GOOD = ["global_batch_size=64", "max_steps=10"]


def problems(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(argv=list(words))
    return str(caught.value).splitlines()


def test_later_sources_win_and_each_value_knows_its_source(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("global_batch_size: 32\nmax_steps: 5\noptimization:\n  learning_rate: 1e-3\n")
    resolved = load_config(
        argv=["--config", str(file), "max_steps=7"],
        defaults={"max_steps": 1, "seed": 9, "optimization": {"learning_rate": 5.0}},
    )
    config = resolved.config
    assert (config.global_batch_size, config.max_steps, config.seed) == (32, 7, 9)
    assert config.optimization.learning_rate == 1e-3
    assert str(resolved.source("max_steps")) == "command line"
    assert str(resolved.source("global_batch_size")) == f"file: {file}"
    assert str(resolved.source("seed")) == "script"
    assert str(resolved.source("data.shuffle")) == "default"


def test_run_yaml_tells_every_source_and_can_be_fed_back(tmp_path: Path) -> None:
    resolved = load_config(argv=GOOD).choose("micro_batch_size", 16, "four ranks")
    document = yaml.safe_load(resolved.to_yaml())
    assert document["sources"]["micro_batch_size"] == "chosen: four ranks"
    assert set(document["sources"]) == set(leaf_keys())
    file = tmp_path / "run.yaml"
    file.write_text(resolved.to_yaml())
    assert load_config(file, argv=[]).config == resolved.config


def test_a_password_in_an_address_is_not_written_down(tmp_path: Path) -> None:
    address = "https://me:hunter2@store.example/runs"
    resolved = load_config(argv=[*GOOD, f"checkpoint.directory={address}"])
    assert resolved.config.checkpoint.directory == address
    assert "hunter2" not in resolved.to_yaml()
    assert "https://<removed>@store.example/runs" in resolved.to_yaml()
    file = tmp_path / "run.yaml"
    file.write_text(resolved.to_yaml())
    (line,) = problems("--config", str(file))
    assert line.startswith("checkpoint.directory = https://<removed>@store.example/runs: ")
    again = load_config(file, argv=[f"checkpoint.directory={address}"])
    assert again.config == resolved.config


def test_mlflows_password_belongs_into_its_variable() -> None:
    given = "record.mlflow.tracking_uri=https://me:hunter2@mlflow.example"
    (line,) = problems(*GOOD, given)
    assert "hunter2" not in line
    assert "MLFLOW_TRACKING_URI" in line


def test_all_problems_come_at_once() -> None:
    lines = problems(
        "optimisation.lerning_rate=3",
        "seed=many",
        "parallel.strategy=dpp",
        "optimization.learning_rate_scaling=linear",
    )
    assert lines == [
        "optimisation.lerning_rate = 3: unknown key; did you mean optimization.learning_rate?",
        "global_batch_size: required, but not set; add it, for example global_batch_size=64",
        "seed = many: must be a whole number; the default is 42",
        "parallel.strategy = dpp: must be 'ddp', 'fsdp', 'local_sgd', 'parameter_server', "
        "'deepspeed' or 'horovod'; did you mean ddp?",
        "max_steps: the run has no end; set max_steps, or num_train_epochs",
        "optimization.learning_rate_scaling = linear: scaling needs the batch size the rate was "
        "tuned for; set optimization.base_batch_size",
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["data=3"], "data = 3: is a section, not a value; set a key inside it: data.shuffle"),
        (
            ["micro_batch_size=7"],
            "micro_batch_size = 7: does not divide global_batch_size = 64; use one of 1, 2, 4, 8, "
            "or set global_batch_size to 63 or 70",
        ),
        (
            ["reproducibility=bitwise"],
            "micro_batch_size = auto: bitwise runs need micro-batches that do not change with the "
            "number of ranks; set a number that divides 64",
        ),
        (
            ["parallel.dp_shard=2"],
            "parallel.dp_shard = 2: ddp keeps a full copy on every rank; "
            "use parallel.strategy=fsdp, or leave it out",
        ),
        (
            ["communication.compression=topk", "parallel.strategy=fsdp"],
            "communication.compression = topk: gradient compression works only with plain ddp, not "
            "with parallel.strategy=fsdp; use none, or plain ddp",
        ),
        (
            ["communication.compression=powersgd", "precision.dtype=fp16"],
            "communication.compression = powersgd: each step's residual is carried over to the "
            "next, so an fp16 overflow would stay; use precision.dtype=bf16, or compression fp16 "
            "or bf16",
        ),
        (
            ["parallel.strategy=parameter_server", "parallel.parameter_server.pull_every=4"],
            "parallel.parameter_server.pull_every = 4: synchronous ranks compute each gradient "
            "with the weights of the previous step; use parallel.parameter_server.mode="
            "stale_synchronous or asynchronous",
        ),
        (
            ["parallel.strategy=parameter_server", "checkpoint.save=full"],
            "checkpoint.save = full: rank 0 does not have the other servers' optimizer state; use "
            "checkpoint.save=sharded",
        ),
        (
            ["parallel.strategy=local_sgd", "precision.dtype=fp16"],
            "precision.dtype = fp16: ranks that train alone would skip different steps; "
            "use bf16 or fp32 with parallel.strategy=local_sgd",
        ),
        (["fast"], "fast: not an override; write path.to.key=value"),
        (
            ["sede=true", "fast.yaml"],
            "fast.yaml: a config file is given with its flag; write --config fast.yaml",
        ),
        (["seed=null"], "seed = null: must be a whole number; the default is 42"),
        (["sede=true"], "sede = true: unknown key; did you mean seed?"),
        (
            ["optimization.warmup_steps=11"],
            "optimization.warmup_steps = 11: longer than the run, which is 10 steps; "
            "use at most 10",
        ),
        (
            ["--config", "missing.yaml"],
            "--config = missing.yaml: No such file or directory; give the path of a YAML file",
        ),
    ],
)
def test_wrong_input_is_answered_with_what_to_do(words: list[str], expected: str) -> None:
    assert problems(*GOOD, *words) == [expected]


FSDP, BITWISE = "parallel.strategy=fsdp", "reproducibility=bitwise"
ZERO = "parallel.strategy=deepspeed"


COMBINED: list[tuple[list[str], list[str]]] = [
    # the run's name
    (["name=a/b"], []),
    (["name=/etc"], ["name"]),
    (["name=."], ["name"]),
    (["name=a/../../b"], ["name"]),
    (["name=" + "x" * 200], []),
    (["name=" + "x" * 201], ["name"]),
    (["name=a\x1bb"], ["name"]),
    # lengths and sizes
    (["optimization.warmup_steps=10"], []),
    (["optimization.learning_rate_scaling=sqrt"], ["optimization.learning_rate_scaling"]),
    (["optimization.learning_rate_scaling=sqrt", "optimization.base_batch_size=8"], []),
    (["micro_batch_size=0"], ["micro_batch_size"]),
    (["micro_batch_size=1"], []),
    (["micro_batch_size=64", BITWISE], []),
    # copies and shards
    (["parallel.dp_replicate=0"], ["parallel.dp_replicate"]),
    (["parallel.dp_replicate=1", "parallel.dp_shard=1"], []),
    (["parallel.dp_shard=0", FSDP], ["parallel.dp_shard"]),
    (["parallel.dp_shard=2", FSDP], []),
    (["parallel.dp_shard=2", ZERO], []),
    # axes that divide the model
    (["parallel.tp=2"], []),
    (["parallel.tp=2", "parallel.strategy=local_sgd"], ["parallel.tp"]),
    (["parallel.pp=2", "parallel.strategy=local_sgd"], ["parallel.pp"]),
    (["parallel.cp=2"], ["parallel.cp"]),
    (["parallel.cp=2", FSDP], []),
    (["parallel.tp=2", "precision.dtype=fp16"], ["precision.dtype"]),
    (["precision.dtype=fp16"], []),
    (["parallel.tp=2", "fault_tolerance=live"], ["fault_tolerance"]),
    (["fault_tolerance=live"], []),
    # pipelines
    (["parallel.pp=2", FSDP], []),
    *(
        (["parallel.pp=2", *strategy, f"parallel.pipeline.schedule={schedule}"], wrong)
        for schedule in ("zero_bubble", "zbv", "dualpipev")
        for strategy, wrong in (([FSDP], ["parallel.pipeline.schedule"]), ([], []))
    ),
    ([FSDP, "parallel.pipeline.schedule=zbv"], []),
    *(
        (["parallel.pp=2", FSDP, word], [word.partition("=")[0]])
        for word in (
            "parallel.tensor.loss_parallel=true",
            "parallel.tensor.sequence_parallel=true",
            "parallel.cp=2",
            "compile.enabled=true",
        )
    ),
    (["compile.enabled=true", "parallel.tensor.loss_parallel=true"], []),
    # memory
    (["memory.offload=cpu"], ["memory.offload"]),
    (["memory.offload=cpu", FSDP], []),
    # the same bits
    ([BITWISE, "micro_batch_size=8", FSDP], ["reproducibility"]),
    ([BITWISE, "micro_batch_size=8", "parallel.tp=2"], ["parallel.tp"]),
    (
        [BITWISE, "micro_batch_size=8", "parallel.tp=2", "parallel.pp=2"],
        ["parallel.tp", "parallel.pp"],
    ),
    (
        [BITWISE, "micro_batch_size=8", "data.iterable_sharding=own_shard"],
        ["data.iterable_sharding"],
    ),
    (["data.iterable_sharding=own_shard"], []),
    (
        [BITWISE, "micro_batch_size=8", "compile.enabled=true", "compile.mode=max-autotune"],
        ["compile.mode"],
    ),
    ([BITWISE, "micro_batch_size=8", "compile.enabled=true"], []),
    ([BITWISE, "micro_batch_size=8", "compile.mode=max-autotune"], []),
    (
        [BITWISE, "micro_batch_size=8", "compile.enabled=true", "compile.mode=default"],
        [],
    ),
    # compression
    (["communication.compression=topk"], []),
    ([FSDP, "communication.compression=none"], []),
    (
        ["communication.compression=topk", BITWISE, "micro_batch_size=8"],
        ["communication.compression"],
    ),
    (["communication.compression=topk", "fault_tolerance=live"], ["communication.compression"]),
    (
        ["communication.compression=topk", "precision.dtype=fp16"],
        ["communication.compression"],
    ),
    (["communication.compression=fp16", "precision.dtype=fp16"], []),
    (
        [
            "communication.compression=auto",
            "communication.allow=[powersgd]",
            "precision.dtype=fp16",
        ],
        ["communication.compression"],
    ),
    (
        [
            "communication.compression=auto",
            "communication.allow=[bf16]",
            "precision.dtype=fp16",
        ],
        [],
    ),
    (["communication.allow=[topk]", "precision.dtype=fp16"], []),
    (["parallel.strategy=local_sgd", "precision.dtype=bf16"], []),
    # DeepSpeed
    ([ZERO], []),
    ([ZERO, "parallel.dp_replicate=2"], ["parallel.dp_replicate"]),
    ([ZERO, "parallel.dp_replicate=1"], []),
    ([ZERO, "precision.dtype=fp16"], ["precision.dtype"]),
    (
        [ZERO, "parallel.deepspeed.offload_optimizer=nvme", "parallel.deepspeed.zero_stage=3"],
        ["parallel.deepspeed.nvme_path"],
    ),
    (
        [ZERO, "parallel.deepspeed.offload_param=nvme", "parallel.deepspeed.zero_stage=3"],
        ["parallel.deepspeed.nvme_path"],
    ),
    (
        [
            ZERO,
            "parallel.deepspeed.offload_param=nvme",
            "parallel.deepspeed.nvme_path=/tmp",
            "parallel.deepspeed.zero_stage=3",
        ],
        [],
    ),
    *(
        (
            [
                ZERO,
                "parallel.deepspeed.offload_param=cpu",
                f"parallel.deepspeed.zero_stage={stage}",
            ],
            wrong,
        )
        for stage, wrong in (
            (1, ["parallel.deepspeed.offload_param"]),
            (2, ["parallel.deepspeed.offload_param"]),
            (3, []),
        )
    ),
    (["parallel.deepspeed.offload_optimizer=nvme"], []),
    ([FSDP, "parallel.cp=2", "fault_tolerance=live"], ["fault_tolerance"]),
    (
        ["optimization.warmup_steps=2", "optimization.warmup_ratio=0.1"],
        ["optimization.warmup_ratio"],
    ),
    (["optimization.decay_steps=2"], ["optimization.decay_steps"]),
    (
        ["optimization.lr_scheduler_type=wsd", "optimization.decay_steps=1000000"],
        ["optimization.decay_steps"],
    ),
    (
        ["optimization.lr_scheduler_type=none", "optimization.warmup_steps=2"],
        ["optimization.warmup_steps"],
    ),
    (
        ["optimization.lr_scheduler_type=none", "optimization.warmup_ratio=0.1"],
        ["optimization.warmup_ratio"],
    ),
    (
        ["checkpoint.keep_best=loss", "checkpoint.every_steps=null"],
        ["checkpoint.keep_best"],
    ),
    (
        ["record.mlflow.tracking_uri=https://me:secret@example.org/"],
        ["record.mlflow.tracking_uri"],
    ),
]
"""Settings, and the keys that are refused."""


@pytest.mark.parametrize(("words", "keys"), COMBINED, ids=" ".join)
def test_which_keys_cannot_be_combined(words: list[str], keys: list[str]) -> None:
    try:
        load_config(argv=[*GOOD, *words])
    except ConfigError as error:
        found = [problem.where for problem in error.problems]
    else:
        found = []
    assert found == keys


SENTENCES = Path(__file__).parents[1] / "golden" / "config-problems.txt"


def test_what_is_said_of_each_combination() -> None:
    """Word for word, as users read it; DRIVETRAIN_WRITE_GOLDEN=1 writes the file anew."""
    lines = []
    for words, keys in COMBINED:
        if keys:
            lines.append(" ".join(words))
            lines += [f"    {line}" for line in problems(*GOOD, *words)]
    text = "\n".join(line.encode("unicode_escape").decode() for line in lines) + "\n"
    if os.environ.get("DRIVETRAIN_WRITE_GOLDEN"):
        SENTENCES.write_text(text)
    assert text == SENTENCES.read_text()


def test_a_rule_reads_keys_that_exist() -> None:
    assert {key for rule in RULES for key in rule.reads} <= set(leaf_keys())


def test_a_rule_is_silent_about_a_key_that_is_wrong_in_itself() -> None:
    offload = "parallel.deepspeed.offload_optimizer=nvme"
    (line,) = problems(*GOOD, ZERO, offload, "parallel.deepspeed.nvme_path=[1]")
    assert line.startswith("parallel.deepspeed.nvme_path = ")
    assert "needs a directory" not in line, "one was given"


@pytest.mark.parametrize("whole", [3_000_000_001, 2**61 - 1, 10**30])
def test_however_large_a_batch_is_the_answer_comes_at_once(whole: int) -> None:
    began_s = time.perf_counter()
    (said,) = problems(f"global_batch_size={whole}", "micro_batch_size=7", "max_steps=1")
    assert time.perf_counter() - began_s < 1
    assert f"does not divide global_batch_size = {whole}; use one of" in said


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("max_steps=yes", "max_steps = true: must be a whole number"),
        ("global_batch_size=true", "global_batch_size = true: must be a whole number"),
        ("micro_batch_size=on", "micro_batch_size = true: must be a whole number or 'auto'"),
        ("checkpoint.every_steps=off", "checkpoint.every_steps = false: must be a whole number"),
        ("checkpoint.keep_every=true", "checkpoint.keep_every = true: must be a whole number"),
        ("optimization.learning_rate=yes", "optimization.learning_rate = true: must be a number"),
        ("optimization.momentum=false", "optimization.momentum = false: must be a number"),
    ],
)
def test_true_and_false_are_no_numbers(word: str, expected: str, tmp_path: Path) -> None:
    key, _, said = word.partition("=")
    lines = {"global_batch_size": "64", "max_steps": "10", key: said}
    file = tmp_path / "run.yaml"
    file.write_text("".join(f"{each}: {value}\n" for each, value in lines.items()))
    for words in ([*GOOD, word], ["--config", str(file)]):
        (problem,) = problems(*words)
        assert problem.startswith(expected)


def test_no_number_of_any_section_takes_true() -> None:
    numbers = [
        key
        for key, field in walk_fields()
        if re.search(r"\b(int|float)\b|Literal\[\d", repr(field)) and "bool" not in repr(field)
    ]
    assert len(numbers) > 50
    taken = [key for key in numbers if not value_problems({key: True})]
    assert taken == []


def test_true_inside_a_list_of_numbers_is_refused() -> None:
    class Points(Section):
        """Numbers within something else."""

        at: dict[str, tuple[float, float]]

    assert Points.model_validate({"at": {"a": [0, 1]}}).at == {"a": (0.0, 1.0)}
    with pytest.raises(ValidationError, match="valid number"):
        Points.model_validate({"at": {"a": [0, True]}})


def test_true_is_no_number_in_a_script_either() -> None:
    with pytest.raises(ConfigError, match="max_steps = true: must be a whole number"):
        resolve({"global_batch_size": 8, "max_steps": True})


def test_the_nearest_divisors_are_found_below_and_above() -> None:
    (said,) = problems("global_batch_size=96", "micro_batch_size=20", "max_steps=1")
    assert "use one of 8, 12, 16, 24" in said


def test_broken_yaml_is_located(tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text("seed: 1\n  max_steps: [\n")
    assert "not YAML at line 2" in problems("--config", str(file))[0]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("seed: 1\ndata:\n\tnum_workers: 1\n", "line 3, column 1"),
        ("data:\n  num_workers: 1\n\tshuffle: true\n", "line 3, column 1"),
        ("seed:\t{\n", ""),
    ],
)
def test_a_tab_is_called_one(tmp_path: Path, text: str, place: str) -> None:
    file = tmp_path / "tabs.yaml"
    file.write_text(text)
    (problem,) = problems("--config", str(file))
    said = f"not YAML at {place}: a tab, and YAML is indented with spaces; write spaces there"
    assert problem.endswith(said) if place else "a tab" not in problem


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seed: 1\nmax_steps: 2\nseed: 3\n", "seed is set on line 1 and on line 3"),
        (
            "data:\n  shuffle: true\nseed: 1\ndata:\n  num_workers: 2\n",
            "data is set on line 1 and on line 4",
        ),
        (
            "data: {shuffle: true, shuffle: false}\n",
            "shuffle is set twice on line 1",
        ),
    ],
)
def test_a_key_that_is_set_twice_is_named(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "twice.yaml"
    file.write_text(text)
    (problem,) = problems("--config", str(file))
    assert problem.endswith(f": {said}; remove one of the two")


def test_a_key_over_a_merged_one_is_not_twice() -> None:
    two = "a: &a {x: 1, y: 1}\nb: &b\n  <<: *a\n  x: 2\nc:\n  <<: *b\n  x: 3\n"
    read = yaml.load(two, set_once.SafeLoader)  # noqa: S506 - a SafeLoader
    assert read["c"] == {"x": 3, "y": 1}


def test_a_folder_is_not_to_be_removed(tmp_path: Path) -> None:
    (problem,) = problems("--config", str(tmp_path))
    assert problem.endswith(": a folder, not a file; give the path of a YAML file")
    with pytest.raises(NotAFile, match=r": a folder, not a file; .*: move it away$") as caught:
        read_text(tmp_path)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # noqa: S301 - our own


def test_a_section_with_nothing_under_it_says_nothing(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("global_batch_size: 8\nmax_steps: 1\ndata:\nrecord: {}\n")
    assert load_config(file, argv=[]).config.global_batch_size == 8


def test_an_unknown_key_with_nothing_in_it_is_still_unknown() -> None:
    assert (
        "did you mean optimization.max_grad_norm?"
        in problems(*GOOD, "optimization.max_grad_nrom=null")[0]
    )


@pytest.mark.parametrize("name", ["2024-01-05", "2020-13-45", "123"])
def test_a_name_may_look_like_a_date_or_a_number(name: str) -> None:
    assert load_config(argv=[*GOOD, f"name={name}"]).config.name == name


def test_a_file_that_is_no_text_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "binary.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    assert "--config" in problems("--config", str(file))[0]
    file.write_text("config: 3\nsources: 4\n")
    assert "config = 3: unknown key" in problems("--config", str(file))[0]


def test_config_is_frozen() -> None:
    config = resolve({"global_batch_size": 8, "max_steps": 1}).config
    with pytest.raises(Exception, match="frozen"):
        config.seed = 3


def test_a_config_object_is_as_good_as_words() -> None:
    by_hand = RunConfig(global_batch_size=64, max_steps=10)
    assert resolve(by_hand).config == load_config(argv=GOOD).config


def test_a_wrong_combination_is_caught_in_objects_too() -> None:
    with pytest.raises(ConfigError, match="the run has no end"):
        resolve(RunConfig(global_batch_size=64))


@given(st.sampled_from(leaf_keys()), st.data())
def test_one_wrong_letter_is_forgiven_with_advice(key: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(key.rfind(".") + 2, len(key) - 1))
    typo = key[:at] + "x" + key[at + 1 :]
    if typo not in leaf_keys():
        assert nearest_key(typo) is not None


@given(st.dictionaries(st.sampled_from(leaf_keys()), st.integers()))
def test_flatten_undoes_unflatten(flat: dict[str, int]) -> None:
    assert flatten(unflatten(flat)) == flat


def test_the_key_that_was_meant_is_found_by_its_name_or_its_spelling() -> None:
    assert nearest_key("data.max_steps") == "max_steps", "a right name in a wrong place"
    assert nearest_key("learning_rate") == "optimization.learning_rate"
    assert nearest_key("optimization.lerning_rate") == "optimization.learning_rate"
    assert nearest_key("somewhere.else.warmup_stps") == "optimization.warmup_steps"
    assert nearest_key("qqqqqq") is None


def test_what_other_tools_call_a_key_is_translated() -> None:
    assert nearest_key("batch_size") == "global_batch_size"
    assert nearest_key("lr") == "optimization.learning_rate"
    assert nearest_key("optimization.lr") == "optimization.learning_rate"
    assert nearest_key("evaluation.batch_siz") == "evaluation.batch_size"
    assert set(_OF_OTHER_TOOLS.values()) <= set(leaf_keys())


@pytest.mark.parametrize(
    ("said", "meant"),
    [("zero3", "fsdp or deepspeed"), ("ZeRO-2", "deepspeed"), ("FSDP", "fsdp"), ("fdsp", "fsdp")],
)
def test_a_strategy_is_found_by_what_other_tools_call_it(said: str, meant: str) -> None:
    (problem,) = value_problems({"parallel.strategy": said})
    assert str(problem).endswith(f"; did you mean {meant}?")


def test_a_section_wins_over_a_value_in_its_place() -> None:
    assert unflatten({"a": 1, "a.b": 2, "a.c.d": 3}) == {"a": {"b": 2, "c": {"d": 3}}}
    assert flatten({"a": {"b": 2, "c": {"d": 3}}, "e": []}) == {"a.b": 2, "a.c.d": 3, "e": []}


def test_every_key_has_a_description() -> None:
    from drivetrain.config.keys import walk_fields

    assert [path for path, field in walk_fields() if not field.description] == []


def test_the_nearest_key_is_one_and_whole() -> None:
    assert nearest_key("optimization.learning_rat") == "optimization.learning_rate"
    assert nearest_key("warmup_step") == "optimization.warmup_steps"
    assert nearest_key("paralel.strategy") == "parallel.strategy"
    assert nearest_key("tensor.loss_paralel") == "parallel.tensor.loss_parallel"
    assert nearest_key("a.b.loss_parallel") == "parallel.tensor.loss_parallel"


def test_every_divisor_near_what_was_asked_is_named() -> None:
    (line,) = problems("global_batch_size=7", "max_steps=2", "micro_batch_size=3")
    assert line.endswith("use one of 1, 7, or set global_batch_size to 6 or 9")
    (line,) = problems("global_batch_size=65", "max_steps=2", "micro_batch_size=16")
    assert line.endswith("use one of 1, 5, 13, 65, or set global_batch_size to 64 or 80")
    (line,) = problems("global_batch_size=7", "max_steps=2", "micro_batch_size=20")
    assert line.endswith("or set global_batch_size to 20"), "not to 0"


def test_what_is_chosen_is_written_down_with_its_reason(tmp_path: Path) -> None:
    resolved = load_config(argv=[*GOOD, f"output_dir={tmp_path}/größe"])
    chosen = resolved.choose("micro_batch_size", 4, "it fits")
    assert chosen.config.micro_batch_size == 4
    assert str(chosen.source("micro_batch_size")).startswith("chosen")
    text = chosen.to_yaml()
    assert "größe" in text, "people read it"
    keys = list(yaml.safe_load(text)["config"])
    assert keys == list(RunConfig.model_fields), "in the config's order"
