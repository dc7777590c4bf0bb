"""Test the detection of secrets, without false alarms."""

import json
import time

import pytest

from proxy.summary.prompt import Redaction

# Put together here, so that no scanner of repositories takes them for real ones.
LETTERS = "aB3dE5gH7jK9mN1pQ2sT4vW6xY8zA0cD"
JWT = "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0NTY3ODkwIn0." + "dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
PEM = "-----BEGIN RSA PRIVATE" + " KEY-----\nMIIEpAIBAAKCAQEA" + "x7Zk" * 12 + "\n-----END RSA PRIVATE" + " KEY-----"

SECRETS = [
    ("the key is sk-" + LETTERS, "sk-" + LETTERS),
    ("sk-proj-" + LETTERS + "_-" + LETTERS, LETTERS),
    ("use 'sk-ant-api03-" + LETTERS + "'", LETTERS),
    ("aws: AKIA" + "IOSFODNN7EXAMPLE", "IOSFODNN7"),
    ("xoxb-" + "123456789012-" + LETTERS, LETTERS),
    ("sk_live_" + LETTERS, LETTERS),
    ("Bearer " + JWT, "dozjgNry"),
    ("cookie " + JWT + " end", "eyJzdWIi"),
    (json.dumps({"arguments": json.dumps({"key": PEM})}), "x7Zkx7Zk"),
    ("password=hunter2", "hunter2"),
    ("password=123456", "123456"),
    ("api_key: " + LETTERS, LETTERS),
    ("export AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "K7MDENG"),
    ("  clientSecret: opensesame\n  port: 80", "opensesame"),
    ("config['token'] = 'opensesame'", "opensesame"),
    ("x-api-key: " + LETTERS.lower(), LETTERS.lower()),
    ("GET /file?id=3&access_token=" + LETTERS + "&page=2", LETTERS),
    ("mysql --password opensesame -h db", "opensesame"),
]


@pytest.mark.parametrize(("text", "secret"), SECRETS, ids=[text[:30] for text, _ in SECRETS])
def test_a_secret_is_blacked_out(text: str, secret: str) -> None:
    assert secret in text
    cleaned = Redaction(secrets=True)(text)
    assert secret not in cleaned
    assert "[redacted]" in cleaned
    assert Redaction(secrets=True)(cleaned) == cleaned, "once is enough"


def test_what_stands_beside_a_secret_stays() -> None:
    clean = Redaction(secrets=True)
    assert clean("DB_PASSWORD=correcthorse\nDB_HOST=db.internal") == "DB_PASSWORD=[redacted]\nDB_HOST=db.internal"
    assert clean("postgres://app:opensesame@db.internal:5432/shop") == "postgres://app:[redacted]@db.internal:5432/shop"
    assert clean('{"password": "s3cr\\"et!", "port": 5432}') == '{"password": "[redacted]", "port": 5432}'
    assert clean("-H 'Authorization: Bearer " + LETTERS + "' x") == "-H 'Authorization: Bearer [redacted]' x"
    assert clean("before\n" + PEM + "\nafter") == "before\n[redacted]\nafter"
    assert clean('{"text": "PASSWORD=hunter2\\nPORT=5432"}') == '{"text": "PASSWORD=[redacted]\\nPORT=5432"}'
    assert clean("?id=3&access_token=" + LETTERS + "&page=2") == "?id=3&access_token=[redacted]&page=2"


@pytest.mark.parametrize(
    "text",
    [
        "commit 0485b0d2f1c7a9e3b6d8f0a1c2e4d6f8a0b1c3d5 on main",
        "id 550e8400-e29b-41d4-a716-446655440000",
        "max_tokens=4096, prompt_tokens: 1234, total_tokens: 99999",
        "The password must have eight characters, and a token lasts an hour.",
        "self._api_key = api_key\nself.password = user_password",
        '{"password": "", "token": null, "secret": true}',
        '{"token": {"type": "string"}, "password": {"type": "string", "minLength": 8}}',
        "https://api.example.com:8443/v1/items?page=2&sort_key=created",
        "Use a bearer authentication-scheme-of-some-kind instead of basic things",
        "-----BEGIN CERTIFICATE-----\nMIIDdzCCAl+gAwIBAgIE\n-----END CERTIFICATE-----",
    ],
    ids=lambda text: text[:30],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert Redaction(secrets=True)(text) == text


def test_a_policys_own_expressions() -> None:
    clean = Redaction(secrets=False, patterns=[r"ACME-\d+", r"(?i)project \w+", r"(?=Zeus)"])
    assert clean("ACME-12 and Project Zeus, Zeus") == "[redacted] and [redacted], Zeus"
    assert clean("password=hunter2") == "password=hunter2"
    both = Redaction(secrets=True, patterns=[r"ACME-\d+"])
    assert both("ACME-12 password=hunter2") == "[redacted] password=[redacted]"


@pytest.mark.long
@pytest.mark.parametrize(
    "unit",
    ["password", "password=", "password: a.b", "token = ", "sk-", "sk-a_", "eyJ", "eyJaaaaaaaaa.", "://a:", "?token=",
     "--token ", "-----BEGIN PRIVATE KEY-----", "-----BEGIN PRIVATE KEY-----\n-", "Bearer ", "bearer a", "curl -u ",
     'secret="', "\\\\", "api_", "a", "1", "authorization: x ", "password: a a a a ", "AKIA", "://", "key=",
     '"password": "\\"'],
)  # fmt: skip
def test_the_time_is_linear_in_the_text(unit: str) -> None:
    clean = Redaction(secrets=True)
    text = unit * (40_000 // len(unit))
    started = time.thread_time()
    clean(text)
    assert time.thread_time() - started < 0.5


@pytest.mark.parametrize("text", ["PASSWORD=Hunter22", "Api-Key: " + LETTERS, "AUTHORIZATION: BEARER " + LETTERS])
def test_whatever_the_case_of_the_name(text: str) -> None:
    assert Redaction(secrets=True)(text).endswith("[redacted]")
