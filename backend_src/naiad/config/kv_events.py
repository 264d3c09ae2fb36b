"""Where and how the changes of the prefix cache are published; checks of the options about it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from naiad.errors import ConfigError

_LOOPBACK = "127.0.0.1"
_ENDPOINT = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")
_MAX_PORT = 65535
_MAX_TOPIC_CHARS = 255


class _KVEventFields(Protocol):
    """The fields of `EngineConfig` that are about KV events."""

    @property
    def kv_events_endpoint(self) -> str: ...
    @property
    def kv_events_replay_endpoint(self) -> str: ...
    @property
    def kv_events_topic(self) -> str: ...
    @property
    def kv_events_token_ids(self) -> bool: ...
    @property
    def enable_prefix_caching(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class KVEventSettings:
    """How the changes of the prefix cache are published.

    Attributes:
        endpoint: where subscribers connect, as ZeroMQ writes it.
        replay_endpoint: where they ask for what they have missed; empty: nowhere.
        topic: with which every message begins.
        has_token_ids: whether events contain tokens. If so, only blocks without a salt are published.
    """

    endpoint: str
    replay_endpoint: str = ""
    topic: str = ""
    has_token_ids: bool = False


def kv_event_settings(config: _KVEventFields) -> KVEventSettings | None:
    """Read and check the settings; None: nothing is published.

    Raises:
        ConfigError: a value is not allowed.
    """
    if not config.kv_events_endpoint:
        _check_unused(config)
        return None
    if not config.enable_prefix_caching:
        expected = "no endpoint: with enable_prefix_caching = false there are no events"
        raise ConfigError("kv_events_endpoint", config.kv_events_endpoint, expected)
    endpoint = _endpoint("kv_events_endpoint", config.kv_events_endpoint)
    replay_endpoint = config.kv_events_replay_endpoint
    if replay_endpoint:
        replay_endpoint = _endpoint("kv_events_replay_endpoint", replay_endpoint)
        if replay_endpoint == endpoint:
            raise ConfigError("kv_events_replay_endpoint", replay_endpoint, "another than kv_events_endpoint")
    topic = config.kv_events_topic
    if len(topic) > _MAX_TOPIC_CHARS or not topic.isprintable():
        expected = f"at most {_MAX_TOPIC_CHARS} printable characters"
        raise ConfigError("kv_events_topic", topic[:_MAX_TOPIC_CHARS], expected)
    return KVEventSettings(endpoint, replay_endpoint, topic, config.kv_events_token_ids)


def is_loopback_endpoint(endpoint: str) -> bool:
    """Whether only this machine reaches an endpoint of `KVEventSettings`."""
    found = _ENDPOINT.fullmatch(endpoint)
    host = "" if found is None else found["host"]
    return host.startswith("127.") or host in ("[::1]", "lo")


def _check_unused(config: _KVEventFields) -> None:
    given: dict[str, str | bool] = {
        "kv_events_replay_endpoint": config.kv_events_replay_endpoint,
        "kv_events_topic": config.kv_events_topic,
        "kv_events_token_ids": config.kv_events_token_ids,
    }
    for key, value in given.items():
        if value:
            raise ConfigError(key, value, "a kv_events_endpoint with it")


def _endpoint(key: str, text: str) -> str:
    """Complete an endpoint; a port alone is one of the loopback address."""
    full = f"tcp://{_LOOPBACK}:{text}" if text.isascii() and text.isdigit() else text
    found = _ENDPOINT.fullmatch(full)
    if found is None or not 1 <= int(found["port"]) <= _MAX_PORT:
        expected = f"a port of this machine, or tcp://ADDRESS:PORT; a port is 1 … {_MAX_PORT}"
        raise ConfigError(key, text, expected)
    return full
