"""Google's object store on the loopback interface (gcp-storage-emulator), behind the proxy of object_store.py."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import pytest

from support.object_store import ObjectStore, behind_proxy
from trilobite.checkpoint.remote import store as remote

BUCKET = "gs://bucket"
# Before gcsfs is imported: else it asks Google itself, wherever the store is, of what kind each bucket is.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"


class GoogleStore(ObjectStore):
    @cached_property
    def fs(self) -> Any:
        import gcsfs

        return gcsfs.GCSFileSystem(
            endpoint_url=self.endpoint, token="anon", use_listings_cache=False, skip_instance_cache=True
        )


def point_at(store: GoogleStore, patch: pytest.MonkeyPatch) -> None:
    """Let gs:// mean that store, for anybody, and lose patience with it soon."""
    import fsspec
    import gcsfs

    patch.setenv("STORAGE_EMULATOR_HOST", store.endpoint)
    patch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
    patch.setattr(remote, "PAUSE", 0.01)
    patch.setattr(remote, "GS_PATIENCE", {"total": 20, "sock_connect": 2, "sock_read": 1.5})
    gcsfs.GCSFileSystem.clear_instance_cache()  # they keep the endpoint that they began with
    remote._filesystem.cache_clear()
    if not store.fs.exists(BUCKET):
        store.fs.mkdir(BUCKET.removeprefix("gs://"))


@contextmanager
def google_store() -> Iterator[GoogleStore]:
    from gcp_storage_emulator.server import create_server

    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    server = create_server("127.0.0.1", 0, in_memory=True)
    server.start()
    try:
        with behind_proxy(GoogleStore, server._api._httpd.server_address) as store:
            yield store
    finally:
        server.stop()
