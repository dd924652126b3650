"""Datasets in object stores: a real S3 server and a web server, both on this machine, killed where it hurts."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import segcal
from datasets import plain
from segcal.calibrators import TemperatureScaling
from segcal.cases.formats import ArraySpec, create_array, open_array, zarr_remote
from segcal.cases.formats.zarr_store import ZarrSink
from segcal.errors import DataError, InputError, MissingExtraError, OutputError
from segcal.evaluation.check import check
from segcal.files import remote
from segcal.files.remote import as_path
from segcal.synthetic import scenes

pytest.importorskip("zarr")
s3fs, _ = pytest.importorskip("s3fs"), pytest.importorskip("moto")
fsspec = pytest.importorskip("fsspec")


class Server:
    """moto's S3 server in a process of its own. It forgets everything when it is stopped."""

    def __init__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self):
        command = [sys.executable, "-m", "moto.server", "-p", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                break
            except OSError:
                time.sleep(0.05)
        self.files().mkdir("bucket")

    def kill(self):
        self.process.kill()
        self.process.wait()

    def files(self):
        return fsspec.filesystem("s3", use_listings_cache=False)

    def names(self, folder):
        return sorted(name.removeprefix(f"{folder}/") for name in self.files().find(folder))

    def require_credentials(self, wanted):
        """Let the server check who asks, or not."""
        data, kind = b"0" if wanted else b"inf", {"Content-Type": "text/plain"}
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/moto-api/reset-auth", data, kind)).close()


@pytest.fixture(scope="module")
def s3():
    server = Server()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            **dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "anyone"),
            **{"AWS_ENDPOINT_URL": server.url, "AWS_DEFAULT_REGION": "us-east-1"},
            "AWS_EC2_METADATA_DISABLED": "true",  # Ask no other machine for credentials.
        }.items():
            patch.setenv(name, value)
        patch.setattr(remote, "_WAITS", (0.01,) * 4)
        server.start()
        yield server
        server.kill()


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A dataset of zarr stores in a local folder."""
    folder = tmp_path_factory.mktemp("data")
    npy = plain(folder / "npy", count=3, shape=(40, 48))
    segcal.write_dataset(segcal.open_cases(npy, class_names=tuple("abcd")), folder / "study", format="zarr")
    return folder / "study"


def upload(s3, study, to):
    s3.files().put(f"{study}/", f"bucket/{to}/", recursive=True)
    return f"s3://bucket/{to}"


def same_cases(one, other):
    assert one.ids == other.ids
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a.logits, b.logits) and torch.equal(a.labels, b.labels) for a, b in pairs)


def test_evaluation_is_that_of_the_local_folder(s3, study, tmp_path):
    there = segcal.open_cases(upload(s3, study, "same"))
    here = segcal.open_cases(study)
    assert there.class_names == tuple("abcd")  # from its segcal.toml
    assert same_cases(here, there)
    results = [segcal.evaluate(cases, metrics=("nll", "ece")).to_dict() for cases in (here, there)]
    assert results[0]["rows"] == results[1]["rows"]
    assert not check("s3://bucket/same").problems
    # Labels may be elsewhere, in both directions.
    (tmp_path / "logits").symlink_to(study / "logits")
    assert same_cases(here, segcal.open_cases(tmp_path, labels="s3://bucket/same/labels"))
    assert same_cases(here, segcal.open_cases("s3://bucket/same", labels=str(study / "labels")))


def test_large_shards_are_fetched_in_parts_at_the_same_time(s3, monkeypatch):
    monkeypatch.setattr(zarr_remote, "PART", 2**15)
    values = np.random.default_rng(0).normal(size=(3, 64, 512)).astype(np.float32)  # does not compress
    path = as_path("s3://bucket/large/a.zarr")
    with create_array(path, ArraySpec(values.shape, values.dtype, 1)) as sink:
        sink.write((slice(None),) * 3, values)
    flying, most, fetch = 0, 0, s3fs.S3FileSystem._cat_file

    async def counted(*args, **options):
        nonlocal flying, most
        flying, most = flying + 1, max(most, flying + 1)
        try:
            return await fetch(*args, **options)
        finally:
            flying -= 1

    monkeypatch.setattr(s3fs.S3FileSystem, "_cat_file", counted)
    assert np.array_equal(open_array(path).read(), values)
    assert most >= 8


def test_lost_chunks_are_noticed(s3, study):
    url = upload(s3, study, "lost")
    s3.files().rm("bucket/lost/logits/case1.zarr/c", recursive=True)
    with pytest.raises(DataError, match=r"case1.*4 of 4 chunks are missing"):
        list(segcal.open_cases(url))


def test_applying_writes_what_it_writes_locally(s3, study, tmp_path):
    cases = segcal.open_cases(upload(s3, study, "in"))
    calibrator = TemperatureScaling().fit(cases)
    segcal.apply(calibrator, cases, tmp_path / "out")
    segcal.apply(calibrator, cases, "s3://bucket/out", confidence=True)
    here, there = (segcal.open_cases(out, need_labels=False) for out in (tmp_path / "out", "s3://bucket/out"))
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(here, there, strict=True))
    confidence = open_array(as_path("s3://bucket/out/confidence/case0.zarr")).read()
    assert np.allclose(confidence, there[0].logits.softmax(1).amax(1)[0], atol=1e-6)
    again = segcal.apply(calibrator, cases, "s3://bucket/out", confidence=True, resume=True)
    assert (again.skipped, again.written) == (3, 0)
    # What changed is made again.
    with create_array(as_path("s3://bucket/in/labels/case1.zarr"), ArraySpec((40, 48), "uint8"), replace=True) as new:
        new.write((slice(None),) * 2, np.zeros((40, 48), np.uint8))
    assert segcal.apply(calibrator, cases, "s3://bucket/out", resume=True).written == 1
    with pytest.raises(OutputError, match="is not empty"):
        segcal.apply(calibrator, cases, "s3://bucket/out")
    with pytest.raises(OutputError, match="is also an input"):
        segcal.apply(calibrator, cases, "s3://bucket/in/logits")


def test_a_read_survives_a_server_that_comes_back(s3, study, monkeypatch):
    case = segcal.open_cases(upload(s3, study, "back"))[0]
    waits = []

    def come_back(seconds):
        waits.append(seconds)
        s3.start()
        upload(s3, study, "back")

    monkeypatch.setattr(remote, "time", SimpleNamespace(sleep=come_back))
    s3.kill()
    logits = case.logits
    assert waits == [0.01]
    assert torch.equal(logits, segcal.open_cases(study)[0].logits)


def test_a_server_that_stays_away_is_a_clear_error(s3, study):
    cases = segcal.open_cases(upload(s3, study, "away"))
    try:  # While the first case is measured, the second may be read; the third is not.
        with pytest.raises(DataError, match=r"case\d.*s3://bucket/away.*cannot be reached, after 5 tries.*network"):
            segcal.evaluate(cases, progress=lambda name: s3.kill())
        s3.start()
        with pytest.raises(OutputError, match=r"s3://bucket/new/logits/case0.zarr: cannot be reached, after 5 tries"):
            segcal.write_dataset(
                segcal.open_cases(study), "s3://bucket/new", format="zarr", progress=lambda name: s3.kill()
            )
    finally:
        s3.start()


@pytest.mark.parametrize("gone", [False, True])
def test_a_failed_write_leaves_no_store_that_can_be_read(s3, study, monkeypatch, tmp_path, gone):
    """All of its store is removed. Where that fails, too, as it does after a kill, the metadata are not there."""
    cases, out = segcal.open_cases(study), f"s3://bucket/failed-{gone}"
    calibrator, close, closed = TemperatureScaling().fit(cases), ZarrSink.close, []

    def fail(sink):
        closed.append(sink.path.name)
        if len(closed) == 2:
            raise KeyboardInterrupt
        close(sink)

    with monkeypatch.context() as patch:
        patch.setattr(ZarrSink, "close", fail)
        if gone:
            patch.setattr(s3fs.S3FileSystem, "_bulk_delete", lambda *args, **options: 1 / 0)
            patch.setattr(remote.RemotePath, "check_writable", lambda path: None)
        with pytest.raises(KeyboardInterrupt):
            segcal.apply(calibrator, cases, out)
    written = [name for name in s3.names(out.removeprefix("s3://")) if name.startswith("probs")]
    complete = ["probs/case0.zarr/c/0/0/0", "probs/case0.zarr/zarr.json"]
    assert written == complete + ["probs/case1.zarr/c/0/0/0"] * gone
    if gone:
        with pytest.raises(DataError, match=r"case1\.zarr: cannot be read"):
            list(segcal.open_cases(out, need_labels=False))
    again = segcal.apply(calibrator, cases, out, resume=True)
    assert (again.skipped, again.written) == (1, 2)
    segcal.apply(calibrator, cases, tmp_path)
    here, there = (segcal.open_cases(place, need_labels=False) for place in (tmp_path, out))
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(here, there, strict=True))


def test_wrong_credentials_are_an_error_at_once(s3, study, monkeypatch, run):
    url = upload(s3, study, "closed")
    monkeypatch.setattr(remote, "time", SimpleNamespace(sleep=lambda seconds: pytest.fail("tried again")))
    s3.require_credentials(True)
    try:
        with pytest.raises(DataError, match=r"s3://bucket/closed: access is denied .*AWS_ACCESS_KEY_ID"):
            segcal.open_cases(url)
        with pytest.raises(OutputError, match=r"s3://bucket/closed2.*: access is denied"):
            segcal.write_dataset(scenes(1), "s3://bucket/closed2", format="zarr")
        code, _, error = run("check", url)
        assert code == 1
        assert "access is denied" in error
    finally:
        s3.require_credentials(False)


@pytest.mark.parametrize(("url", "library"), [("s3://b/x", "s3fs"), ("gs://b/x", "gcsfs"), ("https://b/x", "aiohttp")])
def test_a_missing_library_names_its_extra(monkeypatch, url, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtraError, match=re.escape(f"needs {library}") + r".*pip install 'segcal\[remote\]'"):
        segcal.open_cases(url)


def test_other_formats_and_places_are_refused(s3, study, tmp_path, run):
    s3.files().put(f"{plain(tmp_path / 'npy')}/", "bucket/npy/", recursive=True)
    with pytest.raises(DataError, match=r"s3://bucket/npy/.*npy files cannot be used at a URL.*pack"):
        segcal.open_cases("s3://bucket/npy")
    with pytest.raises(OutputError, match=r"npy files cannot be used at a URL"):
        segcal.write_dataset(scenes(1), "s3://bucket/other")
    assert not s3.files().exists("bucket/other")
    with pytest.raises(DataError, match="nnU-Net"):
        segcal.open_cases("s3://bucket/npy", layout="nnunet")
    with pytest.raises(DataError, match="s3://bucket/nothing: does not exist"):
        segcal.open_cases("s3://bucket/nothing")
    with pytest.raises(OutputError, match=r"s3://none/new: s3://none does not exist; expected a bucket"):
        segcal.write_dataset(scenes(1), "s3://none/new", format="zarr")
    with pytest.raises(InputError, match="ftp://host/study"):
        segcal.open_cases("ftp://host/study")
    code, _, error = run("evaluate", study, "-o", "s3://bucket/results.json")
    assert code == 1
    assert "s3://bucket/results.json" in error
    assert "is a URL" in error


class Ranges(SimpleHTTPRequestHandler):
    """Lists folders and serves parts of files, as nginx and Apache do."""

    def send_head(self):
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        path = self.translate_path(self.path)
        if not asked or not os.path.isfile(path):  # noqa: PTH113
            return super().send_head()
        size = os.path.getsize(path)  # noqa: PTH202
        first, last = asked.groups()
        start = int(first) if first else size - int(last)
        stop = min(int(last) + 1, size) if first and last else size
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        with open(path, "rb") as file:  # noqa: PTH123
            file.seek(start)
            self.wfile.write(file.read(stop - start))
        return None

    def log_message(self, *args):
        pass


def test_a_web_server_that_lists_folders(study, monkeypatch):
    monkeypatch.setattr(zarr_remote, "PART", 2**14)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Ranges, directory=study.parent)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/study"
        assert same_cases(segcal.open_cases(study), segcal.open_cases(url))
        with pytest.raises(OutputError, match="cannot be written to"):
            segcal.write_dataset(scenes(1), url, format="zarr")
        server.shutdown()
