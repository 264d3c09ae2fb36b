"""What tenants have used of an engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

# More tenants than these are added up under `OTHER_TENANTS`.
MAX_TENANTS = 64
OTHER_TENANTS = "other"

_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class TenantUsage(msgspec.Struct, gc=False):
    """What one tenant has used.

    Attributes:
        tenant: its label (`naiad.snapshot.tenant_label`), or `OTHER_TENANTS`.
        step_s: seconds of steps. A step's time is divided among its rows by the tokens that they compute.
        block_s: KV blocks times the seconds for which it held them. A block that several tenants hold is
            divided among its holders.
        num_prompt_tokens: prompt tokens of its sequences that have had a token.
        num_cached_tokens: those of them whose KV was in the prefix cache.
        num_output_tokens: tokens that were generated.
        num_draft_tokens: draft tokens that were computed.
    """

    tenant: str
    step_s: _Seconds = 0.0
    block_s: _Seconds = 0.0
    num_prompt_tokens: _Count = 0
    num_cached_tokens: _Count = 0
    num_output_tokens: _Count = 0
    num_draft_tokens: _Count = 0

    def plus(self, other: TenantUsage, factor: int = 1) -> TenantUsage:
        """Return this usage and `factor` times the other's, under this tenant's label."""
        sums = (getattr(self, name) + factor * getattr(other, name) for name in COUNTED)
        return TenantUsage(self.tenant, *sums)


# The attributes that are counted.
COUNTED = TenantUsage.__struct_fields__[1:]


class UsageLine(TenantUsage, kw_only=True, forbid_unknown_fields=True):
    """A line of a usage file: what a tenant used of a model in some seconds, as a JSON object.

    Attributes:
        begin_s, end_s: from when to when, in Unix time.
        model: the model's served name.
    """

    begin_s: _Seconds
    end_s: _Seconds
    model: str


def added(one: Iterable[TenantUsage], other: Iterable[TenantUsage]) -> list[TenantUsage]:
    """Add usages tenant by tenant; the first ones keep their order."""
    sums = {each.tenant: each for each in one}
    for each in other:
        before = sums.get(each.tenant)
        sums[each.tenant] = each if before is None else before.plus(each)
    return list(sums.values())


def since(now: Iterable[TenantUsage], before: Iterable[TenantUsage]) -> list[TenantUsage]:
    """Return what tenants used between two usages of one engine; those that used nothing are left out."""
    earlier = {each.tenant: each for each in before}
    used = [each.plus(earlier[each.tenant], -1) if each.tenant in earlier else each for each in now]
    return [each for each in used if any(getattr(each, name) for name in COUNTED)]
