"""Accounts of what each tenant uses of the engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from naiad.kv_cache.block_seconds import BlockSeconds
from naiad.outputs import StepRow
from naiad.sequence import Sequence
from naiad.snapshot import tenant_label
from naiad.usage import MAX_TENANTS, OTHER_TENANTS, TenantUsage


class Accounts:
    """One account for each tenant, in the order in which they came; those after the first share one."""

    def __init__(self, block_seconds: BlockSeconds) -> None:
        """Start from zero.

        Args:
            block_seconds: what tenants hold of the KV cache.
        """
        self._block_seconds = block_seconds
        self._usages: dict[str, TenantUsage] = {}
        self._others: TenantUsage | None = None

    def split(self, rows: Iterable[StepRow], running: Mapping[int, Sequence]) -> dict[str, int]:
        """Return the tokens that a step computes for each tenant, and count its drafts."""
        tokens: dict[str, int] = {}
        for row in rows:
            tenant = running[row.sequence_id].tenant
            tokens[tenant] = tokens.get(tenant, 0) + row.num_scheduled_tokens
            if row.draft_token_ids:
                self._of(tenant).num_draft_tokens += len(row.draft_token_ids)
        return tokens

    def charge_step(self, tokens: Mapping[str, int], seconds: float) -> None:
        """Divide a step's time among the tenants by their tokens."""
        num_tokens = sum(tokens.values())
        for tenant, num in tokens.items():
            self._of(tenant).step_s += seconds * num / num_tokens

    def charge_prompt(self, sequence: Sequence) -> None:
        """Charge a sequence's prompt; it has got its first token."""
        usage = self._of(sequence.tenant)
        usage.num_prompt_tokens += sequence.num_prompt_tokens
        usage.num_cached_tokens += sequence.num_cached_tokens

    def charge_output(self, tenant: str, num_tokens: int) -> None:
        """Charge tokens that are sent."""
        self._of(tenant).num_output_tokens += num_tokens

    def usages(self) -> list[TenantUsage]:
        """Copies of all accounts as they are now."""
        for tenant, block_s in self._block_seconds.take().items():
            self._of(tenant).block_s += block_s
        usages = [*self._usages.values(), *([] if self._others is None else [self._others])]
        return [msgspec.structs.replace(each) for each in usages]

    def _of(self, tenant: str) -> TenantUsage:
        usage = self._usages.get(tenant)
        if usage is not None:
            return usage
        if len(self._usages) < MAX_TENANTS:
            usage = self._usages[tenant] = TenantUsage(tenant_label(tenant))
            return usage
        if self._others is None:
            self._others = TenantUsage(OTHER_TENANTS)
        return self._others
