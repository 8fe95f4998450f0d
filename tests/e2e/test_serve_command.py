"""``python scripts/serve.py MODEL`` as a user runs it: a process, its messages, and how it ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def command(engine_options, tmp_path_factory):
    """The process, its URL, and what it printed until it was ready."""
    flags = ["max_slots", "max_model_len", "page_size", "max_step_tokens", "decode_steps", "kv_bytes"]
    argv = [sys.executable, "scripts/serve.py", str(engine_options["model"]), "--port", "0", "--api-key", "secret"]
    argv += [x for f in flags for x in ("--" + f.replace("_", "-"), str(engine_options[f]))]
    profiles = tmp_path_factory.mktemp("profiles")
    argv += ["--profile-dir", str(profiles), "--served-model-name", "tiny"]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first = process.stderr.readline()
    drain = threading.Thread(target=process.stderr.read, daemon=True)
    drain.start()
    url = first.split()[2].rstrip(";")
    early = httpx.get(url + "/health")
    printed = []
    for line in process.stdout:
        printed.append(line)
        if "curl " in line:
            break
    yield process, url, early, "".join(printed), profiles
    process.kill()
    process.wait()


def test_from_start_to_sigterm(command):
    process, url, early, printed, profiles = command
    assert early.status_code == 503
    assert "Memory ledger" in printed
    assert "requests of 128 tokens at once" in printed
    assert f"Ready at {url}/v1" in printed

    # The example it prints works as it stands, in a shell that has the key.
    example = next(line for line in printed.splitlines() if "curl " in line)
    shell = subprocess.run(
        ["bash", "-c", example.replace("curl ", "curl -s ")],
        env={**os.environ, "JAXSQUEEZE_API_KEY": "secret"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert '"role":"assistant"' in shell.stdout

    client = openai.OpenAI(base_url=url + "/v1", api_key="secret", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    (card,) = client.models.list()
    assert (card.id, card.quality) == ("tiny", None)
    assert card.quantisation == {"weights": "float32", "k": "float32", "v": "float32"}

    key = {"Authorization": "Bearer secret"}
    trace = Path(httpx.post(url + "/start_profile", headers=key, timeout=60).json()["trace"])
    client.completions.create(model="tiny", prompt="abc", max_tokens=8)
    assert httpx.post(url + "/stop_profile", headers=key, timeout=60).status_code == 200
    assert trace.parent == profiles
    assert list(trace.rglob("*.xplane.pb"))

    stream = client.completions.create(
        model="tiny", prompt="abc", max_tokens=100, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    next(chunks)
    process.send_signal(signal.SIGTERM)
    assert [c.choices[0].finish_reason for c in chunks][-1] == "length"
    assert process.wait(20) == 0


def test_bad_sources_exit_with_two_and_one_sentence(tmp_path):
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "scripts/serve.py", str(tmp_path / "nothing"), "--port", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "nothing" in errors[0]
    assert "Traceback" not in done.stderr
    assert time.monotonic() - begin < 90
