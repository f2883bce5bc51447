"""Serves a snapshot over HTTP, with nothing but Python's own server and NumPy.

    python serve_http.py PATH [--port 8080]

PATH is a snapshot, or the folder of a delta log, which a thread then follows.

    curl localhost:8080/health
    curl localhost:8080/lookup -d '{"table": "user", "keys": [[7, 9], [8, 8]], "combiner": "mean"}'
    curl localhost:8080/top_k -d '{"table": "item", "query": [0.5, -1], "k": 10}'

A row of keys is a bag. All vectors in an answer are from the version that it names.
"""

import argparse
import json
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

from sparsekit.serving import Snapshot

MOST_BYTES = 16 << 20


class Handler(BaseHTTPRequestHandler):
    snapshot: Snapshot
    protocol_version = "HTTP/1.1"  # connections stay open
    timeout = 60  # seconds until a silent client loses its thread

    def health(self) -> dict:
        snapshot, follower = self.snapshot, self.snapshot.follower
        return {
            "version": snapshot.version,
            "step": snapshot.step,
            "seconds_since_written": time.time() - snapshot.written_at / 1e9,
            "error": None if follower is None or not follower.error else str(follower.error),
            "tables": {name: table.rows for name, table in snapshot.tables.items()},
        }

    def lookup(self, table: str, keys: list, combiner: str | None = None) -> dict:
        with self.snapshot.pin() as pinned:
            vectors = pinned.lookup(table, np.array(keys, np.int64), combiner=combiner)
            return {"version": pinned.version, "vectors": vectors.tolist()}

    def top_k(self, table: str, query: list, k: int = 10) -> dict:
        with self.snapshot.pin() as pinned:
            keys, scores = pinned.top_k(table, np.array(query, np.float32), k)
            return {"version": pinned.version, "keys": keys.tolist(), "scores": scores.tolist()}

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer(200, self.health())
        else:
            self.answer(404, {"error": f"no such page: {self.path}"})

    def do_POST(self) -> None:
        action = {"/lookup": self.lookup, "/top_k": self.top_k}.get(self.path)
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MOST_BYTES:
            self.close_connection = True  # the rest of the request is not read
            self.answer(413, {"error": f"Content-Length must be at most {MOST_BYTES}"})
        elif action is None:
            self.rfile.read(int(length))
            self.answer(404, {"error": f"no such page: {self.path}"})
        else:
            try:
                self.answer(200, action(**json.loads(self.rfile.read(int(length)))))
            except (ValueError, TypeError, OverflowError, KeyError) as error:  # bad input
                self.answer(400, {"error": str(error)})

    def answer(self, status: int, content: dict) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--port", type=int, default=8080)
    args = parser.parse_args()
    with Snapshot(args.path, prefault=True) as snapshot:
        if Path(args.path).is_dir():
            snapshot.refresh()  # so that the first answers are from the newest version
            snapshot.follow(every=0.1)
        Handler.snapshot = snapshot
        with ThreadingHTTPServer(("127.0.0.1", args.port), Handler) as server:
            print(f"serving {args.path} on port {server.server_address[1]}", flush=True)
            server.serve_forever()


if __name__ == "__main__":
    main()
