"""``RESOURCES.md``: what resources.py finds, committed, so that a change that costs registers is seen in review."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from pallas_kernels.resources import DEVICES, Row, measure_all

PATH = Path(__file__).parent / "RESOURCES.md"
COMMAND = "scripts/kernel_resources.py"
_HEAD = """# What each kernel takes of a GPU

Made by `{command}` with Triton {version}; do not edit. Each op's default tile on representative
problems, compiled for compute capabilities {capabilities}. Registers are of a thread, spills the bytes of a
thread that found no register (must be 0), shared the bytes of a block; blocks and warps are those that one streaming
multiprocessor holds at once.
"""
_COLUMNS = ("kernel", "sm", "tile", "warps", "stages", "registers", "spills", "shared", "blocks/SM", "warps/SM")


def write(rows: Iterable[Row], version: str) -> str:
    """Markdown: a section for each op, in it a table for each problem."""
    capabilities = ", ".join(str(d.capability) for d in DEVICES)
    lines = [_HEAD.format(command=COMMAND, version=version, capabilities=capabilities)]
    op = problem = None
    for r in rows:
        if r.op != op:
            lines += [f"## {r.op}", ""]
        if (r.op, r.problem) != (op, problem):
            lines += [f"### {r.problem}", "", _line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
        numbers = (r.warps, r.stages, r.registers, r.spills, r.shared, r.blocks, r.blocks * r.warps)
        lines.append(_line((r.kernel, r.capability, r.tile, *numbers)))
        op, problem = r.op, r.problem
    return re.sub(r"\|\n#", "|\n\n#", "\n".join(lines)) + "\n"


def read(text: str) -> tuple[str, list[Row]]:
    """The version of Triton and the rows of what ``write`` wrote."""
    version = re.search(r"with Triton (\S+);", text)
    rows, op, problem = [], "", ""
    for line in text.splitlines():
        if line.startswith("## "):
            op = line[3:]
        elif line.startswith("### "):
            problem = line[4:]
        elif line.startswith("| ") and not line.startswith(("| kernel |", "| --- |")):
            kernel, capability, tile, *numbers, _ = line.strip("| ").split(" | ")
            rows.append(Row(op, problem, kernel, int(capability), tile, *map(int, numbers)))
    return version[1] if version else "", rows


def faults(measured: list[Row], version: str, committed: str) -> list[str]:
    """What is wrong with the kernels, or with the committed table. With another Triton than the table's, registers and
    shared memory may differ from it, the choice of tiles may not."""
    found = [f"{r.op}, {r.problem}, {r.kernel}, sm_{r.capability} ({r.tile}): {r.fault}" for r in measured if r.fault]
    table_version, rows = read(committed)
    if table_version == version:
        old, new = {str(r) for r in rows}, {str(r) for r in measured}
    else:
        old, new = {str(r.choice) for r in rows}, {str(r.choice) for r in measured}
    found += [f"in the table, no longer so: {row}" for row in sorted(old - new)]
    found += [f"not in the table: {row}" for row in sorted(new - old)]
    return found


def update(check: bool) -> int:
    """Writes the table, or with ``check`` only compares with the committed one. Returns 1 if something is wrong."""
    import triton

    rows = measure_all()
    if not check:
        PATH.write_text(write(rows, triton.__version__))
    found = faults(rows, triton.__version__, PATH.read_text() if PATH.is_file() else "")
    for line in found[:20]:
        print(line)
    if found:
        print(f"{len(found)} faults: give a kernel that spills or does not fit a smaller default tile, then {COMMAND}")
    return int(bool(found))


def _line(cells: Iterable[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"
