"""Cold and warm starts against a stand-in for the server: what is started, in which order, with which cache."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from jaxsqueeze.bench import startup
from jaxsqueeze.cli import main

# Answers 503 twice before 200, and leaves a file in the compile cache, as the real server does.
STAND_IN = """
import http.server, os, pathlib, sys
cache = pathlib.Path(os.environ["JAXSQUEEZE_PROGRAMS"])
with open(os.environ["STARTS"], "a") as log:
    print(len(list(cache.glob("*"))) if cache.exists() else 0, *sys.argv[1:], file=log)
if os.environ.get("WRITES", "1") == "1":
    cache.mkdir(parents=True, exist_ok=True)
    (cache / "entry").touch()
answers = [503, 503]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(answers.pop() if answers else 200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def starts(tmp_path, monkeypatch):
    monkeypatch.setattr(startup, "SERVE", STAND_IN)
    monkeypatch.setattr(startup, "CONVERT", "pass")
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    return lambda: (tmp_path / "starts").read_text().splitlines()


def test_one_cold_start_then_warm_ones_on_its_cache(starts, tmp_path, capsys):
    before = dict(os.environ)
    assert main(["bench", "--startup", "--model", "m", "--repeats", "2", "--json", str(tmp_path / "r.json")]) == 0
    lines = [line.split() for line in starts()]
    assert [line[0] for line in lines] == ["0", "1", "1"]
    assert all(line[1:4] == ["m", "--dtype", "auto"] for line in lines)
    figures = json.loads((tmp_path / "r.json").read_text())["startup"]
    assert figures["cache_entries"] == 1
    assert figures["cold_s"] > 2 * startup.POLL_S  # two refusals were waited out
    assert len(figures["warm_repeats_s"]) == 2
    assert "repeat with: jaxsqueeze bench --model m --startup --repeats 2" in capsys.readouterr().out
    assert dict(os.environ) == before


def test_a_server_that_ignores_the_cache_is_found_out(starts, monkeypatch, capsys):
    monkeypatch.setenv("WRITES", "0")
    assert main(["bench", "--startup"]) == 2
    assert "its starts are all cold" in capsys.readouterr().err
    assert len(starts()) == 1


@pytest.mark.parametrize(
    ("program", "says"),
    [("import sys; sys.exit(3)", "ended with code 3"), ("import time; time.sleep(60)", "not ready in 0.5 s")],
)
def test_a_server_that_does_not_come_up(starts, monkeypatch, capsys, program, says):
    monkeypatch.setattr(startup, "SERVE", program)
    assert main(["bench", "--startup", "--timeout", "0.5"]) == 2
    assert says in capsys.readouterr().err


def test_a_model_that_does_not_convert(starts, monkeypatch, capsys):
    monkeypatch.setattr(startup, "CONVERT", "raise ValueError('no such file')")
    assert main(["bench", "--startup", "--model", "nowhere"]) == 2
    assert "cannot convert nowhere: ValueError: no such file" in capsys.readouterr().err


def test_a_stopped_measurement_stops_its_server(tmp_path):
    mark = tmp_path / "server"
    server = f"import os, time; print(os.getpid(), file=open({str(mark)!r}, 'w'), flush=True); time.sleep(60)"
    program = (
        "import sys; from jaxsqueeze.bench import startup; from jaxsqueeze.cli import main;"
        f"startup.CONVERT = 'pass'; startup.SERVE = {server!r}; sys.exit(main(['bench', '--startup']))"
    )
    bench = subprocess.Popen([sys.executable, "-c", program])
    try:
        while not (mark.exists() and mark.read_text()):
            assert bench.poll() is None
            time.sleep(0.05)
        bench.send_signal(signal.SIGTERM)
        assert bench.wait(30) == 128 + signal.SIGTERM
        with pytest.raises(ProcessLookupError):
            os.kill(int(mark.read_text()), 0)
    finally:
        bench.kill()
        bench.wait()
