"""Teachers behind servers: the same cache as in-process, and every way in which a server fails."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from toy_pipeline import cache_options, call, part
from toy_servers import Server, changed, cut, cut_unsaid, gone, other_model, slow, status

from qat_lora.cache.build import served
from qat_lora.cache.build.served import KEY, ServedConfig
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cache.storage.store import read_manifest, verify_cache
from qat_lora.errors import CacheError, ConfigError, QatLoraError
from qat_lora.losses.objective import ObjectiveConfig
from qat_lora.models.load import load_model

ENGINES = ("vllm", "sglang", "llama.cpp")
BEGUN = {"vllm": 3, "sglang": 3, "llama.cpp": 80}  # requests after which a build has its first rows and not its last
SECRET = "sk-a-key-that-must-not-be-seen"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(served, "_BACKOFF_S", 0.002)
    monkeypatch.setattr(served, "_RETRIES", 3)


@pytest.fixture(scope="module")
def other(tiny, tmp_path_factory):
    """Another model of the same tokenizer: one matrix is twice as large."""
    folder = tmp_path_factory.mktemp("other") / "teacher"
    model = load_model(str(tiny.teacher))
    with torch.no_grad():
        model.module.model.layers[0].mlp.down_proj.weight.mul_(2.0)
    model.module.save_pretrained(folder)
    for file in tiny.teacher.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="module")
def in_process(tiny, tmp_path_factory):
    return str(call("build_cache", options(tiny, None, tmp_path_factory.mktemp("here") / "cache")))


def options(tiny, server, out, given=None, **changed):
    config = {} if server is None else {"teacher_url": server.url, "tokenizer": str(tiny.teacher), **(given or {})}
    settings = dict(top_k=8, num_rows=4, eval_rows=1, teacher_batch_size=2, served=ServedConfig(**config))
    if server is not None:
        settings["teacher"] = None
    return cache_options(tiny, out, **settings | changed)


def build(tiny, server, out, given=None, **changed):
    return str(call("build_cache", options(tiny, server, out, given, **changed)))


def distributions(path, split="train"):
    """Ids, log-probabilities and the tail's, float64, of the positions that count."""
    data = KDCacheDataset(path, split=split)
    rows = data.rows(range(len(data)))
    counts = rows["target_mask"]
    log_p = rows["head_logits"].astype(np.float64) - rows["lse"][..., None]
    return rows["head_ids"][counts], log_p[counts], rows["log_tail"][counts].astype(np.float64)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_cache_from_a_server_is_the_one_built_in_process(tiny, in_process, tmp_path, engine, capfd):
    with Server(tiny.teacher, engine, pause_s=0.01) as server:
        path = build(tiny, server, tmp_path / "cache")
    verify_cache(path)
    for split in ("train", "eval"):
        (ids, log_p, tail), (wanted_ids, wanted, wanted_tail) = (
            distributions(path, split),
            distributions(in_process, split),
        )
        assert (ids == wanted_ids).mean() > 0.99 and len(ids) > 30
        kl = (np.exp(wanted) * (wanted - log_p)).sum(-1) + np.exp(wanted_tail) * (wanted_tail - tail)
        assert abs(kl).max() < 1e-4
    assert 1 < server.at_once <= (2 if engine == "llama.cpp" else 8)  # its slots, or --concurrency
    prompts = [body.get("prompt", body.get("input_ids")) for body in server.asked]
    assert all(isinstance(token, int) for prompt in prompts for token in prompt)
    held = read_manifest(path).fingerprint
    assert held.teacher == "toy" and held.builder.startswith(f"{engine} over HTTP; probe ")
    assert held.optional_arrays == () and held.vocab_size == 320


