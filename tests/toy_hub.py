"""A Hub on this machine: the requests that the real client makes for one dataset repository, over a folder of files.

Every commit is a new revision, its name the number of commits. `Hub.fails(method, path)` may refuse; `asked` counts
requests. Nothing of it knows caches.
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
import uuid
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

REPO = "me/cache"


class Hub:
    """The state of the one repository: revisions, each a dict of files."""

    def __init__(self):
        self.exists, self.private = False, False
        self.revisions: list[dict[str, bytes]] = [{}]
        self.asked: Counter[str] = Counter()
        self.fails = lambda method, path: False
        self.url, self.salt = "", uuid.uuid4().hex[:30]  # the client keeps files by the name of a commit

    @property
    def files(self):
        return self.revisions[-1]

    def at(self, revision):
        return self.files if revision == "main" else self.revisions[int(revision[30:], 16)]

    def sha(self, number=-1):
        return f"{self.salt}{number % len(self.revisions):010x}"


class _Answers(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_):
        pass

    def _send(self, body=b"", code=200, headers=()):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _missing(self, code):
        self._send({"error": code}, 404, {"X-Error-Code": code})

    def do_HEAD(self):
        self._answer(b"")

    def do_GET(self):
        self._answer(b"")

    def do_POST(self):
        self._answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _answer(self, body):
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.asked[f"{self.command} {path.rsplit('/', 1)[-1]}"] += 1
        if hub.fails(self.command, path):
            self.close_connection = True
            return self._send({"error": "gone"}, 403)
        if path == "/api/repos/create":
            code = 409 if hub.exists else 200
            if not hub.exists:
                hub.exists, hub.private = True, json.loads(body).get("visibility") == "private"
            return self._send({"url": f"{hub.url}/datasets/{REPO}", "name": REPO, "id": REPO}, code)
        if path == "/api/validate-yaml":
            return self._send({"errors": [], "warnings": []})
        if not hub.exists:
            return self._missing("RepoNotFound")
        if match := re.fullmatch(rf"/datasets/{REPO}/resolve/([^/]+)/(.+)", path):
            return self._file(*match.groups())
        match = re.fullmatch(rf"/api/datasets/{REPO}(?:/(\w[\w-]*)(?:/([^/]+))?(?:/(.*))?)?", path)
        if match is None:
            return self._missing("EntryNotFound")
        kind, revision = match[1] or "revision", match[2] or "main"
        try:
            files = hub.at(revision)
        except (ValueError, IndexError):
            return self._missing("RevisionNotFound")
        commit = hub.sha() if revision == "main" else revision
        entries = [self._entry(name, data) for name, data in files.items()]
        if kind == "revision":
            siblings = [{"rfilename": name} for name in files]
            return self._send({"id": REPO, "private": hub.private, "sha": commit, "siblings": siblings, "tags": []})
        if kind == "tree":
            return self._send(entries)
        if kind == "paths-info":
            asked = re.findall(r"[\w.-]+", unquote(body.decode()))
            return self._send([entry for entry in entries if entry["path"] in asked])
        if kind == "preupload":
            asked = [file["path"] for file in json.loads(body)["files"]]
            return self._send({"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in asked]})
        if kind == "commit":
            files = dict(files)
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            hub.revisions.append(files)
            oid = hub.sha()
            return self._send(
                {"success": True, "commitOid": oid, "commitUrl": f"{hub.url}/datasets/{REPO}/commit/{oid}"}
            )
        return self._missing("EntryNotFound")

    def _entry(self, name, data):
        oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        return {"type": "file", "path": name, "size": len(data), "oid": oid}

    def _file(self, revision, name):
        try:
            data = self.hub.at(revision)[name]
        except KeyError:
            return self._missing("EntryNotFound")
        commit = self.hub.sha() if revision == "main" else revision
        headers = {
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
        }
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start, end = int(match[1]), int(match[2] or len(data) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            return self._send(data[start : end + 1], 206, headers)
        return self._send(data, 200, headers)


@contextlib.contextmanager
def toy_hub():
    """Serve an empty Hub; yields its state with the address."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Answers", (_Answers,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
