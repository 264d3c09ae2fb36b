"""Checks what the environment is made of: pins and hashes, licences, known vulnerabilities.

    make audit

Run with the environment's Python. Ends with 1 if a requirement has no hash, if a licence is not known to be
one that lets a program be used and passed on freely, or if a package has a known vulnerability. Packages that
could not be looked up, for example because there is no network, are counted, and end it with 1 as well.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

from packaging.markers import Marker

ROOT = Path(__file__).parents[1]
# PyTorch's builds differ by index and device, so no list of hashes would hold.
NOT_HASHED = ("torch.txt",)
# What `make install` installs.
INSTALLED = ("torch.txt", "lock.txt", "server.txt")
_PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)((?:[^\n\\]|\\\n)*)", re.MULTILINE)
_FREE = re.compile(
    r"\b(MIT|Apache|BSD|0BSD|ISC|MPL|Mozilla Public|PSF|Python Software Foundation|ZPL|Zope Public|HPND)\b",
    re.IGNORECASE,
)
_RESTRICTING = re.compile(
    r"\b(A?GPL|LGPL|SSPL|GNU (Affero|General|Lesser)|Commons Clause|BUSL)", re.IGNORECASE
)


def main() -> int:
    """Check, print what was found, and return the exit code."""
    parser = argparse.ArgumentParser(prog="make audit", description=__doc__, allow_abbrev=False)
    parser.add_argument("--pip-audit", required=True, metavar="FILE", help="the program, in an environment")
    args = parser.parse_args()
    faults = [
        *unhashed(requirement_files()),
        *licence_faults(installed_here()),
    ]
    for name in (*INSTALLED, "fuzz.txt", "audit.txt"):
        faults += vulnerabilities(args.pip_audit, ROOT / "requirements" / name)
    for fault in faults:
        print(f"naiad: error: {fault}", file=sys.stderr)
    return int(bool(faults))


def requirement_files() -> list[Path]:
    """Every file of requirements, those of peers, foreign clients, proxies and `naiad quantize` included."""
    others = [
        *ROOT.glob("*/*/requirements/*.txt"),
        *ROOT.glob("deploy/requirements/*.txt"),
        *ROOT.glob("backend_src/naiad/cli/*/*/*.txt"),
    ]
    return sorted({*(ROOT / "requirements").glob("*.txt"), *others})


def pinned_here(path: Path) -> list[str]:
    """The packages of a file of requirements that are for this interpreter and machine."""
    pins = _PIN.finditer(path.read_text(encoding="utf-8"))
    return [pin[1] for pin in pins if _is_for_here(pin[3].partition("--hash")[0])]


def installed_here() -> list[str]:
    """The packages that `make install` installs for this interpreter and machine."""
    return [each for name in INSTALLED for each in pinned_here(ROOT / "requirements" / name)]


def _is_for_here(marker: str) -> bool:
    text = marker.replace("\\\n", "").strip().removeprefix(";").strip()
    return not text or Marker(text).evaluate()


def unhashed(files: list[Path]) -> list[str]:
    """Say which requirements have no version or no hash."""
    faults = []
    num_pins = 0
    for path in files:
        text = path.read_text(encoding="utf-8")
        lines = [line for line in text.splitlines() if line[:1] not in ("", "#", " ", "-")]
        pins = list(_PIN.finditer(text))
        num_pins += len(pins)
        if len(pins) != len(lines):
            faults.append(f"{path.name}: {len(lines) - len(pins)} requirements have no version")
        if path.name not in NOT_HASHED:
            faults += [f"{path.name}: {pin[1]} has no hash" for pin in pins if "--hash=sha256:" not in pin[3]]
    print(f"{num_pins} requirements of {len(files)} files have a version, and all but torch's hashes.")
    return faults


def licence_faults(names: list[str]) -> list[str]:
    """Print the licences of the packages that are installed; say which do not let all use them."""
    by_licence: dict[str, list[str]] = {}
    faults = []
    for name in names:
        try:
            metadata = importlib.metadata.metadata(name)
        except importlib.metadata.PackageNotFoundError:
            faults.append(f"{name} is not installed: run make install first")
            continue
        licence = licence_of(metadata)
        by_licence.setdefault(licence, []).append(name)
        if not _FREE.search(licence) or _RESTRICTING.search(licence):
            faults.append(f"{name}: the licence {licence!r} is not one of those that are known to be free")
    for licence, packages in sorted(by_licence.items()):
        print(f"{licence}: {', '.join(packages)}")
    return faults


def licence_of(metadata: importlib.metadata.PackageMetadata) -> str:
    """The licence that a package names: its expression, else its classifiers, else a line of text."""
    if "License-Expression" in metadata:
        return str(metadata["License-Expression"])
    classifiers = [
        each.rpartition(" :: ")[2]
        for each in metadata.get_all("Classifier") or ()
        if each.startswith("License ::") and each.rpartition(" :: ")[2] != "OSI Approved"
    ]
    if classifiers:
        return ", ".join(classifiers)
    lines = [line.strip() for line in str(metadata["License"] or "").splitlines() if line.strip()]
    return lines[0][:80] if lines else "none named"


def vulnerabilities(program: str, path: Path) -> list[str]:
    """Ask for the known vulnerabilities of a file's packages."""
    command = [
        program,
        "-r",
        str(path),
        "--disable-pip",
        "--no-deps",
        "--format",
        "json",
        "--progress-spinner",
        "off",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        return [f"{path.name}: pip-audit says: {done.stderr.strip()[-400:]}"]
    found = [
        f"{path.name}: {each['name']} {each['version']}: {fault['id']}, mended in {fault['fix_versions']}"
        for each in packages
        for fault in each.get("vulns", ())
    ]
    not_asked = [each["name"] for each in packages if "skip_reason" in each]
    num_asked = len(packages) - len(not_asked)
    print(f"{path.name}: {num_asked} packages looked up, {len(found)} known vulnerabilities.")
    if not_asked:
        found.append(f"{path.name}: {len(not_asked)} packages could not be looked up, {not_asked[0]} first")
    return found


if __name__ == "__main__":
    sys.exit(main())