FAULTS = {
    "busy": [status(429), status(429, Retry_After=0)],
    "error": [status(500), status(503)],
    "gone": [gone],
    "cut": [cut],
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_fails_for_a_while_is_asked_again(tiny, in_process, tmp_path, engine, fault):
    with Server(tiny.teacher, engine, faults=FAULTS[fault], healthy=BEGUN[engine]) as server:
        path = build(tiny, server, tmp_path / "cache", {"concurrency": 1})
        assert not server.faults
    assert (distributions(path)[0] == distributions(in_process)[0]).mean() > 0.99


def test_a_server_that_does_not_answer_in_time_is_asked_again(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(served, "_TIMEOUT_S", 0.3)
    with Server(tiny.teacher, "vllm", faults=[slow(0.5)], healthy=3) as server:
        build(tiny, server, tmp_path / "cache")
        assert not server.faults


@pytest.mark.parametrize("fault", [status(500), status(429), gone, cut, cut_unsaid])
def test_a_server_that_fails_for_good_stops_the_build_and_the_same_command_goes_on(tiny, in_process, tmp_path, fault):
    with Server(tiny.teacher, "sglang", faults=[fault] * 100, healthy=5) as server:
        settings = dict(shard_rows=1, teacher_batch_size=1)
        with pytest.raises(CacheError, match=r"/generate failed .*; the same command goes on"):
            build(tiny, server, tmp_path / "cache", {"concurrency": 1}, **settings)
        done = len(list((tmp_path / "cache").glob("*.json")))
        assert 0 < done < 5 and not (tmp_path / "cache" / "manifest.json").exists()
        server.faults, before = [], server.scored
        path = build(tiny, server, tmp_path / "cache", **settings)
        assert (distributions(path)[0] == distributions(in_process)[0]).mean() > 0.99
        first = server.scored - before
        build(tiny, server, tmp_path / "again", **settings)
        assert first < server.scored - before - first  # what was complete was not asked for again


def wrong_ids(answer):
    if "choices" in answer:
        at = answer["choices"][0]["prompt_logprobs"][-1]
        answer["choices"][0]["prompt_logprobs"][-1] = {str(int(i) + 1 if int(i) < 318 else 0): e for i, e in at.items()}
    elif "meta_info" in answer:
        answer["meta_info"]["input_token_logprobs"][2][1] += 1
    else:
        answer["tokens_evaluated"] += 1  # a server that puts a bos in front


def texts(answer):
    if "choices" in answer:
        at = answer["choices"][0]["prompt_logprobs"]
        answer["choices"][0]["prompt_logprobs"] = [None] + [{f"t{i}": e for i, e in a.items()} for a in at[1:]]
    elif "meta_info" in answer:
        answer["meta_info"]["input_top_logprobs"][1] = [["the", -0.1, 5]] * 8
    else:
        for entry in answer["completion_probabilities"][0]["top_logprobs"]:
            del entry["id"]


def no_log_probs(answer):
    if "choices" in answer:
        for at in answer["choices"][0]["prompt_logprobs"][1:]:
            for entry in at.values():
                entry["logprob"] = -entry["logprob"]
    elif "meta_info" in answer:
        answer["meta_info"]["input_top_logprobs"][1:] = [
            [[-value, *rest] for value, *rest in at] for at in answer["meta_info"]["input_top_logprobs"][1:]
        ]
    else:
        for entry in answer["completion_probabilities"][0]["top_logprobs"]:
            entry["logprob"] *= -1


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (wrong_ids, "by token ids .*other token ids than were sent"),
        (texts, "by token ids"),
        (no_log_probs, "no log-probabilities"),
        (lambda answer: {"error": "none"}, "does not answer as"),
        (lambda answer: {"choices": 3, "meta_info": None, "completion_probabilities": "no"}, "does not answer as"),
    ],
)
def test_wrong_answers_are_refused_and_nothing_is_written(tiny, tmp_path, engine, wrong, message):
    server = Server(tiny.teacher, engine, faults=[changed(wrong)] * 999, healthy=2)
    with server, pytest.raises(CacheError, match=message):
        build(tiny, server, tmp_path / "cache", {"concurrency": 1})
    assert not list(tmp_path.glob("cache/*.safetensors"))


@pytest.mark.parametrize("engine", ENGINES)
def test_fewer_entries_than_asked_for_are_refused(tiny, tmp_path, engine):
    message = "gives [56] entries a position, --top-k 8 were asked for.*--max-logprobs"
    with Server(tiny.teacher, engine, most=5) as server, pytest.raises(CacheError, match=message):
        build(tiny, server, tmp_path / "cache")


