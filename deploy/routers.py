"""The command lines of routers that choose a replica by what its prefix cache holds.

vllm-router and sglang-router are programs of their own, with options and without a configuration file. Both
keep a tree of the texts that they have sent to each replica (`cache_aware`); vllm-router can also read the
replicas' own KV events (`kv_aware`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from naiad.errors import StartupError

if TYPE_CHECKING:
    from deploy.proxy import Plan, Replica

# What a replica says of itself is asked for each second, and believed at once.
_HEALTH = (
    *("--health-check-interval-secs", "1", "--health-check-timeout-secs", "2"),
    *("--health-failure-threshold", "1", "--health-success-threshold", "1"),
)
# A request is tried again within milliseconds, and at the same replica as long as the router trusts it.
_TRUST = (
    *("--cb-failure-threshold", "2", "--cb-success-threshold", "1"),
    *("--cb-timeout-duration-secs", "2"),
)


def vllm_router_options(plan: Plan) -> list[str]:
    """Return vllm-router's options.

    Raises:
        StartupError: a value is not allowed, or the policy needs the replicas' KV events, and one has none.
    """
    options = [*_common(plan), "--prometheus-port", str(plan.admin_port)]
    if plan.policy != "kv_aware":
        return options
    if not all(replica.kv_events_port for replica in plan.replicas):
        raise StartupError("--policy is kv_aware: name the port of the KV events of each --replica")
    for replica in plan.replicas:
        options += ["--kv-event-source", f"{_url(replica)}=tcp://{replica.host}:{replica.kv_events_port}"]
    # The router wants a name for what the replicas have in common.
    return [*options, "--kv-event-block-size", str(plan.block_size), "--kv-event-model", "naiad"]


def sglang_router_options(plan: Plan) -> list[str]:
    """Return sglang-router's options.

    Raises:
        StartupError: a value is not allowed.
    """
    metrics = ("--prometheus-host", "127.0.0.1", "--prometheus-port", str(plan.admin_port))
    return ["launch", *_common(plan), *metrics, "--worker-startup-check-interval", "1"]


def _common(plan: Plan) -> list[str]:
    if plan.session_header != type(plan).session_header:
        raise StartupError(f"--session-header is {plan.session_header}: {plan.proxy} goes by prompts alone")
    listens = ("--host", plan.host, "--port", str(plan.port))
    policy = ("--policy", plan.chosen_policy)
    workers = ("--worker-urls", *map(_url, plan.replicas))
    return [*listens, *workers, *policy, *_HEALTH, *_TRUST, "--log-level", "info"]


def _url(replica: Replica) -> str:
    return f"http://{replica.host}:{replica.openai_port}"


ROUTERS: dict[str, Callable[[Plan], list[str]]] = {
    "vllm-router": vllm_router_options,
    "sglang-router": sglang_router_options,
}
