"""One measured program in a process of its own, spoken to in JSON lines.

Two engines in one process would hold each other's threads and memory; in processes of their own they can be measured
in turn (A B A B), so that whatever drifts on the machine meets both. Only the one that works uses the processor.

The child reads ``{"call": name, ...arguments}`` lines from stdin, calls that method of its subject and answers
``{"value": ...}`` or ``{"error": message, "usage": bool}``; everything it prints otherwise goes to stderr.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import traceback
from types import TracebackType
from typing import Any, Self

SUBJECTS = {
    "engine": ("jaxsqueeze.bench.engine_subject", "EngineSubject"),
    "transformers": ("jaxsqueeze.bench.peers", "TransformersSubject"),
}


class Worker:
    """The parent's end. ``call`` blocks; leaving the ``with`` block ends the child.

    Raises ValueError where the child's own ValueError says what the user can do, else RuntimeError (the child's
    traceback is on stderr by then).
    """

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self._child = subprocess.Popen(
            [sys.executable, "-m", "jaxsqueeze.bench.worker", subject],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def call(self, name: str, **arguments: Any) -> Any:
        """The method's result; everything that crosses is plain JSON."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        line = ""
        try:
            print(json.dumps({"call": name, **arguments}), file=self._child.stdin, flush=True)
            line = self._child.stdout.readline()
        except BrokenPipeError:
            pass
        if not line:
            raise RuntimeError(f"the {self.subject} process ended with code {self._child.wait()} during {name!r}")
        answer = json.loads(line)
        if "error" in answer:
            raise (ValueError if answer["usage"] else RuntimeError)(answer["error"])
        return answer["value"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _value: object, _trace: TracebackType | None) -> None:
        if kind is not None:
            self._child.kill()
        elif self._child.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it is gone already
                self._child.stdin.close()
        try:
            self._child.wait(30)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def main(argv: list[str]) -> int:
    """The child: serves one subject until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print must not speak into the protocol
    subject: Any = None
    for line in sys.stdin:
        arguments = json.loads(line)
        try:
            if subject is None:
                module, name = SUBJECTS[argv[0]]
                subject = getattr(importlib.import_module(module), name)()
            answer = {"value": getattr(subject, arguments.pop("call"))(**arguments)}
        except Exception as error:
            usage = isinstance(error, ValueError)
            if not usage:
                traceback.print_exc()
            answer = {"error": str(error) or type(error).__name__, "usage": usage}
        print(json.dumps(answer), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