@pytest.mark.parametrize("engine", ENGINES)
def test_another_model_under_the_same_name_is_refused(tiny, other, tmp_path, engine):
    """At a start, and in the middle of a build after the connection was lost."""
    out, settings = tmp_path / "cache", dict(shard_rows=1, teacher_batch_size=1)
    with Server(tiny.teacher, engine, faults=[other_model(other)], healthy=BEGUN[engine]) as server:
        with pytest.raises(CacheError, match="another model answers at .* under the name toy"):
            build(tiny, server, out, {"concurrency": 1}, **settings)
        files = sorted(file.name for file in out.iterdir())
        assert "e-000000.json" in files and "manifest.json" not in files
        with pytest.raises(CacheError, match="another model answers"):
            build(tiny, server, out, **settings)
        assert sorted(file.name for file in out.iterdir()) == files
        server.model = load_model(str(tiny.teacher))
        build(tiny, server, out, **settings)
        server.model = load_model(str(other))  # a finished cache says so too
        with pytest.raises(CacheError, match="another model answers"):
            build(tiny, server, out, **settings)
        server.name = "renamed"
        with pytest.raises(QatLoraError, match="holds another cache: teacher"):
            build(tiny, server, out, **settings)


@pytest.mark.parametrize("engine", ["llama.cpp"])
def test_a_killed_build_goes_on(tiny, in_process, tmp_path, engine):
    """SIGKILL in the middle of a build, by the server it asks; then the same command."""
    out = tmp_path / "cache"
    words = ["cache", "build", "--tokenizer", tiny.teacher, "--dataset", tiny.text, "--length", 32, "--top-k", 8]
    words += ["--num-rows", 4, "--eval-rows", 1, "--teacher-batch-size", 1, "--shard-rows", 1, "--device", "cpu"]
    words += ["--concurrency", 1, "--quiet", "--out", out]

    def kill(server, request, answer):
        os.kill(process.pid, signal.SIGKILL)

    with Server(tiny.teacher, engine, faults=[kill], healthy=BEGUN[engine]) as server:
        command = [sys.executable, "-c", "import sys; from qat_lora.cli import main; main(sys.argv[1:])"]
        process = subprocess.Popen([*command, *map(str, words), "--teacher-url", server.url])
        assert process.wait(60) == -signal.SIGKILL
        assert (out / "e-000000.json").exists() and not (out / "manifest.json").exists()
        build(tiny, server, out, teacher_batch_size=1, shard_rows=1, run=part(out))
    assert (distributions(str(out))[0] == distributions(in_process)[0]).mean() > 0.99


def test_the_key_comes_from_the_environment_and_is_nowhere(tiny, tmp_path, monkeypatch, capfd):
    with Server(tiny.teacher, "vllm", key=SECRET) as server:
        monkeypatch.setenv(KEY, "wrong-" + SECRET)
        with pytest.raises(CacheError, match=KEY) as refused:
            build(tiny, server, tmp_path / "cache")
        assert "***" in str(refused.value)
        monkeypatch.setenv(KEY, SECRET)
        server.faults, server.healthy = [status(400)], 3
        with pytest.raises(CacheError, match="no: Bearer \\*\\*\\*.*--max-logprobs 8") as failed:
            build(tiny, server, tmp_path / "cache")
        build(tiny, server, tmp_path / "cache")
    printed = "".join(capfd.readouterr()) + str(refused.value) + str(failed.value)
    files = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert SECRET not in printed and SECRET.encode() not in files and len(files) > 1000


@pytest.mark.parametrize(
    ("given", "changed", "message"),
    [
        ({"teacher_url": "http://user:word@host"}, {}, KEY),
        ({"teacher_url": "ftp://host"}, {}, "no plain http"),
        ({"tokenizer": None}, {}, "tokenizer: missing"),
        ({}, {"hidden": True}, "hidden: True does not fit a server"),
        ({}, {"temperatures": (1.0, 2.0)}, "temperatures"),
        ({}, {"tail_draws": 8}, "tail_draws: 8"),
        ({}, {"draws": 4}, "draws: 4 .* allowed: 0"),
        ({"own_text": True}, {"draws": 0}, "draws: 0 .* allowed: 1"),
        ({}, {"builder": "0/2"}, "builder"),
        ({}, {"device_map": "auto"}, "device_map"),
    ],
)
def test_settings_that_a_server_cannot_fulfil_are_refused(tiny, tmp_path, given, changed, message):
    server = type("", (), {"url": "http://localhost:1"})
    with pytest.raises(ConfigError, match=message):
        options(tiny, server, tmp_path / "cache", given, **changed)


def test_settings_of_a_server_are_refused_without_one(tiny, tmp_path):
    with pytest.raises(ConfigError, match="own_text: is for a teacher behind a server"):
        cache_options(tiny, tmp_path, served=ServedConfig(own_text=True))
    with pytest.raises(ConfigError, match="teacher: missing"):
        cache_options(tiny, tmp_path, teacher=None)
    with pytest.raises(ConfigError, match="tokenizer: is for"):
        cache_options(tiny, tmp_path / "out", served=ServedConfig(tokenizer=str(tiny.teacher)))


