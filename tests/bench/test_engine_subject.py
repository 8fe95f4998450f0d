"""The measured engine on a tiny model: what is run, in which order, and that nothing it delivers is lost."""

import contextlib
import json
import math

import pytest

from jaxsqueeze.bench import replay
from jaxsqueeze.bench.engine_subject import EngineSubject
from jaxsqueeze.bench.worker import Worker
from jaxsqueeze.cli import main

# One set of programs for all tests, and few of them: in bfloat16 there is one bucket of decode rows.
SIZE = {"dtype": "bfloat16", "max_slots": 2, "max_model_len": 64, "page_size": 16, "kv_bytes": 1 << 18}


@pytest.fixture(scope="module")
def opened(tiny_model):
    subject = EngineSubject()
    return subject, subject.open(model=str(tiny_model), **SIZE)


@pytest.fixture
def subject(opened, monkeypatch):
    """The engine, with every step's events and page counts written down in ``subject.seen``."""
    subject, engine, step = opened[0], opened[0]._engine, opened[0]._engine.step
    subject.seen = []

    def watched():
        events = step()
        subject.seen.append((events, engine.stats()))
        return events

    monkeypatch.setattr(engine, "step", watched)
    return subject


def life(seen):
    """Request id to (index of the step with its first token, index of the step with its end), in order of arrival."""
    first, last = {}, {}
    for index, (events, _) in enumerate(seen):
        for event in events:
            first.setdefault(event.request_id, index)
            if event.finish_reason:
                last[event.request_id] = index
    ids = sorted(first, key=lambda i: int(i.rpartition("-")[2]))
    return [(first[i], last[i]) for i in ids]


REQUESTS = [([7] * 20, 24), ([8] * 5, 3), ([9] * 9, 5), ([10] * 12, 20), ([11] * 6, 2)]


def test_facts_about_the_engine(opened):
    assert opened[1]["vocab_size"] == 259
    assert opened[1]["max_model_len"] == 64
    assert opened[1]["dtype"] == "bfloat16"
    assert opened[1]["warm_up_s"] > 0


def test_a_batch_runs_to_full_length_and_has_all_figures(subject):
    figures = subject.batch(prompts=[[5] * 16, [6] * 16], output_tokens=12)
    tokens = [len(e.token_ids) for events, _ in subject.seen for e in events]
    assert sum(tokens) == 24
    for name in ("prefill_tokens_per_s", "decode_tokens_per_s", "output_tokens_per_s"):
        assert math.isfinite(figures[name])
        assert figures[name] > 0
    assert 0 <= figures["host_exposed_share"] <= figures["host_busy_share"] <= 1


def test_static_groups_wait_for_their_slowest_and_continuous_slots_are_refilled(subject):
    static = subject.replay(requests=REQUESTS, group=2, padded=False, watch=False)
    lives = life(subject.seen)
    assert len(lives) == 5
    for group in (0, 2):
        slowest = max(end for _, end in lives[group : group + 2])
        assert all(begin > slowest for begin, _ in lives[group + 2 :])
    subject.seen.clear()
    continuous = subject.replay(requests=REQUESTS, group=None, padded=False, watch=False)
    lives = life(subject.seen)
    assert lives[2][0] < lives[0][1]  # the third took the second's slot while the first was still running
    for figures in (static, continuous):
        assert figures["output_tokens_per_s"] == pytest.approx(54 / figures["seconds"])
        assert figures["total_tokens_per_s"] == pytest.approx((54 + 52) / figures["seconds"])
        assert figures["steps"] > 0
        assert "page_tail_waste" not in figures


