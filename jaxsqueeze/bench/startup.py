"""Seconds from starting the server's process to ``/health`` 200: with nothing compiled, then with programs kept.

The model is converted before the clock starts, and its files are in the page cache both times: the difference is
compiling. The cache is a temporary folder, handed over in the environment; the user's cache is not touched.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from rich.table import Table

from jaxsqueeze.bench import machine, report

CACHE_VARIABLE = "JAXSQUEEZE_PROGRAMS"
POLL_S = 0.05  # resolution of the figure
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never by way of a proxy
CONVERT = "import sys; from jaxsqueeze.checkpoint.ensure import ensure_converted; ensure_converted(*sys.argv[1:])"
SERVE = "import sys; from jaxsqueeze.cli import main; sys.exit(main(['serve', *sys.argv[1:]]))"


def run(args: argparse.Namespace, command: list[str]) -> int:
    """``--startup``: prints the two figures. Raises ValueError if the server does not come up."""
    model = args.model or "demo"
    flags = [model, "--dtype", args.dtype]
    if args.max_model_len:
        flags += ["--max-model-len", str(args.max_model_len)]
    with tempfile.TemporaryDirectory(prefix="jaxsqueeze-startup-") as cache:
        # What is done once per machine, download and conversion, is not part of a start.
        _convert(model, args.dtype)
        cold_dir = Path(cache) / "cache"
        cold = time_to_ready(flags, cold_dir, args.timeout)
        entries = sum(1 for path in cold_dir.rglob("*") if path.is_file())
        if not entries:
            raise ValueError(f"the server left no compiled code in {CACHE_VARIABLE}: its starts are all cold")
        warm = [time_to_ready(flags, cold_dir, args.timeout) for _ in range(args.repeats)]
    figures: dict[str, Any] = {
        "cold_s": cold,
        "warm_s": statistics.median(warm),
        "warm_repeats_s": warm,
        "cache_entries": entries,
    }
    console = report.console()
    table = Table("process start to /health 200", "seconds")
    table.add_row("nothing compiled before", f"{cold:.1f}")
    table.add_row(f"programs kept (median of {len(warm)})", f"{figures['warm_s']:.1f}")
    console.print(table)
    about = machine.describe(command)
    report.print_machine(console, about)
    if args.json:
        report.write_json(args.json, {"machine": about, "model": model, "startup": figures})
    return 0


def time_to_ready(flags: list[str], cache: Path, timeout: float) -> float:
    """Starts the server, waits for it to be ready, stops it; seconds. Raises ValueError with what went wrong."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    begin = time.perf_counter()
    server = subprocess.Popen(
        [sys.executable, "-c", SERVE, *flags, "--host", "127.0.0.1", "--port", str(port)],
        env={**environment, CACHE_VARIABLE: str(cache)},
        stdout=subprocess.DEVNULL,
    )
    try:
        while not _ready(f"http://127.0.0.1:{port}/health"):
            if server.poll() is not None:
                raise ValueError(f"the server ended with code {server.returncode} before it was ready")
            if time.perf_counter() - begin > timeout:
                raise ValueError(f"the server was not ready in {timeout:g} s")
            time.sleep(POLL_S)
        return time.perf_counter() - begin
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _convert(model: str, dtype: str) -> None:
    """In a process of its own: this one must stay small beside the server."""
    dtypes = [] if dtype == "auto" else [dtype]
    done = subprocess.run([sys.executable, "-c", CONVERT, model, *dtypes], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise ValueError(f"cannot convert {model}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")


def _ready(url: str) -> bool:
    try:
        with DIRECT.open(url, timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):  # not listening yet, or 503: still compiling
        return False