def test_servers_that_do_not_fit_are_refused(tiny, wide, tmp_path, monkeypatch):
    openai = pytest.raises(CacheError, match="says that it is openai; allowed: vllm, sglang, llama.cpp")
    with Server(tiny.teacher, "openai") as server, openai:
        build(tiny, server, tmp_path / "cache")
    with Server(tiny.teacher, "vllm") as server:
        server.models = ["one", "two"]
        for teacher in (None, "three"):
            with pytest.raises(ConfigError, match=f"{teacher} is no model of .*; allowed: one, two"):
                build(tiny, server, tmp_path / "cache", teacher=teacher)
        assert build(tiny, server, tmp_path / "two", teacher="two") and server.asked[-1]["model"] == "two"
    for names, message in (("x", "does not answer as"), ([], "None is no model of .*; allowed:$")):
        with Server(tiny.teacher, "vllm") as server:
            server.listed = names
            with pytest.raises(QatLoraError, match=message):
                build(tiny, server, tmp_path / "cache")
    with pytest.raises(CacheError, match="/v1/models failed"):  # it is closed
        build(tiny, server, tmp_path / "cache")


def test_a_tokenizer_of_another_model_is_refused(tiny, tmp_path):
    from qat_lora.models.load import make_tokenizer

    words = "".join(file.read_text() for file in sorted(tiny.text.iterdir()))
    make_tokenizer([words[::-1]], 320, tmp_path / "reversed")
    (tmp_path / "reversed" / "config.json").write_text((tiny.teacher / "config.json").read_text())
    with Server(tiny.teacher, "vllm") as server, pytest.raises(CacheError, match="is not that of"):
        build(tiny, server, tmp_path / "cache", {"tokenizer": str(tmp_path / "reversed")})
    with Server(tiny.teacher, "llama.cpp") as server:
        server.model = server.model.with_vocabulary(300)
        with pytest.raises(CacheError, match="are here 320 .*, there 300 "):
            build(tiny, server, tmp_path / "cache")
    with Server(tiny.teacher, "sglang") as server, pytest.raises(ConfigError, match="vocab_size: 100 is not allowed"):
        build(tiny, server, tmp_path / "cache", vocab_size=100)


def test_the_texts_own_tokens_are_draws_where_the_teacher_wrote_it(tiny, tmp_path):
    with Server(tiny.teacher, "sglang") as server:
        path = build(tiny, server, tmp_path / "cache", {"own_text": True}, draws=1)
    rows = KDCacheDataset(path).rows(range(4))
    assert (rows["draw_ids"][..., 0] == rows["input_ids"][:, 1:]).all()
    assert read_manifest(path).fingerprint.optional_arrays == ("draws:1",)


def test_a_whole_vocabulary_leaves_no_tail(tiny, tmp_path):
    with Server(tiny.teacher, "sglang", most=320) as server:
        path = build(tiny, server, tmp_path / "cache", top_k=320)
    assert np.isneginf(distributions(path)[2]).all()


def test_a_rate_is_kept(tiny, tmp_path, monkeypatch):
    slept = []
    monkeypatch.setattr(served.time, "monotonic", lambda: 0.0)
    monkeypatch.setattr(served.time, "sleep", slept.append)
    with Server(tiny.teacher, "vllm") as server:
        build(tiny, server, tmp_path / "cache", {"requests_per_second": 4.0})
    assert sorted(slept) == [0.25 * turn for turn in range(server.scored + 2)]  # the model's name and /tokenize too


def test_a_dry_run_asks_and_writes_nothing(tiny, tmp_path):
    with Server(tiny.teacher, "vllm") as server:
        cost = call("build_cache", options(tiny, server, tmp_path / "cache", dry_run=True))
    assert cost["tokens"] == 5 * 32 and not (tmp_path / "cache").exists()


def test_a_student_learns_from_it(tiny, tmp_path):
    from toy_pipeline import quantize_options, recover_options

    with Server(tiny.teacher, "vllm") as server:
        path = build(tiny, server, tmp_path / "cache", num_rows=16, top_k=32)
    student = call("quantize", quantize_options(tiny, tmp_path / "student"))
    call("recover", recover_options(student, path, tmp_path / "run", objective=ObjectiveConfig(estimator="ghost")))
    assert Path(tmp_path / "run" / "best").is_dir()
