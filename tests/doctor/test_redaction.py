"""Planted secrets never come out; what is not secret does."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from drivetrain.core.redaction import REMOVED, clean_text, is_secret, without_secrets

# Made up, in the form of real ones; in two parts, so that no scanner takes them for real.
PLANTED = {
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/" + "bPxRfiCYEXAMPLEKEY",
    "AWS_ACCESS_KEY_ID": "AKIA" + "IOSFODNN7EXAMPLE",
    "WANDB_API_KEY": "0123456789abcdef" + "0123456789abcdef01234567",
    "HF_TOKEN": "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz012345",
    "MLFLOW_TRACKING_PASSWORD": "correct horse battery staple",
    "RAY_REDIS_PASSWORD": "5241590000000000",
    "DRIVETRAIN_STORE": "https://me:" + "hunter2pass@minio.local/bucket",
    "SLURM_JWT": "eyJhbGciOiJI." + "eyJzdWIiOiIxMjM0." + "dozjgNryP4J3jVmN",
    "NCCL_COMMENT": "token=" + "abc123def456",
    "TORCH_HOME": "/home/me/.cache/torch?sig=" + "Zm9vYmFyYmF6&x=1",
    "KUBERNETES_NOTE": "Authorization: Bearer " + "abcdef0123456789",
    "GH": "ghp_" + "0123456789abcdefghijABCDEFGHIJ012345",
    "OPENAI": "sk-proj-" + "abcdefghijklmnop0123456789",
    "SSL_BLOB": "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n" + "-----END RSA PRIVATE KEY-----",
}
SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI",
    "AWS_ACCESS_KEY_ID": "IOSFODNN7",
    "WANDB_API_KEY": "89abcdef0123",
    "HF_TOKEN": "AbCdEfGh",
    "MLFLOW_TRACKING_PASSWORD": "battery",
    "RAY_REDIS_PASSWORD": "52415900",
    "DRIVETRAIN_STORE": "hunter2",
    "SLURM_JWT": "eyJzdWIi",
    "NCCL_COMMENT": "abc123def",
    "TORCH_HOME": "Zm9vYmFy",
    "KUBERNETES_NOTE": "abcdef0123456789",
    "GH": "abcdefghij",
    "OPENAI": "abcdefghij",
    "SSL_BLOB": "MIIEow",
}
HARMLESS = {
    "PWD": "/home/me/project",
    "NCCL_SOCKET_IFNAME": "=eth0",
    "SLURM_JOB_NODELIST": "gpu[001-064]",
    "MASTER_ADDR": "ip-10-0-12-34.eu-central-1.compute.internal",
    "CUDA_VISIBLE_DEVICES": "GPU-8f6d3a2e-1234-5678-9abc-def012345678",
    "PYTHONPATH": "/opt/project/src:/opt/venv/lib/python3.11/site-packages",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHELASTIC_RUN_ID": "train-gpt-small-2024-05-01",
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_secret_is_taken_out(name: str) -> None:
    cleaned = without_secrets({name: PLANTED[name]})[name]
    assert SECRETS[name] not in cleaned
    assert REMOVED in cleaned
    assert is_secret(name, PLANTED[name])


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_not_secret_stays(name: str) -> None:
    assert without_secrets(HARMLESS)[name] == HARMLESS[name]


def test_command_lines_keep_all_but_the_secret() -> None:
    line = "python train.py --api-key abc123xyz --lr 0.1 password=hunter2 s3://bucket/run"
    assert clean_text(line) == (
        f"python train.py --api-key {REMOVED} --lr 0.1 password={REMOVED} s3://bucket/run"
    )


def test_the_env_verb_shows_settings_and_no_secret() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "drivetrain", "env"],
        env={**os.environ, **PLANTED, "NCCL_DEBUG": "INFO"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "NCCL_DEBUG=INFO" in result.stdout
    assert "torch:" in result.stdout
    for secret in SECRETS.values():
        assert secret not in result.stdout


# In texts -------------------------------------------------------------------------------------

IN_TEXTS = {
    "python train.py --pass hunter2 --lr 0.1": "hunter2",
    "mysql --pass=hunter2": "hunter2",
    "curl -u me:hunter2 https://api.example.com": "hunter2",
    "curl --user me:hunter2 https://api.example.com": "hunter2",
    "curl -ume:hunter2 https://api.example.com": "hunter2",
    "PGPASS=hunter2 psql": "hunter2",
    "PGPASSWORD=hunter2 psql": "hunter2",
    "post to https://hooks.slack.com/services/T0AB/B0CD/" + "x1y2z3": "x1y2z3",
    "https://discord.com/api/webhooks/1234/" + "abcd-efgh_ij": "abcd-efgh",
    "https://team.webhook.office.com/webhookb2/" + "1a2b": "1a2b",
    "https://example.com/webhook/" + "hunter2": "hunter2",
    "https://me:p@ss:w0rd@host/x": "w0rd",
    "https://me:pa@host.example/x": "me:pa",
    "key: -----BEGIN EC PRIVATE KEY-----\nMHcCAQ\n-----END EC PRIVATE KEY----- end": "MHcCAQ",
    "-----BEGIN PGP PRIVATE KEY BLOCK-----\n\nlQOYBF\n=x\n": "lQOYBF",
    "-----BEGIN OPENSSH PRIVATE KEY-----\\nb3BlbnNz": "b3BlbnNz",
}


@pytest.mark.parametrize("text", IN_TEXTS)
def test_a_secret_in_a_text_is_taken_out(text: str) -> None:
    assert IN_TEXTS[text] not in clean_text(text)
    assert REMOVED in clean_text(text)


@pytest.mark.parametrize("name", ["PGPASS", "PGPASSFILE_PASS", "DB_PASS", "SLACK_WEBHOOK_URL"])
def test_a_secret_variable_is_known_by_its_name(name: str) -> None:
    assert is_secret(name, "hunter2")


WORDS_OF_TRAINING = (
    "tokenizer=gpt2",
    "data.max_tokens=4096",
    "num_tokens: 2048",
    "--max-tokens 4096 --tokenizer gpt2",
    "bypass=true",
    "passes=300",
    "first pass of three",
    "python -u train.py",
    "docker run --user trainer image",
    "https://example.com/a/b@2x.png",
    "git@host.example:team/project.git",
)


@pytest.mark.parametrize("text", WORDS_OF_TRAINING)
def test_words_of_a_training_stay(text: str) -> None:
    assert clean_text(text) == text


HOSTILE = (
    *(
        "a",
        "-",
        ".",
        "token",
        "password",
        "eyJa",
        "-eyJaaaaaaaaa",
        "sk-a-",
        "-sk-a",
        "://",
        "x://a",
    ),
    *("://a:", "?x-amz-a", "bearer ", "token =", "=", "-----BEGIN ", "-----BEGIN PRIVATE KEY-----"),
    *("hf_", "https://hooks.", "https://a/webhook", "-u a", "-u ", "--pass ", "a@", "A1b2+/_=-"),
    *("pass", "passphrase ", " ", "\n", "AKIA", "BEGIN PRIVATE KEY "),
)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("piece", HOSTILE)
def test_a_text_ten_times_as_long_takes_ten_times_as_long(piece: str) -> None:
    """Quadratic patterns took 12 s for 16 kB; these are 256 kB."""
    text = (piece * (262_144 // len(piece)))[:262_144]
    begin_s = time.process_time()
    clean_text(text)
    assert time.process_time() - begin_s < 2.0
