"""What is written is read as it was meant, by every reader of YAML."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from drivetrain.launch.coordinator.member import Member, Members, read_members
from drivetrain.launch.targets.kubernetes.pod import escaped
from tests.kubernetes.jobs import CPU_JOB, CPU_TARGET, changed

# Texts that some YAML takes for a number, a truth, a time or nothing; with signs and without.
UNCLEAR = (
    *("1e-3", "1E5", "-1e3", "+1", ".5", "1.", "1_000", "0x1F", "0o17", "017", "0b101", "1:30"),
    *("y", "Y", "n", "N", "yes", "No", "on", "OFF", "true", "False", "null", "~", ".inf", "-.INF"),
    *(".nan", "=", "<<", "2024-05-01", "2024-05-01 10:00:00", "", "-", "[::1]", "{a: 1}", "*a"),
    *("&a", "!a", "%a", "@x", "`a", "a: b", "a #b", "#a", "'a'", '"a"', "a\nb", " a ", "lr=1e-3"),
    *("8Gi", "--lr=1e-3", "1e3.5", "10", "-1", "0.1", "e3", "1-2"),
)


def arguments(text: str) -> list[str]:
    job = list(yaml.safe_load_all(text))[1]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    found: list[str] = container["args"]
    return found[-len(UNCLEAR) :]


def test_unclear_texts_are_read_back_as_texts() -> None:
    text = CPU_TARGET.render(changed(CPU_JOB, script_args=UNCLEAR)).text
    assert arguments(text) == list(UNCLEAR)


@pytest.mark.parametrize("word", ["1e-3", "y", "N", "1E5", "-1e3", "0o17", ".5", "1_000"])
def test_what_only_other_readers_take_for_a_value_is_quoted(word: str) -> None:
    text = CPU_TARGET.render(changed(CPU_JOB, script_args=(word,))).text
    assert f"- '{word}'\n" in text


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
def test_kubectl_reads_the_same(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(CPU_TARGET.render(changed(CPU_JOB, script_args=UNCLEAR)).text)
    done = subprocess.run(
        ["kubectl", "annotate", "--local", "--filename", path, "seen=1", "--output", "json"],
        env={**os.environ, "KUBECONFIG": os.devnull},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first = json.JSONDecoder().raw_decode(done.stdout)[1]
    job = json.loads(done.stdout[first:])
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["args"][-len(UNCLEAR) :] == list(UNCLEAR)


HOSTS = ("10", "[::1]", "{a: 1}", "yes", "1e3", "null", "@x", "*a", "a: b", "0x10", "node-1", "y")


@pytest.mark.parametrize("host", HOSTS)
def test_a_hosts_name_survives_the_file(host: str, tmp_path: Path) -> None:
    command = ("ssh", host, "cd /code && run 'a\nb' --lr 1e-3")
    (tmp_path / "job.yaml").write_text(Members((Member(host, command),), 30).text())
    (found,) = read_members(tmp_path / "job.yaml").members
    assert (found.host, found.command) == (host, command)


def expanded(text: str, variables: dict[str, str]) -> str:
    """As the kubelet does it: $$ is a dollar, $(NAME) a variable if there is one."""
    out, rest = "", text
    while rest:
        if rest.startswith("$$"):
            out, rest = out + "$", rest[2:]
        elif rest.startswith("$(") and ")" in rest:
            name, _, after = rest[2:].partition(")")
            out, rest = out + variables.get(name, f"$({name})"), after
        else:
            out, rest = out + rest[0], rest[1:]
    return out


@pytest.mark.parametrize(
    "word",
    ["plain", "$(POD_IP)", "cost$$", "pa$$w0rd", "$$(POD_IP)", "$$$$", "a$b", "$", "$(", "$$("],
)
def test_dollars_arrive_as_they_were_typed(word: str) -> None:
    assert expanded(escaped(word), {"POD_IP": "10.0.0.9"}) == word


def test_dollars_of_a_rayjobs_script_arrive_too() -> None:
    target = changed(CPU_TARGET, kind="rayjob")
    job = changed(CPU_JOB, script_args=("name=$(HOME)", "$$"))
    spec = yaml.safe_load(target.render(job).text)["spec"]
    assert expanded(spec["entrypoint"], {"HOME": "/tmp"}).endswith("'name=$(HOME)' '$$'")  # noqa: S108
