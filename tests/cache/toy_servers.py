"""Servers that answer as vLLM, SGLang and llama.cpp do, from a model in this process, and fail as they are told to."""

import http.server
import json
import threading
import time

import torch

from qat_lora.models.load import load_model, load_tokenizer

OWNERS = {"vllm": "vllm", "sglang": "sglang", "llama.cpp": "llamacpp"}


class Server:
    """`faults` are taken off one by one, each by a request for scores, after the first `healthy` of them."""

    def __init__(self, folder, engine, *, name="toy", key=None, most=64, faults=(), healthy=0, pause_s=0.0):
        self.engine, self.name, self.key, self.most = engine, name, key, most
        self.model, self.tokenizer = load_model(str(folder)), load_tokenizer(folder)
        self.faults, self.healthy, self.scored, self.asked, self.at_once = list(faults), healthy, 0, [], 0
        self.listed, self.owner, self.models, self.running = None, OWNERS.get(engine, engine), None, 0
        self.lock, self.counting = threading.Lock(), threading.Lock()
        self.pause_s, outer = pause_s, self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                outer.get(self)

            def do_POST(self):
                outer.post(self)

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()

    def get(self, request):
        if request.path == "/props":
            return self.send(request, {"total_slots": 2})
        meta = {"meta": {"n_vocab": self.model.vocab_size}} if self.engine == "llama.cpp" else {}
        names = self.models or [self.name]
        listed = [{"id": name, "owned_by": self.owner, **meta} for name in names]
        self.send(request, {"data": listed if self.listed is None else self.listed})

    def post(self, request):
        body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        if self.key and request.headers["Authorization"] != f"Bearer {self.key}":
            return self.send(request, {"error": f"not {request.headers['Authorization']}"}, 401)
        if request.path == "/tokenize":
            text = body["content"] if self.engine == "llama.cpp" else body["prompt"]
            return self.send(request, {"tokens": self.tokenizer.encode(text, add_special_tokens=False)})
        with self.counting:
            self.running += 1
            self.at_once = max(self.at_once, self.running)
        if self.pause_s:
            time.sleep(self.pause_s)
        with self.lock:
            self.scored += 1
            self.asked.append(body)
            fault = self.faults.pop(0) if self.scored > self.healthy and self.faults else None
            answer = {"vllm": self.vllm, "sglang": self.sglang, "llama.cpp": self.llama_cpp}[self.engine](body)
        with self.counting:
            self.running -= 1
        fault(self, request, answer) if fault else self.send(request, answer)

    def send(self, request, answer, status=200, headers=()):
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        request.send_response(status)
        for name, value in {"Content-Length": len(data), **dict(headers)}.items():
            if value is not None:
                request.send_header(name, str(value))
        request.end_headers()
        request.wfile.write(data)

    def log_probs(self, ids):
        """Log-probabilities [n, V] after each of the ids."""
        row = torch.tensor([ids])
        with torch.no_grad():
            logits = self.model.logits(self.model.hidden(row, torch.zeros_like(row))[0])
        return torch.log_softmax(logits.float(), -1)

    def top(self, log_p_V, k):
        values, ids = log_p_V.topk(min(k, self.most))
        return list(zip(ids.tolist(), values.tolist(), strict=True))

    def vllm(self, body):
        ids, k = body["prompt"], body["prompt_logprobs"]
        listed = [None]
        for log_p_V, token in zip(self.log_probs(ids)[:-1], ids[1:], strict=True):
            entries = dict(self.top(log_p_V, k)) | {token: log_p_V[token].item()}
            listed.append({str(i): {"logprob": p, "rank": 1, "decoded_token": "?"} for i, p in entries.items()})
        return {"model": body["model"], "choices": [{"text": "?", "prompt_logprobs": listed}]}

    def sglang(self, body):
        ids, k = body["input_ids"], body["top_logprobs_num"]
        log_p_NV = self.log_probs(ids)
        own = [[None, ids[0], None]] + [[log_p_NV[i, t].item(), t, None] for i, t in enumerate(ids[1:])]
        top = [None] + [[[p, i, None] for i, p in self.top(log_p_V, k)] for log_p_V in log_p_NV[:-1]]
        return {"text": "", "meta_info": {"input_token_logprobs": own, "input_top_logprobs": top}}

    def llama_cpp(self, body):
        log_p_V = self.log_probs(body["prompt"])[-1]
        top = [{"id": i, "token": "?", "logprob": p} for i, p in self.top(log_p_V, body["n_probs"])]
        plain = body["logit_bias"][0][0]
        at = {"id": plain, "token": "?", "logprob": log_p_V[plain].item(), "top_logprobs": top}
        return {"tokens_evaluated": len(body["prompt"]), "completion_probabilities": [at]}


def status(code, **headers):
    """Answer with an error, the body naming the key as a careless proxy would."""
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda server, request, answer: server.send(
        request, {"error": f"no: {request.headers['Authorization']}"}, code, headers
    )


def slow(seconds):
    def fault(server, request, answer):
        time.sleep(seconds)
        request.close_connection = True

    return fault


def cut(server, request, answer):
    """Say how long the answer is, and send half of it."""
    data = json.dumps(answer).encode()
    server.send(request, data[: len(data) // 2], headers={"Content-Length": len(data)})
    request.close_connection = True


def cut_unsaid(server, request, answer):
    data = json.dumps(answer).encode()
    server.send(request, data[: len(data) // 2], headers={"Content-Length": None})
    request.close_connection = True


def gone(server, request, answer):
    request.close_connection = True


def changed(change):
    """Answer with what `change` makes of the right answer."""

    def fault(server, request, answer):
        answer = json.loads(json.dumps(answer))
        server.send(request, change(answer) or answer)

    return fault


def other_model(folder):
    """Lose the connection; who answers from then on has other weights under the same name."""

    def fault(server, request, answer):
        server.model = load_model(str(folder))
        request.close_connection = True

    return fault
