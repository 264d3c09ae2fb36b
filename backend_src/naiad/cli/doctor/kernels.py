"""Which kernels a start on this machine will use, and where they come from."""

from __future__ import annotations

from naiad_kernels.native.build import BuildError, Found, NoCompilerError, Origin, find, first_of
from naiad_kernels.native.variants import usable_variants


def find_kernels() -> tuple[dict[str, str], list[str]]:
    """Look for the kernels as a start does, and compile nothing.

    Returns:
        `kernels` and `kernel_library`, and how they could be faster or sooner ready.
    """
    try:
        found, problem = first_of(usable_variants(), find)
    except BuildError as error:
        return {"kernels": "torch", "kernel_library": ""}, [f"torch computes the steps: {_remedied(error)}"]
    advice = []
    if problem is not None:
        advice.append(
            f"{found.variant.name} kernels compute the steps, not the fastest ones: {_remedied(problem)}"
        )
    if not found.is_kept:
        advice.append("no private cache directory: kernels are compiled at every start; set XDG_CACHE_HOME")
    return {"kernels": f"native {found.variant.name}", "kernel_library": _origin(found)}, advice


def _origin(found: Found) -> str:
    if found.origin is not Origin.COMPILED:
        return str(found.origin.value)
    return f"compiled at {'the first' if found.is_kept else 'every'} start"


def _remedied(problem: BuildError) -> str:
    remedy = ": install g++ or clang++" if isinstance(problem, NoCompilerError) else ""
    return f"{problem}{remedy}"
