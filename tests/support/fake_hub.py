"""A hub on this machine with one tiny repository, and a second host for the data of its large files. Both do faults.

`hub.faults[path]` is a list of what goes wrong, one for each request for `path`, then nothing:
a status (503), ("cut", fraction of the body), ("stall", fraction), "drip", "whole" (200 for a range), "416",
"slow-head" and "continue" (a head that never ends), "other-range", "etag", "hash", "size", ("redirect", address),
("range", Content-Range), ("length", Content-Length).
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

REPO = "someone/tiny-qwen"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHARDS = {f"diffusion_pytorch_model-0000{i}-of-00002.safetensors": size for i, size in ((1, 300_007), (2, 70_001))}


def noise(size, seed):
    return np.random.default_rng(seed).bytes(size)


def tiny_files():
    """The files of a repository in diffusers layout with others that are not used; the weights are noise."""
    index = {"metadata": {}, "weight_map": {f"t{i}": name for i, name in enumerate(SHARDS)}}
    files = {
        "model_index.json": b'{"_class_name": "QwenImagePipeline"}',
        "scheduler/scheduler_config.json": b'{"shift": 1.0}',
        "tokenizer/vocab.json": b'{"a": 0}',
        "tokenizer/merges.txt": b"#version: 0.2\n",
        "tokenizer/added_tokens.json": b"",  # empty: nothing to ask a server for
        "transformer/config.json": b'{"a": 1}',
        "transformer/diffusion_pytorch_model.safetensors.index.json": json.dumps(index).encode(),
        "text_encoder/config.json": b'{"b": 1}',
        "text_encoder/model.safetensors": noise(50_021, 3),
        "vae/config.json": b'{"a": 1}',  # the same blob as another file
        "vae/diffusion_pytorch_model.safetensors": noise(20_011, 4),
        "README.md": b"# Tiny",
        "pytorch_model.bin": b"pickle",
        "transformer/modeling.py": b"import os",
        "vae/diffusion_pytorch_model.fp16.safetensors": noise(999, 5),
    }
    for seed, (name, size) in enumerate(SHARDS.items()):
        files[f"transformer/{name}"] = noise(size, seed)
    return files


def is_lfs(path):
    return path.endswith((".safetensors", ".bin"))


def digest_of(path, data):
    if is_lfs(path):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class FakeHub:
    """`requests` holds (method, address, Range, Authorization) in order, `data_requests` those of the data's host."""

    def __init__(self, files):
        self.files, self.faults = files, {}
        self.requests, self.data_requests, self.sent = [], [], {}
        self.commit, self.listing = COMMIT, None
        self.released = threading.Event()  # lets a stalled answer end

    def ranges(self, path):
        """The Range header of each request for the bytes of `path`."""
        asked = self.data_requests if is_lfs(path) else self.requests
        return [r[2] for r in asked if r[0] == "GET" and r[1].endswith(path)]

    def info(self):
        siblings = []
        for path, data in self.files.items():
            entry = {"rfilename": path, "size": len(data), "blobId": hashlib.sha1(path.encode()).hexdigest()}
            if is_lfs(path):
                entry["lfs"] = {"sha256": digest_of(path, data), "size": len(data), "pointerSize": 130}
            else:
                entry["blobId"] = digest_of(path, data)
            siblings.append(entry)
        return {"id": REPO, "sha": self.commit, "siblings": siblings} if self.listing is None else self.listing


class Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    data_host: str | None  # None on the data's host itself

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        asked = self.hub.requests if self.data_host else self.hub.data_requests
        asked.append((self.command, self.path, self.headers.get("Range"), self.headers.get("Authorization")))
        path = self.path.partition("?")[0]
        if path == f"/api/models/{REPO}/revision/main":
            return self.api()
        head = f"/{REPO}/resolve/"
        name = path.removeprefix(head).partition("/")[2]
        if not path.startswith(head) or name not in self.hub.files:
            return self.answer(404)
        fault = self.next_fault(name, on_hub=bool(self.data_host))
        if isinstance(fault, int):
            return self.answer(fault, {"Retry-After": "0"})
        if fault in ("slow-head", "continue"):
            return self.endless_head(fault)
        if isinstance(fault, tuple) and fault[0] == "redirect":
            return self.answer(302, {"Location": fault[1]})
        return self.file(name, fault)

    def next_fault(self, name, *, on_hub):
        """Faults of large files happen at the data's host, but for those that the hub itself makes."""
        faults = self.hub.faults.get(name, [])
        mine = bool(faults) and (not is_lfs(name) or on_hub == (faults[0] == "etag" or "redirect" in str(faults[0])))
        return faults.pop(0) if mine and self.command == "GET" else None

    def endless_head(self, fault):
        self.close_connection = True
        try:
            while not self.hub.released.wait(0.02):
                self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n" if fault == "continue" else b"H")
        except OSError:
            pass  # the other side has gone

    def api(self):
        fault = (self.hub.faults.get("api") or [None]).pop(0)
        if isinstance(fault, int):
            return self.answer(fault)
        return self.answer(200, {"Content-Type": "application/json"}, json.dumps(self.hub.info()).encode())

    def file(self, name, fault):
        data = self.hub.files[name]
        digest = "0" * 64 if fault == "etag" else digest_of(name, data)
        about = {"X-Repo-Commit": self.hub.commit, "ETag": f'"{digest}"'}
        if self.data_host and is_lfs(name):
            about |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
            return self.answer(302, about | {"Location": self.data_host + self.path, "ETag": '"abc"'})
        if not self.data_host:
            about = {"ETag": '"0123-7"'}  # of the storage, and no hash of the file
        if fault == "hash":
            data = data[:-1] + bytes([data[-1] ^ 1])
        if fault == "size":
            data = data + b"more"
        return self.body(name, data, about, fault)

    def body(self, name, data, about, fault):
        asked, first, status = self.headers.get("Range"), 0, 200
        if asked and fault == "416":
            return self.answer(416)
        if asked and fault != "whole":
            first, status = int(asked.removeprefix("bytes=").rstrip("-")), 206
            first += 5 if fault == "other-range" else 0
            about["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        if isinstance(fault, tuple) and fault[0] == "range":
            about["Content-Range"] = fault[1]
        return self.answer(status, about, data[first:], fault, name)

    def answer(self, status, headers=None, data=b"", fault=None, name=None):
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        told = fault[1] if isinstance(fault, tuple) and fault[0] == "length" else str(len(data))
        self.send_header("Content-Length", told)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        if self.command == "HEAD":
            return
        try:
            if fault == "drip":
                for i in range(len(data)):
                    self.wfile.write(data[i : i + 1])
                    time.sleep(0.02)
            kind, fraction = fault if isinstance(fault, tuple) and fault[0] in ("cut", "stall") else (None, 1)
            part = data[: int(len(data) * fraction)]
            self.wfile.write(part)
            if name:
                self.hub.sent[name] = self.hub.sent.get(name, 0) + len(part)
            if kind == "stall":
                self.hub.released.wait(30)
        except OSError:
            pass  # the other side has gone


@contextmanager
def running(files=None):
    """(hub, its address), until the end of the block."""
    hub = FakeHub(files or tiny_files())
    hosts = []
    try:
        for role in ("data", "hub"):
            place = f"http://localhost:{hosts[0].server_port}" if role == "hub" else None
            handler = type("Bound", (Handler,), {"hub": hub, "data_host": place})
            hosts.append(ThreadingHTTPServer(("127.0.0.1", 0), handler))
            hosts[-1].daemon_threads = True
            threading.Thread(target=hosts[-1].serve_forever, args=(0.01,), daemon=True).start()
        yield hub, f"http://127.0.0.1:{hosts[1].server_port}"
    finally:
        hub.released.set()
        for host in hosts:
            host.shutdown()
            host.server_close()
