"""Object stores: one interface, S3 for real, memory for tests."""

from vla_storage.objects.admin import S3Admin
from vla_storage.objects.base import Body, ObjectInfo, ObjectStore
from vla_storage.objects.memory import MemoryObjectStore
from vla_storage.objects.s3 import S3ObjectStore

__all__ = ["Body", "MemoryObjectStore", "ObjectInfo", "ObjectStore", "S3Admin", "S3ObjectStore"]