def test_padded_groups_prefill_their_longest_prompt_for_everyone(subject, monkeypatch):
    lengths = []
    add = subject._engine.add
    monkeypatch.setattr(subject._engine, "add", lambda r: (lengths.append(len(r.prompt_ids)), add(r)))
    figures = subject.replay(requests=REQUESTS, group=2, padded=True, watch=False)
    longest = [max(len(ids) for ids, _ in REQUESTS[i : i + 2]) for i in (0, 2, 4)]
    room = [64 - output for _, output in REQUESTS]
    assert lengths == [min(longest[i // 2], room[i]) for i in range(5)]
    assert lengths != [len(ids) for ids, _ in REQUESTS]
    # Padding is work, not throughput.
    assert figures["total_tokens_per_s"] == pytest.approx((54 + 52) / figures["seconds"])


def test_page_tail_waste_is_the_mean_over_steps_that_leave_something_in_the_pool(subject):
    figures = subject.replay(requests=REQUESTS, group=None, padded=False, watch=True)
    shares = [sum(s.tail_tokens) / sum(s.live_tokens) for _, s in subject.seen if sum(s.live_tokens)]
    assert figures["page_tail_waste"] == pytest.approx(sum(shares) / len(shares))
    assert figures["page_tail_waste"] > 0


def test_a_request_that_cannot_fit_is_the_callers_error(subject):
    with pytest.raises(ValueError, match="64"):
        subject.batch(prompts=[[5] * 80], output_tokens=1)
    assert not subject._engine.has_work()


def test_where_a_peer_finds_the_weights(subject, tiny_model, hf_checkpoint):
    folder = hf_checkpoint()
    assert subject.peer_source(model=str(folder)) == str(folder)
    # The converted fixture names a source that is not there any more.
    with pytest.raises(ValueError, match=r"was converted from tiny.*--peer-model"):
        subject.peer_source(model=str(tiny_model))


FLAGS = ["--dtype", "bfloat16", "--max-model-len", "64", "--kv-bytes", str(1 << 18)]


def test_side_by_side_command_writes_figures_and_a_profiler_trace(tiny_model, tmp_path, capsys):
    flags = ["--concurrency", "1,2", "--input-tokens", "8", "--output-tokens", "12", "--repeats", "1"]
    out = ["--trace", str(tmp_path / "trace"), "--json", str(tmp_path / "r.json")]
    assert main(["bench", "--model", str(tiny_model), *FLAGS, *flags, *out]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert [entry["rows"] for entry in report["figures"]] == [1, 2]
    assert all(entry["median"]["engine"]["decode_tokens_per_s"] > 0 for entry in report["figures"])
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))
    assert list((tmp_path / "trace").rglob("perfetto_trace.json.gz"))
    text = capsys.readouterr().out
    assert "decode" in text
    assert f"repeat with: jaxsqueeze bench --model {tiny_model}" in text


def test_static_batching_command(opened, tiny_model, tmp_path, capsys, monkeypatch):
    class InThisProcess(contextlib.nullcontext):
        """The opened engine behind the interface of a Worker."""

        def call(self, name, **arguments):
            if name == "open":
                assert arguments == {"model": str(tiny_model), **SIZE}
                return opened[1]
            return getattr(opened[0], name)(**json.loads(json.dumps(arguments)))

    monkeypatch.setattr(replay, "Worker", lambda subject: InThisProcess(enter_result=InThisProcess()))
    trace = tmp_path / "mini.csv"
    lines = [f"2023-11-16 18:15:4{i}.68,{len(ids)},{out}" for i, (ids, out) in enumerate([*REQUESTS, ([1] * 60, 9)])]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines, ""]))
    flags = ["--static-batching", "--trace-file", str(trace), "--slots", "2", "--repeats", "1"]
    assert main(["bench", "--model", str(tiny_model), *FLAGS, *flags, "--json", str(tmp_path / "r.json")]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    speeds = {name: figures["output_tokens_per_s"] for name, figures in report["median"].items()}
    assert report["continuous_over"] == pytest.approx(
        {name: speeds["continuous"] / speeds[name] for name in ("static", "static, unpadded")}
    )
    assert report["page_tail_waste"] > 0
    text = capsys.readouterr().out
    assert "5 requests, lengths x 1, time x 1, 1 longer than 64 tokens left out" in text
    assert "continuous / static, throughput" in text


def test_a_model_that_is_not_there_is_one_sentence(tmp_path, capfd):
    assert main(["bench", "--model", str(tmp_path / "none"), *FLAGS]) == 2
    assert capfd.readouterr().err.strip() == (
        f"jaxsqueeze bench: {tmp_path / 'none'}: no such file or folder; check the path"
    )


def test_static_batching_needs_a_trace(capsys):
    assert main(["bench", "--static-batching"]) == 2
    assert "--trace-file" in capsys.readouterr().err


def test_a_measured_process_that_dies_is_reported():
    with Worker("engine") as worker:
        worker._child.kill()
        with pytest.raises(RuntimeError, match="the engine process ended with code -9"):
            worker.call("batch", prompts=[[1]], output_tokens=1)


@pytest.mark.parity
def test_transformers_runs_the_same_folder_to_full_length(hf_checkpoint):
    # Every token is an end token: a peer that stopped early would look faster than it is.
    folder = hf_checkpoint(eos_token_id=list(range(259)))
    with Worker("transformers") as worker:
        assert worker.call("open", source=str(folder), dtype="float32")["vocab_size"] == 259
        figures = worker.call("batch", prompts=[[5] * 8, [6] * 8], output_tokens=6)
    assert figures["decode_tokens_per_s"] > 0


@pytest.mark.parity
def test_transformers_reads_the_demo_file(demo_gguf):
    with Worker("transformers") as worker:
        about = worker.call("open", source=str(demo_gguf), dtype="bfloat16")
        assert (about["vocab_size"], about["dtype"]) == (49152, "bfloat16")
        assert worker.call("batch", prompts=[[500] * 4], output_tokens=2)["prefill_tokens_per_s"] > 0
