"""The store on S3, spoken to over a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import boto3
import obstore
import pytest
import trio
from moto.server import ThreadedMotoServer

from gradient.nar.bundle import BundleItem, EntryHeader, bundled
from gradient.nar.errors import NoSuchObject, StoreUnavailable
from gradient.nar.ingest import ingest_bundle
from gradient.nar.objects import RemoteObjects
from gradient.nar.store import NarStore, nar_key
from gradient.nar.tree import Regular
from gradient.nix.hashes import Hash
from tests.noise import noise

PATH = "/nix/store/00000000000000000000000000000001-one"
KEY = nar_key(PATH)
LOGIN = {"access_key_id": "testing", "secret_access_key": "testing", "region": "us-east-1"}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@pytest.fixture
def store(endpoint: str, tmp_path: Path) -> NarStore:
    # An object store of a test is as fresh as its folder.
    bucket = tmp_path.name.replace("_", "-")[:60]
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name=LOGIN["region"],
        aws_access_key_id=LOGIN["access_key_id"],
        aws_secret_access_key=LOGIN["secret_access_key"],
    )
    client.create_bucket(Bucket=bucket)
    client.close()
    return NarStore.open(tmp_path, f"s3://{bucket}/prefix", {**LOGIN, "endpoint": endpoint})


def fetched(url: str) -> bytes:
    with urlopen(url) as response:
        return bytes(response.read())


async def test_put_get_delete(store: NarStore, tmp_path: Path) -> None:
    await store.put_bytes(KEY, b"hello world")
    await store.sync([KEY])
    assert await store.size(KEY) == 11
    assert await store.get(KEY) == b"hello world"
    assert await store.get(KEY, 6) == b"world"
    assert await store.get(KEY, 2, 4) == b"ll"
    async with store.stream(KEY) as stream:
        assert b"".join([chunk async for chunk in stream]) == b"hello world"
    assert list((tmp_path / "spool").iterdir()) == []
    assert store.local_path(KEY) is None
    await store.delete(KEY)
    await store.delete(KEY)
    assert not await store.exists(KEY)
    with pytest.raises(NoSuchObject, match="nars/00"):
        await store.get(KEY)


async def test_a_large_upload_goes_up_in_parts_and_comes_back(store: NarStore, tmp_path: Path) -> None:
    """12 MiB that do not compress, in parts of 5 MiB."""
    tree = Regular(12 * 2**20, False, [noise(2**20, number) for number in range(12)])
    async with bundled([BundleItem(EntryHeader(PATH), tree)]) as stream:
        (record,) = await ingest_bundle(stream, store, lambda header: True)
    assert await store.size(KEY) == record.file_size
    assert Hash.of(await store.get(KEY)).nix32() == record.file_hash
    assert isinstance(store.objects, RemoteObjects)
    # The entity tag of an object in parts ends with their number.
    assert obstore.head(store.objects._store, KEY)["e_tag"].endswith('-3"')
    assert list((tmp_path / "spool").iterdir()) == []


async def test_a_signed_url_is_enough_to_get(store: NarStore) -> None:
    await store.put_bytes(KEY, b"hello")
    url = await store.signed_url(KEY, 60)
    assert url is not None
    assert await trio.to_thread.run_sync(fetched, url) == b"hello"


async def test_a_store_out_of_reach_is_not_a_missing_object(tmp_path: Path) -> None:
    store = NarStore.open(tmp_path, "s3://bucket", {**LOGIN, "endpoint": "http://127.0.0.1:1"})
    for call in (store.exists, store.get, store.delete):
        with pytest.raises(StoreUnavailable, match="nars/00"):
            await call(KEY)
    with pytest.raises(StoreUnavailable):
        await store.put_bytes(KEY, b"x")
    assert list((tmp_path / "spool").iterdir()) == []
