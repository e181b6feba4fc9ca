"""Is what would be published whole? python release/check.py [FOLDER], which holds one wheel and one source archive.

The wheel holds what git has of the packages and nothing else; the archive all that the tests need. `make wheel` runs
it.
"""

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from email.parser import HeaderParser
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]

PACKAGES = ("controller", "deploy", "kernels", "kvcache", "proto", "workers")
IN_WHEEL = ("*.py", "*.pyi", "*.json", "*.html", "*.proto", "*.cpp", "*.h", "deploy/demo/model/*", "deploy/cluster/*")
ONLY_IN_GIT = (".ci/*",)

MUST_SAY = ("License-Expression", "License-File", "Author", "Requires-Python", "Keywords", "Description-Content-Type")
PYTHONS = ("3.11", "3.12", "3.13")
LARGEST_WHEEL_BYTES = 4_000_000


def main(folder: str) -> int:
    tracked = of_git()
    wheel, archive = the_one(folder, "*.whl"), the_one(folder, "*.tar.gz")
    faults = [*faults_of_wheel(wheel, tracked), *faults_of_archive(archive, tracked)]
    for fault in faults:
        print(f"packaging: {fault}", file=sys.stderr)
    if not faults:
        print(f"packaging: {wheel.name} ({wheel.stat().st_size:,} bytes) and {archive.name} are whole")
    return bool(faults)


def of_git() -> set[str]:
    """Files that git has, or would add."""
    asked = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.splitlines() if (ROOT / name).is_file()}


def the_one(folder: str, pattern: str) -> Path:
    found = list(Path(folder).glob(pattern))
    if len(found) != 1:
        sys.exit(f"packaging: {folder} must have one {pattern}, and has {len(found)}")
    return found[0]


def wanted_in_wheel(tracked: Iterable[str]) -> set[str]:
    def is_wanted(name: str) -> bool:
        path = PurePosixPath(name)
        if len(path.parts) == 1:
            return name in ("__init__.py", "environment.py", "errors.py", "py.typed")
        return path.parts[0] in PACKAGES and any(fnmatch(name, pattern) for pattern in IN_WHEEL)

    return {f"intarsia/{name}" for name in tracked if is_wanted(name)}


def faults_of_wheel(wheel: Path, tracked: set[str]) -> list[str]:
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
        [metadata] = [name for name in file.namelist() if name.endswith(".dist-info/METADATA")]
        said = file.read(metadata).decode()
    wanted = wanted_in_wheel(tracked)
    faults = [f"the wheel lacks {name}" for name in sorted(wanted - names)]
    faults += [f"the wheel has {name}, which is not meant to be there" for name in sorted(names - wanted)]
    if wheel.stat().st_size > LARGEST_WHEEL_BYTES:
        faults.append(f"the wheel has {wheel.stat().st_size:,} bytes, more than {LARGEST_WHEEL_BYTES:,}")
    return faults + faults_of_metadata(said)


def faults_of_metadata(said: str) -> list[str]:
    headers = HeaderParser().parsestr(said)
    faults = [f"the metadata says no {name}" for name in MUST_SAY if not headers.get(name)]
    classifiers = headers.get_all("Classifier", [])
    faults += [
        f"no classifier for Python {version}"
        for version in PYTHONS
        if f"Programming Language :: Python :: {version}" not in classifiers
    ]
    return faults


def faults_of_archive(archive: Path, tracked: set[str]) -> list[str]:
    with tarfile.open(archive) as file:
        names = {member.name.partition("/")[2] for member in file.getmembers() if member.isfile()}
    wanted = {name for name in tracked if not any(fnmatch(name, pattern) for pattern in ONLY_IN_GIT)}
    made = {name for name in names if name in ("PKG-INFO", "setup.cfg") or ".egg-info/" in name}
    faults = [f"the source distribution lacks {name}" for name in sorted(wanted - names)]
    return faults + [f"the source distribution has {name}, which git has not" for name in sorted(names - made - wanted)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "dist"))
