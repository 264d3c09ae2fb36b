from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from naiad.cli.main import main
from naiad.errors import StartupError
from naiad.openai_server.access.key_file import Key, Limits, digest_of, new_key, read_key_file

ALICE: dict[str, Any] = {"name": "alice", "sha256": digest_of("a"), "tenant": "acme"}


def written(folder: Path, content: Any, mode: int = 0o600) -> Path:
    path = folder / "keys.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    path.chmod(mode)
    return path


def test_a_file_of_keys(tmp_path: Path) -> None:
    limits = {
        "requests_per_minute": 1,
        "tokens_per_minute": None,
        "concurrent_requests": 2,
        "highest_priority": 5,
    }
    bob = {"name": "bob", "sha256": digest_of("b"), "tenant": "acme", "role": "operator", "limits": limits}
    alice, other = read_key_file(written(tmp_path, {"keys": [ALICE, bob]}))
    assert alice == Key(**ALICE, role="user", limits=Limits())
    assert (other.role, other.limits) == (
        "operator",
        Limits(requests_per_minute=1, concurrent_requests=2, highest_priority=5),
    )


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path, {"keys": [ALICE]}, mode)
    with pytest.raises(
        StartupError, match=f"{path}: mode = {mode:04o}: expected .* owner alone .*chmod go-w"
    ):
        read_key_file(path)


def test_a_file_that_others_may_read_is_allowed(tmp_path: Path) -> None:
    assert len(read_key_file(written(tmp_path, {"keys": [ALICE]}, 0o644))) == 1


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "name": ({"name": "a b"}, "(a b): name = 'a b': expected 1 to 64 letters"),
    "name with a line": ({"name": "a\n"}, "name = 'a\\n': expected 1 to 64 letters"),
    "no name": ({"name": None}, "entry 2: name = None: expected 1 to 64 letters"),
    "tenant": ({"tenant": ""}, "(bob): tenant = '': expected 1 to 64 letters"),
    "the key itself": ({"sha256": "secret-key"}, "(bob): sha256 = 'secr…': expected the SHA-256 of the key"),
    "upper case": (
        {"sha256": "A" * 64},
        "sha256 = 'AAAA…': expected the SHA-256 of the key: 64 digits 0-9a-f",
    ),
    "role": ({"role": "admin"}, "(bob): role = 'admin': expected user or operator"),
    "limits": ({"limits": 5}, "(bob): limits = 5: expected an object"),
    "limit": (
        {"limits": {"requests_per_minute": 0}},
        "(bob): limits.requests_per_minute = 0: expected a whole number, 1 …",
    ),
    "limit as text": (
        {"limits": {"tokens_per_minute": "9"}},
        "limits.tokens_per_minute = '9': expected a whole",
    ),
    "boolean limit": (
        {"limits": {"concurrent_requests": True}},
        "limits.concurrent_requests = True: expected",
    ),
    "priority": (
        {"limits": {"highest_priority": -1}},
        "limits.highest_priority = -1: expected a whole number, 0",
    ),
    "unknown field": (
        {"tenants": "x"},
        "(bob): tenants: this field is not known: expected name, sha256, tenant",
    ),
    "unknown limit": (
        {"limits": {"rpm": 1}},
        "limits.rpm: this field is not known: expected requests_per_min",
    ),
    "same name": ({"name": "alice"}, "2 entries (alice, alice) have name = 'alice': expected one"),
    "same key": ({"sha256": digest_of("a")}, "2 entries (alice, bob) have sha256 = 'ca97…': expected one"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_error_names_file_entry_field_value_and_what_is_allowed(tmp_path: Path, case: str) -> None:
    fields, words = WRONG[case]
    bob = {"name": "bob", "sha256": digest_of("b"), "tenant": "acme"} | fields
    path = written(tmp_path, {"keys": [ALICE, bob]})
    with pytest.raises(StartupError) as caught:
        read_key_file(path)
    message = str(caught.value)
    assert message.startswith(f"--api-keys {path}: ")
    assert words in message
    assert "\n" not in message
    assert "2" in message


@pytest.mark.parametrize("field", ["name", "sha256", "tenant"])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    entry = {name: value for name, value in ALICE.items() if name != field}
    with pytest.raises(StartupError, match=f"entry 1.*: {field} is missing: expected "):
        read_key_file(written(tmp_path, {"keys": [entry]}))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ([ALICE], "expected a JSON object whose field keys is a list"),
        ({"keys": []}, "at least one entry"),
        ({"keys": {}}, "expected a JSON object whose field keys is a list"),
        ({"keys": ["a"]}, "entry 1: expected an object with the fields name, sha256"),
        ({"keys": [ALICE], "more": 1}, "more: this field is not known"),
    ],
)
def test_a_file_of_something_else(tmp_path: Path, content: Any, words: str) -> None:
    with pytest.raises(StartupError, match=words):
        read_key_file(written(tmp_path, content))


def test_a_file_that_is_not_utf_8(tmp_path: Path) -> None:
    path = written(tmp_path, {"keys": [ALICE]})
    path.write_bytes(path.read_bytes().replace(b'"keys"', b'"keys\xff"'))
    with pytest.raises(StartupError, match="is not JSON"):
        read_key_file(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"none.json: it can not be read: No such file"):
        read_key_file(tmp_path / "none.json")


def test_a_new_key_is_long_and_its_entry_has_its_digest() -> None:
    made = [new_key("alice", "acme", "operator") for _ in range(100)]
    assert len({key for key, _ in made}) == 100
    for key, entry in made:
        assert len(key) == 43
        assert entry == Key(name="alice", sha256=digest_of(key), tenant="acme", role="operator")


def test_naiad_key_prints_an_entry_that_the_file_may_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["key", "alice", "--tenant", "acme", "--role", "operator"]) == 0
    printed = capsys.readouterr()
    path = written(tmp_path, {"keys": [json.loads(printed.out)]})
    secret = printed.err.split()[-1]
    expected = Key(name="alice", sha256=digest_of(secret), tenant="acme", role="operator")
    assert read_key_file(path) == (expected,)
    assert secret not in printed.out
    assert main(["key", "alice", "--tenant", ""]) == 1
    assert "tenant = ''" in capsys.readouterr().err
