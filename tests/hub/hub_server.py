"""A small Hub on 127.0.0.1: as much of its HTTP API as huggingface_hub's own client uses, with faults on demand.

Repos are kept in memory as a list of commits, each a map from path to content. Large files go through the LFS
protocol: batch, upload, verify. Not served: Xet (the tests set HF_HUB_DISABLE_XET).
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

LFS_SUFFIXES = (".safetensors", ".bin", ".pt")


@dataclass
class Commit:
    sha: str
    files: dict[str, bytes]


@dataclass
class Repo:
    commits: list[Commit]
    private: bool = False
    gated: bool = False
    modified: datetime = field(default_factory=lambda: datetime.now(timezone.utc))
    branches: dict[str, str] = field(default_factory=dict)

    @property
    def head(self) -> Commit:
        return self.commits[-1]

    def at(self, revision: str) -> Commit | None:
        revision = self.branches.get(revision, revision)
        if revision == "main":
            return self.head
        return next((commit for commit in self.commits if commit.sha == revision), None)

    def commit(self, files: dict[str, bytes]) -> Commit:
        content = b"".join(name.encode() + data for name, data in sorted(files.items()))
        sha = hashlib.sha1(content + str(len(self.commits)).encode()).hexdigest()
        self.commits.append(Commit(sha, dict(files)))
        self.modified = datetime.now(timezone.utc)
        return self.head


@dataclass
class Fault:
    """What goes wrong with requests whose "METHOD path" matches a pattern, `times` times.

    kind: "status" (answers `status`), "drop" (closes the connection after `after` bytes of the body: of the request
    if one is sent, else of the answer), "truncate" (announces and sends only `after` bytes), "corrupt" (right
    length, other bytes), "lose_answer" (does what was asked, then closes without answering).
    """

    pattern: str
    kind: str
    times: int = 1
    status: int = 503
    after: int = 100
    headers: dict[str, str] = field(default_factory=dict)
    seen: int = 0


class HubServer:
    """Runs on a thread while the `with` block lasts.

    tokens: the role of each accepted token, "write" or "read". requests: "METHOD path" of all that were answered.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.tokens = {"hf_writer": "write", "hf_reader": "read"}
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add_repo(self, repo_id: str, files: dict[str, bytes] | None = None, days_ago: float = 0, **flags: Any) -> Repo:
        repo = Repo([Commit(hashlib.sha1(repo_id.encode()).hexdigest(), {".gitattributes": b"* text=auto\n"})], **flags)
        if files is not None:
            repo.commit(files)
        repo.modified -= timedelta(days=days_ago)
        self.repos[repo_id] = repo
        return repo

    def fail(self, pattern: str, kind: str, **arguments: Any) -> Fault:
        fault = Fault(pattern, kind, **arguments)
        self.faults.append(fault)
        return fault

    def take_fault(self, request: str, *kinds: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.kind in kinds and fault.seen < fault.times and re.search(fault.pattern, request):
                    fault.seen += 1
                    return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        return

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    # -- one request

    def _serve(self) -> None:
        url = urlsplit(self.path)
        self.route, self.query = unquote(url.path), parse_qs(url.query)
        self.request_line = f"{self.command} {self.route}"
        self.hub.requests.append(self.request_line)
        body = self._read_body()
        if body is None:
            return
        if fault := self.hub.take_fault(self.request_line, "status"):
            return self._answer(fault.status, {"error": "injected"}, fault.headers)
        for method, pattern, action in _ROUTES:
            match = re.fullmatch(pattern, self.route)
            if match and self.command in method:
                return action(self, body, *match.groups())
        self._answer(404, {"error": f"no such route: {self.request_line}"})

    def _read_body(self) -> bytes | None:
        length = int(self.headers.get("Content-Length") or 0)
        if self.headers.get("Transfer-Encoding") == "chunked":
            return self._read_chunks()
        fault = self.hub.take_fault(self.request_line, "drop") if length else None
        if fault:
            self.rfile.read(min(fault.after, length))
            self.close_connection = True
            self.connection.close()
            return None
        return self.rfile.read(length)

    def _read_chunks(self) -> bytes | None:
        fault, body = self.hub.take_fault(self.request_line, "drop"), b""
        while True:
            size = int(self.rfile.readline().strip() or b"0", 16)
            chunk = self.rfile.read(size)
            self.rfile.readline()
            if size == 0:
                return body
            body += chunk
            if fault:
                self.close_connection = True
                self.connection.close()
                return None

    def _answer(self, status: int, content: Any = None, headers: dict[str, str] | None = None) -> None:
        if status < 400 and self.hub.take_fault(self.request_line, "lose_answer"):
            self.close_connection = True
            self.connection.close()
            return
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        headers = {"Content-Type": "application/json", **(headers or {})}
        announced, sent = len(data), data
        if self.command == "GET" and status < 300:
            if fault := self.hub.take_fault(self.request_line, "truncate"):
                sent = data[: fault.after]
                announced = len(sent)
            elif fault := self.hub.take_fault(self.request_line, "drop"):
                sent = data[: fault.after]
                self.close_connection = True
            elif self.hub.take_fault(self.request_line, "corrupt"):
                sent = data[:-1] + bytes([data[-1] ^ 1])
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(announced))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(sent)
        if self.close_connection:
            self.connection.close()

    # -- who may do what

    @property
    def _role(self) -> str | None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        return self.hub.tokens.get(token)

    def _repo(self, repo_id: str, write: bool = False) -> Repo | None:
        repo = self.hub.repos.get(repo_id)
        hidden = repo is not None and repo.private and self._role is None
        if repo is None or hidden:
            self._answer(
                401 if self._role is None else 404,
                {"error": "Repository not found"},
                {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"},
            )
            return None
        return None if write and not self._may_write() else repo

    def _may_write(self) -> bool:
        if self._role == "write":
            return True
        status = 401 if self._role is None else 403
        self._answer(
            status,
            {"error": "no right to write"},
            {"X-Error-Message": "You have read access but not the required permissions for this operation"},
        )
        return False

    def _commit_of(self, repo: Repo, revision: str) -> Commit | None:
        commit = repo.at(revision)
        if commit is None:
            self._answer(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
        return commit

    # -- routes

    def whoami(self, body: bytes) -> None:
        if self._role is None:
            return self._answer(401, {"error": "Invalid username or password."})
        self._answer(200, {"name": "org", "type": "user", "auth": {"accessToken": {"role": self._role}}})

    def validate_yaml(self, body: bytes) -> None:
        match = re.match(r"---\n(.*?)\n---", json.loads(body)["content"], re.DOTALL)
        data = yaml.safe_load(match[1]) if match else {}
        if not isinstance(data, dict) or not isinstance(data.get("tags", []), list):
            return self._answer(400, {"errors": [{"message": "metadata is not valid"}], "warnings": []})
        self._answer(200, {"errors": [], "warnings": []})

    def create(self, body: bytes) -> None:
        wanted = json.loads(body)
        repo_id = f"{wanted.get('organization') or 'org'}/{wanted['name']}"
        if not self._may_write():
            return
        if repo_id in self.hub.repos:
            return self._answer(409, {"error": "You already created this model repo", "url": self.hub.url})
        self.hub.add_repo(repo_id, private=wanted.get("visibility") == "private")
        self._answer(200, {"url": f"{self.hub.url}/{repo_id}"})

    def delete(self, body: bytes) -> None:
        wanted = json.loads(body)
        repo_id = f"{wanted.get('organization') or 'org'}/{wanted['name']}"
        if self._repo(repo_id, write=True) is not None:
            del self.hub.repos[repo_id]
            self._answer(200, {})

    def models(self, body: bytes) -> None:
        wanted = set(self.query.get("filter", []))
        found = [
            description
            for repo_id, repo in self.hub.repos.items()
            if not (repo.private and self._role is None)
            and wanted <= set((description := self._describe(repo_id, repo, repo.head))["tags"])
        ]
        self._answer(200, found)

    def info(self, body: bytes, repo_id: str, revision: str | None = None) -> None:
        repo = self._repo(repo_id)
        if repo is None or (commit := self._commit_of(repo, revision or "main")) is None:
            return
        self._answer(200, self._describe(repo_id, repo, commit))

    def _describe(self, repo_id: str, repo: Repo, commit: Commit) -> dict[str, Any]:
        card = re.match(rb"---\n(.*?)\n---", commit.files.get("README.md", b""), re.DOTALL)
        data = (yaml.safe_load(card[1]) if card else {}) or {}
        base = data.get("base_model") or []
        tags = [*data.get("tags", []), *(f"base_model:{name}" for name in ([base] if isinstance(base, str) else base))]
        return {
            "_id": repo_id,
            "id": repo_id,
            "modelId": repo_id,
            "sha": commit.sha,
            "private": repo.private,
            "gated": repo.gated,
            "tags": tags,
            "cardData": {k: v for k, v in data.items() if k != "model-index"},
            "model-index": data.get("model-index"),
            "lastModified": repo.modified.strftime("%Y-%m-%dT%H:%M:%S.000Z"),
            "siblings": [{"rfilename": name, **self._entry(name, content)} for name, content in commit.files.items()],
        }

    def _entry(self, name: str, content: bytes) -> dict[str, Any]:
        entry: dict[str, Any] = {"size": len(content), "blobId": git_oid(content)}
        if name.endswith(LFS_SUFFIXES):
            entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return entry

    def tree(self, body: bytes, repo_id: str, revision: str, folder: str | None = None) -> None:
        repo = self._repo(repo_id)
        if repo is None or (commit := self._commit_of(repo, revision)) is None:
            return
        entries = []
        for name, content in commit.files.items():
            if folder and not name.startswith(folder.strip("/") + "/"):
                continue
            entry = {"type": "file", "path": name, "size": len(content), "oid": git_oid(content)}
            if name.endswith(LFS_SUFFIXES):
                entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
            entries.append(entry)
        self._answer(200, entries)

    def resolve(self, body: bytes, repo_id: str, revision: str, path: str) -> None:
        repo = self._repo(repo_id)
        if repo is None:
            return
        if repo.gated and self._role is None:
            return self._answer(401, {"error": "gated"}, {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated repo"})
        commit = self._commit_of(repo, revision)
        if commit is None:
            return
        if path not in commit.files:
            return self._answer(
                404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit.sha}
            )
        content = commit.files[path]
        lfs = path.endswith(LFS_SUFFIXES)
        etag = hashlib.sha256(content).hexdigest() if lfs else git_oid(content)
        headers = {
            "ETag": f'"{etag}"',
            "X-Repo-Commit": commit.sha,
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        if lfs:
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(content))}
        if self.command == "HEAD":
            return self._answer(200, b"", headers | {"Content-Length": str(len(content))})
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            first, last = int(match[1]), int(match[2] or len(content) - 1)
            part = content[first : last + 1]
            headers["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
            return self._answer(206, part, headers)
        self._answer(200, content, headers)

    def preupload(self, body: bytes, repo_id: str, revision: str) -> None:
        repo = self._repo(repo_id, write=True)
        if repo is None:
            return
        answers = []
        for file in json.loads(body)["files"]:
            content = repo.head.files.get(file["path"])
            lfs = file["path"].endswith(LFS_SUFFIXES)
            oid = None if content is None else hashlib.sha256(content).hexdigest() if lfs else git_oid(content)
            answers.append(
                {"path": file["path"], "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False, "oid": oid}
            )
        self._answer(200, {"files": answers})

    def lfs_batch(self, body: bytes, repo_id: str) -> None:
        if self._repo(repo_id, write=True) is None:
            return
        objects = []
        for wanted in json.loads(body)["objects"]:
            entry = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.blobs:
                entry["actions"] = {
                    "upload": {"href": f"{self.hub.url}/lfs/{wanted['oid']}"},
                    "verify": {"href": f"{self.hub.url}/lfs/{wanted['oid']}/verify"},
                }
            objects.append(entry)
        self._answer(200, {"transfer": "basic", "objects": objects})

    def lfs_put(self, body: bytes, oid: str) -> None:
        if self.hub.take_fault(self.request_line, "corrupt"):
            body = body[:-1] + bytes([body[-1] ^ 1])
        if hashlib.sha256(body).hexdigest() != oid:
            return self._answer(400, {"error": "content does not match its checksum"})
        self.hub.blobs[oid] = body
        self._answer(200, {})

    def lfs_verify(self, body: bytes, oid: str) -> None:
        there = oid in self.hub.blobs and len(self.hub.blobs[oid]) == json.loads(body)["size"]
        self._answer(200 if there else 404, {})

    def commit(self, body: bytes, repo_id: str, revision: str) -> None:
        repo = self._repo(repo_id, write=True)
        if repo is None:
            return
        files = dict(repo.head.files)
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header" and value.get("parentCommit") not in (None, repo.head.sha):
                return self._answer(412, {"error": "A commit has happened since. Please refresh and try again."})
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                if value["oid"] not in self.hub.blobs:
                    return self._answer(400, {"error": f"LFS object of {value['path']} was never uploaded"})
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif item["key"] == "deletedFile" and files.pop(value["path"], None) is None:
                return self._answer(
                    404, {"error": "A file with this name doesn't exist"}, {"X-Error-Code": "EntryNotFound"}
                )
        commit = repo.commit(files)
        url = f"{self.hub.url}/{repo_id}/commit/{commit.sha}"
        self._answer(200, {"commitUrl": url, "commitOid": commit.sha, "pullRequestUrl": None})


def git_oid(content: bytes) -> str:
    """Object id that git gives a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


_ID = r"([\w.-]+/[\w.-]+)"
_ROUTES: list[tuple[tuple[str, ...], str, Callable[..., None]]] = [
    (("GET",), r"/api/whoami-v2", _Handler.whoami),
    (("POST",), r"/api/validate-yaml", _Handler.validate_yaml),
    (("POST",), r"/api/repos/create", _Handler.create),
    (("DELETE",), r"/api/repos/delete", _Handler.delete),
    (("GET",), r"/api/models", _Handler.models),
    (("GET",), rf"/api/models/{_ID}", _Handler.info),
    (("GET",), rf"/api/models/{_ID}/revision/(.+)", _Handler.info),
    (("GET",), rf"/api/models/{_ID}/tree/([^/]+)(/.*)?", _Handler.tree),
    (("POST",), rf"/api/models/{_ID}/preupload/(.+)", _Handler.preupload),
    (("POST",), rf"/{_ID}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    (("PUT",), r"/lfs/([0-9a-f]{64})", _Handler.lfs_put),
    (("POST",), r"/lfs/([0-9a-f]{64})/verify", _Handler.lfs_verify),
    (("POST",), rf"/api/models/{_ID}/commit/(.+)", _Handler.commit),
    (("GET", "HEAD"), rf"/{_ID}/resolve/([^/]+)/(.+)", _Handler.resolve),
]
