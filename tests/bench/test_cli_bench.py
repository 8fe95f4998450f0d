"""``jaxsqueeze bench --url`` end to end: table, JSON, plot, exit codes, and no accelerator runtime in the process."""

import json
import subprocess
import sys

import pytest

from jaxsqueeze.cli import main


@pytest.fixture
def bench(fake_server, capsys):
    def call(*flags):
        code = main(["bench", "--url", fake_server.url, "--num-requests", "6", "--output-tokens", "3", *flags])
        return code, *capsys.readouterr()

    return call


def test_closed_loop_report(bench, fake_server, tmp_path):
    code, out, _ = bench("--concurrency", "1,3", "--input-tokens", "uniform:5:9", "--json", str(tmp_path / "r.json"))
    assert code == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert list(report["runs"]) == ["1 in flight", "3 in flight"]
    for run in report["runs"].values():
        assert (run["complete"], run["output_tokens"], run["errors"]) == (6, 18, {})
        assert run["prompts"] == "token ids"
        assert 30 <= run["prompt_tokens"] <= 54
    assert "fake-model" in out
    assert "TTFT" in out
    assert "repeat with: jaxsqueeze bench --url" in out
    assert "uniform:5:9" in report["machine"]["command"]
    # Runs and the first probing request never share a prompt: a prefix cache would favour the later ones.
    prompts = [tuple(body["prompt"]) for body in fake_server.bodies]
    assert len(set(prompts)) == len(prompts) == 13


def test_poisson_with_slo_and_plot(bench, tmp_path):
    plot = tmp_path / "p.png"
    code, out, _ = bench("--rate", "200", "--slo-ttft", "60000", "--slo-itl", "0", "--plot", str(plot))
    assert code == 0
    assert "0 of 6 requests met TTFT <= 60000 ms and ITL <= 0 ms" in out
    assert plot.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_trace_file_lengths_reach_the_server(bench, fake_server, tmp_path):
    trace = tmp_path / "mini.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,100,20\n2023-11-16 18:15:47.68,200,40\n"
        "2023-11-16 18:15:47.68,40900,70\n"  # 4090 + 7 tokens: longer than the server says it takes
    )
    code, out, _ = bench("--trace-file", str(trace), "--length-scale", "0.1", "--time-scale", "0.01")
    assert code == 0
    sizes = [(len(body["prompt"]), body["max_tokens"]) for body in fake_server.bodies[1:]]
    assert sorted(sizes) == [(10, 2), (20, 4)]
    assert "2 requests, lengths x 0.1, time x 0.01, 1 longer than 4096 tokens left out" in out


def test_text_prompts_where_the_server_has_no_tokenizer(bench, fake_server):
    fake_server.can_tokenize = False
    code, out, err = bench("--concurrency", "2", "--input-tokens", "40")
    assert code == 0
    assert "no /tokenize" in err
    assert "text, 0.75 words a token" in out
    assert {len(body["prompt"].split()) for body in fake_server.bodies[1:]} == {30}


def test_chat_and_text_file(bench, fake_server, tmp_path):
    text = tmp_path / "t.txt"
    text.write_text(" ".join(f"w{i}" for i in range(500)))
    code, _, _ = bench("--endpoint", "chat", "--text", str(text), "--concurrency", "2")
    assert code == 0
    assert all(body["messages"][0]["content"].startswith("w") for body in fake_server.bodies)


def test_some_requests_failed_is_exit_code_1(bench, fake_server):
    fake_server.fault = "refuse"
    code, out, _ = bench("--concurrency", "2")
    assert code == 1
    assert "6 failed: HTTP 400: too long" in out


def test_a_strict_server_is_met_with_a_cure(bench, fake_server):
    fake_server.fault = "strict"
    code, _, err = bench()
    assert code == 2
    assert "unknown field ignore_eos; try --no-ignore-eos" in err
    assert bench("--no-ignore-eos", "--concurrency", "1")[0] == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--trace", "d"], "/start_profile"),
        (["--startup"], "give one of them"),
        (["--peer", "transformers"], "--peer goes with fixed batches"),
        (["--trace-file", "none.csv"], "cannot read"),
        (["--rate", "0"], "--rate must be positive"),
        (["--text", "none.txt"], "none.txt"),
        (["--endpoint", "chat", "--prompt-form", "ids"], "a chat takes text"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(bench, flags, says):
    code, _, err = bench(*flags)
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--plot", "p.png"], "--plot goes with --url"),
        (["--rate", "2", "--startup"], "--rate goes with --url"),
        (["--peer", "transformers", "--trace-file", "t.csv"], "--peer goes with fixed batches"),
        (["--startup", "--trace", "d"], "--trace goes with an engine"),
    ],
)
def test_flags_of_another_mode_are_refused(flags, says, capsys):
    assert main(["bench", *flags]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--concurrency", "1,x"], ["--concurrency", "0"], ["--input-tokens", "many"]])
def test_flags_that_do_not_parse_are_usage_errors(bench, flags):
    with pytest.raises(SystemExit) as stop:
        bench(*flags)
    assert stop.value.code == 2


def test_driving_a_server_imports_no_accelerator_runtime(fake_server):
    program = (
        "import sys; from jaxsqueeze.cli import main; code = main(sys.argv[1:]);"
        "bad = {'jax', 'jaxlib', 'flax', 'torch', 'transformers'} & set(sys.modules);"
        "print('imported', bad) if bad else None; sys.exit(code or len(bad))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "bench", "--url", fake_server.url, "--num-requests", "2", "--concurrency", "1"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
