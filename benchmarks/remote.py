"""Evaluating zarr stores in an object store: moto's S3 server on this machine, slowed down to the speed of a real one.

Each request waits, and each connection has a limited bandwidth, as S3 has. Compared are the local folder, shards that
are fetched as a whole, and shards that are fetched in parts at the same time. Needs s3fs and moto.

    python benchmarks/remote.py
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Seconds before the first byte of an answer, and bytes per second of one connection: those of S3 in its own region.
LATENCY, BANDWIDTH = 0.03, 60e6
CASES, SIZE = 3, (19, 768, 1024)


def serve(port: int, latency: float, bandwidth: float) -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    app = DomainDispatcherApplication(create_backend_app)

    def slowed(environ, start):
        body = b"".join(app(environ, start))
        time.sleep(latency + len(body) / bandwidth)
        return [body]

    WSGIRequestHandler.log = lambda *args: None
    make_server("127.0.0.1", port, slowed, threaded=True).serve_forever()


def main() -> None:
    import fsspec
    import numpy as np

    from segcal.cases.formats import ArraySpec, create_array, zarr_remote
    from segcal.files.remote import file_sizes

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_EC2_METADATA_DISABLED": "true"}
    with tempfile.TemporaryDirectory() as folder:
        random = np.random.default_rng(0)
        for number in range(CASES):
            logits = random.normal(size=SIZE).astype(np.float16)
            for kind, array in (("logits", logits), ("labels", logits.argmax(0).astype(np.uint8))):
                spec = ArraySpec(array.shape, array.dtype, row_axis=array.ndim - 2)
                with create_array(Path(folder, "study", kind, f"{number}.zarr"), spec) as sink:
                    sink.write((slice(None),) * array.ndim, array)
        stored = sum(file_sizes(Path(folder) / "study" / "logits").values()) / CASES
        print(f"{CASES} cases of {' x '.join(map(str, SIZE))}, float16, {stored / 1e6:.1f} MB of logits each")
        for latency, bandwidth in ((0.0, 1e12), (LATENCY, BANDWIDTH)):
            command = [sys.executable, __file__, str(port), str(latency), str(bandwidth)]
            server = subprocess.Popen(command)
            try:
                upload(fsspec, port, folder)
                print(f"\n{'server as it is' if not latency else 'with 30 ms before and 60 MB/s in each answer'}")
                local = show("local folder", f"{folder}/study")
                for name, part in (("shards as a whole", 2**40), ("parts of 4 MB at once", 4 * 2**20)):
                    zarr_remote.PART = part
                    show(name, "s3://bucket/study", local)
            finally:
                server.kill()
                server.wait()


def upload(fsspec, port: int, folder: str) -> None:
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            time.sleep(0.05)
    files = fsspec.filesystem("s3", use_listings_cache=False)
    files.mkdir("bucket")
    files.put(f"{folder}/study/", "bucket/study/", recursive=True)


def show(name: str, place: str, local: tuple[float, float] | None = None) -> tuple[float, float]:
    """Print the best of three: seconds to read all logits, and to evaluate."""
    import segcal

    cases = segcal.open_cases(place)
    reading, evaluating = [], []
    for _ in range(3):
        started = time.perf_counter()
        for ref in cases.refs:
            _ = ref.open().logits
        reading.append(time.perf_counter() - started)
        started = time.perf_counter()
        segcal.evaluate(cases, metrics=("nll", "ece"), regions=("everything",))
        evaluating.append(time.perf_counter() - started)
    best = min(reading), min(evaluating)
    ratios = "" if local is None else f"   {best[0] / local[0]:5.1f}x {best[1] / local[1]:5.1f}x the local folder"
    print(f"  {name:24} read {best[0]:6.2f} s   evaluate {best[1]:6.2f} s{ratios}", flush=True)
    return best


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(int(sys.argv[1]), *map(float, sys.argv[2:]))
    else:
        main()
